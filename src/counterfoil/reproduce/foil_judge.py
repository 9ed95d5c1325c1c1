"""The numbers of measure columns: foils, single wrong words, people's judgements, the cost."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from counterfoil.errors import ConfigError, DataError
from counterfoil.evaluation.foil_fluency import RunFluency
from counterfoil.evaluation.foil_metrics import judge_foils
from counterfoil.evaluation.foil_report import FoilReport
from counterfoil.evaluation.foil_sets import FoilSet
from counterfoil.evaluation.foil_sources import FoilChoice, foils_by, foils_of_model
from counterfoil.evaluation.judgements import JudgementReport
from counterfoil.evaluation.judgements import judge as judge_by_people
from counterfoil.evaluation.report import Report
from counterfoil.evaluation.rule_words import evaluate_rule_words
from counterfoil.evaluation.word_report import WordReport
from counterfoil.evaluation.words import evaluate_words
from counterfoil.files import write_atomically
from counterfoil.matchers.cross_encoder import CrossEncoder
from counterfoil.models import Model
from counterfoil.reproduce.cost import read_cost
from counterfoil.reproduce.judge import Judge
from counterfoil.reproduce.measures import OWN, RETRIEVED, FoilOptions, MeasureColumn
from counterfoil.reproduce.planned import PlannedRun
from counterfoil.reproduce.retrieved import retrieved_set
from counterfoil.training.load import load_model

R = TypeVar("R", bound=Report)

TRUTH = 3
"""Of how foils are held against the truth of scenes: what was judged otherwise is judged again."""


class FoilJudge:
    """Measures finished runs, and keeps what it found beside the judge's other results."""

    def __init__(self, judge: Judge, options: FoilOptions) -> None:
        self.judge, self.options = judge, options
        self.choice = FoilChoice(**options.model_dump())
        self._foils: dict[tuple[str, bool], FoilSet] = {}

    def number(
        self, column: MeasureColumn, run: PlannedRun, writer: PlannedRun | None
    ) -> float | None:
        """What a column says of a run; None where it cannot be measured of it.

        That is words and perplexity of a model without heads for them, foils by such a one, and
        judgements of other data.
        """
        value: float | None
        if column.is_cost:
            value = getattr(read_cost(run.folder), column.number)
        elif column.judgements is not None:
            value = self._tau(column.judgements, run)
        elif column.foils is None or column.of_rule_words:
            value = getattr(self._words(run, column.of_rule_words), column.number).value
        else:
            report = self._foil_report(column, run, run if column.foils == OWN else writer)
            value = math.nan if report is None else getattr(report, column.number)
        return None if value is None or math.isnan(value) else value

    def known(self, column: MeasureColumn, run: PlannedRun, writer: PlannedRun | None) -> bool:
        """Whether it has been measured before."""
        if column.is_cost:
            return True
        if column.judgements is not None:
            return self._path(self._tau_key(column.judgements, run)).is_file()
        if column.foils is None or column.of_rule_words:
            return self._path(self._words_key(run, column.of_rule_words)).is_file()
        by = run if column.foils == OWN else writer
        return self._path(self._foils_key(column, run, by)).is_file()

    def _words(self, run: PlannedRun, by_rule: bool) -> WordReport:
        """Wrong words of drawn scenes, or those that rules exchanged."""
        most, seed, progress = self.options.captions, self.options.seed, self.judge.progress

        def measure() -> WordReport:
            split = self.judge.split_of(run)
            if by_rule:
                return evaluate_rule_words(
                    _model(run), split, most=most, bootstrap=0, seed=seed, progress=progress
                )
            return evaluate_words(
                _model(run), split, max_captions=most, bootstrap=0, seed=seed, progress=progress
            )

        return self.kept(self._words_key(run, by_rule), WordReport, measure)

    def _words_key(self, run: PlannedRun, by_rule: bool) -> list[object]:
        by = ["rules"] if by_rule else []
        return ["words", run.digest, self.options.captions, self.options.seed, *by]

    def _tau(self, name: str, run: PlannedRun) -> float | None:
        """Agreement with the judgements of a file in the folder of the run's data."""
        folder = Path(run.config.data.source)
        if not folder.is_dir():
            return None
        path = folder / name
        if not path.is_file():
            raise DataError(f"{path}: no such file of judgements; copy it there")
        report = self.kept(
            self._tau_key(name, run),
            JudgementReport,
            lambda: judge_by_people(
                _model(run), self.judge.pairs_of(run), path, self.judge.progress
            ),
        )
        return report.tau

    def _tau_key(self, name: str, run: PlannedRun) -> list[object]:
        return ["tau", run.digest, name]

    def _foil_report(
        self, column: MeasureColumn, run: PlannedRun, writer: PlannedRun | None
    ) -> FoilReport | None:
        needed = [] if self.known(column, run, writer) else [writer]
        if needed and column.reads_fluency:
            needed.append(run)
        if not all(_has_words(one) for one in needed if one is not None):
            return None

        def measure() -> FoilReport:
            model = _model(run)
            fluency = RunFluency(model, run.name) if column.reads_fluency else None
            foils = self.foil_set(column, run, writer)
            split, progress = self.judge.split_of(run), self.judge.progress
            return judge_foils(model, split, foils, fluency=fluency, progress=progress)

        return self.kept(self._foils_key(column, run, writer), FoilReport, measure)

    def _foils_key(
        self, column: MeasureColumn, run: PlannedRun, writer: PlannedRun | None
    ) -> list[object]:
        source, options = _source(column, writer), self.options.model_dump()
        blind = ["blind"] if column.blind else []
        return ["foils", run.digest, source, options, column.reads_fluency, TRUTH, *blind]

    def foil_set(
        self, column: MeasureColumn, run: PlannedRun, writer: PlannedRun | None
    ) -> FoilSet:
        """Foils of the run's split; a run's are written once, for whoever is judged on them."""
        source, split = _source(column, writer), self.judge.split_of(run)
        if source in RETRIEVED:
            retrieved = (f"{source} {run.digest}", False)
            if retrieved not in self._foils:  # every pair of the split is scored for it
                self._foils[retrieved] = retrieved_set(
                    _model(run), split, self.choice, source == RETRIEVED[0], self.judge.progress
                )
            return self._foils[retrieved]
        if writer is None:
            return foils_by(source, split, self.choice, _never, self.judge.progress)
        theirs = self.judge.split_of(writer)
        if theirs.texts != split.texts:
            raise ConfigError(
                f"{run.title} cannot be judged on foils by {writer.title}: their test splits have "
                "other captions"
            )
        key = (source, column.blind)
        if key not in self._foils:
            choice = replace(self.choice, blind=column.blind)
            self._foils[key] = foils_of_model(
                _model(writer), writer.title, theirs, choice, self.judge.progress
            )
        return self._foils[key]

    def kept(self, key: Sequence[object], kind: type[R], measure: Callable[[], R]) -> R:
        path = self._path(key)
        if path.is_file():
            return kind.from_json(path.read_text(encoding="utf-8"))
        report = measure()
        write_atomically(path, report.to_json())
        return report

    def _path(self, key: Sequence[object]) -> Path:
        digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]
        return self.judge.folder / f"{key[0]}-{digest}.json"


def _source(column: MeasureColumn, writer: PlannedRun | None) -> str:
    """Who writes the foils of a column."""
    return writer.digest if writer is not None else str(column.foils)


def _model(run: PlannedRun) -> Model:
    return load_model(run.folder, run.config.train.device)


def _has_words(run: PlannedRun) -> bool:
    """Whether a run has a masked language head, to write foils or to read how fluent they are."""
    matcher = _model(run).matcher
    return isinstance(matcher, CrossEncoder) and "mlm" in matcher.heads


def _never(path: Path) -> Model:
    raise ConfigError(f"{path}: columns name the run that writes foils, not its folder")
