"""`CaptionItems`: the captions of a split with their images, augmented, as items of batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from counterfoil.core.errors import ConfigError, DataError
from counterfoil.data.batches.collate import (
    FragmentSelection,
    Item,
)
from counterfoil.data.fragments import Fragments, FragmentTable
from counterfoil.data.pairs import Split
from counterfoil.data.pixels import PixelAugmentation, PixelTable
from counterfoil.data.text.tokenizers import TextProcessor, Tokens, WordNoise

MAX_CACHED_CAPTIONS = 1 << 18
"""Results that are kept: of captions cut into tokens, a few hundred bytes each."""

Key = TypeVar("Key")
Value = TypeVar("Value")

TEXT_ONLY = -1
"""The view of a caption whose image is already in the batch."""


class Once(Generic[Key, Value]):
    """A function whose results are kept, up to so many."""

    def __init__(self, find: Callable[[Key], Value]) -> None:
        self.find = find
        self.known: dict[Key, Value] = {}

    def __call__(self, key: Key) -> Value:
        if key in self.known:
            return self.known[key]
        found = self.find(key)
        if len(self.known) < MAX_CACHED_CAPTIONS:
            self.known[key] = found
        return found


@dataclass(frozen=True)
class Augmentation:
    """What is done to a training item (VSE∞): regions dropped, words disturbed.

    ``regions`` is the share of fragments dropped. With ``varying`` (the grid-feature form) the rate
    itself is drawn anew per image, from 0 to ``regions``, and one image in five is left whole.
    ``pixel_augmentation`` is how pixels are looked at.
    """

    regions: float = 0.0
    words: float = 0.0
    varying: bool = False
    pixel_augmentation: PixelAugmentation = field(default_factory=PixelAugmentation)


@dataclass(frozen=True)
class ExtraItems:
    """More images (by index) and captions (as text) that a pair brings into its batch."""

    images: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()


class ExtraNegativeSource(Protocol):
    """What each caption of a training split brings into a batch besides itself."""

    def of(self, caption: int, rng: np.random.Generator) -> ExtraItems: ...


class CaptionItems(Dataset["Item | str"]):
    """One item per caption of a split: its image's fragments and its token ids.

    An index is (epoch, caption, view): augmentation draws from a generator seeded with all three
    and the seed, so a batch is the same whichever worker or process makes it, and two views of one
    caption differ. An item that cannot be used comes back as the text of its problem.

    ``held`` says of each image whether the training device has its fragments: then an item has the
    places of those that are kept, image after image with as many for each as the table's widest.
    """

    def __init__(
        self,
        split: Split,
        text: TextProcessor,
        augmentation: Augmentation,
        seed: int,
        extra_sources: Mapping[str, ExtraNegativeSource] | None = None,
        held: NDArray[np.bool_] | None = None,
    ) -> None:
        self.split, self.text, self.augmentation, self.seed = split, text, augmentation, seed
        self.fragments = split.require_fragments()
        _check_augmentation(self.fragments, augmentation)
        self.extra_sources = dict(extra_sources or {})
        self.held = held
        self.whole = np.ones(self.fragments.max_fragments, dtype=np.bool_)
        self.draws = _ItemRng(seed)
        self.tokens_of = Once(self._tokens_of)

    def __len__(self) -> int:
        return len(self.split.texts)

    def __getitem__(self, index: tuple[int, int, int]) -> Item | str:
        epoch, caption, view = index
        image = int(self.split.image_of[caption])
        rng = self.draws.of(epoch, caption, view)
        try:
            fragments = self._read(image, rng) if view != TEXT_ONLY else None
            extras = {
                name: self._extra(more.of(caption, rng), rng)
                for name, more in self.extra_sources.items()
            }
        except DataError as error:
            return f"image {self.split.ids[image]}: {error}"
        return Item(fragments, self._ids(caption, rng), image, caption, extras)

    def _ids(self, caption: int, rng: np.random.Generator) -> list[int]:
        """Token ids of a caption, which is cut into tokens once: nothing else takes as long."""
        rate = self.augmentation.words
        noise = WordNoise(rate, rng) if rate else None
        return self.text.with_noise(self.tokens_of(caption), noise)

    def _tokens_of(self, caption: int) -> Tokens:
        return self.text.tokenize(self.split.texts[caption])

    def _read(self, image: int, rng: np.random.Generator) -> Fragments | FragmentSelection:
        if self.held is not None:
            return self._places(image, rng)
        if isinstance(self.fragments, PixelTable) and self.augmentation.pixel_augmentation:
            return self.fragments.augment(image, self.augmentation.pixel_augmentation, rng)
        fragments = self.fragments.compact(image)
        if not self.augmentation.regions:
            return fragments
        return drop_regions(fragments, self.augmentation, rng)

    def _places(self, image: int, rng: np.random.Generator) -> FragmentSelection:
        table = self.fragments
        if self.held is not None and not self.held[image]:
            table.compact(image)  # which says why it cannot be read
            raise DataError("could not be read at first, but can be now: start again to use it")
        keep = self.whole[: table.count(image)]
        if self.augmentation.regions:
            keep = kept_regions(len(keep), self.augmentation, rng)
        return FragmentSelection(image * table.max_fragments, keep)

    def _extra(
        self, extra: ExtraItems, rng: np.random.Generator
    ) -> tuple[list[Fragments | FragmentSelection], list[list[int]]]:
        """Extra images are augmented like any other; extra texts stay as they are written."""
        images = [self._read(image, rng) for image in extra.images]
        return images, [self.text.encode(text) for text in extra.texts]


class _ItemRng:
    """One generator that begins anew for each item: to make one takes longer than to draw."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.generator = np.random.Generator(np.random.Philox(key=0))

    def of(self, epoch: int, caption: int, view: int) -> np.random.Generator:
        """As ``Generator(Philox(key=[seed, epoch << 40 + caption], counter=[0, 0, 0, view]))``."""
        state: Any = {  # plain numbers in it are read ten times as fast as arrays
            "bit_generator": "Philox",
            "state": {
                "counter": (0, 0, 0, max(0, view)),
                "key": (self.seed, (epoch << 40) + caption),
            },
            "buffer": (0, 0, 0, 0),
            "buffer_pos": 4,  # all of it is used up
            "has_uint32": 0,
            "uinteger": 0,
        }
        self.generator.bit_generator.state = state  # its own: a copied one may have another
        return self.generator


