"""Updates that are tried before they are made (`objectives.services.Trial`)."""

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
    """Whether any term looks ahead before an update."""
    return any(type(term).before_step is not Objective.before_step for _, term in objective.each())


def create_trials(
    model: Model, prepared: Prepared, config: RunConfig, device: torch.device
) -> LookaheadFactory | None:
    """The trials of a run; None if its objective does not look ahead."""
    if not uses_lookahead(prepared.objective):
        return None
    protects, held_out = prepared.objective.protects_identical, prepared.held_out
    twins = (prepared.protected, find_twins(held_out, device) if protects else None)
    return LookaheadFactory(model, held_out, config, device, twins)


class HeldOutBatches:
    """Batches of the images set aside, as large as those of training and never augmented.

    Which batch comes depends on its number alone, so a resumed run goes on with the next one.
    """

    def __init__(self, split: Split, text: TextProcessor, config: RunConfig) -> None:
        self.items = CaptionItems(split, text, Augmentation(), config.seed)
        self.plan = BatchPlan(split, config.train.batch_size, config.seed, config.data.captions)
        self.collate = Collate(text.pad)

    def __getitem__(self, number: int) -> PairBatch:
        """This process's share; the rounds over the images repeat for ever, each in a new order."""
        turn, place = divmod(number, len(self.plan))
        indices = next(iter(RankBatches(self.plan, turn, place, rank(), world_size())))
        batch = self.collate([self.items[index] for index in indices])
        if not isinstance(batch, PairBatch):
            raise TrainingError(
                f"no usable item among the images set aside for process {rank()}: "
                f"{'; '.join(batch) or 'too few images; set a larger share aside'}"
            )
        return batch


class LookaheadFactory:
    """Makes the trial of each update of a run."""

    def __init__(
        self,
        model: Model,
        held_out: Split | None,
        config: RunConfig,
        device: torch.device,
        twins: tuple[Twins | None, Twins | None] = (None, None),
    ) -> None:
        """``twins`` are those of the training split, and of the images set aside."""
        self.twins = twins
        self.model, self.device, self.chunk_size = model, device, config.train.chunk_size
        self.held_out = (
            HeldOutBatches(held_out, model.text, config) if held_out is not None else None
        )

    def of(self, batch: PairBatch, step: int, rate: float) -> StepTrial:
        return StepTrial(
            self.model,
            batch,
            step,
            rate,
            self.held_out,
            self.device,
            self.chunk_size,
            self.twins,
        )


class StepTrial:
    """One update before it is made, with its batch on the model's device."""

    def __init__(
        self,
        model: Model,
        batch: PairBatch,
        step: int,
        rate: float,
        held_out: HeldOutBatches | None,
        device: torch.device,
        chunk_size: int = 0,
        twins: tuple[Twins | None, Twins | None] = (None, None),
    ) -> None:
        self.twins = twins
        self.model, self.batch, self.step = model, batch, step
        self.chunk_size = chunk_size  # as in the step to come: dropout draws chunk by chunk
        self.held_out, self.device = held_out, device
        self._rate = rate
        self.weights = [p for p in model.parameters() if p.requires_grad]

    @property
    def rate(self) -> float:
        return self._rate

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
            raise TrainingError("no images were set aside to try an update on")
        return self.held_out[self.step].to(self.device)

    def gradient(self, loss: Tensor) -> list[Tensor]:
        """The mean over processes, which is the gradient of the global loss on each of them."""
        if not loss.requires_grad:
            return [torch.zeros_like(weight) for weight in self.weights]
        found = torch.autograd.grad(loss, self.weights, allow_unused=True, materialize_grads=True)
        if world_size() == 1:
            return list(found)
        grads = [grad.contiguous() for grad in found]
        for grad in grads:
            torch.distributed.all_reduce(grad)
            grad /= world_size()
        return grads

    @contextmanager
    def moved(self, direction: list[Tensor], amount: float) -> Iterator[None]:
        kept = [weight.detach().clone() for weight in self.weights]
        with torch.no_grad():
            for weight, change in zip(self.weights, direction, strict=True):
                weight.add_(change, alpha=amount)
        try:
            yield
        finally:
            with torch.no_grad():
                for weight, before in zip(self.weights, kept, strict=True):
                    weight.copy_(before)


@contextmanager
def restore_after(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Whatever is scored inside, running statistics and random numbers are as before after it."""
    for part in model.modules():
        if isinstance(part, MismatchBoundary):
            part.flush()  # samples still being copied belong to before
    kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for buffer, before in kept:
            # by .data: the graph of what was scored may still read the buffer
            buffer.data.copy_(before)
