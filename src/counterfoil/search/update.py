"""Add images with captions to an index, and remove them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from counterfoil.core.errors import DataError, nearest
from counterfoil.core.progress import Progress
from counterfoil.core.storage.segments import Change, Ids
from counterfoil.data.batches.collate import pad_fragments
from counterfoil.data.images import as_json
from counterfoil.data.pairs import Split
from counterfoil.data.text.tokenizers import known_text
from counterfoil.encoders import Encoded
from counterfoil.search.first_stage import ItemEncoder
from counterfoil.search.items import BLOCK_ITEMS, Block, stored_dtype, write_blocks
from counterfoil.search.state import IndexState

Existing = Literal["refuse", "skip", "update"]

IMAGES_PER_COMMIT = 1 << 14
"""Images per commit: the most that an interrupted call loses."""


@dataclass(frozen=True)
class Added:
    """Counts of added, updated and skipped images; ``left_out`` says why some are missing."""

    images: int = 0
    captions: int = 0
    updated: int = 0
    skipped: int = 0
    left_out: list[str] = field(default_factory=list)

    def __add__(self, other: Added) -> Added:
        return Added(
            self.images + other.images,
            self.captions + other.captions,
            self.updated + other.updated,
            self.skipped + other.skipped,
            [*self.left_out, *other.left_out],
        )


def add_splits(
    index: IndexState, splits: Sequence[Split], existing: Existing, progress: Progress
) -> Added:
    """Add splits; all ids are checked before anything is changed."""
    chosen = [_select_new(index, split, existing) for split in splits]
    names = [name for part in chosen for name in part.ids]
    if len(set(names)) < len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise DataError(f"the image id {twice} stands twice in this data; nothing was added")
    total = Added(skipped=sum(map(len, splits)) - len(names))
    for split in chosen:
        for start in range(0, len(split), IMAGES_PER_COMMIT):
            images = range(start, min(start + IMAGES_PER_COMMIT, len(split)))
            total = total + _Addition(index, split.select(images), progress).commit()
    return total


def _select_new(index: IndexState, split: Split, existing: Existing) -> Split:
    """The images of a split that will be written."""
    split.require_fragments()  # before anything is written
    names = index.items["images"].names
    known = {i for i, name in enumerate(split.ids) if name in names}
    if known and existing == "refuse":
        raise DataError(
            f"{len(known)} images of split '{split.name}' are in the index already (the first: "
            f"{split.ids[min(known)]}); nothing was added; skip or update them with --existing"
        )
    left = known if existing == "skip" else set()
    return split.select([i for i in range(len(split)) if i not in left])


def remove_items(index: IndexState, ids: Sequence[str]) -> int:
    """Delete images with their captions, and captions, in one commit."""
    images, captions = index.items["images"], index.items["captions"]
    unknown = [name for name in ids if name not in images.names and name not in captions.names]
    if unknown:
        hint = nearest(unknown[0], [*images.names, *captions.names])
        raise DataError(f"{unknown[0]}: no such id in this index{hint}; nothing was removed")
    gone = {images.names[name] for name in ids if name in images.names}
    texts = {captions.names[name] for name in ids if name in captions.names}
    texts |= set(_captions_of(index, {name for name in ids if name in images.names}))
    removed = {"images": _keys(gone), "captions": _keys(texts)}
    if not ids:
        return 0
    index.store.commit({side: Change(remove=keys) for side, keys in removed.items()})
    index.reload_and_merge()
    nothing = _keys(set())
    index.sync_backend("images", removed["images"], nothing)
    index.sync_backend("captions", removed["captions"], nothing)
    return len(gone) + len(texts)


def _captions_of(index: IndexState, images: set[str]) -> Iterator[int]:
    """Keys of the captions of some images."""
    captions = index.items["captions"]
    if images:
        keys = captions.table.live_ids
        for key, about in zip(keys, captions.about(keys), strict=True):
            if about["image"] in images:
                yield int(key)


def _keys(keys: set[int]) -> Ids:
    return np.array(sorted(keys), dtype=np.int64)


class _Addition:
    """One commit: images, then the captions of the readable ones."""

    def __init__(self, index: IndexState, split: Split, progress: Progress) -> None:
        self.index, self.split, self.progress = index, split, progress
        self.first_key = int(index.store.header["next_key"])
        self.readable: list[int] = []
        self.left_out: list[str] = []

    def commit(self) -> Added:
        index, split = self.index, self.split
        names = index.items["images"].names
        replaced = {name for name in split.ids if name in names}
        old_images = _keys({names[name] for name in replaced})
        old_captions = _keys(set(_captions_of(index, replaced)))
        dtype = stored_dtype(index.store.header["dtype"])
        last = self.first_key + len(split) + len(split.texts)
        changes = {
            "images": Change(old_images, lambda to: write_blocks(to, dtype, self.images())),
            "captions": Change(old_captions, lambda to: write_blocks(to, dtype, self.captions())),
        }
        index.store.commit(changes, {"next_key": last})
        index.reload_and_merge()
        fresh = {side: index.items[side].table.live_ids for side in index.items}
        added = {side: keys[keys >= self.first_key] for side, keys in fresh.items()}
        index.sync_backend("images", old_images, added["images"])
        index.sync_backend("captions", old_captions, added["captions"])
        return Added(len(added["images"]), len(added["captions"]), len(replaced), 0, self.left_out)

    def images(self) -> Iterator[Block]:
        split, starts = self.split, range(0, len(self.split), BLOCK_ITEMS)
        for start in self.progress.track(starts, f"indexing images ({split.name})", len(starts)):
            chosen = range(start, min(start + BLOCK_ITEMS, len(split)))
            encoded, readable = _encode_images(self.index.encoder, split, chosen, self.left_out)
            self.readable += readable
            if encoded is not None:
                keys = self.first_key + np.array(readable, dtype=np.int64)
                yield Block(keys, encoded, [self._about_image(image) for image in readable])

    def captions(self) -> Iterator[Block]:
        split, readable = self.split, set(self.readable)
        chosen = [t for t, image in enumerate(split.image_of) if int(image) in readable]
        chosen = [text for text in chosen if self._is_readable(text)]
        counts = np.bincount(split.image_of, minlength=len(split))
        firsts = np.cumsum(counts) - counts
        starts = range(0, len(chosen), 4 * BLOCK_ITEMS)
        for start in self.progress.track(starts, f"indexing captions ({split.name})", len(starts)):
            part = chosen[start : start + 4 * BLOCK_ITEMS]
            encoded = self.index.encoder.texts([split.texts[t] for t in part])
            keys = self.first_key + len(split) + np.array(part, dtype=np.int64)
            about = []
            for text in part:
                image = int(split.image_of[text])
                name = f"{split.ids[image]}#{text - int(firsts[image])}"
                about.append({"id": name, "image": split.ids[image], "text": split.texts[text]})
            yield Block(keys, encoded, about)

    def _is_readable(self, text: int) -> bool:
        """Whether the model knows a word of a caption; if not, the caption is left out."""
        read = known_text(self.index.model.text, self.split.texts[text])
        if not read.is_readable:
            image = self.split.ids[int(self.split.image_of[text])]
            words = ", ".join(read.unknown_words)
            self.left_out.append(f"a caption of image {image}: no known word in it ({words})")
        return read.is_readable

    def _about_image(self, image: int) -> dict[str, Any]:
        split = self.split
        about: dict[str, Any] = {"id": split.ids[image], "captions": list(split.captions[image])}
        if split.pixels is not None:
            about["pixels"] = as_json(split.pixels[image])
        return about


def _encode_images(
    encoder: ItemEncoder, split: Split, images: range, left_out: list[str]
) -> tuple[Encoded | None, list[int]]:
    """Encode the readable ones of some images; None if there are none."""
    table = split.require_fragments()
    items, readable = [], []
    for image in images:
        try:
            items.append(table.read(image))
            readable.append(image)
        except DataError as error:
            left_out.append(f"image {split.ids[image]}: {error}")
    if not items:
        return None, readable
    return encoder.images(pad_fragments(items)), readable
