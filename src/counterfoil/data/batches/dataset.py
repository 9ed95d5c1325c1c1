"""`CaptionItems`: a `torch` data set with one augmented image–caption item per caption."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from counterfoil.core.errors import ConfigError, DataError
from counterfoil.data.batches.collate import NO_IMAGE, FragmentSelection, Item, ItemExtras
from counterfoil.data.fragments import Fragments, FragmentTable, PixelAugmentation, PixelTable
from counterfoil.data.pairs import Split
from counterfoil.data.text.tokenizers import TextProcessor, Tokens, WordNoise

MAX_CACHED_CAPTIONS = 1 << 18
"""Results that `Once` caches: a tokenized caption takes a few hundred bytes."""

Key = TypeVar("Key")
Value = TypeVar("Value")

TEXT_ONLY = -1
"""The view number of a caption whose image is already in the batch."""


class Once(Generic[Key, Value]):
    """A function that caches its first ``most`` results; picklable."""

    def __init__(self, compute: Callable[[Key], Value], most: int | None = None) -> None:
        self.compute = compute
        self.most = MAX_CACHED_CAPTIONS if most is None else most
        self.cache: dict[Key, Value] = {}

    def __call__(self, key: Key) -> Value:
        if key in self.cache:
            return self.cache[key]
        result = self.compute(key)
        if len(self.cache) < self.most:
            self.cache[key] = result
        return result


@dataclass(frozen=True)
class Augmentation:
    """Augmentation of a training item (VSE∞): drop regions, disturb words, crop and flip pixels.

    ``regions`` is the share of fragments dropped. With ``varying`` (for grid features) the rate is
    drawn per image from 0 to ``regions``, and one image in five stays whole.
    """

    regions: float = 0.0
    words: float = 0.0
    varying: bool = False
    pixel_augmentation: PixelAugmentation = field(default_factory=PixelAugmentation)


@dataclass(frozen=True)
class ExtraItems:
    """Extra images and captions (as text) that a pair adds to its batch.

    ``images`` are indices into the split, ``fragments`` are images outside it; a source has one of
    the two.
    """

    images: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()
    fragments: tuple[Fragments, ...] = ()


class ExtraNegativeSource(Protocol):
    """Gives the extra items for a caption of the training split.

    If nothing but the draws differs between epochs, ``changes = False`` lets the processes that
    load batches, and what they cached, last for the whole run.
    """

    def of(self, caption: int, rng: np.random.Generator) -> ExtraItems: ...


class CaptionItems(Dataset["Item | str"]):
    """One item per caption of a split: its image's fragments and its token ids.

    An index is (epoch, caption, view). Augmentation draws from a generator seeded with these three
    and the seed. So every worker and process makes the same batch, and two views of one caption
    differ. An item that cannot be used is returned as an error message.

    ``resident`` [images] is True for images whose fragments are resident on the training device.
    If it is given, an item has the rows of its fragments in the resident table instead.
    """

    def __init__(
        self,
        split: Split,
        text: TextProcessor,
        augmentation: Augmentation,
        seed: int,
        extra_sources: Mapping[str, ExtraNegativeSource] | None = None,
        resident: NDArray[np.bool_] | None = None,
    ) -> None:
        self.split, self.text, self.augmentation, self.seed = split, text, augmentation, seed
        self.fragments = split.require_fragments()
        _check_augmentation(self.fragments, augmentation)
        self.extra_sources = dict(extra_sources or {})
        self.resident = resident
        self.all_regions = np.ones(self.fragments.max_fragments, dtype=np.bool_)
        self.item_rng = _ItemRng(seed)
        self.tokens_of = Once(self._tokens_of)

    def __len__(self) -> int:
        return len(self.split.texts)

    @property
    def changes(self) -> bool:
        """Whether an extra source may give other items in the next epoch."""
        return any(getattr(source, "changes", True) for source in self.extra_sources.values())

    def for_thread(self) -> CaptionItems:
        """The same items for another thread, with a random generator of its own."""
        items = copy.copy(self)
        items.item_rng = _ItemRng(self.seed)
        return items

    def __getitem__(self, index: tuple[int, int, int]) -> Item | str:
        epoch, caption, view = index
        image = int(self.split.image_of[caption])
        rng = self.item_rng.of(epoch, caption, view)
        try:
            fragments = self._read(image, rng) if view != TEXT_ONLY else None
            extras = {
                name: self._extra(source.of(caption, rng), rng)
                for name, source in self.extra_sources.items()
            }
        except DataError as error:
            return f"image {self.split.ids[image]}: {error}"
        return Item(fragments, self._ids(caption, rng), image, caption, extras)

    def _ids(self, caption: int, rng: np.random.Generator) -> list[int]:
        """Token ids of a caption; tokens are cached, as tokenizing is the slowest step."""
        rate = self.augmentation.words
        noise = WordNoise(rate, rng) if rate else None
        return self.text.with_noise(self.tokens_of(caption), noise)

    def _tokens_of(self, caption: int) -> Tokens:
        return self.text.tokenize(self.split.texts[caption])

    def _read(self, image: int, rng: np.random.Generator) -> Fragments | FragmentSelection:
        if self.resident is not None:
            return self._select(image, rng)
        if isinstance(self.fragments, PixelTable) and self.augmentation.pixel_augmentation:
            return self.fragments.augment(image, self.augmentation.pixel_augmentation, rng)
        fragments = self.fragments.compact(image)
        if not self.augmentation.regions:
            return fragments
        return drop_regions(fragments, self.augmentation, rng)

    def _select(self, image: int, rng: np.random.Generator) -> FragmentSelection:
        table = self.fragments
        if self.resident is not None and not self.resident[image]:
            table.compact(image)  # raises with the reason, unless the image is readable by now
            raise DataError(
                "was unreadable when training started but is readable now; restart to include it"
            )
        keep = self.all_regions[: table.count(image)]
        if self.augmentation.regions:
            keep = draw_regions(len(keep), self.augmentation, rng)
        return FragmentSelection(image * table.max_fragments, keep)

    def _extra(self, extra: ExtraItems, rng: np.random.Generator) -> ItemExtras:
        """Extra images are augmented like any other; extra texts are not."""
        images = [self._read(image, rng) for image in extra.images]
        rate = self.augmentation.regions
        images += [drop_regions(x, self.augmentation, rng) if rate else x for x in extra.fragments]
        ids = [*extra.images, *(NO_IMAGE for _ in extra.fragments)]
        return ItemExtras(images, [self.text.encode(text) for text in extra.texts], ids)


class _ItemRng:
    """One generator, reseeded per item: creating a generator takes longer than drawing."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.generator = np.random.Generator(np.random.Philox(key=0))

    def of(self, epoch: int, caption: int, view: int) -> np.random.Generator:
        """As ``Generator(Philox(key=[seed, epoch << 40 + caption], counter=[0, 0, 0, view]))``."""
        state: Any = {  # tuples are read ten times as fast as arrays
            "bit_generator": "Philox",
            "state": {
                "counter": (0, 0, 0, max(0, view)),
                "key": (self.seed, (epoch << 40) + caption),
            },
            "buffer": (0, 0, 0, 0),
            "buffer_pos": 4,  # the buffer is used up
            "has_uint32": 0,
            "uinteger": 0,
        }
        self.generator.bit_generator.state = state
        return self.generator


