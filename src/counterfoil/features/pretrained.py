"""Vision networks of `transformers`: loading, kinds, digests of weights, preprocessing."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from counterfoil.core.errors import CheckpointError, ConfigError, MissingExtraError
from counterfoil.core.storage.reading import read_text
from counterfoil.features.views import Preprocessing, read_preprocessing

if TYPE_CHECKING:
    import torch


def is_detector(config: Any) -> bool:
    """Whether a configuration is of a network that finds things, such as DETR or YOLOS."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES as names,
    )

    return config.model_type in names


def load_config(name: str) -> Any:
    """The configuration in a local folder or, where there is a network, on a hub."""
    try:
        from transformers import AutoConfig
    except ImportError:
        raise MissingExtraError("transformers", "hf", "the extractor 'transformers'") from None
    with _refusals(name):
        return AutoConfig.from_pretrained(name)


def load_network(name: str, detector: bool) -> Any:
    """The network in evaluation mode; of a dual encoder, the half that sees."""
    import torch
    from transformers import AutoModel, AutoModelForObjectDetection

    with _refusals(name), no_bars():
        maker = AutoModelForObjectDetection if detector else AutoModel
        network = maker.from_pretrained(name, dtype=torch.float32)
    network = getattr(network, "vision_model", network).eval().requires_grad_(False)
    if "pixel_values" not in inspect.signature(network.forward).parameters:
        raise CheckpointError(f"'{name}' is a {type(network).__name__}, which sees no pictures")
    return network


def load_stated(name: str) -> dict[str, Any]:
    """What the model says of its pixels; empty where it says nothing."""
    for file, key in (("preprocessor_config.json", None), ("processor_config.json", "image")):
        path = _find(name, file)
        if path is not None:
            with _refusals(name):
                stated = json.loads(read_text(path))
            stated = stated.get(f"{key}_processor") if key else stated
            if isinstance(stated, dict):
                return stated
    return {}


def weights_digest(network: torch.nn.Module) -> str:
    """SHA-256 of all weights by name, wherever they came from."""
    digest = hashlib.sha256()
    for key, value in sorted(network.state_dict().items()):
        digest.update(f"{key} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).numpy().tobytes())
    return digest.hexdigest()


def _find(name: str, file: str) -> Path | None:
    if Path(name).is_dir():
        path = Path(name) / file
        return path if path.is_file() else None
    from transformers.utils import cached_file

    try:
        found = cached_file(name, file)
    except OSError:
        return None
    return Path(found) if found else None


@contextmanager
def _refusals(name: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise CheckpointError(f"'{name}' needs a package that is missing: {error}") from None
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(
            f"no vision model could be loaded from '{name}': {error} (option model: a local "
            "folder, or a hub's name where there is a network)"
        ) from None


@contextmanager
def no_bars() -> Iterator[None]:
    """Keep the library from drawing bars of its own between ours."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def silent_loading() -> Iterator[None]:
    """Keep the library from reporting weights that a caller looks after itself."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with no_bars():
            yield
    finally:
        logging.set_verbosity(level)


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
