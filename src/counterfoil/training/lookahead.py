"""Look-ahead: tries an update before it is made, for objectives with `before_step`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from counterfoil.core.config import RunConfig
from counterfoil.core.distributed import gather_rows, rank, world_size
from counterfoil.core.errors import TrainingError
from counterfoil.data.batches.collate import Collate, PairBatch
from counterfoil.data.batches.dataset import Augmentation, CaptionItems
from counterfoil.data.batches.sampling import BatchPlan, RankBatches
from counterfoil.data.pairs import Split
from counterfoil.data.text.tokenizers import TextProcessor
from counterfoil.matchers.mismatch_boundary import MismatchBoundary
from counterfoil.models.model import Model
from counterfoil.objectives import Composite, Objective
from counterfoil.objectives.positives import Twins, find_twins, twin_pairs
from counterfoil.training.services import Prepared
from counterfoil.training.step import score_batch


def uses_lookahead(objective: Composite) -> bool:
    """Whether any term has a `before_step`."""
    return any(type(term).before_step is not Objective.before_step for _, term in objective.each())


def create_trials(
    model: Model, prepared: Prepared, config: RunConfig, device: torch.device
) -> LookaheadFactory | None:
    """The trials of a run; None if its objective does not use look-ahead."""
    if not uses_lookahead(prepared.objective):
        return None
    protects, held_out = prepared.objective.protects_identical, prepared.held_out
    twins = (prepared.protected, find_twins(held_out, device) if protects else None)
    return LookaheadFactory(model, held_out, config, device, twins)


class HeldOutBatches:
    """Batches of held-out images, as large as training batches and not augmented.

    A batch depends only on its number, so a resumed run continues with the next one.
    """

    def __init__(self, split: Split, text: TextProcessor, config: RunConfig) -> None:
        self.items = CaptionItems(split, text, Augmentation(), config.seed)
        self.plan = BatchPlan(split, config.train.batch_size, config.seed, config.data.captions)
        self.collate = Collate(text.pad)

    def __getitem__(self, number: int) -> PairBatch:
        """This process's share of a batch; every pass over the images has a new order."""
        epoch, start = divmod(number, len(self.plan))
        indices = next(iter(RankBatches(self.plan, epoch, start, rank(), world_size())))
        batch = self.collate([self.items[index] for index in indices])
        if not isinstance(batch, PairBatch):
            raise TrainingError(
                f"no usable item among the images set aside for process {rank()}: "
                f"{'; '.join(batch) or 'too few images; set a larger share aside'}"
            )
        return batch


class LookaheadFactory:
    """Creates the trial of each update of a run."""

    def __init__(
        self,
        model: Model,
        held_out: Split | None,
        config: RunConfig,
        device: torch.device,
        twins: tuple[Twins | None, Twins | None] = (None, None),
    ) -> None:
        """``twins`` are those of the training split and of the held-out images."""
        self.twins = twins
        self.model, self.device, self.chunk_size = model, device, config.train.chunk_size
        self.held_out = (
            HeldOutBatches(held_out, model.text, config) if held_out is not None else None
        )

    def of(self, batch: PairBatch, step: int, rate: float) -> StepTrial:
        return StepTrial(self, batch, step, rate)


class StepTrial:
    """One update before it is made, with its batch on the model's device."""

    def __init__(self, run: LookaheadFactory, batch: PairBatch, step: int, rate: float) -> None:
        self.batch, self.step, self.rate = batch, step, rate
        self.model, self.device, self.twins = run.model, run.device, run.twins
        self.chunk_size = run.chunk_size  # as in the update: dropout draws per chunk
        self.held_out = run.held_out
        self.weights = [p for p in run.model.parameters() if p.requires_grad]

    def scores(self, batch: PairBatch | None = None) -> tuple[Tensor, Tensor]:
        batch = self.batch if batch is None else batch
        with restore_after(self.model, self.device):
            scores = score_batch(self.model, batch, chunk_size=self.chunk_size).scores
        owners = gather_rows(batch.owners)
        return scores, gather_rows(batch.image_ids)[:, None] == owners[None, :]

    def protected(self, batch: PairBatch | None = None) -> Tensor | None:
        batch, twins = (self.batch, self.twins[0]) if batch is None else (batch, self.twins[1])
        image_ids, owners = gather_rows(batch.image_ids), gather_rows(batch.owners)
        positives = image_ids[:, None] == owners[None, :]
        return twin_pairs(twins, image_ids, gather_rows(batch.caption_ids), positives)

    def held_out_batch(self) -> PairBatch:
        if self.held_out is None:
            raise TrainingError("no held-out images: the objective must hold out a share of them")
        return self.held_out[self.step].to(self.device)

    def gradient(self, loss: Tensor) -> list[Tensor]:
        """The gradient of the global loss: the mean over processes."""
        if not loss.requires_grad:
            return [torch.zeros_like(weight) for weight in self.weights]
        own = torch.autograd.grad(loss, self.weights, allow_unused=True, materialize_grads=True)
        if world_size() == 1:
            return list(own)
        grads = [grad.contiguous() for grad in own]
        for grad in grads:
            torch.distributed.all_reduce(grad)
            grad /= world_size()
        return grads

    @contextmanager
    def moved(self, direction: list[Tensor], amount: float) -> Iterator[None]:
        saved = [weight.detach().clone() for weight in self.weights]
        with torch.no_grad():
            for weight, change in zip(self.weights, direction, strict=True):
                weight.add_(change, alpha=amount)
        try:
            yield
        finally:
            with torch.no_grad():
                for weight, before in zip(self.weights, saved, strict=True):
                    weight.copy_(before)


@contextmanager
def restore_after(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore buffers (running statistics) and random states after the block."""
    for part in model.modules():
        if isinstance(part, MismatchBoundary):
            part.flush()  # finish pending copies of samples first
    saved = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for buffer, before in saved:
            # by .data: the graph of what was scored may still read the buffer
            buffer.data.copy_(before)
