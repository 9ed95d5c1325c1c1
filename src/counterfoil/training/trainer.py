"""The training loop for all models and objectives, on one or several processes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from counterfoil.core.config import RunConfig
from counterfoil.core.distributed import any_process, gather_unique, rank, world_size
from counterfoil.core.errors import DataError, DivergedError, RemoteError, TrainingError
from counterfoil.core.progress import Progress, Silent
from counterfoil.core.tensors.device import choose_device
from counterfoil.data.batches.collate import PairBatch
from counterfoil.data.batches.streaming import ReadFailure
from counterfoil.data.pairs import Pairs
from counterfoil.data.splits import evenly_spaced
from counterfoil.encoders.recurrent import cuda_graphs
from counterfoil.evaluation.evaluate import evaluate, flat_metrics
from counterfoil.models.model import Model
from counterfoil.training.checkpoint import Checkpoints, Position, Stateful, random_states
from counterfoil.training.collapse import CollapseWatch
from counterfoil.training.diagnostics import projection_gradient
from counterfoil.training.logs import RunLogs, finite
from counterfoil.training.lookahead import create_trials
from counterfoil.training.optim import OptimizerStep, as_numbers, warmup_warnings
from counterfoil.training.run_data import TrainingBatches, lost_workers
from counterfoil.training.run_folder import locked_run, write_config
from counterfoil.training.services import TrainingSurvey, prepare_objective
from counterfoil.training.step import HISTOGRAM, MARGIN_RANGE, PRECISIONS, TrainingStep, batch_notes

MAX_SKIPPED = 10_000
"""Limit of recorded problems of items."""


@dataclass(frozen=True, repr=False)
class RunResult:
    """Result of a run: its folder, the best RSUM on ``evaluation.split`` and its epoch."""

    folder: Path
    best_rsum: float
    best_epoch: int
    steps: int
    seconds: float
    skipped: int
    interrupted: bool = False

    def __repr__(self) -> str:
        best = f"best RSUM {self.best_rsum:.1f} in epoch {self.best_epoch}"
        end = ", interrupted" if self.interrupted else ""
        return f"RunResult('{self.folder}', {best}, {self.steps:,} steps{end})"


class Trainer:
    """The state of a run and its training loop."""

    def __init__(
        self,
        model: Model,
        pairs: Pairs,
        config: RunConfig,
        folder: Path,
        progress: Progress | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        cache: Path | None = None,
    ) -> None:
        self.pairs, self.config, self.folder, train = pairs, config, folder, config.train
        self.progress, self.should_stop = progress or Silent(), should_stop
        self.device = device = choose_device(train.device)
        self.model = model.to(device)
        if train.compile:
            model.image_encoder.compile()
            model.text_encoder.compile()
        captures = not train.compile if train.cuda_graphs is None else train.cuda_graphs
        self.use_cuda_graphs = captures and device.type == "cuda"
        prepared = prepare_objective(model, pairs.train, config, device, self.progress, cache)
        self.objective, self.twins = prepared.objective, prepared.twins
        precision = PRECISIONS[train.precision]
        self.step_module = TrainingStep(
            model, self.objective, precision, train.chunk_size, prepared.protected
        ).to(device)
        split = prepared.train
        self.batches = TrainingBatches(split, model, self.objective, config, device, self.progress)
        self.updates = OptimizerStep(self.step_module, train, len(self.batches), device)
        self.trials = create_trials(model, prepared, config, device)
        self.survey = TrainingSurvey(model, split, config, device, self.progress)
        self.watch = CollapseWatch(config.objective, train.batch_size)
        self.introduced = False
        self.checkpoints, self.position = Checkpoints(folder), Position()
        self.started = time.monotonic()
        torch.manual_seed(config.seed + rank())

    def run(self, resume: bool = False) -> RunResult:
        """Train to the end, or until `should_stop`, with the folder locked."""
        with locked_run(self.folder):
            self._begin(resume)
            interrupted = self._train()
        position, seconds = self.position, self._seconds()
        best, skipped = (position.best_rsum, position.best_epoch), gather_unique(position.skipped)
        return RunResult(self.folder, *best, position.step, seconds, len(skipped), interrupted)

    def _begin(self, resume: bool) -> None:
        self.model.yardstick = self.model.correction_rule = None  # measured with older weights
        digest = self.pairs.train.digest
        if resume:
            self.position = self.checkpoints.restore(self.model, self._parts(), self.device)
            if self.position.data_digest not in ("", digest):
                raise DataError(
                    f"{self.folder}: the training data are no longer those that the run began with "
                    "(other images or captions); restore them, or start another run from its "
                    f"weights, with model.init_from={self.folder}"
                )
            self.batches.check_resumed(self.position.batch)
        elif rank() == 0:
            write_config(self.folder, self.config)
        self.position.data_digest = digest
        for warning in warmup_warnings(self.config.train, self.objective, self.updates.per_epoch):
            self.progress.say(f"warning: {warning}")
        for note in self.model.matcher.notes(self.config.train.epochs):
            self.progress.say(f"note: {note}")
        if self.twins is not None:
            self.progress.say(self.twins.note(self.objective.protects_identical))

    def _train(self) -> bool:
        """Train all epochs; True if interrupted."""
        step: nn.Module = self.step_module
        if world_size() > 1:
            step = DistributedDataParallel(
                step, broadcast_buffers=False, find_unused_parameters=True
            )
        board, interrupted = self.config.train.tensorboard, False
        try:
            with (
                RunLogs(self.folder, self.position, board, self.device.type) as logs,
                lost_workers(),
            ):
                while not self.position.finished and not interrupted:
                    interrupted = self._epoch(step, logs)
        finally:
            self.batches.close()
        return interrupted

    def _epoch(self, step: nn.Module, logs: RunLogs) -> bool:
        """Train to the end of the current epoch, then evaluate; True if interrupted."""
        position, train = self.position, self.config.train
        if position.batch == 0:
            self.survey.epoch = position.epoch
            self.objective.begin_epoch(position.epoch, self.survey)
        self.step_module.train()
        label, count = f"epoch {position.epoch + 1}/{train.epochs}", len(self.batches)
        loader = self.batches.read(position.epoch, position.batch)
        for batch in self.progress.track(loader, label, count, done=position.batch):
            self._check_read(batch, logs)
            position.batch += 1
            last = position.batch == count
            update = last or position.batch % train.accumulate == 0
            if self._usable(batch):
                self._step(step, self.batches.to_device(batch), update, last, logs)
            if update and not last:
                stop = any_process(self.should_stop(), self.device)
                if stop or (train.save_every and position.step % train.save_every == 0):
                    self._save(logs)
                if stop:
                    return True
        if self.batches.is_stream:  # validation reads remote data, too, and may fail
            self._save(logs)
        self._finish_epoch(logs)
        return any_process(self.should_stop(), self.device) and not position.finished

    def _check_read(self, batch: Any, logs: RunLogs) -> None:
        """If any process could not read its batch of a stream: save, and end with the reason."""
        failure = batch if isinstance(batch, ReadFailure) else None
        if not self.batches.is_stream or not any_process(failure is not None, self.device):
            return
        position = self.position
        if position.batch and position.batch % self.config.train.accumulate == 0:
            self._save(logs)
        reason = failure.error if failure else "another process could not read its data"
        raise self._interrupted(f"batch {position.batch + 1}", reason)

    def _interrupted(self, where: str, reason: object) -> TrainingError:
        return TrainingError(
            f"epoch {self.position.epoch + 1}, {where}: {reason}; continue with: counterfoil train "
            f"--resume {self.folder}"
        )

    def _usable(self, batch: PairBatch | tuple[str, ...]) -> bool:
        """Report the items that were skipped; False if none is left."""
        usable, known = isinstance(batch, PairBatch), self.position.skipped
        for problem in batch.skipped if isinstance(batch, PairBatch) else batch:
            if problem not in known and len(known) < MAX_SKIPPED:
                known.append(problem)
                self.progress.say(f"skipped {problem}")
        if not usable and world_size() > 1:
            raise TrainingError(f"no usable item in the share of process {rank()}: {batch}")
        return usable

    def _step(
        self, step: nn.Module, batch: PairBatch, update: bool, last: bool, logs: RunLogs
    ) -> None:
        """One batch: its loss, its gradient, and the update if one is due."""
        position = self.position
        due = not position.step or (position.step + 1) % self.config.train.log_every == 0
        logged = update and due
        loss, diagnostics = self._backward(step, batch, update, logged or last)
        norms = self._norms(logged) if update else {}
        # the only host sync of the step, after all its work is queued on the GPU
        value, *sizes = as_numbers(loss, *norms.values())
        self._check(value, batch)
        position.loss_sum += value
        position.loss_count += 1
        if last and HISTOGRAM in diagnostics:
            position.margins = [int(count) for count in diagnostics[HISTOGRAM]]
        if not update:
            return
        self.updates.step(sizes[0], position.step)
        position.step += 1
        self.progress.note(f"loss {value:.4f}")
        scalars = {k: torch.as_tensor(v).detach() for k, v in diagnostics.items() if k != HISTOGRAM}
        numbers = {k: finite(float(v)) for k, v in scalars.items()}
        if logged:
            record = {"kind": "step", "step": position.step, "epoch": position.epoch, "loss": value}
            record |= {"lr": self.updates.rate}
            record |= {name: finite(size) for name, size in zip(norms, sizes, strict=True)}
            record |= {**numbers, **self.model.matcher.diagnostics()}
            logs.write(record, self._seconds())
        warning = self.watch.judge(self.step_module, batch, position, value, numbers)
        if warning is not None:
            self.progress.say(f"warning: {warning}")
            logs.write({"kind": "warning", "step": position.step, "text": warning}, self._seconds())

    def _backward(
        self, step: nn.Module, batch: PairBatch, update: bool, logging: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and diagnostics of a batch, after adding its gradient to the accumulated one."""
        position, accumulate = self.position, self.config.train.accumulate
        sync = update or not isinstance(step, DistributedDataParallel)
        with torch.enable_grad() if sync else step.no_sync():  # type: ignore[operator]
            if not self.introduced:
                self.introduced = True
                for line in batch_notes(self.step_module, batch):
                    self.progress.say(line)
            if self.trials is not None and (position.batch - 1) % accumulate == 0:
                trial = self.trials.of(batch, position.step, self.updates.rate)
                self.objective.before_step(trial, position.epoch)
            with cuda_graphs(self.use_cuda_graphs):
                loss, diagnostics = step(batch, position.epoch, position.step, logging)
            self.updates.backward(loss if accumulate == 1 else loss / accumulate)
        return loss, diagnostics

    def _norms(self, logged: bool) -> dict[str, Tensor]:
        """Norms of the gradient before clipping, still on the device."""
        self.updates.unscale()
        norms = {"grad_norm": self.updates.gradient_norm()}
        return {**norms, **projection_gradient(self.model)} if logged else norms

    def _check(self, value: float, batch: PairBatch) -> None:
        """Raise for a loss that is not finite, before the update."""
        if math.isfinite(value):
            return
        split = self.batches.items.split  # without held-out images
        images = [split.ids[int(i)] for i in batch.image_ids[:8]]
        raise DivergedError(
            f"epoch {self.position.epoch + 1}, batch {self.position.batch}: the loss is {value}; "
            f"stopped before the update. First images of the batch: {', '.join(images)}. Look at "
            "them with: counterfoil data inspect; or lower train.optimizer.lr"
        )

    def _finish_epoch(self, logs: RunLogs) -> None:
        """Evaluate, compare with the best epoch, log, and save."""
        position, train = self.position, self.config.train
        closed = self.model.matcher.close_epoch(position.epoch)
        try:
            rsum, metrics = self._validate()
        except RemoteError as error:
            raise self._interrupted("validation", error) from error
        position.epoch += 1
        position.batch = 0
        better = rsum > position.best_rsum
        position.worse_epochs += 1
        if better:
            position.best_rsum, position.best_epoch, position.worse_epochs = rsum, position.epoch, 0
        stopped = bool(train.early_stop) and position.worse_epochs >= train.early_stop
        position.finished = position.epoch >= train.epochs or stopped
        loss = position.loss_sum / max(1, position.loss_count)
        position.loss_sum, position.loss_count = 0.0, 0
        record = {"kind": "epoch", "step": position.step, "epoch": position.epoch, "loss": loss}
        record |= metrics | closed
        if position.margins:
            low, high = MARGIN_RANGE
            record["margin_histogram"] = {"low": low, "high": high, "counts": position.margins}
        logs.write({**record, "best_rsum": position.best_rsum}, self._seconds())
        self.progress.say(
            f"epoch {position.epoch}/{train.epochs}  loss {loss:.4f}  "
            f"RSUM {rsum:.1f}{' (best)' if better else f'  best {position.best_rsum:.1f}'}"
        )
        if stopped and position.epoch < train.epochs:
            self.progress.say(f"stopped early: no better RSUM in {train.early_stop} epochs")
        self._save(logs, best=better)

    def _validate(self) -> tuple[float, dict[str, Any]]:
        """RSUM on ``evaluation.split`` and all metrics; only the first process has the metrics."""
        metrics: dict[str, Any] = {}
        rsum = torch.zeros(1, dtype=torch.float64, device=self.device)
        if rank() == 0:
            settings = self.config.evaluation
            split = evenly_spaced(self.pairs[settings.split], settings.max_images)
            report = evaluate(
                self.model,
                split,
                batch_size=settings.batch_size,
                folds=settings.folds,
                bootstrap=0,
                identical_captions="negatives",
            )
            metrics = {settings.split: flat_metrics(report)}
            rsum[0] = report.rsum
        if world_size() > 1:
            torch.distributed.broadcast(rsum, 0)
        return float(rsum), metrics

    def _save(self, logs: RunLogs, best: bool = False) -> None:
        self.position.skipped = gather_unique(self.position.skipped)
        random = random_states(self.device)
        if rank() == 0:
            self.position.metrics_bytes = logs.size
            self.position.seconds = self._seconds()
            self.started = time.monotonic()
            state = {name: part.state_dict() for name, part in self._parts().items()}
            self.checkpoints.save(self.model, {**state, **random}, self.position, best=best)

    def _parts(self) -> dict[str, Stateful]:
        """Parts of the training state in a checkpoint."""
        parts: dict[str, Stateful] = {
            "updates": self.updates,
            "objective": self.objective,
            "watch": self.watch,
        }
        return {**parts, "stream": self.batches} if self.batches.is_stream else parts

    def _seconds(self) -> float:
        return self.position.seconds + time.monotonic() - self.started
