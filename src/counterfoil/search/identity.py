"""Which model an index was made with: a digest of everything that bears on a score."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from counterfoil.errors import CheckpointError
from counterfoil.models.checksums import SUMS
from counterfoil.models.explain import YARDSTICK
from counterfoil.models.model import Model
from counterfoil.models.store import CONFIG, LANGUAGE_MODEL, VISION_MODEL, write_files
from counterfoil.reading import open_regular, read_text
from counterfoil.scratch import scratch_folder


def folder_digest(folder: Path) -> str:
    """SHA-256 over the names and contents of a saved model's files."""
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"{folder}: the model of the index is missing; build it again")
    digest = hashlib.sha256()
    # the sums follow from the files, and from paths in the config that do not count here; the
    # yardstick bears on no score
    apart = {folder / SUMS, folder / YARDSTICK}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p not in apart):
        digest.update(f"{path.relative_to(folder).as_posix()}\n".encode())
        if path == folder / CONFIG:
            digest.update(_portable(path))
            continue
        with open_regular(path) as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def model_digest(model: Model) -> str:
    """The digest that a model would have once saved."""
    with scratch_folder("counterfoil-model-") as folder:
        saved = folder / "model"
        saved.mkdir()
        write_files(model, saved)
        return folder_digest(saved)


def _portable(path: Path) -> bytes:
    """The config without the paths that pretrained parts were read from."""
    try:
        layout = json.loads(read_text(path))
        for part, place in (("text", LANGUAGE_MODEL), ("image", VISION_MODEL)):
            if (path.parent / place).is_dir():
                layout["spec"][part].pop("pretrained", None)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: damaged ({error})") from None
    return json.dumps(layout, sort_keys=True).encode()
