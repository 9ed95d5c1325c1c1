"""Save and load models: self-contained folders of weights (safetensors), config and vocabulary.

`SHA256SUMS` lists the checksums of all files; loading a model verifies them, and so does
``sha256sum -c SHA256SUMS``. Checksums are written before the folder gets its name, so files and
checksums are always of the same save. CLIP and SigLIP load from a folder or a hub's name.
"""

from __future__ import annotations

import hashlib
import json
import os
import reprlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from counterfoil.core import zoo
from counterfoil.core.config import MODEL_CONFIG
from counterfoil.core.errors import (
    ArgumentError,
    CheckpointError,
    DataError,
    MissingExtraError,
    UnknownNameError,
    require_path,
)
from counterfoil.core.registry import IF_OWN
from counterfoil.core.storage.atomic import atomic_folder, scratch_folder
from counterfoil.core.storage.checksums import SUMS, check_sum, check_sums, read_sums, write_sums
from counterfoil.core.storage.reading import open_regular, read_text
from counterfoil.core.tensors.device import MemoryGuard
from counterfoil.data.text.tokenizers import HuggingFaceText, load_text_processor
from counterfoil.encoders.bert import BertEncoder
from counterfoil.encoders.dual import DualImageEncoder, DualTextEncoder
from counterfoil.features.pixels import Pixels
from counterfoil.features.pretrained import dual_config, dual_refusals
from counterfoil.matchers.ensemble import EnsembleEncoder, EnsembleMatcher
from counterfoil.models.catalogue import ModelSpec
from counterfoil.models.correction_rule import CorrectionRule
from counterfoil.models.match import YARDSTICK, load_yardstick
from counterfoil.models.model import Model

FORMAT = 1
CARD = zoo.CARD
WEIGHTS, CONFIG = "model.safetensors", MODEL_CONFIG
CONFIG_BYTES = 1 << 20
LANGUAGE_MODEL, VISION_MODEL = "language_model", "vision_model"


def save_pretrained(
    model: Model, folder: str | Path, *, half: bool = False, card: str | None = None
) -> None:
    """Write a model; the folder appears complete or not at all.

    A saved model that is there is replaced. A folder with anything else in it is refused. With
    ``half``, weights are stored as float16, in half the space; a loaded model computes in float32
    again, with scores that differ slightly. ``card`` is the text of a README.md to go with it.
    """
    require_path("save_pretrained", folder)
    given: object = model
    if not isinstance(given, Model):
        got = type(given).__name__
        raise ArgumentError(f"save_pretrained: expected a model and a folder, got {got} first")
    folder = Path(folder)
    if folder.exists() and not _is_replaceable(folder):
        raise ArgumentError(
            f"{folder}: not empty and not a saved model; choose another folder to save to"
        )
    with atomic_folder(folder) as new:
        if card is not None:
            (new / CARD).write_text(card, encoding="utf-8")
        write_model(model, new, half)


def _is_replaceable(folder: Path) -> bool:
    """Whether a folder is empty, or holds a saved model's files and nothing else."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {""}
    if not names:
        return True
    if not {CONFIG, SUMS} <= names:
        return False
    listed = {Path(name).parts[0] for name in read_sums(folder / SUMS)}
    return names <= listed | {SUMS}


def write_model(model: Model, folder: Path, half: bool = False) -> None:
    """Write a model's files into a new folder, their checksums last."""
    write_files(model, folder, half)
    write_sums(folder)


def write_files(model: Model, folder: Path, half: bool = False) -> None:
    """Write a model's files without their checksums."""
    image_encoder = first_member(model.image_encoder)
    text_encoder = first_member(model.text_encoder)
    layout: dict[str, Any] = {
        "format": FORMAT,
        "spec": _portable_spec(model),
        "input_dim": model.input_dim,
        "text_processor": model.text.kind,
        "fragments_from": model.fragments_from,
        "fragments_options": model.fragments_options,
        "pretrained": sorted(model.pretrained),
    }
    if model.correction_rule is not None:
        layout["correction_rule"] = asdict(model.correction_rule)
    (folder / CONFIG).write_text(json.dumps(layout, indent=2), encoding="utf-8")
    model.text.save(folder)
    if model.yardstick is not None:
        (folder / YARDSTICK).write_text(model.yardstick.to_json(), encoding="utf-8")
    if isinstance(text_encoder, BertEncoder):
        text_encoder.bert.save(folder / LANGUAGE_MODEL)
    if isinstance(text_encoder, DualTextEncoder):
        text_encoder.tower.save(folder / LANGUAGE_MODEL)
    if isinstance(image_encoder, DualImageEncoder):
        image_encoder.tower.save(folder / VISION_MODEL)
    weights = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
    if half:
        weights = {key: _to_half(key, value) for key, value in weights.items()}
    try:
        save_file(weights, folder / WEIGHTS)
    except SafetensorError as error:  # such as a full disk
        raise CheckpointError(f"{folder / WEIGHTS}: could not be written ({error})") from None


