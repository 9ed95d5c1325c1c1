"""What the first stage compares of an encoded image or caption."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from counterfoil.encoders import Encoded
from counterfoil.encoders.copies import members_of
from counterfoil.errors import DataError
from counterfoil.matchers.copies import CopiedMatcher
from counterfoil.models.model import Model
from counterfoil.search.fit import Fit, features
from counterfoil.search.items import Side
from counterfoil.search.vectors import Vectors

FirstStage = Literal["pooled", "fitted", "maxsim", "other"]
"""``other``: vectors of another model, which lie beside what the matcher compares."""

Asked = Literal["auto", "pooled", "fitted", "maxsim"]


@dataclass(frozen=True)
class FirstStageProxy:
    """Turns what the matcher compares into what the first stage compares."""

    model: Model
    form: FirstStage
    fit: Fit | None = None

    @torch.inference_mode()
    def vectors(self, encoded: Encoded, side: Side) -> Vectors:
        if self.form == "other":
            return self.alike(encoded)
        if self.form == "pooled":
            return pooled_vectors(self.model, encoded)
        if self.form == "maxsim":
            return fragment_vectors(self.model, encoded)
        assert self.fit is not None  # noqa: S101 - an index with this form has one
        to = self.fit.images if side == "images" else self.fit.captions
        return Vectors.single((features(self.model, encoded).cpu() @ to).numpy())

    @torch.inference_mode()
    def alike(self, encoded: Encoded) -> Vectors:
        """Vectors whose inner product says how alike two items of one side are."""
        if self.form != "other":
            return pooled_vectors(self.model, encoded)
        assert encoded.pooled is not None  # noqa: S101 - `ItemEncoder` put it there
        return Vectors.single(F.normalize(encoded.pooled.float(), dim=-1).cpu().numpy())


@torch.inference_mode()
def pooled_vectors(model: Model, encoded: Encoded) -> Vectors:
    """One vector an item, at unit length.

    It is the matcher's own where it compares such vectors; of a matcher of fragments it is the mean
    of the fragments at unit length, a stand-in. The members of an ensemble stand side by side, so
    that an inner product is the mean of theirs.
    """

    def member(one: Encoded) -> Tensor:
        if one.pooled is not None:
            return F.normalize(one.pooled.float(), dim=-1)
        return F.normalize(_unit(one).sum(1), dim=-1)

    return Vectors.single(_side_by_side(model, encoded, member).cpu().numpy())


@torch.inference_mode()
def fragment_vectors(model: Model, encoded: Encoded) -> Vectors:
    """One vector for each fragment, for MaxSim."""
    values = _side_by_side(model, encoded, _unit)
    mask = encoded.mask.clone()
    mask[:, 0] |= ~mask.any(1)  # an item without fragments has one that is zero
    lengths = mask.sum(1).cpu().numpy().astype(np.int64)
    return Vectors(values[mask].cpu().numpy(), lengths)


def choose_form(asked: Asked, model: Model, can_fit: bool) -> FirstStage:
    """ "auto" is pooled for models of whole vectors and fitted for others, given data to fit on."""
    whole = model.matcher.needs == "pooled"
    if asked == "auto":
        return "pooled" if whole or not can_fit else "fitted"
    if whole and asked != "pooled":
        raise DataError(
            f"the model '{model.spec.name}' compares whole vectors and has no fragments for a "
            f"first stage '{asked}': use --first-stage pooled, which is exact"
        )
    return asked


def _side_by_side(model: Model, encoded: Encoded, make: Callable[[Encoded], Tensor]) -> Tensor:
    matcher = model.matcher
    count = len(matcher.members) if isinstance(matcher, CopiedMatcher) else 1
    parts = [make(member) for member in members_of(encoded, count)]
    return torch.cat(parts, dim=-1) / count**0.5


def _unit(encoded: Encoded) -> Tensor:
    assert encoded.fragments is not None  # noqa: S101 - `choose_form` saw to it
    return F.normalize(encoded.fragments.float(), dim=-1) * encoded.mask[..., None]
