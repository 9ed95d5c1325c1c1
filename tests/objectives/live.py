"""Real batches with what objectives bring into them, and their scores one pair at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from counterfoil.core.config import build_config
from counterfoil.core.progress import Silent
from counterfoil.data.batches.collate import Collate, PairBatch
from counterfoil.data.batches.dataset import Augmentation, CaptionItems, ExtraItems
from counterfoil.data.batches.sampling import BatchPlan, RankBatches
from counterfoil.data.pairs import Pairs, Split
from counterfoil.models import Model, create_model
from counterfoil.objectives import Objective
from counterfoil.objectives.composite import Composite
from counterfoil.training.services import TrainingRunSetup
from counterfoil.training.step import TrainingStep
from tests.training.trained_runs import score_as_trained


class Noted:
    """Companions that remember what they gave to each caption."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.given = inner, {}

    def of(self, caption: int, rng: np.random.Generator) -> ExtraItems:
        self.given[caption] = self.inner.of(caption, rng)
        return self.given[caption]


def some_of(pairs: Pairs) -> Pairs:
    """A data set of which an epoch of 32 captions a batch has three batches."""
    sizes = {"train": 48, "dev": 16}
    return Pairs("few", {name: pairs[name].select(range(size)) for name, size in sizes.items()})


def small_model(split: Split, name: str) -> Model:
    config = build_config({"model": {"name": name, "embed_size": 16}, "data": {"min_count": 1}})
    torch.manual_seed(0)
    return create_model(config.model, split, config.data).eval()


def prepare(objective: Objective, split: Split, model: Model) -> None:
    config = build_config({"model": {"name": "vse-fc"}})
    objective.prepare(TrainingRunSetup(split, model, config, torch.device("cpu"), Silent()))


def one_step(
    objective: Objective,
    split: Split,
    model: Model,
    captions: str = "all",
    size: int = 9,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, dict[str, Tensor], PairBatch, Mapping[int, ExtraItems]]:
    """Loss and diagnostics of one batch without dropout or augmentation, and what it brought."""
    prepare(objective, split, model)
    noted = Noted(objective.extra_negatives())
    items = CaptionItems(split, model.text, Augmentation(), 3, {"it": noted})
    plan = BatchPlan(split, size, 3, captions)
    indices = next(iter(RankBatches(plan, epoch=0)))
    batch = Collate(model.text.pad)([items[index] for index in indices])
    whole = Composite({"it": objective}, {"it": 1.0}, {"it": (0, None)})
    loss, diagnostics = TrainingStep(model, whole, dtype)(batch, 0, 0)
    return loss, diagnostics, batch, noted.given


def score(model: Model, split: Split, image: int, text: str) -> float:
    return float(score_as_trained(model, [split.fragments.read(image)], [text]))
