"""The format "scan": precomputed features as SCAN and vse_infty store them, read and written.

A folder has `{split}_caps.txt` (one caption per line), `{split}_ids.txt` (one image id per line)
and `{split}_ims.npy` (see `feature_files`). vse_infty has them in a folder `precomp`, beside an
`id_mapping.json` from ids to file names and a folder of images.

If there is a `{split}_items.jsonl`, it replaces the captions and ids. Conversion writes it if the
plain files cannot store everything: one object per image, in row order, with ``id``, ``captions``
(any number, any characters), ``image`` (a path in the folder), ``original_name`` (the image's name
if the file has another) and any further keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

from counterfoil.core.storage.arrays import ArrayFile
from counterfoil.data.formats.base import (
    LABEL,
    Draft,
    Item,
    Source,
    Writer,
    extras_of,
    in_order,
    sources,
    writers,
)
from counterfoil.data.formats.feature_files import FEATURES, FeatureWriter, open_features
from counterfoil.data.formats.image_files import ImageFolder, ImageWriter, image_folder
from counterfoil.data.formats.text_files import (
    json_bytes,
    merge_extras,
    parse_json,
    read_json,
    read_lines,
    read_raw_lines,
    split_extras,
)
from counterfoil.data.fragments import FragmentTable
from counterfoil.data.pairs import ProblemLog, Split

CAPTIONS, IDS, ITEMS = "_caps.txt", "_ids.txt", "_items.jsonl"
_SPLIT_FILE = re.compile(f"(.+)({CAPTIONS}|{ITEMS}|{FEATURES})$")
_IMAGE_FOLDERS = ("images", "flickr30k-images", "flickr30k_images", "Images", ".")
_ITEM_KEYS = frozenset({"id", "captions", "image", LABEL})
USUAL_CAPTIONS = 5


@sources.register("scan")
class ScanSource(Source):
    """Precomputed features with captions and ids as text, as SCAN and vse_infty publish them.

    ``images`` is the folder of the images that `id_mapping.json` names.
    """

    looks_for = "a folder with {split}_caps.txt, {split}_ims.npy and {split}_ids.txt (or precomp/)"
    examples = ("train_caps.txt", "train_ims.npy", "train_ids.txt", "test_caps.txt", "precomp")

    def __init__(self, *, images: str | Path | None = None) -> None:
        self.images = images

    @classmethod
    def matches(cls, path: Path) -> bool:
        folder = _folder(path)
        if not folder.is_dir():
            return False
        files = [match for file in folder.iterdir() if (match := _SPLIT_FILE.match(file.name))]
        if any(match.group(2) != FEATURES for match in files):
            return True
        # The source "table" also has features, beside its table of captions.
        tables = any(folder.glob("captions.*")) or any(folder.glob("metadata.*"))
        return bool(files) and not tables

    def read(self, path: Path, log: ProblemLog) -> Draft:
        folder = _folder(path)
        draft = Draft(path.name)
        if not folder.is_dir():
            log.fatal("missing-file", folder, "no such folder")
            return draft
        names = _FileNames(folder, self.images, log)
        matches = [_SPLIT_FILE.match(file.name) for file in sorted(folder.iterdir())]
        for split in in_order(match.group(1) for match in matches if match):
            table = open_features(folder, split, log)
            if (folder / (split + ITEMS)).exists():
                items = list(_sidecar_items(folder, split, log))
                if table is not None and len(table) != len(items):
                    log.fatal(
                        "count-mismatch",
                        folder / (split + ITEMS),
                        f"{len(items)} images, but {len(table)} rows of features",
                    )
            else:
                items = list(_plain_items(folder, split, table, names, log))
            draft.items += items
            if table is not None:
                draft.tables[split] = table
        return draft


class _FileNames:
    """vse_infty's `id_mapping.json`, if there is one."""

    def __init__(self, folder: Path, images: str | Path | None, log: ProblemLog) -> None:
        beside = [parent / "id_mapping.json" for parent in (folder, folder.parent)]
        self.path = next((path for path in beside if path.is_file()), None)
        self.mapping: dict[str, Any] = {}
        self.folder: ImageFolder | None = None
        if self.path is None:
            return
        mapping = read_json(self.path, log)
        if not isinstance(mapping, dict):
            if mapping is not None:
                log.fatal("bad-json", self.path, "expected an object from ids to file names")
            return
        self.mapping = mapping
        image_files = image_folder(images, self.path.parent, _IMAGE_FOLDERS, log)
        if image_files.has_any(str(name) for name in mapping.values()):
            self.folder = image_files
        else:
            log.note("no-image-folder", self.path, "the images it names are not there")

    def describe(self, item: Item, log: ProblemLog) -> None:
        name = self.mapping.get(item.id)
        if not isinstance(name, str):
            return
        if self.folder is None:
            item.extras["file"] = name
        else:
            item.image = self.folder.find([name], item.where, log)


