"""The stages of `counterfoil demo` on scenes: test a pretrained model, audit, train a small one.

Each stage stores its result. A later demo with the same settings reads it, and an interrupted
training continues from its run folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import typer

from counterfoil.audit import Audit, Corrector, audit_split
from counterfoil.audit import write_report as write_audit
from counterfoil.audit.findings import LINES
from counterfoil.audit.planted_errors import (
    AuditMeasures,
    Corrupted,
    PlantedCaption,
    corrupt,
    mark_planted,
    measure_audit,
    planted_captions,
)
from counterfoil.audit.report import PAGE as AUDIT_PAGE
from counterfoil.audit.report import SUMMARY
from counterfoil.audit.suspicion import WEIGHTS
from counterfoil.cli.signals import StopSignals
from counterfoil.cli.train import ADVICE
from counterfoil.core.config import RunConfig
from counterfoil.core.errors import CheckpointError, CounterfoilError, DataError
from counterfoil.core.progress import Progress
from counterfoil.core.storage.atomic import write_atomically
from counterfoil.core.storage.locks import locked_folder
from counterfoil.core.storage.reading import read_text
from counterfoil.core.zoo import resolve
from counterfoil.data.load import load_pairs
from counterfoil.data.pairs import Split
from counterfoil.evaluation.evaluate import Search, example_searches, report_scores
from counterfoil.evaluation.report import Report, RetrievalReport
from counterfoil.features import with_fragments
from counterfoil.models import Model
from counterfoil.models.store import model_digest
from counterfoil.scoring.encode import score_split
from counterfoil.search import SearchIndex
from counterfoil.training.run import execute
from counterfoil.training.run_folder import (
    RUN_FILES,
    clear_run,
    holds_a_run,
    is_finished,
    load_model,
    locked_run,
    make_room,
    resumed_config,
    write_config,
)

RESULT = "demo.json"
INTERRUPTED_NOTE = "interrupted; repeat the command to continue"
AUDITED_SCENES = 250
PLANTED_CAPTIONS = 12
"""Captions moved to other images; the same number gets exchanged words."""
THRESHOLD = 0.7
"""Few captions are wrong: at the default of 0.5, nearly half of the listed ones would be right."""
SEED = 0


class Example(Report):
    """A search: its query, and for each of the first hits its score and whether it is right."""

    query: str
    hits: tuple[tuple[bool, float, str], ...]


class ScenesResult(Report):
    """Retrieval of the pretrained model on scenes; ``settings`` identify model and data."""

    settings: dict[str, Any]
    retrieval: RetrievalReport
    by_text: tuple[Example, ...]
    by_image: tuple[Example, ...]


class AuditResult(Report):
    """Which of the planted captions the audit lists; ``suggested`` are corrections of these.

    The corrections have the order of ``planted``; None if there is none.
    """

    settings: dict[str, Any]
    threshold: float
    measures: AuditMeasures
    planted: tuple[PlantedCaption, ...]
    suggested: tuple[str | None, ...]

    def audit_sentence(self) -> str:
        """Precision and recall of the audit, with the precision of a random list."""
        result, planted = self.measures.captions, sum(one.listed for one in self.planted)
        precision = f"{result.precision:.0f} %" if result.listed else "undefined"
        return (
            f"{result.wrong} of {result.items} captions were made wrong on purpose. From suspicion "
            f"{self.threshold:.2g} up, the audit lists {result.listed}, {planted} of them planted: "
            f"precision {precision} (chance {result.chance:.1f} %), recall {result.recall:.0f} %."
        )

    def correction_sentence(self) -> str:
        pairs = zip(self.planted, self.suggested, strict=True)
        made = [(one, text) for one, text in pairs if one.error == "words" and one.listed]
        suggested = [(one, text) for one, text in made if text is not None]
        restored = sum(text.lower() == one.original.lower() for one, text in suggested)
        return (
            f"Of the {len(made)} listed captions with exchanged words, {len(suggested)} got a "
            f"suggested correction; {restored} of these restore the original caption."
        )

    def measure_rows(self) -> Sequence[Sequence[str]]:
        """A header, and a row of text for all planted captions and for each kind."""
        kinds = {"all": self.measures.captions}
        if self.measures.swapped is not None:
            kinds["captions of other images"] = self.measures.swapped
        if self.measures.exchanged is not None:
            kinds["words exchanged"] = self.measures.exchanged
        header = ("planted", "captions", "found", "recall %", "AP %", "AP by chance %")
        return [header] + [
            (
                name,
                str(one.wrong),
                str(round(one.recall * one.wrong / 100)),
                f"{one.recall:.0f}",
                f"{one.ap:.0f}",
                f"{one.chance:.1f}",
            )
            for name, one in kinds.items()
        ]

    def planted_rows(self) -> Sequence[Sequence[str]]:
        """A header and a row of text per planted caption."""
        names = {"swapped": "other image", "words": "words"}
        header = ("found", "suspicion", "error", "image", "planted caption", "it was", "suggested")
        return [header] + [
            (
                "✓" if one.listed else "–",
                f"{one.suspicion:.2f}",
                names[one.error],
                one.image,
                one.text,
                one.original,
                text or "",
            )
            for one, text in zip(self.planted, self.suggested, strict=True)
        ]


R = TypeVar("R", ScenesResult, AuditResult)


@dataclass
class Demo:
    """Settings and folders of a demo; ``config`` is that of the small model.

    ``matcher`` and ``corrector`` are pretrained: names or folders. ``data`` are the options of the
    test scenes. ``may_delete``: delete another run in the folder instead of refusing it.
    """

    config: RunConfig
    folder: Path
    cache: Path
    data: dict[str, Any]
    matcher: str
    corrector: str
    progress: Progress
    may_delete: bool = False
    signals: StopSignals = field(default_factory=StopSignals)

    @property
    def audit_folder(self) -> Path:
        return beside(self.folder, "audit")

    @property
    def index_folder(self) -> Path:
        return beside(self.folder, "index")

    @cached_property
    def model(self) -> Model:
        return load_model(resolve(self.matcher, cache=self.cache), "cpu").eval()

    @cached_property
    def correcting_model(self) -> Model:
        return load_model(resolve(self.corrector, cache=self.cache), "cpu").eval()

    @cached_property
    def split(self) -> Split:
        """Test scenes with fragments: never trained on, whatever the number of scenes."""
        pairs = load_pairs(
            "scenes", options=self.data, cache_dir=self.cache, progress=self.progress
        )
        features = (self.model.fragments_from or "segments", self.model.fragments_options)
        return with_fragments(pairs, self.cache, *features, self.progress)["test"]

    def clear(self, overwrite: bool) -> None:
        """Make room for the small model's run, and write its config for the page to list.

        A run with the same settings is kept and continued, unless ``overwrite``.
        """
        with locked_run(self.folder, ADVICE):
            if overwrite:
                for folder in (self.index_folder, self.audit_folder):
                    (folder / RESULT).unlink(missing_ok=True)
                if holds_a_run(self.folder):
                    clear_run(self.folder)
            _make_room(self.folder, self.config, self.may_delete)
            if not (self.folder / "config.yaml").exists():
                write_config(self.folder, self.config)

    # --- the pretrained model ---

    def test(self) -> ScenesResult:
        """Retrieval of the pretrained model on the test scenes, and an index of them."""
        settings = {"scenes": self.data, "matcher": model_digest(self.model)}
        stored = _try_read(ScenesResult, self.index_folder / RESULT, settings)
        if stored is not None and _try_open(self.index_folder, self.model):
            return stored
        split = self.split
        scored = score_split(self.model, split, progress=self.progress)
        report = report_scores([scored], split.name, captions=scored.captions(split))
        gallery = example_searches(scored, seed=SEED)
        quoted = [f"“{text}”" for text in split.texts]
        return ScenesResult(
            settings=settings,
            retrieval=report,
            by_text=tuple(_example(one, quoted, split.ids) for one in gallery.text_to_image),
            by_image=tuple(_example(one, split.ids, split.texts) for one in gallery.image_to_text),
        )

    def index(self, result: ScenesResult) -> None:
        """Write the index that the page searches; its result file comes last."""
        path = self.index_folder / RESULT
        if _try_read(ScenesResult, path, result.settings) is not None:
            return
        SearchIndex.build(
            self.index_folder,
            self.model,
            self.split,
            first_stage="pooled",
            overwrite=True,
            progress=self.progress,
        ).close()
        write_atomically(path, result.to_json())

    # --- the audit ---

    @cached_property
    def audit_settings(self) -> dict[str, Any]:
        """What identifies the audit of this demo; another version may weigh signs otherwise."""
        models = {"matcher": self.model, "corrector": self.correcting_model}
        digests = {name: model_digest(one) for name, one in models.items()}
        return {"scenes": self.data, "threshold": THRESHOLD, "weights": dict(WEIGHTS), **digests}

    def audited(self) -> AuditResult | None:
        """The result of an earlier demo with these settings; None if any part of it is missing."""
        result = _try_read(AuditResult, self.audit_folder / RESULT, self.audit_settings)
        files = (self.audit_folder / name for name in (AUDIT_PAGE, LINES, SUMMARY))
        return result if all(path.is_file() for path in files) else None

    def discard_other_audit(self) -> None:
        """Unless this demo was audited before, delete what marks an audit as complete."""
        if self.audited() is None:
            for name in (RESULT, SUMMARY):
                (self.audit_folder / name).unlink(missing_ok=True)

    def audit(self) -> AuditResult:
        """Plant wrong captions, audit them with the pretrained model, and write the report."""
        with locked_folder(self.audit_folder, "writing an audit there", ADVICE):
            if (stored := self.audited()) is not None:
                return stored
            self.discard_other_audit()
            result = self._audit()
            write_atomically(self.audit_folder / RESULT, result.to_json())
            return result

    def _audit(self) -> AuditResult:
        split = self.split.select(range(min(AUDITED_SCENES, len(self.split))))
        truth = plant(split)
        audit = self._list(truth, Corrector(self.correcting_model, split))
        planted = planted_captions(audit, truth, split)
        audit = replace(audit, findings=mark_planted(audit.findings, planted))
        corrections = {
            (one.image, one.caption): one.correction.text
            for one in audit.findings
            if one.correction
        }
        result = AuditResult(
            settings=self.audit_settings,
            threshold=audit.threshold,
            measures=measure_audit(audit, truth),
            planted=tuple(planted),
            suggested=tuple(corrections.get((one.image, one.caption)) for one in planted),
        )
        about = {"run": self.matcher, "model": self.model.spec.name, "data": "scenes"}
        title = f"scenes with planted errors, read by {Path(self.matcher).name}"
        notes = [result.audit_sentence(), result.correction_sentence()]
        write_audit(self.audit_folder, title, [audit], about, notes=notes)
        return result

    def _list(self, truth: Corrupted, corrector: Corrector) -> Audit:
        """List captions above `THRESHOLD` or, if there are none, as many as were planted."""
        audit = audit_split(
            self.model,
            truth.split,
            threshold=THRESHOLD,
            corrector=corrector,
            progress=self.progress,
        )
        if audit.listed:
            return audit
        self.progress.say("no caption reaches the threshold; listing the most suspicious ones")
        ranked = np.sort(audit.suspicion[~np.isnan(audit.suspicion)])
        lowest = float(ranked[-min(len(ranked), max(1, int(truth.labels.sum())))])
        return audit_split(
            self.model, truth.split, threshold=lowest, corrector=corrector, progress=self.progress
        )

    # --- the small model ---

    def train(self) -> RetrievalReport:
        """Train the small model from nothing and test it, continuing an interrupted run."""
        if (stored := self.trained()) is not None:
            return stored
        again = _goes_on(self.folder, self.config)
        try:
            return self._execute(again)
        except (CheckpointError, DataError) as error:
            if not again:
                raise
            self.progress.say(f"starting over: the existing run is damaged ({error})")
        clear_run(self.folder)
        return self._execute(False)

    def trained(self) -> RetrievalReport | None:
        """The result of an earlier demo with these settings; None if any part of it is missing."""
        try:
            resumed_config(self.folder, self.config)
            if not is_finished(self.folder) or not (self.folder / "report.html").is_file():
                return None
            load_model(self.folder, "cpu")
            return RetrievalReport.from_json(read_text(self.folder / "results.json"))
        except (CounterfoilError, OSError, ValueError):
            return None

    def _execute(self, resume: bool) -> RetrievalReport:
        run = execute(
            self.config,
            self.folder,
            self.cache,
            resume=resume,
            progress=self.progress,
            should_stop=lambda: self.signals.stop_requested,
            on_training=self.signals.listen,
            on_trained=self.signals.stop_listening,
        )
        if run.report is None:
            self.progress.say(INTERRUPTED_NOTE)
            raise typer.Exit(self.signals.exit_code)
        return run.report


def beside(run: Path, what: str) -> Path:
    """Folder of the audit or the index of a demo."""
    return run.parent / f"{run.name}-{what}"


def plant(split: Split) -> Corrupted:
    """The split with a few wrong captions: `PLANTED_CAPTIONS` per kind, at most a tenth of all."""
    captions = len(split.texts)
    share = min(PLANTED_CAPTIONS, captions // 10) / max(1, captions)
    return corrupt(split, share, share, SEED)


def _try_read(kind: type[R], path: Path, settings: dict[str, Any]) -> R | None:
    """A stored result; None if there is none, or one of other settings."""
    try:
        result = kind.from_json(read_text(path))
    except (CounterfoilError, OSError, ValueError):
        return None
    return result if result.settings == settings else None


def _try_open(folder: Path, model: Model) -> bool:
    """Whether a folder has an index of the model."""
    try:
        SearchIndex.open(folder, model=model).close()
    except (CounterfoilError, OSError, ValueError):
        return False
    return True


def _goes_on(folder: Path, config: RunConfig) -> bool:
    """Whether a folder holds a run with these settings."""
    try:
        resumed_config(folder, config)
    except CounterfoilError:
        return False
    return True


def _make_room(folder: Path, config: RunConfig, may_delete: bool) -> None:
    if _goes_on(folder, config):
        return
    if may_delete and folder.is_dir() and not (folder / "config.yaml").exists():
        names = {path.name for path in folder.iterdir() if path.suffix != ".png"}
        if {name for name in names if not name.startswith(".")} <= RUN_FILES:
            write_config(folder, config)  # without one, what is left of it would be no run
    make_room(folder, may_delete, "choose another --out; --overwrite deletes it")


def _example(search: Search, queries: Sequence[str], items: Sequence[str]) -> Example:
    hits = tuple((hit.right, hit.score, items[hit.index]) for hit in search.hits)
    return Example(query=queries[search.query], hits=hits)
