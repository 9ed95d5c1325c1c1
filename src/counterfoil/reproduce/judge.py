"""Scores of finished runs on the test split: one run, an ensemble, another protocol, the speed."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from counterfoil.data.pairs import Pairs, Split
from counterfoil.errors import ConfigError
from counterfoil.evaluation.evaluate import report_scores
from counterfoil.evaluation.report import RetrievalReport
from counterfoil.evaluation.scoring import encode_images, encode_texts, score_all, score_split
from counterfoil.files import write_atomically
from counterfoil.models import Model
from counterfoil.progress import Progress
from counterfoil.reproduce.planned import PlannedRun
from counterfoil.reproduce.results import Speed
from counterfoil.training.load import load_model
from counterfoil.training.run import read_data


class Judge:
    """Reads results where they are, computes and keeps them where they are not."""

    def __init__(self, folder: Path, cache: Path, progress: Progress) -> None:
        self.folder, self.cache, self.progress = folder, cache, progress
        self._pairs: dict[str, Pairs] = {}

    def report(
        self, runs: Sequence[PlannedRun], folds: int | None = None, standardise: bool = False
    ) -> RetrievalReport:
        """One run, or several as an ensemble; ``folds`` where not as their config says."""
        settings = runs[0].config.evaluation
        folds = settings.folds if folds is None else folds
        kept = self.place(runs, folds, standardise)
        if kept.is_file():
            return _read(kept)
        split = self.split_of(runs[0])
        models = [load_model(run.folder, run.config.train.device) for run in runs]
        if len({(model.fragments_from, str(model.fragments_options)) for model in models}) > 1:
            raise ConfigError("the members of this ensemble read different features")
        found = [score_split(model, split, settings.batch_size, self.progress) for model in models]
        report = report_scores(
            found,
            split.name,
            folds=folds,
            bootstrap=settings.bootstrap,
            standardise=standardise,
        )
        write_atomically(kept, report.to_json())
        return report

    def place(
        self, runs: Sequence[PlannedRun], folds: int | None = None, standardise: bool = False
    ) -> Path:
        """Where a report is kept, once there is one."""
        settings = runs[0].config.evaluation
        folds = settings.folds if folds is None else folds
        if len(runs) == 1 and folds == settings.folds:
            return runs[0].folder / "results.json"
        how = ["standardised"] if standardise else []
        key = "-".join([*(run.digest for run in runs), f"folds{folds}", *how])
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"

    def speed(self, runs: Sequence[PlannedRun], repeats: int) -> Speed:
        """How fast these models together score the test split: the median of some timings."""
        split = self.split_of(runs[0])
        models = [load_model(run.folder, run.config.train.device).eval() for run in runs]
        size = runs[0].config.evaluation.batch_size
        _time_once(models, split, size)  # the first time also warms caches and kernels
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
        """The split that a run is judged on."""
        pairs, settings = self.pairs_of(run), run.config.evaluation
        return pairs[settings.test_split if settings.test_split in pairs else settings.split]


def _time_once(models: Sequence[Model], split: Split, size: int) -> tuple[float, float]:
    """Seconds to encode a split, and to score all its pairs."""
    encoding = matching = 0.0
    for model in models:
        start = time.perf_counter()
        images, _, _ = encode_images(model, split, size)
        texts = encode_texts(model, split.texts, size)
        _finish(model)
        between = time.perf_counter()
        score_all(model, images, texts)  # its result is on the CPU, so it has ended
        matching += time.perf_counter() - between
        encoding += between - start
    return encoding, matching


def _finish(model: Model) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def _device_name(model: Model) -> str:
    if model.device.type == "cuda":
        return torch.cuda.get_device_name(model.device)
    return f"{model.device.type}, {torch.get_num_threads()} threads"


def _read(path: Path) -> RetrievalReport:
    return RetrievalReport.from_json(path.read_text(encoding="utf-8"))
