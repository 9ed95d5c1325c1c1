"""Add images with captions to an index, and remove them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from counterfoil.core.errors import DataError, nearest
from counterfoil.core.printable import plural
from counterfoil.core.progress import Progress
from counterfoil.core.storage.segments import Change, Ids
from counterfoil.data.batches.collate import pad_fragments
from counterfoil.data.images import FileImage, as_json
from counterfoil.data.pairs import Split
from counterfoil.data.text.tokenizers import known_text
from counterfoil.encoders import Encoded
from counterfoil.models.match import shortened
from counterfoil.models.model import Model
from counterfoil.search.first_stage import ItemEncoder
from counterfoil.search.items import BLOCK_ITEMS, Block, Items, stored_dtype, write_blocks
from counterfoil.search.state import IndexState

Existing = Literal["refuse", "skip", "update"]

CAPTIONS_PER_BLOCK = 4 * BLOCK_ITEMS

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

    def __str__(self) -> str:
        line = f"added {plural(self.images, 'image')} and {plural(self.captions, 'caption')}"
        if self.updated:
            verb = "was" if self.updated == 1 else "were"
            line += f"; {self.updated:,} of the images {verb} updated"
        if self.skipped:
            line += f"; {plural(self.skipped, 'image was', 'images were')} already in the index"
        return line

    def __add__(self, other: Added) -> Added:
        return Added(
            self.images + other.images,
            self.captions + other.captions,
            self.updated + other.updated,
            self.skipped + other.skipped,
            [*self.left_out, *other.left_out],
        )


class BlockSource(Protocol):
    """Encodes images and captions a block at a time, or reads what another process encoded."""

    def images(self, split: Split, chosen: range) -> tuple[Encoded | None, list[int], list[str]]:
        """Encoded images of a block (None: no image), the readable ones, and why others are not.

        A block starts at a multiple of `BLOCK_ITEMS`.
        """
        ...

    def captions(self, split: Split, block: int, chosen: Sequence[int], first: int) -> Encoded:
        """Captions of the block that starts at image ``block``; ``first`` of its were before."""
        ...


@dataclass(frozen=True)
class FreshBlocks:
    """Encodes with the model of an index."""

    encoder: ItemEncoder

    def images(self, split: Split, chosen: range) -> tuple[Encoded | None, list[int], list[str]]:
        left_out: list[str] = []
        encoded, readable = _encode_images(self.encoder, split, chosen, left_out)
        return encoded, readable, left_out

    def captions(self, split: Split, block: int, chosen: Sequence[int], first: int) -> Encoded:
        return self.encoder.texts([split.texts[text] for text in chosen])


def add_splits(
    index: IndexState,
    splits: Sequence[Split],
    existing: Existing,
    progress: Progress,
    source: BlockSource | None = None,
) -> Added:
    """Add splits; all ids are checked before anything is changed.

    A ``source`` other than the index's own model has all images of the splits encoded already.
    """
    source = source or FreshBlocks(index.encoder)
    chosen = [_select_new(index, _with_stored_ids(index, one), existing) for one in splits]
    names = [name for part in chosen for name in part.ids]
    if len(set(names)) < len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise DataError(f"the image id {twice} stands twice in this data; nothing was added")
    total = Added(skipped=sum(map(len, splits)) - len(names))
    for split in chosen:
        for start in range(0, len(split), IMAGES_PER_COMMIT):
            images = range(start, min(start + IMAGES_PER_COMMIT, len(split)))
            total = total + _Addition(index, split, images, progress, source).commit()
    return total


def _with_stored_ids(index: IndexState, split: Split) -> Split:
    """The split; files that the index has already keep their ids there, and no other gets these.

    An id that was made of a file's path depends on the other files of its folder: ``a`` becomes
    ``a.jpg`` when there is ``a.png``, too.
    """
    if not index.items["images"].names:
        return split
    files = {
        row: ref.path
        for row, ref in enumerate(split.pixels or ())
        if isinstance(ref, FileImage) and split.ids[row] in _path_ids(ref.path)
    }
    stored = {row: name for row in files if (name := _stored_id(index, split, row, files[row]))}
    owners = {name: row for row, name in enumerate(split.ids)}
    for row, name in list(stored.items()):
        owner = owners.get(name, row)
        if owner in files and owner != row and files[owner].resolve() == files[row].resolve():
            del stored[row]  # a link to the file, under its own id
    ids = [stored.get(row, name) for row, name in enumerate(split.ids)]
    taken = {*ids, *index.items["images"].names}
    claimed = set(stored.values())
    for row, path in files.items():
        if row not in stored and ids[row] in claimed:
            ids[row] = next((name for name in _path_ids(path) if name not in taken), ids[row])
            taken.add(ids[row])
    return replace(split, ids=ids)


def _stored_id(index: IndexState, split: Split, row: int, path: Path) -> str | None:
    """The id, other than its own, under which an index has an image file of a split."""
    images, own = index.items["images"], split.ids[row]
    names = [name for name in _path_ids(path) if name in images.names]
    if names in ([], [own]):
        return None
    stored = images.about(np.array([images.names[name] for name in names], dtype=np.int64))
    file = str(path.resolve())
    same = [one["id"] for one in stored if (one.get("pixels") or {}).get("file") == file]
    return None if own in same else next(iter(same), None)


def _path_ids(path: Path) -> list[str]:
    """All ids that an image file can have by its path: last parts of it, first those with ending.

    >>> _path_ids(Path("b/a.jpg"))
    ['a.jpg', 'b/a.jpg', 'a', 'b/a']
    """
    whole = ["/".join(path.parts[start:]) for start in reversed(range(len(path.parts)))]
    return [*whole, *(name.removesuffix(path.suffix) for name in whole)]


def _select_new(index: IndexState, split: Split, existing: Existing) -> Split:
    """The images of a split that will be written."""
    index.model.fragments_of(split)  # before anything is written
    names = index.items["images"].names
    known = {i for i, name in enumerate(split.ids) if name in names}
    if known and existing == "refuse":
        raise DataError(
            f"{plural(len(known), 'image')} of split '{split.name}' "
            f"{'is' if len(known) == 1 else 'are'} in the index already (the first: "
            f"{split.ids[min(known)]}); nothing was added; skip or update them with --existing"
        )
    left = known if existing == "skip" else set()
    return split.select([i for i in range(len(split)) if i not in left])


def remove_items(index: IndexState, ids: Sequence[str]) -> int:
    """Delete images with their captions, and captions, in one commit.

    An id of an image and of a caption (caption 0 of ``x`` and the photo ``x#0``) is the image's.
    """
    images, captions = index.items["images"], index.items["captions"]
    unknown = [name for name in ids if name not in images.names and name not in captions.names]
    if unknown:
        hint = nearest(unknown[0], [*images.names, *captions.names])
        raise DataError(f"{unknown[0]}: no such id in this index{hint}; nothing was removed")
    gone = {images.names[name] for name in ids if name in images.names}
    texts = {captions.names[name] for name in ids if name not in images.names}
    texts |= set(_captions_of(index, {name for name in ids if name in images.names}))
    if not ids:
        return 0
    about = _about_remaining(index, texts, gone)
    first = int(index.store.header["next_key"])
    new = first + np.arange(len(about), dtype=np.int64)
    removed = {"images": _keys(gone | about.keys()), "captions": _keys(texts)}
    changes = {side: Change(remove=keys) for side, keys in removed.items()}
    if about:
        dtype = stored_dtype(index.store.header["dtype"])
        changes["images"] = Change(
            removed["images"], lambda to: write_blocks(to, dtype, _described(images, about, first))
        )
    index.store.commit(changes, {"next_key": first + len(about)})
    index.reload_and_merge()
    index.sync_backend("images", removed["images"], new)
    index.sync_backend("captions", removed["captions"], _keys(set()))
    return len(gone) + len(texts)


def _about_remaining(
    index: IndexState, texts: set[int], gone: set[int]
) -> dict[int, dict[str, Any]]:
    """Descriptions, by key, of the images that stay but lose some of these captions."""
    images = index.items["images"]
    about: dict[int, dict[str, Any]] = {}
    for caption in index.items["captions"].about(_keys(texts)):
        key = images.names.get(caption["image"])
        if key is None or key in gone:
            continue
        if key not in about:
            (about[key],) = images.about(_keys({key}))
        if caption["text"] in about[key].get("captions", []):
            about[key]["captions"].remove(caption["text"])
    return about


def _described(images: Items, about: dict[int, dict[str, Any]], first_key: int) -> Iterator[Block]:
    """Images as they are, with other descriptions and keys."""
    old = _keys(set(about))
    for start in range(0, len(old), BLOCK_ITEMS):
        part = old[start : start + BLOCK_ITEMS]
        keys = first_key + start + np.arange(len(part), dtype=np.int64)
        yield Block(keys, images.encoded(part), [about[key] for key in part.tolist()])


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

    def __init__(
        self,
        index: IndexState,
        whole: Split,
        images: range,
        progress: Progress,
        source: BlockSource,
    ) -> None:
        self.index, self.whole, self.progress, self.source = index, whole, progress, source
        self.split, self.first_image = whole.select(images), images.start
        self.first_text = int(np.searchsorted(whole.image_of, images.start))
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
            block = self.first_image + start
            chosen = range(block, min(block + BLOCK_ITEMS, self.first_image + len(split)))
            encoded, numbers, left_out = self.source.images(self.whole, chosen)
            readable = [image - self.first_image for image in numbers]
            self.left_out += left_out
            self.readable += readable
            if encoded is not None:
                keys = self.first_key + np.array(readable, dtype=np.int64)
                yield Block(keys, encoded, [self._about_image(image) for image in readable])

    def captions(self) -> Iterator[Block]:
        split, readable = self.split, set(self.readable)
        counts = np.bincount(split.image_of, minlength=len(split))
        firsts = np.cumsum(counts) - counts
        starts = range(0, len(split), BLOCK_ITEMS)
        for start in self.progress.track(starts, f"indexing captions ({split.name})", len(starts)):
            images = range(start, min(start + BLOCK_ITEMS, len(split)))
            texts = [
                int(firsts[image]) + number
                for image in images
                if image in readable
                for number in range(int(counts[image]))
            ]
            texts = [text for text in texts if self._is_readable(text)]
            for first in range(0, len(texts), CAPTIONS_PER_BLOCK):
                part = texts[first : first + CAPTIONS_PER_BLOCK]
                chosen = [self.first_text + text for text in part]
                block = self.first_image + start
                encoded = self.source.captions(self.whole, block, chosen, first)
                keys = self.first_key + len(split) + np.array(part, dtype=np.int64)
                yield Block(keys, encoded, [self._about_caption(text, firsts) for text in part])

    def _about_caption(self, text: int, firsts: Ids) -> dict[str, Any]:
        image = int(self.split.image_of[text])
        name = self.split.ids[image]
        number = text - int(firsts[image])
        return {"id": f"{name}#{number}", "image": name, "text": self.split.texts[text]}

    def _is_readable(self, text: int) -> bool:
        unknown = unknown_words(self.index.model, self.split.texts[text])
        if unknown is not None:
            image = self.split.ids[int(self.split.image_of[text])]
            named = shortened(unknown, 200)
            self.left_out.append(f"a caption of image {image}: no known word in it ({named})")
        return unknown is None

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


def unknown_words(model: Model, text: str) -> str | None:
    """The words of a caption if the model knows none of them, so that it is left out."""
    read = known_text(model.text, text)
    return None if read.is_readable else ", ".join(read.unknown_words)
