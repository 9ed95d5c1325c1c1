"""How a dual encoder of `transformers` (CLIP, SigLIP) wants its pictures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from counterfoil.errors import CheckpointError, ConfigError, MissingExtraError
from counterfoil.features.preprocessing import Preprocessing, read_preprocessing
from counterfoil.features.pretrained import load_stated

# What the published networks of each kind were shown, where no file beside the weights says more.
CUSTOMS: dict[str, dict[str, Any]] = {
    "clip": {
        "do_center_crop": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    },
    "siglip": {
        "do_center_crop": False,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
}


@dataclass(frozen=True)
class DualSettings:
    """The kind of a dual encoder, the side of its patches, and how its pixels are prepared."""

    kind: str
    patch: int
    preprocessing: Preprocessing


def dual_config(name: str) -> Any:
    """The configuration of a dual encoder in a local folder or, with a network, on a hub."""
    if not name:
        raise ConfigError(
            "model.image.pretrained: name a CLIP or SigLIP: a folder, or a hub's name"
        )
    try:
        from transformers import AutoConfig
    except ImportError:
        raise MissingExtraError("transformers", "hf", "a dual encoder such as CLIP") from None
    with dual_refusals(name):
        config = AutoConfig.from_pretrained(name)
    if config.model_type not in CUSTOMS:
        raise CheckpointError(
            f"'{name}' is a '{config.model_type}', not a dual encoder that can be trained here "
            f"({', '.join(CUSTOMS)})"
        )
    return config


def dual_settings(name: str, side: int = 0) -> DualSettings:
    """Read from the files beside the weights; ``side`` replaces the size they state."""
    config = dual_config(name)
    kind, seen = config.model_type, config.vision_config
    stated = CUSTOMS[kind] | load_stated(name)
    fit = "crop" if stated["do_center_crop"] else "squash"
    size = side or int(seen.image_size)
    preprocessing = read_preprocessing(stated, seen.image_size, fit, size)  # type: ignore[arg-type]
    return DualSettings(kind, int(seen.patch_size), preprocessing)


@contextmanager
def dual_refusals(name: str) -> Iterator[None]:
    """Whatever keeps a model from being loaded, as one error that says what to do."""
    try:
        yield
    except ImportError as error:
        raise CheckpointError(f"'{name}' needs a package that is missing: {error}") from None
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(
            f"no dual encoder could be loaded from '{name}': {error} (set model.image.pretrained "
            "to the path of a local folder, or to a hub's name where there is a network)"
        ) from None