def _check_augmentation(fragments: FragmentTable, augmentation: Augmentation) -> None:
    """Refuse what cannot be done to this kind of image."""
    pixels = isinstance(fragments, PixelTable)
    if augmentation.pixel_augmentation and not pixels:
        raise ConfigError(
            "data.random_crop and data.flip change pixels, but this model reads features that were "
            "made before: leave them out, or train a model that reads pixels (such as clip)"
        )
    if augmentation.regions and pixels:
        raise ConfigError(
            "data.drop_regions leaves out features, but this model reads whole pictures: set it to "
            "0, or use data.random_crop"
        )


def drop_regions(
    fragments: Fragments, augmentation: Augmentation, rng: np.random.Generator
) -> Fragments:
    """Leave out each fragment with the augmentation's rate; at least one stays."""
    keep = kept_regions(len(fragments), augmentation, rng)
    if keep.all():
        return fragments
    boxes = fragments.boxes[keep] if fragments.boxes is not None else None
    return Fragments(fragments.features[keep], boxes)


def kept_regions(
    count: int, augmentation: Augmentation, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """Which of so many fragments stay."""
    rate = augmentation.regions
    if augmentation.varying:
        rate = rate * rng.random() if rng.random() > 0.2 else 0.0
    keep: NDArray[np.bool_] = rng.random(count) >= rate
    if not np.count_nonzero(keep):  # many times as fast as to ask for any
        keep[:1] = True
    return keep
