"""The scale of the scores that a dual encoder was trained with, handed on to its new objective."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from counterfoil.models.model import Model
from counterfoil.models.store import first_member
from counterfoil.objectives import Composite
from counterfoil.objectives.contrastive import MAX_SCALE, InfoNCE, SigLIP


def adopt_scale(objective: Composite, stated: Mapping[str, Any], model: Model) -> None:
    """Start learned scales, and SigLIP's bias, where CLIP or SigLIP left theirs.

    Only where the configuration names no value of its own: fine-tuning at another temperature
    first undoes what pretraining learned. Other matchers than cosine have scores of another range.
    """
    found = getattr(first_member(model.image_encoder), "pretrained_scale", None)
    if found is None or model.spec.matcher["name"] != "cosine":
        return
    scale, bias = found
    for name, term in objective.each():
        given = stated.get(name)
        options: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
        if not isinstance(term, (InfoNCE, SigLIP)) or term.scale.log is None:
            continue
        with torch.no_grad():
            if "temperature" not in options and "scale" not in options:
                term.scale.log.fill_(math.log(min(scale, MAX_SCALE)))
            if isinstance(term, SigLIP) and "bias" not in options and bias:
                term.bias.fill_(bias)
