"""Create the folder of a new, empty index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from counterfoil.core.errors import ConfigError
from counterfoil.core.progress import Progress
from counterfoil.core.storage.atomic import atomic_folder
from counterfoil.core.storage.segments import SegmentStore
from counterfoil.data.pairs import Split
from counterfoil.models.model import Model
from counterfoil.models.store import folder_digest, write_model
from counterfoil.search.backends import backends
from counterfoil.search.codes import DTYPES
from counterfoil.search.fde import FdeOptions, FixedEncoding
from counterfoil.search.first_stage import (
    FirstStage,
    FirstStageOption,
    FirstStageProxy,
    ItemEncoder,
    check_first,
    choose_form,
    enough_to_fit,
    fit_first_stage,
    fragment_dim,
)
from counterfoil.search.state import FIRST, FIT, KIND, MANIFEST, SIDES, vectors_folder

SECRET = "api_key"  # noqa: S105 - the name of the option that is never stored


@dataclass(frozen=True)
class Settings:
    """Options of a new index, see `SearchIndex.build`."""

    backend: str
    options: dict[str, Any]
    first_stage: FirstStageOption
    dtype: str
    shortlist: int
    first: Model | None = None
    first_stage_options: dict[str, Any] = field(default_factory=dict)


def create_folder(
    folder: Path,
    model: Model,
    settings: Settings,
    splits: Sequence[Split],
    overwrite: bool,
    progress: Progress,
) -> None:
    """Write the model, the settings and an empty first stage, fitted on ``splits`` if needed."""
    form, fde_options = check_settings(settings, model, splits)
    for split in splits:
        if split.fragments is not None:
            model.fragments_of(split)
    check_folder(folder, overwrite)
    _drop_vectors(folder, settings.options)
    encoder = ItemEncoder(model, settings.first)
    example = encoder.texts(["a"])
    dim = FirstStageProxy(model, form).same_side_vectors(example).rows.shape[1]
    fit, fde = None, None
    if form == "fde":
        fde = FixedEncoding.draw(fragment_dim(encoder), fde_options)
    if form == "fitted":
        fit = fit_first_stage(model, splits, dim, progress)
        if settings.first_stage == "auto" and fit.gain <= 0:
            form, fit = "pooled", None
    dim = FirstStageProxy(model, form, fit, fde).vectors(example, "captions").rows.shape[1]
    with atomic_folder(folder) as new:
        (new / "model").mkdir()
        write_model(model, new / "model")
        if settings.first is not None:
            (new / FIRST).mkdir()
            write_model(settings.first, new / FIRST)
        if fit is not None:
            fit.save(new / FIT)
        if fde is not None:
            fde.save(new / FIT)
        for side in SIDES:
            backends[settings.backend].create(
                vectors_folder(new, side), dim, form == "maxsim", settings.dtype, settings.options
            ).close()
        header = {
            "model": {"name": model.spec.name, "sha256": folder_digest(new / "model")},
            "backend": settings.backend,
            "backend_options": {k: v for k, v in settings.options.items() if k != SECRET},
            "first_stage": form,
            "dtype": settings.dtype,
            "shortlist": settings.shortlist,
            "next_key": 0,
        }
        if form == "fde":
            header["first_stage_options"] = fde_options.model_dump()
        if settings.first is not None:
            name = settings.first.spec.name
            header["first_model"] = {"name": name, "sha256": folder_digest(new / FIRST)}
        SegmentStore.create(new, KIND, header, SIDES, MANIFEST)


def check_settings(
    settings: Settings, model: Model, splits: Sequence[Split]
) -> tuple[FirstStage, FdeOptions]:
    """Refuse options that do not fit; the first stage of the index, and the options of "fde".

    The splits need no features for this.
    """
    if settings.dtype not in DTYPES:
        raise ConfigError(f"dtype: {', '.join(DTYPES)} are possible, got {settings.dtype}")
    if settings.first_stage not in get_args(FirstStageOption):
        options = ", ".join(get_args(FirstStageOption))
        raise ConfigError(f"first_stage: {options} are possible, got {settings.first_stage}")
    if settings.shortlist < 1:
        raise ConfigError(f"shortlist_size: at least 1, got {settings.shortlist}")
    backends.check(settings.backend, settings.options, where="backend")
    form = _choose_first_stage(settings, model, splits)
    backends[settings.backend].check_choices(form == "maxsim", settings.dtype)
    if form != "fde" and settings.first_stage_options:
        raise ConfigError(f"first_stage_options: only 'fde' has options, not '{form}'")
    return form, FdeOptions.read(settings.first_stage_options)


def _choose_first_stage(settings: Settings, model: Model, splits: Sequence[Split]) -> FirstStage:
    if settings.first is None:
        return choose_form(settings.first_stage, model, enough_to_fit(splits))
    if settings.first_stage != "auto":
        raise ConfigError(
            f"first_stage: '{settings.first_stage}' uses vectors of the model itself, --retriever "
            "those of another model; give one of them"
        )
    check_first(model, settings.first)
    return "other"


def check_folder(folder: Path, overwrite: bool) -> None:
    """Refuse a folder that is not empty, unless it is an index to overwrite."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / MANIFEST).is_file():
        raise ConfigError(f"{folder}: not empty and not an index; choose another folder")
    if not overwrite:
        raise ConfigError(
            f"{folder}: an index is there already; add to it, or continue after an interruption, "
            f"with: counterfoil index add {folder} PAIRS --existing skip; or replace it with "
            "--overwrite"
        )


def _drop_vectors(folder: Path, options: dict[str, Any]) -> None:
    """Drop the vectors of an index that is replaced; a server may have them."""
    if not (folder / MANIFEST).is_file():
        return
    header = SegmentStore(folder, KIND, MANIFEST).header
    secrets = {key: value for key, value in options.items() if key == SECRET}
    for side in SIDES:
        old = backends[header["backend"]].open(
            vectors_folder(folder, side), {**header["backend_options"], **secrets}
        )
        old.drop()
        old.close()
