"""Building a guide: K trained runs over the whole training split, block by block.

After every block the data are flushed, then `guide.json` says so. A build that is killed at any
moment goes on from there, with the same blocks and so to the same bytes.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from counterfoil.config import model_folder
from counterfoil.data.pairs import Split
from counterfoil.errors import ConfigError, DataError
from counterfoil.files import atomic_folder
from counterfoil.locks import LOCK, locked_folder
from counterfoil.models.model import Model
from counterfoil.models.store import from_pretrained
from counterfoil.progress import Progress, Silent
from counterfoil.training.checkpoint import STATE
from counterfoil.training.guide import MODEL, check_weights
from counterfoil.training.guide_data import (
    CAPTIONS,
    IDS,
    difference,
    keep_texts,
    mark_of,
)
from counterfoil.training.guide_encode import encode_captions_to, encode_images_to
from counterfoil.training.guide_manifest import (
    MANIFEST,
    Form,
    Manifest,
    TeacherMark,
    default_form,
    read_manifest,
    teacher_folder,
    weights_digest,
)
from counterfoil.training.guide_matrix import fill_matrix


def build_guide(
    folder: Path,
    runs: Sequence[Path],
    split: Split,
    *,
    form: Form | None = None,
    device: torch.device | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Make a guide of some runs for a training split, or finish one that was begun.

    ``form`` is by default `matrix` where that takes up to a gigabyte, else `embeddings`.
    """
    progress, place = progress or Silent(), device or torch.device("cpu")
    teachers = [_look_at(run, split) for run in runs]
    if folder.is_file():
        raise ConfigError(f"{folder}: exists and is not a guide; choose another --out")
    if _is_complete(folder):  # then nothing is written, and no lock is needed
        manifest = _begun(folder, teachers, split, form)
        progress.say(f"{folder} is complete already")
        return manifest
    advice = "wait for it, or choose another folder"
    with locked_folder(folder, "building a guide there", advice):
        manifest = _begun(folder, teachers, split, form)
        _sweep(folder)
        if manifest.complete:
            progress.say(f"{folder} is complete already")
        elif manifest.form == "matrix":
            _fill_matrix(folder, manifest, runs, split, place, progress)
        else:
            _fill_embeddings(folder, manifest, runs, split, place, progress)
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
        copy = _copied(folder, run, number)
        model = _checked(copy, manifest, number).to(device)
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
        _checked(model_folder(run), manifest, number).to(device) for number, run in enumerate(runs)
    ]
    for number, model in enumerate(models):
        encode_captions_to(folder, manifest, number, model, split, progress)
    fill_matrix(folder, manifest, models, split.require_fragments(), progress)
    manifest.complete, manifest.sides = True, {}
    manifest.save(folder)
    for number in range(len(runs)):
        shutil.rmtree(teacher_folder(folder, number), ignore_errors=True)


def _look_at(run: Path, split: Split) -> TeacherMark:
    """What a guide remembers of a run, which must read the split's fragments."""
    folder = model_folder(run)
    model = from_pretrained(folder)
    fragments = split.require_fragments()
    made_by = fragments.made_by
    if model.fragments_from != made_by and None not in (model.fragments_from, made_by):
        raise DataError(
            f"{run}: its model reads fragments of '{model.fragments_from}', the data have those of "
            f"'{made_by}'; a guide's teachers read the same features"
        )
    if model.input_dim != fragments.dim:
        raise DataError(
            f"{run}: its model reads fragments of {model.input_dim} numbers, the data have "
            f"{fragments.dim}; a guide's teachers read the same features"
        )
    return TeacherMark(
        run=run.resolve().name, model=model.spec.name, weights_sha256=weights_digest(folder)
    )


def _begun(folder: Path, teachers: list[TeacherMark], split: Split, form: Form | None) -> Manifest:
    """The manifest of a guide that was begun before, if it is this one; else of a new guide."""
    if not teachers:
        raise ConfigError("a guide takes at least one trained run")
    if not (folder / MANIFEST).is_file():
        return _new(folder, teachers, split, form)
    manifest = read_manifest(folder)
    if form is not None and form != manifest.form:
        raise ConfigError(
            f"{folder}: begun as '{manifest.form}', asked for '{form}'; choose another --out"
        )
    found = difference(manifest.data, split, folder)
    if found is not None:
        raise DataError(
            f"{folder}: begun with other data: {found}. Choose another --out, or delete it"
        )
    theirs, ours = ([t.weights_sha256 for t in some] for some in (manifest.teachers, teachers))
    if theirs != ours:
        names = ", ".join(teacher.run for teacher in manifest.teachers)
        raise DataError(
            f"{folder}: begun with other teachers ({names}, as they were then), now asked for "
            f"{', '.join(teacher.run for teacher in teachers)}; choose another --out, or delete it"
        )
    return manifest


def _new(folder: Path, teachers: list[TeacherMark], split: Split, form: Form | None) -> Manifest:
    if any(map(_is_strange, folder.iterdir())):
        raise ConfigError(f"{folder}: exists and is not a guide; choose another --out")
    data = mark_of(split)
    manifest = Manifest(
        form=form or default_form(data.images, data.captions), data=data, teachers=teachers
    )
    keep_texts(split, folder)
    manifest.save(folder)
    return manifest


def _is_strange(path: Path) -> bool:
    """Whether a build that was cut off before it wrote its manifest cannot have left this."""
    return path.name not in (IDS, CAPTIONS) and not path.name.startswith(".")


def _sweep(folder: Path) -> None:
    """Delete what a build was writing when it was killed."""
    for name in (IDS, CAPTIONS, MANIFEST):
        for path in folder.glob(f".{name}.*"):
            path.unlink()
    for path in folder.glob(f"teacher-*/.{MODEL}.new.*"):
        shutil.rmtree(path)
    for path in folder.glob(f"teacher-*/.{MODEL}{LOCK}"):
        path.unlink()


def _copied(folder: Path, run: Path, number: int) -> Path:
    """A teacher's model inside the guide, which then needs nothing outside its folder."""
    copy = teacher_folder(folder, number) / MODEL
    if not copy.is_dir():
        with atomic_folder(copy) as new:
            shutil.copytree(
                model_folder(run), new, ignore=shutil.ignore_patterns(STATE), dirs_exist_ok=True
            )
    return copy


def _checked(model: Path, manifest: Manifest, number: int) -> Model:
    loaded = from_pretrained(model)
    check_weights(model, manifest, number)
    return loaded