def _to_half(name: str, weight: torch.Tensor) -> torch.Tensor:
    """A weight as float16; integers and other precisions stay as they are."""
    if weight.dtype != torch.float32:
        return weight
    small = weight.half()
    if not torch.isfinite(small).all():
        raise CheckpointError(
            f"the weight '{name}' holds numbers above {torch.finfo(torch.float16).max:g}, which "
            "half precision cannot store; save the model without half=True"
        )
    return small


def _portable_spec(model: Model) -> dict[str, Any]:
    """The spec of a model, without files that its saved weights make unnecessary."""
    spec = model.spec.model_dump()
    for part, module in (
        ("image", model.image_encoder),
        ("text", model.text_encoder),
        ("matcher", model.matcher),
    ):
        spec[part] |= getattr(first_member(module), "portable_options", {})
    return spec


def changed_parts(model: Model, folder: Path) -> list[str]:
    """Keys of the spec by which a model differs from a saved one; initial weights do not count."""
    own = json.loads(json.dumps(_portable_spec(model)))
    saved = _read_config(folder / CONFIG)["spec"]
    for part in ("image", "text", "matcher"):
        own[part].pop("pretrained", None)
        saved[part].pop("pretrained", None)
    return [key for key in own if own[key] != saved.get(key)]


def first_member(part: nn.Module) -> nn.Module:
    """The encoder or matcher, or the first member of an ensemble."""
    return part.members[0] if isinstance(part, (EnsembleEncoder, EnsembleMatcher)) else part


def from_pretrained(folder: str | Path) -> Model:
    """Load a model: a folder of `save_pretrained`, the best checkpoint of a run, or by name."""
    require_path("from_pretrained", folder)
    folder = zoo.resolve(folder)
    if not os.path.lexists(folder / CONFIG) and (folder / "best" / CONFIG).is_file():
        folder = folder / "best"
    if not os.path.lexists(folder / CONFIG):
        raise CheckpointError(f"{folder}: not a saved model (no {CONFIG} there)")
    check_sums(folder, without={WEIGHTS})  # `load_weights` verifies those
    layout = _read_config(folder / CONFIG)
    try:
        model = _build(layout, folder)
    except (CheckpointError, DataError, MissingExtraError):
        raise
    except UnknownNameError as error:
        advice = "" if IF_OWN in str(error) else f"; {IF_OWN}"
        raise CheckpointError(f"{folder / CONFIG}: {error}{advice}") from None
    except Exception as error:  # a forged config may fail in any part of a model
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"{folder / CONFIG}: damaged ({reason[:300]})") from None
    load_weights(model, folder)
    model.pretrained = frozenset(layout["pretrained"])
    model.yardstick = load_yardstick(folder)
    return model.eval()


def _build(layout: dict[str, Any], folder: Path) -> Model:
    """The model of a config, before its weights are loaded."""
    spec = dict(layout["spec"])
    for part, subfolder in (("text", LANGUAGE_MODEL), ("image", VISION_MODEL)):
        if (folder / subfolder).is_dir():
            spec[part] = {**spec[part], "pretrained": str(folder / subfolder)}
    text = load_text_processor(layout["text_processor"], folder)
    with MemoryGuard(copies=1):  # no gradients or optimizer state
        model = Model(
            ModelSpec.model_validate(spec),
            layout["input_dim"],
            text,
            layout["fragments_from"],
            layout["fragments_options"],
        )
    if "correction_rule" in layout:
        model.correction_rule = CorrectionRule(**layout["correction_rule"])
    return model