def _folder(path: Path) -> Path:
    inner = path / "precomp"
    return inner if inner.is_dir() else path


def _sidecar_items(folder: Path, split: str, log: ProblemLog) -> Iterable[Item]:
    path = folder / (split + ITEMS)
    images = ImageFolder([folder])
    row = 0
    for number, line in read_raw_lines(path, log):
        record = parse_json(line.encode(), path, log, number) if line.strip() else None
        if record is None:
            continue
        captions = record.get("captions") if isinstance(record, dict) else None
        if not isinstance(captions, list) or not all(isinstance(c, str) for c in captions):
            log.fatal("bad-json", f"{path}:{number}", "expected an object with id and captions")
            continue
        item = Item(str(record.get("id", "")), split, captions, path, line=number, row=row)
        item.extras = split_extras({k: v for k, v in record.items() if k not in _ITEM_KEYS})
        name, label = record.get("image"), record.get("original_name")
        if isinstance(name, str):
            label = label if isinstance(label, str) else Path(name).name
            item.image = images.find([name], item.where, log, label=label)
        row += 1
        yield item


def _plain_items(
    folder: Path, split: str, table: FragmentTable | None, names: _FileNames, log: ProblemLog
) -> Iterable[Item]:
    path = folder / (split + CAPTIONS)
    if not path.exists():
        log.fatal("missing-file", path, "no such file")
        return
    texts = [line for _, line in read_lines(path, log)]
    ids = _read_ids(folder / (split + IDS), log)
    features = table.features if table is not None else None
    if table is None and not (folder / (split + FEATURES)).exists() and not names.mapping:
        log.fatal("missing-file", folder / (split + FEATURES), "no such file")
    rows = len(features) if features is not None else len(ids or ())
    while texts and not texts[-1].strip() and rows and len(texts) % rows:
        texts.pop()
    layout = find_layout(len(texts), ids, features if isinstance(features, ArrayFile) else None)
    if layout.fault:
        log.fatal("count-mismatch", path, layout.fault)
    _note_layout(folder, split, layout, log)
    for image in range(len(layout)):
        start, end = layout.starts[image], layout.starts[image + 1]
        item = Item(
            id=layout.ids[image] if layout.ids is not None else f"{split}-{image}",
            split=split,
            captions=texts[start:end],
            file=path,
            line=start + 1,
            caption_lines=range(start + 1, end + 1),
            row=layout.rows[image],
        )
        names.describe(item, log)
        yield item


def _read_ids(path: Path, log: ProblemLog) -> list[str] | None:
    if not path.exists():
        return None
    ids = [line.strip() for _, line in read_lines(path, log)]
    while ids and not ids[-1]:
        ids.pop()
    return ids


def _note_layout(folder: Path, split: str, layout: Layout, log: ProblemLog) -> None:
    if layout.ids is None:
        log.note("no-ids", folder / (split + IDS), f"no image ids; using '{split}-0' and so on")
    if layout.collapsed > 1:
        log.note(
            "repeated-images",
            folder / (split + FEATURES),
            f"images are stored up to {layout.collapsed} times; each is used once",
        )


