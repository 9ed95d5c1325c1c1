"""Models on disk: a folder with weights (safetensors), config and vocabulary, self-contained.

`SHA256SUMS` in it lists the sums of all these files, which are compared when the model is read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from counterfoil.data.texts import load_text_processor
from counterfoil.encoders.bert import BertEncoder
from counterfoil.encoders.copies import CopiedEncoder
from counterfoil.encoders.dual import DualImageEncoder, DualTextEncoder
from counterfoil.errors import CheckpointError
from counterfoil.files import atomic_folder
from counterfoil.matchers.copies import CopiedMatcher
from counterfoil.models.checksums import check_sum, check_sums, write_sums
from counterfoil.models.model import Model
from counterfoil.models.spec import ModelSpec

FORMAT = 1
WEIGHTS, CONFIG = "model.safetensors", "config.json"
LANGUAGE_MODEL, VISION_MODEL = "language_model", "vision_model"


def save_pretrained(model: Model, folder: str | Path) -> None:
    """Write a model; the folder appears whole or not at all."""
    with atomic_folder(Path(folder)) as new:
        write_model(model, new)


def write_model(model: Model, folder: Path) -> None:
    """Write a model's files into a new folder, their checksums last."""
    write_files(model, folder)
    write_sums(folder)


def write_files(model: Model, folder: Path) -> None:
    """Write a model's files without their checksums."""
    spec = model.spec.model_dump()
    image_encoder = first_member(model.image_encoder)
    text_encoder = first_member(model.text_encoder)
    spec["image"] |= getattr(image_encoder, "portable_options", {})
    spec["text"] |= getattr(text_encoder, "portable_options", {})
    spec["matcher"] |= getattr(first_member(model.matcher), "portable_options", {})
    layout: dict[str, Any] = {
        "format": FORMAT,
        "spec": spec,
        "input_dim": model.input_dim,
        "text_processor": model.text.kind,
        "fragments_from": model.fragments_from,
        "fragments_options": model.fragments_options,
        "pretrained": sorted(model.pretrained),
    }
    (folder / CONFIG).write_text(json.dumps(layout, indent=2), encoding="utf-8")
    model.text.save(folder)
    if isinstance(text_encoder, BertEncoder):
        text_encoder.bert.save(folder / LANGUAGE_MODEL)
    if isinstance(text_encoder, DualTextEncoder):
        text_encoder.tower.save(folder / LANGUAGE_MODEL)
    if isinstance(image_encoder, DualImageEncoder):
        image_encoder.tower.save(folder / VISION_MODEL)
    weights = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
    try:
        save_file(weights, folder / WEIGHTS)
    except SafetensorError as error:  # a full disk, for one
        raise CheckpointError(f"{folder / WEIGHTS}: could not be written ({error})") from None


def first_member(part: nn.Module) -> nn.Module:
    """The encoder or matcher itself, or the first of several copies of it."""
    return part.members[0] if isinstance(part, (CopiedEncoder, CopiedMatcher)) else part


def from_pretrained(folder: str | Path) -> Model:
    """Read a model that `save_pretrained` wrote; nothing but that folder is needed."""
    folder = Path(folder)
    layout = _read_config(folder)
    check_sums(folder, without={WEIGHTS})  # those are compared when they are loaded
    spec = dict(layout["spec"])
    for part, place in (("text", LANGUAGE_MODEL), ("image", VISION_MODEL)):
        if (folder / place).is_dir():
            spec[part] = spec[part] | {"pretrained": str(folder / place)}
    try:
        model = Model(
            ModelSpec.model_validate(spec),
            int(layout["input_dim"]),
            load_text_processor(layout["text_processor"], folder),
            layout.get("fragments_from"),
            layout.get("fragments_options"),
        )
    except (ValidationError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / CONFIG}: {error}") from None
    load_weights(model, folder)
    model.pretrained = frozenset(layout.get("pretrained", ()))
    return model.eval()


def model_folder(folder: Path) -> Path:
    """Where the weights are: in `best` of a run, in the folder itself of a saved model."""
    for place in (folder / "best", folder):
        if (place / CONFIG).is_file():
            return place
    if (folder / "config.yaml").is_file():
        raise CheckpointError(f"{folder}: this run has no checkpoint yet; train it to the end")
    raise CheckpointError(f"{folder}: neither a run nor a saved model")


def load_weights(model: Model, folder: Path) -> None:
    """Give a model the weights of a folder: those that were saved, all of them finite."""
    path = folder / WEIGHTS
    try:
        weights = load_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; the saved model is not whole") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file ({error})") from None
    check_sum(folder, WEIGHTS)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(f"{path}: the weights do not fit the config: {error}") from None
    for name, value in model.state_dict().items():  # in the model's precision, not the file's
        if not torch.isfinite(value).all():
            raise CheckpointError(
                f"{path}: the weight '{name}' holds numbers that are not finite; scores of this "
                "model would mean nothing: use an earlier checkpoint, or train again"
            )


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        layout = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{folder}: not a saved model (no {CONFIG} there)") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: damaged ({error})") from None
    missing = {"format", "spec", "input_dim", "text_processor"} - set(layout)
    if missing or not isinstance(layout["spec"], dict):
        raise CheckpointError(f"{path}: damaged (missing: {', '.join(sorted(missing)) or 'spec'})")
    if layout["format"] != FORMAT:
        raise CheckpointError(
            f"{path}: written in format {layout['format']}, this version reads format {FORMAT}"
        )
    return layout
