"""Dual encoders by name, and what a model that reads pixels asks of its data."""

from __future__ import annotations

from typing import Any

from counterfoil.encoders import image_encoders
from counterfoil.models.spec import ModelSpec, models


def _dual(pretrained: str) -> ModelSpec:
    return ModelSpec(
        image={"name": "dual", "pretrained": pretrained},
        text={"name": "dual"},
        matcher={"name": "cosine"},
    )


@models.register("clip")
def clip() -> ModelSpec:
    """CLIP, trained end to end from pixels; any matcher reads its patches and tokens."""
    return _dual("openai/clip-vit-base-patch32")


@models.register("siglip")
def siglip() -> ModelSpec:
    """SigLIP, trained end to end from pixels; any matcher reads its patches and tokens."""
    return _dual("google/siglip-base-patch16-224")


def reads_pixels(spec: ModelSpec) -> bool:
    """Whether a model's image encoder sees pictures, not features made before."""
    return bool(getattr(image_encoders[spec.image["name"]], "reads_pixels", False))


def pixel_options(spec: ModelSpec) -> dict[str, Any] | None:
    """Options of the extractor "pixels" for a model; None for one that reads features."""
    if not reads_pixels(spec):
        return None
    chosen = image_encoders.options(spec.image["name"]) | spec.image
    return {"model": chosen["pretrained"], "size": chosen["size"]}


def with_one_checkpoint(spec: ModelSpec) -> ModelSpec:
    """The spec with the text half of the image half's checkpoint, unless it names one itself."""
    if spec.text["name"] != "dual" or spec.text.get("pretrained") or not reads_pixels(spec):
        return spec
    named = (image_encoders.options(spec.image["name"]) | spec.image)["pretrained"]
    return spec.model_copy(update={"text": {**spec.text, "pretrained": named}})
