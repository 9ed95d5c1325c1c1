"""Why an image and a caption of an index match, from what the index holds of them."""

from __future__ import annotations

import torch

from counterfoil.encoders import Encoded
from counterfoil.models.explain import Match, explain_pair
from counterfoil.models.model import Model


@torch.inference_mode()
def explain_encoded(model: Model, image: Encoded, caption: str) -> Match:
    """What `Model.explain` says, for an image that is encoded already."""
    boxes = image.boxes[0][image.mask[0]].cpu().numpy() if image.boxes is not None else None
    return explain_pair(model, image, caption, boxes)