# The plain files have only counts. If there are fewer rows than captions, every image has equally
# many captions. With as many rows as captions, either every image has one caption, or images are
# stored once per caption (the published dev and test files store them five times).
@dataclass(frozen=True)
class Layout:
    """Captions ``starts[i]`` to ``starts[i + 1]`` belong to image ``i``, stored in ``rows[i]``."""

    starts: list[int]
    rows: list[int]
    ids: list[str] | None
    fault: str | None = None
    collapsed: int = 1

    def __len__(self) -> int:
        return len(self.rows)


def find_layout(captions: int, ids: Sequence[str] | None, features: ArrayFile | None) -> Layout:
    """The layout of a split, with a fault if its counts do not fit together."""
    if features is None:
        return _without_features(captions, ids)
    rows = len(features)
    if rows == captions:
        return _one_row_per_caption(rows, ids, features)
    if rows and captions > rows and captions % rows == 0:
        return _even(captions, rows, ids)
    fault = f"{captions} captions for {rows} images: expected the same number for every image"
    guess = min(rows, -(-captions // USUAL_CAPTIONS)) if captions > rows else captions
    known = list(ids[:guess]) if ids is not None and len(ids) in (rows, guess) else None
    return Layout(_starts(captions, guess), list(range(guess)), known, fault)


def _even(captions: int, images: int, ids: Sequence[str] | None) -> Layout:
    each = captions // images
    fault = None
    if ids is not None and len(ids) == captions:
        ids = ids[::each]
    elif ids is not None and len(ids) != images:
        fault, ids = f"{len(ids)} ids for {images} images", None
    starts = list(range(0, captions + 1, each))
    return Layout(starts, list(range(images)), list(ids) if ids is not None else None, fault)


def _one_row_per_caption(rows: int, ids: Sequence[str] | None, features: ArrayFile) -> Layout:
    if ids is not None and len(ids) == rows:
        runs = [len(list(run)) for _, run in groupby(ids)]
        if len(runs) < rows and _runs_are_equal(runs, features):
            return _from_runs(runs, ids)
        if _stored_five_times(features, must_differ=True):
            return _from_runs([USUAL_CAPTIONS] * (rows // USUAL_CAPTIONS), ids)
        return Layout(list(range(rows + 1)), list(range(rows)), list(ids))
    if ids is not None and ids and rows % len(ids) == 0:
        each = rows // len(ids)
        if _runs_are_equal([each] * len(ids), features):
            starts = list(range(0, rows + 1, each))
            return Layout(starts, starts[:-1], list(ids), collapsed=each)
    fault = f"{len(ids)} ids for {rows} images" if ids is not None else None
    if _stored_five_times(features, must_differ=False):
        layout = _from_runs([USUAL_CAPTIONS] * (rows // USUAL_CAPTIONS), None)
        return Layout(layout.starts, layout.rows, None, fault, USUAL_CAPTIONS)
    return Layout(list(range(rows + 1)), list(range(rows)), None, fault)


def _from_runs(runs: Sequence[int], ids: Sequence[str] | None) -> Layout:
    starts = [0, *accumulate(runs)]
    rows = starts[:-1]
    return Layout(starts, rows, [ids[row] for row in rows] if ids else None, None, max(runs))


def _without_features(captions: int, ids: Sequence[str] | None) -> Layout:
    if ids is None:
        each = USUAL_CAPTIONS if captions % USUAL_CAPTIONS == 0 else 1
        return _even(captions, captions // each, None) if captions else Layout([0], [], None)
    if len(ids) == captions:
        return (
            _from_runs([len(list(run)) for _, run in groupby(ids)], ids)
            if ids
            else Layout([0], [], [])
        )
    if ids and captions and captions % len(ids) == 0:
        return _even(captions, len(ids), ids)
    guess = min(len(ids), captions)
    fault = f"{captions} captions for {len(ids)} ids: expected the same number for every image"
    return Layout(_starts(captions, guess), list(range(guess)), list(ids[:guess]), fault)


def _starts(captions: int, images: int) -> list[int]:
    return [image * captions // max(images, 1) for image in range(images + 1)]


def _runs_are_equal(runs: Sequence[int], features: ArrayFile) -> bool:
    start = 0
    for run in runs:
        head = features.head(start)
        if any(features.head(start + step) != head for step in range(1, run)):
            return False
        start += run
    return True


def _stored_five_times(features: ArrayFile, *, must_differ: bool) -> bool:
    """Whether rows come in equal fives; ``must_differ``: and no five equals the previous one."""
    rows = len(features)
    if rows == 0 or rows % USUAL_CAPTIONS:
        return False
    previous = None
    for start in range(0, rows, USUAL_CAPTIONS):
        head = features.head(start)
        if any(features.head(start + step) != head for step in range(1, USUAL_CAPTIONS)):
            return False
        if must_differ and head == previous:
            return False
        previous = head
    return not must_differ or rows > USUAL_CAPTIONS


# Regular data become exactly the plain files, with every image stored once. With a
# `{split}_items.jsonl`, the plain files have spaces for line breaks and row numbers for ids.
@writers.register("scan")
class ScanWriter(Writer):
    """Writes the files that SCAN reads, and `_items.jsonl` if these cannot store everything."""

    def __init__(self, folder: Path, log: ProblemLog) -> None:
        super().__init__(folder, log)
        self._images = ImageWriter(folder, log)

    def write_split(self, split: Split, images: Iterable[int]) -> None:
        if split.fragments is None:
            self.log.note(
                "no-features", f"split '{split.name}'", "there are no features to write as _ims.npy"
            )
        numeric = all(map(_is_number, split.ids))
        sidecar = None if _is_plain(split) else self._open(split, ITEMS)
        with (
            self._open(split, CAPTIONS) as captions,
            self._open(split, IDS) as ids,
            FeatureWriter(self.folder, split.name, split.fragments) as features,
        ):
            try:
                for image in images:
                    ids.write(f"{split.ids[image] if numeric else image}\n".encode())
                    for caption in split.captions[image]:
                        captions.write(_one_line(caption))
                    features.write(image)
                    if sidecar is not None:
                        sidecar.write(self._record(split, image))
            finally:
                if sidecar is not None:
                    sidecar.close()

    def _open(self, split: Split, end: str):  # type: ignore[no-untyped-def]
        return (self.folder / (split.name + end)).open("wb")

    def _record(self, split: Split, image: int) -> bytes:
        record = {
            "id": split.ids[image],
            **self._images.describe(split, image),
            "captions": list(split.captions[image]),
        }
        return json_bytes(merge_extras(record, extras_of(split, image), _ITEM_KEYS)) + b"\n"


def _is_plain(split: Split) -> bool:
    """Whether SCAN's plain files store everything, and `ScanSource` reads them back the same."""
    counts = {len(captions) for captions in split.captions}
    if split.fragments is None or split.pixels is not None or split.extras is not None:
        return False
    if len(counts) != 1 or 0 in counts or not all(map(_is_number, split.ids)):
        return False
    # One caption per image, in fives, could be mistaken for images stored five times.
    if counts == {1} and len(split) % USUAL_CAPTIONS == 0:
        return False
    return len(set(split.ids)) == len(split) and all(map(_is_plain_caption, split.texts))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and str(int(text)) == text


def _is_plain_caption(text: str) -> bool:
    return bool(text) and text == text.strip().lstrip("\ufeff") and not set(text) & set("\r\n")


def _one_line(caption: str) -> bytes:
    line = caption.replace("\r\n", " ").replace("\n", " ").replace("\r", " ")
    return line.encode(errors="replace") + b"\n"
