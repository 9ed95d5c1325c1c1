"""Loading vision networks of `transformers`: configurations, weights, preprocessing."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, Literal

from counterfoil.core.errors import (
    CheckpointError,
    ConfigError,
    CounterfoilError,
    MissingExtraError,
)
from counterfoil.core.storage.reading import read_text
from counterfoil.features.views import Preprocessing, read_preprocessing

if TYPE_CHECKING:
    import torch

MAX_REASON = 400
"""Most characters of an error of `transformers` that are quoted."""


def is_detector(config: Any) -> bool:
    """Whether a configuration is of an object detector, such as DETR or YOLOS."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES as names,
    )

    return config.model_type in names


def load_config(name: str) -> Any:
    """The configuration of a vision network, from a local folder or the hub."""
    try:
        from transformers import AutoConfig
    except ImportError:
        raise MissingExtraError("transformers", "hf", "the extractor 'transformers'") from None
    with _vision_refusals(name):
        return AutoConfig.from_pretrained(name)


def load_network(name: str, detector: bool) -> Any:
    """The network in eval mode; of a dual encoder, the vision half."""
    import torch
    from transformers import AutoModel, AutoModelForObjectDetection

    with _vision_refusals(name), no_bars():
        model_class = AutoModelForObjectDetection if detector else AutoModel
        network = model_class.from_pretrained(name, dtype=torch.float32)
    network = getattr(network, "vision_model", network).eval().requires_grad_(False)
    if "pixel_values" not in inspect.signature(network.forward).parameters:
        raise CheckpointError(
            f"'{name}' is a {type(network).__name__}, which takes no images; name a vision network"
        )
    return network


def load_processor(name: str) -> dict[str, Any]:
    """The preprocessing that a model's files state; empty if they state none."""
    for file, key in (("preprocessor_config.json", None), ("processor_config.json", "image")):
        path = _find(name, file)
        if path is not None:
            with _vision_refusals(name):
                processor = json.loads(read_text(path))
            processor = processor.get(f"{key}_processor") if key else processor
            if isinstance(processor, dict):
                return processor
    return {}


def weights_digest(network: torch.nn.Module) -> str:
    """SHA-256 of all weights and their names."""
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
        path = cached_file(name, file)
    except OSError:
        return None
    return Path(path) if path else None


@contextmanager
def refusals(name: str, kind: str, advice: str) -> Iterator[None]:
    """Turn whatever keeps a model from being loaded into a `CheckpointError` with advice."""
    try:
        yield
    except CounterfoilError:
        raise
    except ImportError as error:
        raise CheckpointError(f"'{name}' needs a package that is missing: {error}") from None
    except UnpicklingError:  # its own message advises to load the file all the same
        raise CheckpointError(
            f"no {kind} could be loaded from '{name}': its weights are a pickle of more than "
            "tensors, which could run code (nothing was run); name a model with safetensors"
        ) from None
    except Exception as error:  # `transformers` raises any class for a damaged folder
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(
            f"no {kind} could be loaded from '{name}': {reason[:MAX_REASON]} ({advice})"
        ) from None


def _vision_refusals(name: str) -> AbstractContextManager[None]:
    return refusals(name, "vision model", "option model: a local folder, or a name on the hub")


def dual_refusals(name: str) -> AbstractContextManager[None]:
    advice = "set model.image.pretrained to the path of a local folder, or to a name on the hub"
    return refusals(name, "dual encoder", advice)


@contextmanager
def no_bars() -> Iterator[None]:
    """Keep `transformers` from drawing its own progress bars."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


@contextmanager
def silent_loading() -> Iterator[None]:
    """Keep `transformers` from reporting missing weights that the caller handles."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with no_bars():
            yield
    finally:
        logging.set_verbosity(level)


# Preprocessing of the published networks of each kind, if no file beside the weights states it.
DEFAULT_PROCESSORS: dict[str, dict[str, Any]] = {
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
    """The kind of a dual encoder, its patch size, and its preprocessing."""

    kind: str
    patch: int
    preprocessing: Preprocessing


def dual_config(name: str) -> Any:
    """The configuration of a dual encoder, from a local folder or the hub."""
    if not name:
        raise ConfigError(
            "model.image.pretrained: name a CLIP or SigLIP: a local folder, or a name on the hub"
        )
    try:
        from transformers import AutoConfig
    except ImportError:
        raise MissingExtraError("transformers", "hf", "a dual encoder such as CLIP") from None
    with dual_refusals(name):
        config = AutoConfig.from_pretrained(name)
    if config.model_type not in DEFAULT_PROCESSORS:
        raise CheckpointError(
            f"'{name}' is a '{config.model_type}', not a dual encoder that can be trained here "
            f"({', '.join(DEFAULT_PROCESSORS)})"
        )
    return config


def dual_settings(name: str, side: int = 0) -> DualSettings:
    """Settings from the files beside the weights; ``side`` replaces the stated image size."""
    config = dual_config(name)
    kind, vision = config.model_type, config.vision_config
    processor = DEFAULT_PROCESSORS[kind] | load_processor(name)
    fit: Literal["squash", "crop"] = "crop" if processor["do_center_crop"] else "squash"
    size = side or int(vision.image_size)
    preprocessing = read_preprocessing(processor, vision.image_size, fit, size)
    return DualSettings(kind, int(vision.patch_size), preprocessing)
