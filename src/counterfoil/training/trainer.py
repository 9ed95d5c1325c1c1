"""The training loop: one for all models, objectives and numbers of processes."""

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
from torch.utils.data import DataLoader

from counterfoil.core.config import RunConfig
from counterfoil.core.distributed import gather_rows, rank, world_size
from counterfoil.core.errors import CheckpointError, ConfigError, TrainingError
from counterfoil.core.parallel import begin_loader_worker, bounded_workers
from counterfoil.core.progress import Progress, Silent
from counterfoil.core.tensors.device import choose_device
from counterfoil.data.batches.collate import Collate, PairBatch
from counterfoil.data.batches.dataset import Augmentation, CaptionItems
from counterfoil.data.batches.resident import resident
from counterfoil.data.batches.sampling import BatchPlan, RankBatches
from counterfoil.data.pairs import Pairs, Split
from counterfoil.data.pixels import Glance
from counterfoil.encoders.recurrent import replaying
from counterfoil.evaluation.evaluate import evaluate, flat_metrics
from counterfoil.models.model import Model
from counterfoil.models.store import STATE, load_weights
from counterfoil.objectives import create_objective
from counterfoil.objectives.twins import find_twins
from counterfoil.scoring.engine import fallback
from counterfoil.training.checkpoint import Checkpoints, Position
from counterfoil.training.collapse import CollapseWatch
from counterfoil.training.gradient_cache import GradientCache
from counterfoil.training.logs import RunLogs, finite
from counterfoil.training.lookahead import Trials, tries
from counterfoil.training.optim import Updates
from counterfoil.training.run_folder import locked_run, write_config
from counterfoil.training.services import RunPreparation, TrainingSurvey, adopt_scale, set_aside
from counterfoil.training.step import HISTOGRAM, MARGIN_RANGE, TrainingStep, anchors_and_negatives

MOST_SKIPPED = 10_000
"""Problems of items that a run remembers."""

PRECISIONS = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


Norms = dict[str, Tensor]
Numbers = dict[str, float | None]


@dataclass(frozen=True)
class RunResult:
    """What a run came to: its folder, the best dev RSUM and where it was reached."""

    folder: Path
    best_rsum: float
    best_epoch: int
    steps: int
    seconds: float
    skipped: int
    interrupted: bool = False


