"""Builds a guide: scores or encodings of the training split by K trained runs.

After every block the data are flushed, then `guide.json` is updated. A build that is killed resumes
there with the same blocks, and so with the same bytes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor

from counterfoil.core.config import model_folder
from counterfoil.core.errors import ConfigError, DataError
from counterfoil.core.progress import Progress, Silent
from counterfoil.core.storage.arrays import parse_header
from counterfoil.core.storage.atomic import atomic_folder
from counterfoil.core.storage.checksums import STATE
from counterfoil.core.storage.locks import LOCK, locked_folder
from counterfoil.core.tensors.device import room_for
from counterfoil.data.batches.collate import pad_fragments
from counterfoil.data.fragments import FragmentTable
from counterfoil.data.pairs import Split
from counterfoil.encoders import Encoded
from counterfoil.encoders.stored import EncodedReader, EncodedWriter, Extent, full_precision
from counterfoil.models.model import Model
from counterfoil.models.store import from_pretrained
from counterfoil.scoring.encode import encode_texts, score_all
from counterfoil.training.guides.guide import MATRIX, MODEL, check_weights, load_teacher
from counterfoil.training.guides.manifest import (
    CAPTIONS,
    IDS,
    MANIFEST,
    Form,
    Manifest,
    TeacherMark,
    default_form,
    difference,
    mark_of,
    read_manifest,
    side_name,
    teacher_folder,
    weights_digest,
    write_texts,
)

IMAGE_BLOCK, CAPTION_BLOCK = 256, 1024
"""Images and captions per block."""

MAX_SCORES_IN_MEMORY = 1 << 25
"""Scores in memory at once, in single precision."""


def encode_images_to(
    folder: Path, manifest: Manifest, number: int, model: Model, split: Split, progress: Progress
) -> None:
    """Encode the images for teacher ``number``; unreadable ones are marked as absent."""
    name = side_name(number, "images")
    writer = EncodedWriter(folder / name, manifest.dtype, manifest.sides.get(name, Extent()))
    table = split.require_fragments()
    label = f"encoding images ({manifest.teachers[number].run})"
    for images in blocks(writer.done.items, len(split), IMAGE_BLOCK, label, progress):
        encoded, present = encode_image_block(model, table, images)
        manifest.sides[name] = writer.append(encoded, present)
        manifest.save(folder)


def encode_captions_to(
    folder: Path, manifest: Manifest, number: int, model: Model, split: Split, progress: Progress
) -> None:
    """Encode the captions for teacher ``number``, with its own vocabulary."""
    name = side_name(number, "captions")
    writer = EncodedWriter(
        folder / name, caption_dtype(manifest), manifest.sides.get(name, Extent())
    )
    label = f"encoding captions ({manifest.teachers[number].run})"
    total = len(split.texts)
    for captions in blocks(writer.done.items, total, CAPTION_BLOCK, label, progress):
        encoded = encode_texts(model, [split.texts[t] for t in captions])
        manifest.sides[name] = writer.append(encoded, np.ones(len(captions), dtype=np.bool_))
        manifest.save(folder)


def caption_dtype(manifest: Manifest) -> str:
    """Half precision if captions are stored; a matrix needs them temporarily and exactly."""
    return manifest.dtype if manifest.form == "embeddings" else "float32"


@torch.inference_mode()
def encode_image_block(
    model: Model, table: FragmentTable, images: range
) -> tuple[Encoded | None, NDArray[np.bool_]]:
    """The readable images of a range, encoded, and a mask of them."""
    items = []
    present = np.zeros(len(images), dtype=np.bool_)
    for row, image in enumerate(images):
        try:
            items.append(table.read(image))
            present[row] = True
        except DataError:
            continue
    if not items:
        return None, present
    return model.encode_images(pad_fragments(items).to(model.device)), present


def blocks(done: int, total: int, size: int, label: str, progress: Progress) -> Iterator[range]:
    """Ranges of the remaining items of ``total``, ``size`` at a time, with a progress bar."""
    starts = range(done, total, size)
    before = -(-done // size)
    for start in progress.track(starts, label, before + len(starts), done=before):
        yield range(start, min(start + size, total))


def fill_matrix(
    folder: Path,
    manifest: Manifest,
    models: Sequence[Model],
    table: FragmentTable,
    progress: Progress,
) -> None:
    """Write the mean of the models' scores of every image with every caption.

    Images are encoded in blocks. The encoded captions are read again for every block unless they
    fit on the GPU, so neither side is ever completely in the computer's memory. Rows of unreadable
    images are NaN.
    """
    path, captions = folder / MATRIX, manifest.data.captions
    offset = _open(path, (manifest.data.images, captions), begun=manifest.matrix_rows > 0)
    sides = [side_name(number, "captions") for number in range(len(models))]
    readers = [
        EncodedReader(folder / name, caption_dtype(manifest), manifest.sides[name])
        for name in sides
    ]
    texts = [_Captions(reader, model.device) for reader, model in zip(readers, models, strict=True)]
    rows = max(1, min(IMAGE_BLOCK, MAX_SCORES_IN_MEMORY // max(1, captions)))
    todo = blocks(manifest.matrix_rows, manifest.data.images, rows, "scoring", progress)
    with path.open("r+b") as file:
        for images in todo:
            scores = _mean_scores(models, texts, table, images)
            file.seek(offset + images.start * captions * 2)
            file.write(scores.numpy().astype("<f2").data)
            file.flush()
            os.fsync(file.fileno())
            manifest.matrix_rows = images.stop
            manifest.save(folder)


def _open(path: Path, shape: tuple[int, int], begun: bool) -> int:
    """Create a `.npy` file of this shape unless it was ``begun``; returns its data offset."""
    if not begun:
        with path.open("wb") as file:
            header = {"descr": "<f2", "fortran_order": False, "shape": shape}
            npy.write_array_header_1_0(file, header)
            file.truncate(file.tell() + shape[0] * shape[1] * 2)
    with path.open("rb") as file:
        return parse_header(file, str(path))[2]


class _Captions:
    """The encoded captions of one teacher, in blocks; read once if they fit on the GPU.

    Twice their size must be free, because blocks are padded.
    """

    def __init__(self, reader: EncodedReader, device: torch.device) -> None:
        self.reader, self.device = reader, device
        fits = room_for(2 * reader.size_in_bytes, device)
        self._on_gpu: list[Encoded] | None = [] if fits else None

    def __len__(self) -> int:
        return len(self.reader)

    def blocks(self) -> Iterator[tuple[slice, Encoded]]:
        for number, start in enumerate(range(0, len(self), CAPTION_BLOCK)):
            columns = slice(start, min(start + CAPTION_BLOCK, len(self)))
            if self._on_gpu is not None and number < len(self._on_gpu):
                yield columns, self._on_gpu[number]
                continue
            captions, _ = self.reader.read(np.arange(columns.start, columns.stop))
            block = full_precision(captions, self.device)
            if self._on_gpu is not None:
                self._on_gpu.append(block)
            yield columns, block


@torch.inference_mode()
def _mean_scores(
    models: Sequence[Model], texts: Sequence[_Captions], table: FragmentTable, images: range
) -> Tensor:
    total = torch.zeros(len(images), len(texts[0]))
    for model, captions in zip(models, texts, strict=True):
        encoded, present = encode_image_block(model, table, images)
        there = torch.from_numpy(present)
        total[~there] = torch.nan
        if encoded is None:
            break
        for columns, block in captions.blocks():
            total[there, columns] += score_all(model, encoded, block)
    return total / len(models)


def build_guide(
    folder: Path,
    runs: Sequence[Path],
    split: Split,
    *,
    form: Form | None = None,
    device: torch.device | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Build a guide from runs for a training split, or resume a build.

    ``form`` is by default `matrix` up to a gigabyte, otherwise `embeddings`.
    """
    progress, target = progress or Silent(), device or torch.device("cpu")
    teachers = [_teacher_mark(run, split) for run in runs]
    if folder.is_file():
        raise ConfigError(f"{folder}: exists and is not a guide; choose another --out")
    if _is_complete(folder) and not _leftovers(folder):  # nothing is written: no lock is needed
        manifest = _open_or_create(folder, teachers, split, form)
        progress.say(f"{folder} is complete already")
        return manifest
    advice = "wait for it, or choose another folder"
    with locked_folder(folder, "building a guide there", advice):
        manifest = _open_or_create(folder, teachers, split, form)
        _sweep(folder)
        if manifest.complete:
            _remove(_leftovers(folder))
            progress.say(f"{folder} is complete already")
        elif manifest.form == "matrix":
            _fill_matrix(folder, manifest, runs, split, target, progress)
        else:
            _fill_embeddings(folder, manifest, runs, split, target, progress)
    return manifest