def load_weights(model: Model, folder: Path) -> None:
    """Load the weights of a folder, verified and checked to be finite."""
    path = folder / WEIGHTS
    try:
        weights = load_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file: an incomplete model folder") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file ({error})") from None
    check_sum(folder, WEIGHTS)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        first, *others = str(error).strip().splitlines()[1:] or [str(error)]
        more = f" (and {len(others)} more)" if others else ""
        raise CheckpointError(
            f"{path}: the weights do not fit the config: {first.strip()[:500]}{more}"
        ) from None
    for name, value in model.state_dict().items():  # in the model's precision, not the file's
        if not torch.isfinite(value).all():
            raise CheckpointError(
                f"{path}: the weight '{name}' holds numbers that are not finite; scores of this "
                "model would be meaningless: use an earlier checkpoint, or train again"
            )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        layout = json.loads(read_text(path, CONFIG_BYTES))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except RecursionError:
        raise CheckpointError(f"{path}: damaged (nested too deeply)") from None
    except ValueError as error:  # not UTF-8, or not JSON
        raise CheckpointError(f"{path}: damaged ({error})") from None
    if not isinstance(layout, dict):
        raise CheckpointError(f"{path}: damaged (expected a JSON object)")
    missing = {"format", "spec", "input_dim", "text_processor"} - set(layout)
    if missing:
        raise CheckpointError(f"{path}: damaged (missing: {', '.join(sorted(missing))})")
    if layout["format"] != FORMAT:
        raise CheckpointError(
            f"{path}: written in format {reprlib.repr(layout['format'])}, this version reads "
            f"format {FORMAT}"
        )
    layout = {"fragments_from": None, "fragments_options": None, "pretrained": [], **layout}
    for name, accepts in FIELDS.items():
        if not accepts(layout[name]):
            raise CheckpointError(
                f"{path}: damaged ('{name}' is {reprlib.repr(layout[name])}, which is not valid)"
            )
    return layout


FIELDS: dict[str, Callable[[Any], bool]] = {
    "spec": lambda value: isinstance(value, dict),
    "input_dim": lambda value: type(value) is int and 0 < value < 1 << 31,
    "text_processor": lambda value: isinstance(value, str),
    "fragments_from": lambda value: value is None or isinstance(value, str),
    "fragments_options": lambda value: value is None or isinstance(value, dict),
    "pretrained": lambda value: (
        isinstance(value, list) and all(isinstance(name, str) for name in value)
    ),
}
"""Valid values of the fields of a saved model's config."""


def folder_digest(folder: Path) -> str:
    """SHA-256 over the names and contents of a saved model's files."""
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"{folder}: the model of the index is missing; build it again")
    digest = hashlib.sha256()
    # checksums depend on the ignored paths in the config; the yardstick affects no score
    ignored = {folder / SUMS, folder / YARDSTICK}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p not in ignored):
        digest.update(f"{path.relative_to(folder).as_posix()}\n".encode())
        if path == folder / CONFIG:
            digest.update(_portable(path))
            continue
        with open_regular(path) as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def model_digest(model: Model) -> str:
    """The `folder_digest` that a model has after saving."""
    with scratch_folder("counterfoil-model-") as folder:
        saved = folder / "model"
        saved.mkdir()
        write_files(model, saved)
        return folder_digest(saved)


def _portable(path: Path) -> bytes:
    """The config without the paths of pretrained parts."""
    try:
        layout = json.loads(read_text(path))
        for part, subfolder in (("text", LANGUAGE_MODEL), ("image", VISION_MODEL)):
            if (path.parent / subfolder).is_dir():
                layout["spec"][part].pop("pretrained", None)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: damaged ({error})") from None
    return json.dumps(layout, sort_keys=True).encode()


def is_transformers_folder(folder: Path) -> bool:
    """Whether a folder was written by `transformers`, not by `save_pretrained`."""
    return (folder / MODEL_CONFIG).is_file() and not os.path.lexists(folder / SUMS)


def load_zero_shot(name: str) -> Model:
    """A pretrained dual encoder of `transformers` (CLIP, SigLIP) with cosine scores."""
    config = dual_config(name)
    clip = config.model_type == "clip"
    half = {"name": "dual", "pretrained": name}
    with dual_refusals(name):
        width = config.projection_dim if clip else config.vision_config.hidden_size
        spec = ModelSpec(
            name=config.model_type,
            embed_size=int(width),
            image=half,
            text=half,
            matcher={"name": "cosine"},
        )
    pixels = Pixels(model=name)
    text = HuggingFaceText.from_pretrained(name)
    return Model(spec, pixels.dim, text, fragments_from=pixels.description()).eval()
