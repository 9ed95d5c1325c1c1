"""Evaluates finished runs on the test split and caches the reports.

Retrieval by one run or an ensemble, speed, foils, wrong words, human judgements and cost.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from counterfoil.core.errors import ConfigError, DataError
from counterfoil.core.progress import Progress
from counterfoil.core.storage.atomic import write_atomically
from counterfoil.data.pairs import Pairs, Split
from counterfoil.evaluation.evaluate import report_scores
from counterfoil.evaluation.foils.fluency import RunFluency
from counterfoil.evaluation.foils.metrics import judge_foils
from counterfoil.evaluation.foils.report import FoilReport
from counterfoil.evaluation.foils.sets import (
    FoilChoice,
    FoilPair,
    FoilSet,
    choose_captions,
    foils_by,
    foils_of_model,
)
from counterfoil.evaluation.forgetting import REPORT_FILE, ForgettingReport
from counterfoil.evaluation.judgements import JudgementReport
from counterfoil.evaluation.judgements import evaluate_judgements as judge_by_people
from counterfoil.evaluation.report import Report, RetrievalReport, WordReport
from counterfoil.evaluation.words.evaluate import evaluate_rule_words, evaluate_words
from counterfoil.matchers.cross_encoder import CrossEncoder
from counterfoil.models.match import Method
from counterfoil.models.model import Model, reads_the_same
from counterfoil.reproduce.columns import OWN, RETRIEVED, FoilOptions, MeasureColumn
from counterfoil.reproduce.plan import PlannedRun
from counterfoil.reproduce.results import Speed, read_cost
from counterfoil.scoring.encode import encode_images, encode_texts, score_all, score_split
from counterfoil.training.run_data import read_data
from counterfoil.training.run_folder import load_model

CAPTION_BATCH = 128
"""Captions per batch, as in a usual batch of training."""

R = TypeVar("R", bound=Report)

TRUTH_REVISION = 3
"""Part of the cache key of foil reports; raised when the comparison with the truth of scenes
changes, so that reports are computed anew."""


class RunEvaluator:
    """Retrieval reports of runs, read from the cache or computed and cached."""

    def __init__(self, folder: Path, cache: Path, progress: Progress) -> None:
        self.folder, self.cache, self.progress = folder, cache, progress
        self._pairs: dict[str, Pairs] = {}

    def report(
        self, runs: Sequence[PlannedRun], folds: int | None = None, standardize: bool = False
    ) -> RetrievalReport:
        """Report of one run or of an ensemble; ``folds`` defaults to those of the config."""
        path = self.report_path(runs, folds, standardize)
        if path.is_file():
            return RetrievalReport.from_json(path.read_text(encoding="utf-8"))
        settings = runs[0].config.evaluation
        split = self.split_of(runs[0])
        models = [_model(run) for run in runs]
        if not all(reads_the_same(models[0], model) for model in models):
            raise ConfigError(
                "the members of this ensemble read different features; choose runs with the same"
            )
        report = report_scores(
            [score_split(model, split, settings.batch_size, self.progress) for model in models],
            split.name,
            folds=settings.folds if folds is None else folds,
            bootstrap=settings.bootstrap,
            standardize=standardize,
        )
        write_atomically(path, report.to_json())
        return report

    def report_path(
        self, runs: Sequence[PlannedRun], folds: int | None = None, standardize: bool = False
    ) -> Path:
        """The file of a report; it need not exist yet."""
        settings = runs[0].config.evaluation
        folds = settings.folds if folds is None else folds
        if len(runs) == 1 and folds == settings.folds:
            return runs[0].folder / "results.json"
        options = ["standardised"] if standardize else []
        key = "-".join([*(run.digest for run in runs), f"folds{folds}", *options])
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"

    def speed(self, runs: Sequence[PlannedRun], repeats: int) -> Speed:
        """Median speed at which these models together score the test split."""
        split = self.split_of(runs[0])
        models = [_model(run).eval() for run in runs]
        size = runs[0].config.evaluation.batch_size
        _time_once(models, split, size)  # warm-up
        timings = [_time_once(models, split, size) for _ in range(repeats)]
        pairs = len(split) * len(split.texts) / 1000
        return Speed(
            kpps=pairs / statistics.median(encoding + match for encoding, match in timings),
            matching_kpps=pairs / statistics.median(match for _, match in timings),
            images=len(split),
            captions=len(split.texts),
            device=_device_name(models[0]),
        )

    def pairs_of(self, run: PlannedRun) -> Pairs:
        """The data of a run, read once."""
        key = run.config.data.model_dump_json()
        if key not in self._pairs:
            self._pairs[key] = read_data(run.config, self.cache, self.progress)
        return self._pairs[key]

    def split_of(self, run: PlannedRun) -> Split:
        """The split on which a run is evaluated."""
        pairs, settings = self.pairs_of(run), run.config.evaluation
        return pairs[settings.test_split if settings.test_split in pairs else settings.split]


def _time_once(models: Sequence[Model], split: Split, size: int) -> tuple[float, float]:
    """Seconds to encode a split, and to score all its pairs."""
    encoding = matching = 0.0
    for model in models:
        start = time.perf_counter()
        images, _, _ = encode_images(model, split, size)
        texts = encode_texts(model, split.texts, size)
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        encoded = time.perf_counter()
        score_all(model, images, texts)  # returns a CPU tensor, so it needs no synchronization
        matching += time.perf_counter() - encoded
        encoding += encoded - start
    return encoding, matching


def _device_name(model: Model) -> str:
    if model.device.type == "cuda":
        return torch.cuda.get_device_name(model.device)
    return f"{model.device.type}, {torch.get_num_threads()} threads"


def retrieved_set(
    model: Model, split: Split, choice: FoilChoice, of_batch: bool, progress: Progress
) -> FoilSet:
    """Foils that are the hardest negative caption of each caption's image, by the model's scores.

    Negatives are from the split, or from a batch drawn with ``choice.seed``. A caption with the
    same text as one of the image's own is not a negative.
    """
    scored = score_split(model, split, progress=progress)
    row_of = {image: row for row, image in enumerate(scored.images)}
    column_of = {caption: column for column, caption in enumerate(scored.texts)}
    groups = _batches(scored.texts, choice.seed) if of_batch else [list(scored.texts)]
    group_of = {caption: group for group in groups for caption in group}
    pairs: list[FoilPair] = []
    chosen = choose_captions(split, choice.captions, choice.seed)
    for caption in chosen:
        if caption not in column_of:  # its image is unreadable
            continue
        image = int(split.image_of[caption])
        own = set(split.captions[image])
        others = [other for other in group_of[caption] if split.texts[other] not in own]
        if others:
            columns = torch.tensor([column_of[other] for other in others])
            best = int(scored.scores[row_of[image], columns].argmax())
            pairs.append(FoilPair(caption, split.texts[others[best]]))
    name = "the hardest of a batch" if of_batch else "the hardest of the split"
    return FoilSet.of(name, pairs, len(chosen))


def _batches(captions: list[int], seed: int) -> list[list[int]]:
    shuffled = random.Random(f"{seed}/batches").sample(captions, len(captions))
    return [
        shuffled[start : start + CAPTION_BATCH] for start in range(0, len(shuffled), CAPTION_BATCH)
    ]


class MeasureEvaluator:
    """Numbers of measured columns for finished runs; reports are cached."""

    def __init__(self, evaluator: RunEvaluator, options: FoilOptions) -> None:
        self.evaluator, self.options = evaluator, options
        self.choice = FoilChoice(**options.model_dump())
        self._foils: dict[tuple[str, bool], FoilSet] = {}

    def number(
        self, column: MeasureColumn, run: PlannedRun, writer: PlannedRun | None
    ) -> float | None:
        """A column's number for a run; None if it cannot be measured.

        Models without a masked language head have no word numbers and perplexity, and write no
        foils. Data that is not a folder has no judgements.
        """
        value: float | None
        if column.is_cost:
            value = getattr(read_cost(run.folder), column.number)
        elif column.is_forgetting:
            value = _forgotten(run.folder).get(column.number)
        elif column.judgements is not None:
            value = self.tau(column.judgements, [run])
        elif column.foils is None or column.of_rule_words:
            value = getattr(self._words(run, column.of_rule_words), column.number).value
        else:
            report = self._try_foil_report(column, run, run if column.foils == OWN else writer)
            value = math.nan if report is None else getattr(report, column.number)
        return None if value is None or math.isnan(value) else value

    def known(self, column: MeasureColumn, run: PlannedRun, writer: PlannedRun | None) -> bool:
        """Whether the number is in the cache."""
        if column.is_cost or column.is_forgetting:
            return True
        if column.judgements is not None:
            return self._path(self._tau_key(column.judgements, [run])).is_file()
        if column.foils is None or column.of_rule_words:
            return self._path(self._words_key(run, column.of_rule_words)).is_file()
        by = run if column.foils == OWN else writer
        return self._path(self._foils_key(column, run, by)).is_file()

    def _words(self, run: PlannedRun, by_rule: bool) -> WordReport:
        """Report on wrong words of drawn scenes, or on words that rules replaced."""
        most = self.options.captions
        settings: dict[str, Any] = {
            "bootstrap": 0,
            "seed": self.options.seed,
            "progress": self.evaluator.progress,
        }

        def measure_by(method: Method) -> WordReport:
            model, split = _model(run), self.evaluator.split_of(run)
            if by_rule:
                return evaluate_rule_words(model, split, most=most, method=method, **settings)
            return evaluate_words(model, split, max_captions=most, method=method, **settings)

        def measure() -> WordReport:
            # one method for all rows of a table, whatever each run chose for its explanations
            try:
                return measure_by("parts")
            except ConfigError:  # a matcher without parts per word
                return measure_by("leave-one-out")

        return self.cached(self._words_key(run, by_rule), WordReport, measure)

    def _words_key(self, run: PlannedRun, by_rule: bool) -> list[object]:
        by = ["rules"] if by_rule else []
        return ["words", run.digest, self.options.captions, self.options.seed, *by]

    def tau(self, name: str, runs: Sequence[PlannedRun], standardize: bool = False) -> float | None:
        """Kendall's τ of a run or an ensemble with the judgements of a file beside its data."""
        folder = Path(runs[0].config.data.source)
        if not folder.is_dir():
            return None
        path = folder / name
        if not path.is_file():
            raise DataError(f"{path}: no such file of judgements; copy it there")
        report = self.cached(
            self._tau_key(name, runs, standardize),
            JudgementReport,
            lambda: judge_by_people(
                [_model(run) for run in runs],
                self.evaluator.pairs_of(runs[0]),
                path,
                self.evaluator.progress,
                standardize=standardize,
            ),
        )
        return None if math.isnan(report.tau) else report.tau

    def _tau_key(
        self, name: str, runs: Sequence[PlannedRun], standardize: bool = False
    ) -> list[object]:
        options = ["standardised"] if standardize else []
        return ["tau", *(run.digest for run in runs), name, *options]

    def _try_foil_report(
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
            split, progress = self.evaluator.split_of(run), self.evaluator.progress
            return judge_foils(model, split, foils, fluency=fluency, progress=progress)

        return self.cached(self._foils_key(column, run, writer), FoilReport, measure)

    def _foils_key(
        self, column: MeasureColumn, run: PlannedRun, writer: PlannedRun | None
    ) -> list[object]:
        source, options = _source(column, writer), self.options.model_dump()
        blind = ["blind"] if column.blind else []
        return ["foils", run.digest, source, options, column.reads_fluency, TRUTH_REVISION, *blind]

    def foil_set(
        self, column: MeasureColumn, run: PlannedRun, writer: PlannedRun | None
    ) -> FoilSet:
        """Foils for the run's split; those of a writer are written once, for all runs."""
        source, split = _source(column, writer), self.evaluator.split_of(run)
        if source in RETRIEVED:
            retrieved = (f"{source} {run.digest}", False)
            if retrieved not in self._foils:
                self._foils[retrieved] = retrieved_set(
                    _model(run), split, self.choice, source == RETRIEVED[0], self.evaluator.progress
                )
            return self._foils[retrieved]
        if writer is None:
            return foils_by(source, split, self.choice, _never, self.evaluator.progress)
        writer_split = self.evaluator.split_of(writer)
        if writer_split.texts != split.texts:
            raise ConfigError(
                f"{run.title} cannot be evaluated on foils by {writer.title}: their test splits "
                "have other captions; use runs on the same data"
            )
        key = (source, column.blind)
        if key not in self._foils:
            choice = replace(self.choice, blind=column.blind)
            self._foils[key] = foils_of_model(
                _model(writer), writer.title, writer_split, choice, self.evaluator.progress
            )
        return self._foils[key]

    def cached(self, key: Sequence[object], kind: type[R], measure: Callable[[], R]) -> R:
        """The cached report of a key, or the one that ``measure`` returns, which is cached."""
        path = self._path(key)
        if path.is_file():
            return kind.from_json(path.read_text(encoding="utf-8"))
        report = measure()
        write_atomically(path, report.to_json())
        return report

    def _path(self, key: Sequence[object]) -> Path:
        digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]
        return self.evaluator.folder / f"{key[0]}-{digest}.json"


def _source(column: MeasureColumn, writer: PlannedRun | None) -> str:
    """The source of a column's foils: the digest of the writer, or a name."""
    return writer.digest if writer is not None else str(column.foils)


def _forgotten(folder: Path) -> dict[str, float]:
    """The changes against its start that a run reports; none if it started from nothing."""
    path = folder / REPORT_FILE
    if not path.is_file():
        return {}
    return ForgettingReport.from_json(path.read_text(encoding="utf-8")).numbers()


def _model(run: PlannedRun) -> Model:
    return load_model(run.folder, run.config.train.device)


def _has_words(run: PlannedRun) -> bool:
    """Whether a run has a masked language head, for writing foils and for perplexity."""
    matcher = _model(run).matcher
    return isinstance(matcher, CrossEncoder) and "mlm" in matcher.heads


def _never(path: Path) -> Model:
    raise ConfigError(f"{path}: foils must name a run of this file, not a folder")