def _is_complete(folder: Path) -> bool:
    return (folder / MANIFEST).is_file() and read_manifest(folder).complete


def _fill_embeddings(
    folder: Path,
    manifest: Manifest,
    runs: Sequence[Path],
    split: Split,
    device: torch.device,
    progress: Progress,
) -> None:
    for number, run in enumerate(runs):
        copy = _copy_model(folder, run, number)
        model = _load_checked(copy, manifest, number).to(device)
        encode_images_to(folder, manifest, number, model, split, progress)
        encode_captions_to(folder, manifest, number, model, split, progress)
    manifest.complete = True
    manifest.save(folder)


def _fill_matrix(
    folder: Path,
    manifest: Manifest,
    runs: Sequence[Path],
    split: Split,
    device: torch.device,
    progress: Progress,
) -> None:
    models = [
        _load_checked(model_folder(run), manifest, number).to(device)
        for number, run in enumerate(runs)
    ]
    for number, model in enumerate(models):
        encode_captions_to(folder, manifest, number, model, split, progress)
    fill_matrix(folder, manifest, models, split.require_fragments(), progress)
    manifest.complete, manifest.sides = True, {}
    manifest.save(folder)
    _remove(_leftovers(folder))


def _leftovers(folder: Path) -> list[Path]:
    """Folders of encoded captions, which a complete matrix no longer needs.

    A build that was killed after its last save can have left them.
    """
    matrix = (folder / MATRIX).is_file()
    return sorted(folder.glob("teacher-*")) if matrix else []


