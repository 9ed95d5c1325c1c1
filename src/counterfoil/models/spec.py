"""`ModelSpec`: a model as plain values, by the registered names of its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from counterfoil.core.config import ModelConfig
from counterfoil.core.errors import ConfigError
from counterfoil.core.registry import Registry
from counterfoil.encoders import image_encoders, text_encoders
from counterfoil.matchers import matchers

models: Registry[Callable[[], ModelSpec]] = Registry("model")

PARTS: dict[str, Registry[Any]] = {
    "image": image_encoders,
    "text": text_encoders,
    "matcher": matchers,
}


class ModelSpec(BaseModel):
    """Names and options of an image encoder, a text encoder and a matcher.

    ``ensemble_size`` of them, each with weights of its own, score as one: the mean of their scores.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = "custom"
    embed_size: int = Field(1024, ge=2, le=65_536)
    image: dict[str, Any]
    text: dict[str, Any]
    matcher: dict[str, Any]
    ensemble_size: int = Field(1, ge=1, le=64)


def resolve(config: ModelConfig) -> ModelSpec:
    """The named composition with the config's changes, every option checked."""
    base = models[config.name]()
    parts = {}
    for part, registry in PARTS.items():
        parts[part] = _merge_part(getattr(base, part), getattr(config, part), registry, part)
    return ModelSpec(
        name=config.name, embed_size=config.embed_size, ensemble_size=config.ensemble_size, **parts
    )


def _merge_part(
    base: Mapping[str, Any], change: Mapping[str, Any], registry: Registry[Any], part: str
) -> dict[str, Any]:
    name = change.get("name", base["name"])
    if not isinstance(name, str):
        raise ConfigError(f"model.{part}.name: expected a name, got {name!r}")
    known = registry.options(name)
    # A part exchanged for another keeps the options that both have, such as the pooling.
    kept = {key: value for key, value in base.items() if key in known}
    options = kept | {key: value for key, value in change.items() if key != "name"}
    registry.check(name, options, where=f"model.{part}")
    return {"name": name, **options}


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
