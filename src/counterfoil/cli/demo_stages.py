"""The stages of `counterfoil demo`: train, plant errors and audit, correct, report.

A finished demo is read back from its `demo.json`. An unfinished one continues from its files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import typer

from counterfoil.audit import Audit, Corrector, audit_split
from counterfoil.audit import write_report as write_audit
from counterfoil.audit.benchmark import (
    AuditMeasures,
    Corrupted,
    PlantedCaption,
    corrupt,
    mark_planted,
    measure_audit,
    planted_captions,
)
from counterfoil.cli.signals import StopSignals
from counterfoil.core.config import RunConfig, load_config
from counterfoil.core.errors import CheckpointError, CounterfoilError, DataError
from counterfoil.core.progress import Progress
from counterfoil.core.storage.atomic import write_atomically
from counterfoil.core.storage.reading import read_text
from counterfoil.data.pairs import Pairs, Split
from counterfoil.evaluation.corrections import CorrectionReport, measure_corrections
from counterfoil.evaluation.evaluate import Search
from counterfoil.evaluation.report import Report, RetrievalReport
from counterfoil.models import Model, from_pretrained
from counterfoil.models.correct import rule_of
from counterfoil.training.report import Section, write_report
from counterfoil.training.run import FinishedRun, execute, new_model, save_rule
from counterfoil.training.run_folder import (
    RUN_FILES,
    clear_run,
    load_model,
    make_room,
    resumed_config,
    write_config,
)
from counterfoil.training.trainer import Trainer

T = TypeVar("T")

RESULT = "demo.json"
INTERRUPTED_NOTE = "interrupted; repeat the command to continue"
PLANTED_CAPTIONS = 12
"""Captions moved to other images; the same number gets exchanged words."""
THRESHOLD = 0.8
"""Few captions are wrong: at the default of 0.5, most listed captions would be right."""
HELD_OUT_IMAGES = 40
"""Images that select the corrector's epoch; few, as a cross-encoder scores pairs one by one."""
CORRECTED_CAPTIONS = 200
"""Captions of each kind that corrections are measured on."""
SEED = 0

DATA_SECONDS = 0.016
MATCHER_SECONDS = 0.09
TEST_SECONDS = 0.02
AUDIT_SECONDS = 0.04
CORRECTOR_SECONDS = 0.6
"""On two cores: per scene; per training step; per tested image; per audited image; per step."""


class Example(Report):
    """A search: its query, and for each of the first hits its score and whether it is right."""

    query: str
    hits: tuple[tuple[bool, float, str], ...]


class Corrections(Report):
    """Results of the corrector on test captions with exchanged words, and on as many true ones.

    ``right`` of the ``changes`` replaced an exchanged word by a true one. ``unchanged`` of the
    ``exchanged`` got no change; ``needless`` changes were made to true captions.
    """

    exchanged: int
    unchanged: int
    changes: int
    right: int
    needless: int

    @classmethod
    def of(cls, report: CorrectionReport) -> Corrections:
        return cls(
            exchanged=report.exchanged,
            unchanged=report.exchanged - report.changed,
            changes=report.changes,
            right=report.right,
            needless=report.untouched_changes,
        )