class Trainer:
    """State of a run and the steps that advance it."""

    def __init__(
        self,
        model: Model,
        pairs: Pairs,
        config: RunConfig,
        folder: Path,
        progress: Progress | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.pairs, self.config, self.folder = pairs, config, folder
        self.progress, self.should_stop = progress or Silent(), should_stop
        self.device = choose_device(config.train.device)
        self.model = model.to(self.device)
        if config.train.compile:
            model.image_encoder.compile()
            model.text_encoder.compile()
        wanted = not config.train.compile if config.train.graphs is None else config.train.graphs
        self.replays = wanted and self.device.type == "cuda"
        self.objective = create_objective(config.objective)
        idle = self.objective.idle_epochs(config.train.epochs)
        if idle:
            raise ConfigError(
                f"objective: no term is active in epoch {idle[0]} (counted from 0): the ranges of "
                f"'epochs' must cover all {config.train.epochs}"
            )
        train, held_out = set_aside(pairs.train, self.objective.held_out, config.seed)
        self.twins = find_twins(train, self.device)
        twins = self.twins if self.objective.protects_identical else None
        self.objective.prepare(
            RunPreparation(train, model, config, self.device, self.progress, twins)
        )
        adopt_scale(self.objective, config.objective, model)
        self.step_module = TrainingStep(
            model,
            self.objective,
            PRECISIONS[config.train.precision],
            config.train.chunk_size,
            twins,
        ).to(self.device)
        self.plan = BatchPlan(
            train,
            config.train.batch_size,
            config.seed,
            config.data.captions,
            config.train.drop_last,
            config.data.views,
        )
        per_epoch = -(-len(self.plan) // config.train.accumulate)
        self.updates = Updates(self.step_module, config.train, per_epoch, self.device)
        augmentation = Augmentation(
            config.data.drop_regions,
            config.data.disturb_words,
            config.data.drop_regions_varying,
            Glance(config.data.random_crop or 1.0, bool(config.data.flip)),
        )
        self.resident = resident(train.fragments, config.data.resident, self.device, self.progress)
        self.items = CaptionItems(
            train,
            model.text,
            augmentation,
            config.seed,
            self.objective.companions_by_term(),
            held=self.resident.good if self.resident else None,
        )
        self.shares = RankBatches(self.plan, 0, 0, rank(), world_size())
        self.loader: DataLoader[Any] | None = None
        self.held_out = held_out
        held_out_twins = None
        if self.objective.protects_identical:
            held_out_twins = find_twins(held_out, self.device)
        self.trials = (
            Trials(model, held_out, config, self.device, (twins, held_out_twins))
            if tries(self.objective)
            else None
        )
        self.survey = TrainingSurvey(model, train, config, self.device, self.progress)
        self.watch = CollapseWatch(config.objective)
        self.crowd = (config.train.batch_size, float(config.train.batch_size - 1))
        self.introduced = False
        self.checkpoints = Checkpoints(folder)
        self.position = Position()
        self.started = time.monotonic()
        torch.manual_seed(config.seed + rank())

    def run(self, resume: bool = False) -> RunResult:
        """Train to the end, or until told to stop, as the only process that writes the folder."""
        with locked_run(self.folder):
            return self._run(resume)

    def _run(self, resume: bool) -> RunResult:
        self.model.yardstick = self.model.correction_rule = None  # measured with older weights
        if resume:
            self._restore()
        elif rank() == 0:
            write_config(self.folder, self.config)
        for note in self.model.matcher.notes(self.config.train.epochs):
            self.progress.say(f"note: {note}")
        if self.twins is not None:
            self.progress.say(self.twins.note(self.objective.protects_identical))
        run: nn.Module = self.step_module
        if world_size() > 1:
            run = DistributedDataParallel(run, broadcast_buffers=False, find_unused_parameters=True)
        interrupted = False
        try:
            board, kind = self.config.train.tensorboard, self.device.type
            with RunLogs(self.folder, self.position, board, kind) as logs:
                while not self.position.finished and not interrupted:
                    interrupted = self._epoch(run, logs)
        finally:
            self.loader = None  # and with it the processes that read
        return RunResult(
            self.folder,
            self.position.best_rsum,
            self.position.best_epoch,
            self.position.step,
            self._seconds(),
            len(everyones(self.position.skipped)),
            interrupted,
        )

    def _epoch(self, run: nn.Module, logs: RunLogs) -> bool:
        """Train to the end of the current epoch, then evaluate; True where it was interrupted."""
        place, train = self.position, self.config.train
        if place.batch == 0:
            self.survey.epoch = place.epoch
            self.objective.begin_epoch(place.epoch, self.survey)
        self.step_module.train()
        label = f"epoch {place.epoch + 1}/{train.epochs}"
        loader = self._loader()
        for batch in self.progress.track(loader, label, len(self.plan), done=place.batch):
            place.batch += 1
            last = place.batch == len(self.plan)
            self._advance(run, batch, update=last or place.batch % train.accumulate == 0, logs=logs)
            at_update = last or place.batch % train.accumulate == 0
            if at_update and not last:
                stop = self._everyone(self.should_stop())
                if stop or (train.save_every and place.step % train.save_every == 0):
                    self._save(logs)
                if stop:
                    return True
        self._finish_epoch(logs)
        return self._everyone(self.should_stop()) and not place.finished

    def _advance(
        self, run: nn.Module, batch: PairBatch | tuple[str, ...], update: bool, logs: RunLogs
    ) -> None:
        place, train = self.position, self.config.train
        skipped = batch.skipped if isinstance(batch, PairBatch) else batch
        for problem in skipped:
            if problem not in place.skipped and len(place.skipped) < MOST_SKIPPED:
                place.skipped.append(problem)
                self.progress.say(f"skipped {problem}")
        if not isinstance(batch, PairBatch):
            if world_size() > 1:
                raise TrainingError(f"no usable item in the share of process {rank()}: {batch}")
            return
        coming = place.step + 1
        logged = update and (coming % train.log_every == 0 or coming == 1)
        last = place.batch == len(self.plan)
        sync = update or not isinstance(run, DistributedDataParallel)
        with torch.enable_grad() if sync else run.no_sync():  # type: ignore[operator]
            batch = batch.to(self.device)
            if self.resident is not None:
                batch = self.resident.filled(batch)
            self._introduce(batch)
            if self.trials is not None and (place.batch - 1) % train.accumulate == 0:
                trial = self.trials.of(batch, place.step, self.updates.rate)
                self.objective.before_step(trial, place.epoch)
            with replaying(self.replays):
                loss, diagnostics = run(batch, place.epoch, place.step, logged or last)
            self.updates.backward(loss if train.accumulate == 1 else loss / train.accumulate)
        norms = self._norms(logged) if update else {}
        # the loop waits here, once the whole step is on its way to the GPU, and not before
        value, *sizes = as_numbers(loss, *norms.values())
        self._check(value, batch)
        place.loss_sum += value
        place.loss_count += 1
        if last and HISTOGRAM in diagnostics:
            place.margins = [int(count) for count in diagnostics[HISTOGRAM]]
        if update:
            self.updates.step(sizes[0], place.step)
            place.step += 1
            self.progress.note(f"loss {value:.4f}")
            numbers = {k: finite(float(v)) for k, v in diagnostics.items() if k != HISTOGRAM}
            if logged:
                record = {
                    "kind": "step",
                    "step": place.step,
                    "epoch": place.epoch,
                    "loss": value,
                    "lr": self.updates.rate,
                    **{name: finite(size) for name, size in zip(norms, sizes, strict=True)},
                    **numbers,
                    **self.model.matcher.diagnostics(),
                }
                logs.write(record, self._seconds())
            self._look_out(value, numbers, batch, logs)

    def _introduce(self, batch: PairBatch) -> None:
        """Say once how many negatives an anchor sees, what is in memory for it, who scores it."""
        if self.introduced:
            return
        self.introduced = True
        pairs, negatives = anchors_and_negatives(batch, self.step_module.twins)
        text = f"an anchor sees {negatives:.4g} negatives: batches of {pairs} pairs"
        size = self.config.train.chunk_size
        if size:
            text += f", encoded {size} at a time"
            whole = GradientCache(self.model).whole()
            if whole:
                text += f" (the {' and '.join(whole)} side whole: it normalises over its batch)"
        self.progress.say(text)
        line = fallback(self.model, training=True)
        if line:
            self.progress.say(line)

    def _look_out(self, loss: float, numbers: Numbers, batch: PairBatch, logs: RunLogs) -> None:
        """Say so where the run has collapsed, and where it has recovered."""
        place, gap = self.position, numbers.get("gap/abs")
        if gap is not None:  # measured now; batches hardly differ in how many negatives they have
            self.crowd = anchors_and_negatives(batch, self.step_module.twins)
        expected = self.objective.uninformed(*self.crowd, place.epoch)
        manner = self.objective.manner(place.epoch)
        separated = numbers.get("separation")
        text = self.watch.update(place.step, loss, expected, gap, manner, separated)
        if text is not None:
            self.progress.say(f"warning: {text}")
            logs.write({"kind": "warning", "step": place.step, "text": text}, self._seconds())

    def _norms(self, logged: bool) -> Norms:
        """Norms of the gradient before it is clipped, which nobody has waited for yet."""
        self.updates.unscale()
        projection = projection_gradient(self.model) if logged else None
        norms = {"grad_norm": self.updates.gradient_norm()}
        return norms if projection is None else {**norms, "gradient/projection": projection}

    def _check(self, value: float, batch: PairBatch) -> None:
        """Refuse a loss that is not a finite number, before the update."""
        if math.isfinite(value):
            return
        split = self.items.split  # less what objectives set aside
        images = [split.ids[int(i)] for i in batch.image_ids[:8]]
        raise TrainingError(
            f"epoch {self.position.epoch + 1}, batch {self.position.batch}: the loss is {value}; "
            f"stopped before the update. First images of the batch: {', '.join(images)}. Look at "
            "them with: counterfoil data inspect; or lower train.optimiser.lr"
        )

    def _finish_epoch(self, logs: RunLogs) -> None:
        place, train = self.position, self.config.train
        closed = self.model.matcher.close_epoch(place.epoch)
        rsum, record = self._validate()
        record |= closed
        place.epoch += 1
        place.batch = 0
        better = rsum > place.best_rsum
        if better:
            place.best_rsum, place.best_epoch, place.worse_epochs = rsum, place.epoch, 0
        else:
            place.worse_epochs += 1
        stopped = bool(train.early_stop) and place.worse_epochs >= train.early_stop
        place.finished = place.epoch >= train.epochs or stopped
        mean_loss = place.loss_sum / max(1, place.loss_count)
        place.loss_sum, place.loss_count = 0.0, 0
        summary = {"kind": "epoch", "step": place.step, "epoch": place.epoch, "loss": mean_loss}
        if place.margins:
            low, high = MARGIN_RANGE
            record["margin_histogram"] = {"low": low, "high": high, "counts": place.margins}
        logs.write({**summary, **record, "best_rsum": place.best_rsum}, self._seconds())
        self.progress.say(
            f"epoch {place.epoch}/{train.epochs}  loss {mean_loss:.4f}  "
            f"RSUM {rsum:.1f}{' (best)' if better else f'  best {place.best_rsum:.1f}'}"
        )
        if stopped and place.epoch < train.epochs:
            self.progress.say(f"stopped early: no better RSUM in {train.early_stop} epochs")
        self._save(logs, best=better)

    def _validate(self) -> tuple[float, dict[str, Any]]:
        """RSUM on the dev split, computed by the first process and told to the others."""
        metrics: dict[str, Any] = {}
        rsum = torch.zeros(1, dtype=torch.float64, device=self.device)
        if rank() == 0:
            settings = self.config.evaluation
            split = evenly_spaced(self.pairs[settings.split], settings.images)
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

    def _loader(self) -> DataLoader[Any]:
        """Batches of the epoch from the place on where it stands."""
        self.shares.epoch, self.shares.start = self.position.epoch, self.position.batch
        if self.loader is None:
            workers = bounded_workers(self.config.data.workers, "data.workers", self.progress)
            self.loader = DataLoader(
                self.items,
                batch_sampler=self.shares,
                num_workers=workers,
                worker_init_fn=begin_loader_worker,
                collate_fn=Collate(self.model.text.pad),
                # only fragments are worth a thread that takes turns with this one
                pin_memory=self.device.type == "cuda" and self.resident is None,
                # what objectives send along may change from epoch to epoch: then processes, too
                persistent_workers=workers > 0 and not self.items.companions,
                # not the global one, whose state a resumed run restores: a loader draws from it
                generator=torch.Generator(),
            )
        return self.loader

    def _save(self, logs: RunLogs, best: bool = False) -> None:
        self.position.skipped = everyones(self.position.skipped)
        random = gather_rows(torch.get_rng_state()[None].to(self.device)).cpu()
        cuda = None
        if self.device.type == "cuda":
            cuda = gather_rows(torch.cuda.get_rng_state(self.device)[None].to(self.device)).cpu()
        if rank() == 0:
            self.position.metrics_bytes = logs.size
            self.position.seconds = self._seconds()
            self.started = time.monotonic()
            state = {
                **self.updates.state_dict(),
                "objective": self.step_module.objective.state_dict(),
                "watch": self.watch.state_dict(),
                "random": random,
                "cuda_random": cuda,
            }
            self.checkpoints.save(self.model, state, self.position, best=best)

    def _restore(self) -> None:
        folder, state, self.position = self.checkpoints.load()
        load_weights(self.model, folder)
        try:
            self._take_over(state)
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise CheckpointError(
                f"{folder / STATE}: not the state of this run ({error!r:.200}); was the config or "
                "the version of Counterfoil changed?"
            ) from error

    def _take_over(self, state: dict[str, Any]) -> None:
        self.updates.load_state_dict(state)
        self.step_module.objective.load_state_dict(state["objective"])
        self.watch.load_state_dict(state["watch"])
        if rank() < len(state["random"]):
            torch.set_rng_state(state["random"][rank()].clone())  # it ignores the offset of a view
            if state["cuda_random"] is not None and self.device.type == "cuda":
                torch.cuda.set_rng_state(state["cuda_random"][rank()].clone(), self.device)

    def _seconds(self) -> float:
        return self.position.seconds + time.monotonic() - self.started

    def _everyone(self, flag: bool) -> bool:
        """True where any process says so, so that all stop at the same step."""
        if world_size() == 1:
            return flag
        votes = torch.tensor([int(flag)], device=self.device)
        torch.distributed.all_reduce(votes)
        return bool(votes.item())


def evenly_spaced(split: Split, most: int | None) -> Split:
    """So many images of a split, or all: scoring every pair takes the square of it."""
    if most is None or most >= len(split):
        return split
    return split.select([place * len(split) // most for place in range(most)])


def as_numbers(*tensors: Tensor) -> list[float]:
    """Single numbers, read from a GPU at once."""
    found: list[float] = torch.stack([tensor.detach() for tensor in tensors]).tolist()
    return found


def projection_gradient(model: Model) -> Tensor | None:
    """Norm of the gradient of the image encoder's first linear layer (SelHN figure 3b)."""
    layers = (part for part in model.image_encoder.modules() if isinstance(part, nn.Linear))
    layer = next(layers, None)
    if layer is None or layer.weight.grad is None:
        return None
    return torch.linalg.vector_norm(layer.weight.grad)


def everyones(problems: list[str]) -> list[str]:
    """The problems that any process met, each once."""
    if world_size() == 1:
        return problems
    met: list[list[str]] = [[] for _ in range(world_size())]
    torch.distributed.all_gather_object(met, problems)
    return list(dict.fromkeys(problem for some in met for problem in some))
