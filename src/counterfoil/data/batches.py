"""Padded batches of fragments and words, with masks and image ids, as training reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from counterfoil.data.fragments import Fragments
from counterfoil.data.pairs import Split
from counterfoil.data.parsing import LinkedIds
from counterfoil.data.texts import TextProcessor, WordNoise
from counterfoil.errors import DataError

B = TypeVar("B", bound="_Movable")


class _Movable:
    """Moves every tensor of a dataclass at once."""

    def to(self: B, device: torch.device | str) -> B:
        moved: dict[str, Tensor | _Movable] = {}
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                moved[field.name] = value.to(device, non_blocking=True)
            elif isinstance(value, _Movable):
                moved[field.name] = value.to(device)
        return replace(self, **moved)  # type: ignore[type-var]

    def pin_memory(self: B) -> B:
        pinned = {}
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, (Tensor, _Movable)):
                pinned[field.name] = value.pin_memory()
        return replace(self, **pinned)  # type: ignore[type-var]


@dataclass(frozen=True)
class ImageBatch(_Movable):
    """Fragments [B, N, D] with mask [B, N] (True: real) and boxes [B, N, 4] where known."""

    fragments: Tensor
    mask: Tensor
    boxes: Tensor | None = None


@dataclass(frozen=True)
class TextBatch(_Movable):
    """Token ids [B, W] with mask [B, W] (True: real) and graph [B, W, W] of links where known."""

    ids: Tensor
    mask: Tensor
    graph: Tensor | None = None


@dataclass(frozen=True)
class PairBatch(_Movable):
    """Caption ``k`` of the batch belongs to image ``k``; equal ``image_ids`` are positives too."""

    images: ImageBatch
    texts: TextBatch
    image_ids: Tensor
    caption_ids: Tensor
    skipped: tuple[str, ...] = ()


def pad_fragments(items: Sequence[Fragments]) -> ImageBatch:
    dim = items[0].features.shape[1]
    longest = max(1, max(len(item) for item in items))
    features = torch.zeros(len(items), longest, dim)
    mask = torch.zeros(len(items), longest, dtype=torch.bool)
    boxed = all(item.boxes is not None for item in items)
    boxes = torch.zeros(len(items), longest, 4) if boxed else None
    for row, item in enumerate(items):
        features[row, : len(item)] = torch.from_numpy(item.features)
        mask[row, : len(item)] = True
        if boxes is not None and item.boxes is not None:
            boxes[row, : len(item)] = torch.from_numpy(item.boxes)
    return ImageBatch(features, mask, boxes)


def pad_texts(items: Sequence[Sequence[int]], pad: int) -> TextBatch:
    longest = max(len(item) for item in items)
    ids = torch.full((len(items), longest), pad, dtype=torch.long)
    mask = torch.zeros(len(items), longest, dtype=torch.bool)
    for row, item in enumerate(items):
        ids[row, : len(item)] = torch.tensor(item, dtype=torch.long)
        mask[row, : len(item)] = True
    return TextBatch(ids, mask, _word_graph(items, longest))


def _word_graph(items: Sequence[Sequence[int]], longest: int) -> Tensor | None:
    """Links [B, longest, longest], each both ways; None unless every caption was parsed."""
    graph = torch.zeros(len(items), longest, longest, dtype=torch.bool)
    for row, item in enumerate(items):
        if not isinstance(item, LinkedIds):
            return None
        if item.edges:
            start, end = torch.tensor(item.edges).T
            graph[row, start, end] = graph[row, end, start] = True
    return graph


@dataclass(frozen=True)
class Augmentation:
    """What is done to a training item (VSE∞): regions dropped, words disturbed.

    ``regions`` is the share of fragments dropped. With ``varying`` (the grid-feature form) the rate
    itself is drawn anew per image, from 0 to ``regions``, and one image in five is left whole.
    """

    regions: float = 0.0
    words: float = 0.0
    varying: bool = False


class CaptionItems(Dataset["tuple[Fragments, list[int], int, int] | str"]):
    """One item per caption of a split: its image's fragments and its token ids.

    An index is (epoch, caption): augmentation draws from a generator seeded with (seed, epoch,
    caption), so a batch is the same whichever worker or process makes it. An item that cannot be
    used comes back as the text of its problem.
    """

    def __init__(
        self, split: Split, text: TextProcessor, augmentation: Augmentation, seed: int
    ) -> None:
        if split.fragments is None:
            raise DataError(f"split '{split.name}' has no fragments; extract features first")
        self.split, self.text, self.augmentation, self.seed = split, text, augmentation, seed
        self.fragments = split.fragments

    def __len__(self) -> int:
        return len(self.split.texts)

    def __getitem__(self, index: tuple[int, int]) -> tuple[Fragments, list[int], int, int] | str:
        epoch, caption = index
        image = int(self.split.image_of[caption])
        try:
            fragments = self.fragments.read(image)
        except DataError as error:
            return f"image {self.split.ids[image]}: {error}"
        noise = None
        if self.augmentation.regions or self.augmentation.words:
            key = np.array([self.seed, (epoch << 40) + caption], dtype=np.uint64)
            rng = np.random.Generator(np.random.Philox(key=key))
            fragments = drop_regions(fragments, self.augmentation, rng)
            noise = WordNoise(self.augmentation.words, rng) if self.augmentation.words else None
        return fragments, self.text.encode(self.split.texts[caption], noise), image, caption


def drop_regions(
    fragments: Fragments, augmentation: Augmentation, rng: np.random.Generator
) -> Fragments:
    """Leave out each fragment with the augmentation's rate; at least one stays."""
    rate = augmentation.regions
    if augmentation.varying:
        rate = rate * rng.random() if rng.random() > 0.2 else 0.0
    keep: NDArray[np.bool_] = rng.random(len(fragments)) >= rate
    if keep.all() or not len(fragments):
        return fragments
    if not keep.any():
        keep[0] = True
    boxes = fragments.boxes[keep] if fragments.boxes is not None else None
    return Fragments(fragments.features[keep], boxes)


class Collate:
    """Items to a `PairBatch`; a picklable callable for loader workers."""

    def __init__(self, pad: int) -> None:
        self.pad = pad

    def __call__(
        self, items: Sequence[tuple[Fragments, list[int], int, int] | str]
    ) -> PairBatch | tuple[str, ...]:
        good = [item for item in items if not isinstance(item, str)]
        skipped = tuple(item for item in items if isinstance(item, str))
        if not good:
            return skipped
        fragments, ids, images, captions = zip(*good, strict=True)
        return PairBatch(
            pad_fragments(fragments),
            pad_texts(ids, self.pad),
            torch.tensor(images, dtype=torch.long),
            torch.tensor(captions, dtype=torch.long),
            skipped,
        )