class DemoResult(Report):
    """Everything that the demo prints, and the ``configs`` of its runs."""

    configs: dict[str, dict[str, Any]]
    retrieval: RetrievalReport
    by_text: tuple[Example, ...]
    by_image: tuple[Example, ...]
    threshold: float
    measures: AuditMeasures
    planted: tuple[PlantedCaption, ...]
    corrections: Corrections | None = None

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
        made = self.corrections
        if "corrector" not in self.configs:
            return "No corrector was trained; `counterfoil demo --corrector` trains one."
        if made is None or not made.exchanged:
            return "Corrections were not measured: no test caption has a word to exchange."
        precision = f"{100 * made.right / made.changes:.0f} %" if made.changes else "undefined"
        return (
            f"Of {made.exchanged} test captions with words exchanged by rule, "
            f"{made.exchanged - made.unchanged} were corrected (left unchanged: "
            f"{100 * made.unchanged / made.exchanged:.0f} %); {made.right} of {made.changes} "
            f"changes are right: precision {precision}. Of the same number of true captions, "
            f"{made.needless} had a word changed."
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
        header = ("found", "suspicion", "error", "image", "planted caption", "it was")
        return [header] + [
            (
                "✓" if one.listed else "–",
                f"{one.suspicion:.2f}",
                names[one.error],
                one.image,
                one.text,
                one.original,
            )
            for one in self.planted
        ]


@dataclass
class Demo:
    """Settings and folders of a demo; ``corrector`` is None if none is trained.

    ``may_delete``: delete other runs in its folders instead of refusing them.
    """

    matcher: RunConfig
    corrector: RunConfig | None
    folder: Path
    cache: Path
    progress: Progress
    may_delete: bool = False
    signals: StopSignals = field(default_factory=StopSignals)
    stage: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def audit_folder(self) -> Path:
        return beside(self.folder, "audit")

    @property
    def corrector_folder(self) -> Path:
        return beside(self.folder, "corrector")

    @property
    def configs(self) -> dict[str, dict[str, Any]]:
        """Settings that identify a finished demo."""
        named = {"matcher": self.matcher, "corrector": self.corrector}
        return {name: config.model_dump(mode="json") for name, config in named.items() if config}

    def finished(self) -> DemoResult | None:
        """The result of an earlier demo with these settings; None if any part of it is missing."""
        try:
            result = DemoResult.from_json(read_text(self.audit_folder / RESULT))
            if result.configs != {**result.configs, **self.configs}:
                return None
            resumed_config(self.folder, self.matcher)
            load_model(self.folder, "cpu")
            if "corrector" in result.configs:
                load_model(self.corrector_folder, "cpu")
        except (CounterfoilError, OSError, ValueError):
            return None
        audit = (self.audit_folder / name for name in ("index.html", "findings.jsonl"))
        whole = all(path.is_file() for path in (self.folder / "report.html", *audit))
        return result if whole else None

    def clear(self) -> None:
        """Make room for new runs; a run with the same settings is kept and continued."""
        _make_room(self.folder, self.matcher, self.may_delete)
        if self.corrector is not None:
            _make_room(self.corrector_folder, self.corrector, self.may_delete)

    def make(self) -> DemoResult:
        """Train, audit and report, continuing an interrupted demo."""
        (self.audit_folder / RESULT).unlink(missing_ok=True)
        run = self._train_matcher()
        corrector = self._train_corrector(run.pairs)
        assert run.report is not None and run.gallery is not None  # noqa: S101, PT018
        split = run.pairs[run.report.split]
        self._begin("planting wrong captions, auditing the test split", AUDIT_SECONDS * len(split))
        truth = plant(split)
        audit = self._audit(
            run.model, truth, None if corrector is None else Corrector(corrector, split)
        )
        quoted = [f"“{text}”" for text in split.texts]
        planted = planted_captions(audit, truth, split)
        audit = replace(audit, findings=mark_planted(audit.findings, planted))
        result = DemoResult(
            configs=self.configs,
            retrieval=run.report,
            by_text=tuple(_example(one, quoted, split.ids) for one in run.gallery.text_to_image),
            by_image=tuple(
                _example(one, split.ids, split.texts) for one in run.gallery.image_to_text
            ),
            threshold=audit.threshold,
            measures=measure_audit(audit, truth),
            planted=tuple(planted),
            corrections=None if corrector is None else self._measure(corrector, split),
        )
        self._report(run, audit, result)
        return result

    def _begin(self, what: str, seconds: float) -> None:
        """Announce the next stage and its expected duration."""
        self.stage += 1
        stages = 4 if self.corrector is None else 5
        so_far = f", {_duration(time.monotonic() - self.started)} so far" if self.stage > 1 else ""
        self.progress.say(
            f"[{self.stage}/{stages}{so_far}] {what}: about {_duration(seconds)} on two cores"
        )

    def _train_matcher(self) -> FinishedRun:
        images = int(self.matcher.data.options["images"])
        what = f"drawing {images:,} scenes and extracting regions (cached in {self.cache})"
        self._begin(what, DATA_SECONDS * images)
        again = _goes_on(self.folder, self.matcher)
        run = self._or_anew(self.folder, again, self._execute)
        self._stop_if(run.result.interrupted)
        return run

    def _or_anew(self, folder: Path, again: bool, train: Callable[[bool], T]) -> T:
        """Continue the run of a folder if ``again``; start over if it is damaged."""
        stage = self.stage
        try:
            return train(again)
        except (CheckpointError, DataError) as error:
            if not again:
                raise
            self.progress.say(f"starting over: the existing run is damaged ({error})")
        clear_run(folder)
        self.stage = stage
        return train(False)

    def _execute(self, resume: bool) -> FinishedRun:
        epochs, images = self.matcher.train.epochs, int(self.matcher.data.options["images"])

        def training() -> None:
            seconds = MATCHER_SECONDS * _steps(self.matcher)
            self._begin(f"training NAAF for {epochs} epochs", seconds)
            self.signals.listen()

        def trained() -> None:
            self.signals.stop_listening()
            self._begin(
                "evaluating the best epoch, writing the report", TEST_SECONDS * images // 10
            )

        return execute(
            self.matcher,
            self.folder,
            self.cache,
            resume=resume,
            progress=self.progress,
            should_stop=lambda: self.signals.stop_requested,
            on_training=training,
            on_trained=trained,
        )

    def _train_corrector(self, pairs: Pairs) -> Model | None:
        """TAGS-DC on the same scenes, with its correction rule chosen on all of dev."""
        config, folder = self.corrector, self.corrector_folder
        if config is None:
            return None
        seconds = CORRECTOR_SECONDS * _steps(config)
        self._begin("training a small TAGS-DC, which suggests corrections", seconds)
        few = {
            name: pairs[name].select(range(min(HELD_OUT_IMAGES, len(pairs[name]))))
            for name in ("dev", "test")
        }
        dev, pairs = pairs["dev"], replace(pairs, splits={**pairs.splits, **few})
        again = _goes_on(folder, config) and (folder / "last").exists()
        self._stop_if(self._or_anew(folder, again, lambda resume: self._fit(config, pairs, resume)))
        model = load_model(folder, "cpu")
        model.correction_rule = save_rule(folder, model, dev, self.progress)
        return model

    def _measure(self, corrector: Model, split: Split) -> Corrections | None:
        try:
            report = measure_corrections(
                corrector,
                split,
                rule_of(corrector),
                captions=CORRECTED_CAPTIONS,
                seed=SEED,
                progress=self.progress,
            )
        except DataError:  # no caption of a tiny split has words to exchange
            return None
        return Corrections.of(report)

    def _fit(self, config: RunConfig, pairs: Pairs, resume: bool) -> bool:
        """Train the corrector; True if it was interrupted."""
        folder, signals = self.corrector_folder, self.signals
        if resume:
            model = from_pretrained(folder / "last")
        else:
            model = new_model(config, pairs, self.progress)
        trainer = Trainer(
            model, pairs, config, folder, self.progress, lambda: signals.stop_requested
        )
        signals.listen()
        interrupted = trainer.run(resume).interrupted
        if not interrupted:
            signals.stop_listening()
        return interrupted

    def _audit(self, model: Model, truth: Corrupted, corrector: Corrector | None) -> Audit:
        """List captions above `THRESHOLD` or, if there are none, as many as were planted."""
        audit = audit_split(
            model, truth.split, threshold=THRESHOLD, corrector=corrector, progress=self.progress
        )
        if any(finding.kind == "mismatch" for finding in audit.findings):
            return audit
        self.progress.say("no caption reaches the threshold; listing the most suspicious ones")
        ranked = np.sort(audit.suspicion[~np.isnan(audit.suspicion)])
        lowest = float(ranked[-min(len(ranked), max(1, int(truth.labels.sum())))])
        return audit_split(
            model, truth.split, threshold=lowest, corrector=corrector, progress=self.progress
        )

    def _stop_if(self, interrupted: bool) -> None:
        if interrupted:
            self.progress.say(INTERRUPTED_NOTE)
            raise typer.Exit(self.signals.exit_code)

    def _report(self, run: FinishedRun, audit: Audit, result: DemoResult) -> None:
        """Write the audit, add it to the run's report, and last the file that marks it finished."""
        assert run.report is not None and run.gallery is not None  # noqa: S101, PT018
        sentences = [result.audit_sentence(), result.correction_sentence()]
        about = {"run": str(self.folder), "model": run.model.spec.name, "data": run.pairs.name}
        title = f"{run.pairs.name} with planted errors, read by {self.folder.name}"
        write_audit(self.audit_folder, title, [audit], about, notes=sentences)
        sections = [
            Section("Audit", sentences[:1], result.measure_rows()),
            Section("Planted captions", [], result.planted_rows()),
            Section("Corrections", sentences[1:]),
        ]
        split = run.pairs[run.report.split]
        config = load_config(self.folder / "config.yaml")
        page = (run.report, split, run.gallery, run.notes, sections)
        write_report(self.folder, config, *page, png=False)  # the plots exist already
        write_atomically(self.audit_folder / RESULT, result.to_json())


def beside(run: Path, what: str) -> Path:
    """Folder of the audit or the corrector of a demo."""
    return run.parent / f"{run.name}-{what}"


def plant(split: Split) -> Corrupted:
    """The split with a few wrong captions: `PLANTED_CAPTIONS` per kind, at most a tenth of all."""
    captions = len(split.texts)
    share = min(PLANTED_CAPTIONS, captions // 10) / max(1, captions)
    return corrupt(split, share, share, SEED)


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


def _steps(config: RunConfig) -> int:
    """Training steps of a run on scenes: 80 % of the images, five captions each."""
    pairs = 4 * int(config.data.options["images"])
    return config.train.epochs * (pairs // config.train.batch_size)


def _duration(seconds: float) -> str:
    return f"{max(1, round(seconds))} s" if seconds < 100 else f"{seconds / 60:.0f} min"
