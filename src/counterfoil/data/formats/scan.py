"""Precomputed features in SCAN's layout, and in vse_infty's variant of it, read and written.

A folder with `{split}_caps.txt` (one caption a line), `{split}_ids.txt` (one image id a line) and
`{split}_ims.npy` (see `feature_files`). vse_infty keeps them in a folder `precomp`, beside an
`id_mapping.json` from ids to file names and a folder of images.

`{split}_items.jsonl`, where present, is preferred to the captions and ids. Conversion writes it
where the plain files cannot carry everything: one image a line, in the order of the rows, with
``id``, ``captions`` (any number, any characters), ``image`` (a path under the folder),
``original_name`` (the image's name, if the file has another) and any further keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
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
from counterfoil.data.formats.scan_layout import USUAL_CAPTIONS, Layout, find_layout
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


@sources.register("scan")
class ScanSource(Source):
    """Precomputed features with captions and ids as text, as SCAN and vse_infty publish them.

    ``images`` is the folder of the images themselves, where `id_mapping.json` names them.
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
        found = [match for file in folder.iterdir() if (match := _SPLIT_FILE.match(file.name))]
        if any(match.group(2) != FEATURES for match in found):
            return True
        # Features alone also stand beside a table of captions.
        tables = any(folder.glob("captions.*")) or any(folder.glob("metadata.*"))
        return bool(found) and not tables

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
        found = image_folder(images, self.path.parent, _IMAGE_FOLDERS, log)
        if found.has_any(str(name) for name in mapping.values()):
            self.folder = found
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
            shown = label if isinstance(label, str) else Path(name).name
            item.image = images.find([name], item.where, log, label=shown)
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
            f"every image is stored up to {layout.collapsed} times; it is used once",
        )


# Regular data becomes exactly the plain files, with every image stored once. Beside
# `{split}_items.jsonl` they are still written: line breaks as spaces, ids as row numbers.
@writers.register("scan")
class ScanWriter(Writer):
    """The files that SCAN and its descendants read, and a sidecar for what those cannot carry."""

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
    """Whether SCAN's own files say everything, and our reader would read them so."""
    counts = {len(captions) for captions in split.captions}
    if split.fragments is None or split.pixels is not None or split.extras is not None:
        return False
    if len(counts) != 1 or 0 in counts or not all(map(_is_number, split.ids)):
        return False
    # As many rows as captions, in fives, could be taken for images stored five times.
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