def _check_augmentation(fragments: FragmentTable, augmentation: Augmentation) -> None:
    """Refuse pixel augmentation of features, and region dropping of pixels."""
    pixels = isinstance(fragments, PixelTable)
    if augmentation.pixel_augmentation and not pixels:
        raise ConfigError(
            "data.random_crop and data.flip change pixels, but this model reads precomputed "
            "features: leave them out, or train a model that reads pixels (such as clip)"
        )
    if augmentation.regions and pixels:
        raise ConfigError(
            "data.drop_regions drops features, but this model reads pixels: set it to "
            "0, or use data.random_crop"
        )


def drop_regions(
    fragments: Fragments, augmentation: Augmentation, rng: np.random.Generator
) -> Fragments:
    """Drop each fragment with the augmentation's rate; at least one stays."""
    keep = draw_regions(len(fragments), augmentation, rng)
    if keep.all():
        return fragments
    boxes = fragments.boxes[keep] if fragments.boxes is not None else None
    return Fragments(fragments.features[keep], boxes)


def draw_regions(
    count: int, augmentation: Augmentation, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """Mask [count] of the fragments to keep."""
    rate = augmentation.regions
    if augmentation.varying:
        rate = rate * rng.random() if rng.random() > 0.2 else 0.0
    keep: NDArray[np.bool_] = rng.random(count) >= rate
    if not np.count_nonzero(keep):  # much faster than `any` on few items
        keep[:1] = True
    return keep
