"""From folders to what is served."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from counterfoil.app.audits import Audit
from counterfoil.app.runs import Runs, runs_below
from counterfoil.app.service import Content
from counterfoil.data.pairs import Pairs, Split
from counterfoil.errors import ConfigError
from counterfoil.models.correct import can_correct
from counterfoil.models.model import Model
from counterfoil.progress import Progress
from counterfoil.scratch import Scratch
from counterfoil.search import SearchIndex
from counterfoil.search.state import MANIFEST
from counterfoil.training.load import evaluation_split, load_model, run_config

MOST_IMAGES = 2000
"""Of a run's data that are indexed at the start; `counterfoil index` makes larger ones to keep."""

SCENES = {"images": [0, 0, 200]}


def open_content(
    place: Path,
    *,
    index: Path | None = None,
    corrector: Path | None = None,
    audit: Path | None = None,
    runs: Path | None = None,
    cache: Path,
    device: str = "auto",
    progress: Progress,
) -> Content:
    """Open a run or an index, and what is shown with it.

    A run without an ``index`` gets one of the images of its test split, for as long as it is
    served; a model without data gets the scenes.
    """
    findings = Audit(audit) if audit is not None else None
    helper = _corrector(corrector, device) if corrector is not None else None
    shown = [path for path in (place, corrector) if path is not None]
    shown += runs_below(runs) if runs is not None else []
    if (place / MANIFEST).is_file():
        if index is not None:
            raise ConfigError(f"{place} is an index already: name a run, or leave --index out")
        opened, close = SearchIndex.open(place, device=device), _nothing
    else:
        model = load_model(place, device)
        if index is not None:
            opened, close = SearchIndex.open(index, model=model), _nothing
        else:
            scratch = Scratch("counterfoil-serve-")
            split = _shown_split(place, cache, progress)
            opened = SearchIndex.build(
                scratch.folder / "index", model, split, first_stage="pooled", progress=progress
            )
            close = scratch.close
    if helper is None and can_correct(opened.model):
        helper = opened.model
    return Content(opened, helper, findings, Runs(shown), close)


def _nothing() -> None:
    """An index that was there before stays."""


def _corrector(folder: Path, device: str) -> Model:
    model = load_model(folder, device)
    if not can_correct(model):
        raise ConfigError(
            f"{folder}: this model was not taught to correct: train one with the objective "
            "tags-dc (recipe scenes/tags-dc)"
        )
    if model.fragments_from is None:
        raise ConfigError(f"{folder}: this model was trained on features: it reads no pixels")
    return model


def _shown_split(run: Path, cache: Path, progress: Progress) -> Split:
    config = run_config(run)
    if config is None:
        pairs = evaluation_split(run, "scenes", None, SCENES, cache, progress)
        return pairs["test"]
    pairs = evaluation_split(run, None, None, {}, cache, progress)
    chosen = _first(pairs, (config.evaluation.test_split, config.evaluation.split))
    if len(chosen) > MOST_IMAGES:
        progress.say(f"the first {MOST_IMAGES} of {len(chosen)} images are shown; see --index")
        chosen = chosen.select(range(MOST_IMAGES))
    return chosen


def _first(pairs: Pairs, names: Sequence[str]) -> Split:
    return next((pairs[name] for name in names if name in pairs), next(iter(pairs)))