def _remove(folders: Sequence[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _teacher_mark(run: Path, split: Split) -> TeacherMark:
    """Fingerprint of a run, which must read the split's fragments."""
    name, digest = load_teacher(run, split).spec.name, weights_digest(model_folder(run))
    return TeacherMark(run=run.resolve().name, model=name, weights_sha256=digest)


def _open_or_create(
    folder: Path, teachers: list[TeacherMark], split: Split, form: Form | None
) -> Manifest:
    """The manifest of a started guide, checked to be the same; otherwise of a new one."""
    if not teachers:
        raise ConfigError("a guide takes at least one trained run")
    if not (folder / MANIFEST).is_file():
        return _create(folder, teachers, split, form)
    manifest = read_manifest(folder)
    if form is not None and form != manifest.form:
        raise ConfigError(
            f"{folder}: begun as '{manifest.form}', asked for '{form}'; choose another --out"
        )
    reason = difference(manifest.data, split, folder)
    if reason is not None:
        raise DataError(
            f"{folder}: begun with other data: {reason}. Choose another --out, or delete it"
        )
    theirs, ours = ([t.weights_sha256 for t in marks] for marks in (manifest.teachers, teachers))
    if theirs != ours:
        names = ", ".join(teacher.run for teacher in manifest.teachers)
        raise DataError(
            f"{folder}: begun with other teachers ({names}, as they were then), now asked for "
            f"{', '.join(teacher.run for teacher in teachers)}; choose another --out, or delete it"
        )
    return manifest


def _create(folder: Path, teachers: list[TeacherMark], split: Split, form: Form | None) -> Manifest:
    if any(map(_is_foreign, folder.iterdir())):
        raise ConfigError(f"{folder}: exists and is not a guide; choose another --out")
    data = mark_of(split)
    manifest = Manifest(
        form=form or default_form(data.images, data.captions), data=data, teachers=teachers
    )
    write_texts(split, folder)
    manifest.save(folder)
    return manifest


def _is_foreign(path: Path) -> bool:
    """Whether a file cannot come from a build that was killed before it wrote its manifest."""
    return path.name not in (IDS, CAPTIONS) and not path.name.startswith(".")


def _sweep(folder: Path) -> None:
    """Delete temporary files of a killed build."""
    for name in (IDS, CAPTIONS, MANIFEST):
        for path in folder.glob(f".{name}.*"):
            path.unlink()
    for path in folder.glob(f"teacher-*/.{MODEL}.new.*"):
        shutil.rmtree(path)
    for path in folder.glob(f"teacher-*/.{MODEL}{LOCK}"):
        path.unlink()


def _copy_model(folder: Path, run: Path, number: int) -> Path:
    """Copy a teacher's model into the guide, which then needs no other folder."""
    copy = teacher_folder(folder, number) / MODEL
    if not copy.is_dir():
        with atomic_folder(copy) as new:
            shutil.copytree(
                model_folder(run), new, ignore=shutil.ignore_patterns(STATE), dirs_exist_ok=True
            )
    return copy


def _load_checked(model: Path, manifest: Manifest, number: int) -> Model:
    loaded = from_pretrained(model)
    check_weights(model, manifest, number)
    return loaded
