"""The format "shards": WebDataset tar archives, read and written; members of an image share a key.

`<key>.jpg` (or .png, .webp …) is the image. `<key>.json` has its ``captions``, ``id``, ``split``,
``file`` (the image's name) and any further keys. `<key>.txt` is a single caption if the JSON has
none. `<key>.fragments.npy` [fragments, dim] and `<key>.boxes.npy` [fragments, 4] are its fragments.
In the JSON, ``box_size`` is the width and height that scale boxes in pixels, ``fragments_by`` the
name of the extractor.
"""

from __future__ import annotations

import io
import math
import re
import tarfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from counterfoil.core.errors import ConfigError, DataError
from counterfoil.core.storage.arrays import ArrayError, parse_header
from counterfoil.core.storage.reading import IMAGE_BYTES, LINE_BYTES, open_regular
from counterfoil.core.storage.remote import RemoteFile
from counterfoil.data.formats.base import (
    Draft,
    Item,
    Source,
    Writer,
    extras_of,
    set_splits,
    sources,
    split_in_name,
    writers,
)
from counterfoil.data.formats.image_files import is_safe_name
from counterfoil.data.formats.tar_files import (
    Archive,
    ArrayMember,
    MemberRows,
    TarMember,
    archive_path,
    read_members,
)
from counterfoil.data.formats.text_files import (
    decode,
    json_bytes,
    merge_extras,
    parse_json,
    split_extras,
)
from counterfoil.data.fragments import FragmentTable
from counterfoil.data.images import ImageRef, MemberImage, MissingImage
from counterfoil.data.pairs import ProblemLog, Split

IMAGE_TYPES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "img")
FRAGMENTS, BOXES = "fragments.npy", "boxes.npy"
_CAPTION_KEYS = ("captions", "caption", "text")
_KEYS = ("id", "image_id", "split", "file", "box_size", "fragments_by")
RESERVED = frozenset(_CAPTION_KEYS + _KEYS)
_KNOWN_ENDS = (FRAGMENTS, BOXES, "json", "txt", *IMAGE_TYPES)
HEADER_BYTES = 4096

Content = Callable[..., bytes]
"""Called with a member, and with the number of bytes if its start is enough."""

_MAGIC = {b"\xff\xd8\xff": "jpg", b"\x89PNG": "png", b"RIFF": "webp", b"GIF8": "gif"}


@sources.register("shards")
class ShardSource(Source):
    """WebDataset tar shards; images and features are read from the archives on demand."""

    looks_for = "a .tar file of <key>.jpg + <key>.json members (WebDataset), or a folder of them"
    examples = ("train-00000.tar", "shard-000000.tar")

    @classmethod
    def matches(cls, path: Path) -> bool:
        return bool(_shards(path))

    def read(self, path: Path, log: ProblemLog) -> Draft:
        shards = _shards(path)
        if not shards:
            log.fatal("missing-file", path, "no .tar files")
        entries: list[Entry] = []
        for shard in shards:
            members = list(read_members(shard, log))
            with ExitStack() as stack:
                file = stack.enter_context(open_regular(shard)) if members else None
                entries += read_entries(shard, members, partial(_content, file), log)
        return make_draft(path.name if path.is_dir() else path.stem, path, entries, log)


def make_draft(name: str, where: Path, entries: list[Entry], log: ProblemLog) -> Draft:
    """The items of all shards, with their splits and fragments."""
    draft = Draft(name, [entry.item for entry in entries])
    set_splits(draft.items, where, log)
    _add_tables(draft, entries, log)
    return draft


def _content(file: Any, member: TarMember, size: int | None = None) -> bytes:
    file.seek(member.offset)
    return bytes(file.read(min(member.size, size) if size else member.size))


@dataclass
class Entry:
    """An item with the arrays of its fragments."""

    item: Item
    fragments: ArrayMember | None = None
    boxes: ArrayMember | None = None
    box_size: tuple[float, float] | None = None
    made_by: str | None = None


@dataclass
class _Sample:
    """The members that share a key, by ending."""

    key: str
    members: dict[str, TarMember] = field(default_factory=dict)


def _shards(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if re.search(r"\.(tar|tgz|tar\.[a-z0-9]+)$", path.name) else []
    if not path.is_dir():
        return []
    files = [file for pattern in ("*.tar", "*.tar.*", "*.tgz") for file in path.glob(pattern)]
    return sorted(files, key=_natural)


def _natural(path: Path) -> list[Any]:
    """Sort key that puts shard 2 before shard 10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.name)]


def read_entries(
    shard: Archive, members: Iterable[TarMember], content: Content, log: ProblemLog
) -> list[Entry]:
    """The samples of a shard; ``content`` reads the start of a member, or all of it."""
    samples: dict[str, _Sample] = {}
    for member in members:
        key, end = split_name(member.name)
        if not key:
            continue
        if not is_safe_name(member.name):
            log.fatal("unsafe-path", f"{shard}: {member.name}", "the name leads out of the shard")
            continue
        if end in ("json", "txt") and member.size > LINE_BYTES:
            log.fatal(
                "large-member",
                f"{shard}: {member.name}",
                f"{member.size} bytes, at most {LINE_BYTES} are read",
            )
            continue
        sample = samples.setdefault(key, _Sample(key))
        if end in sample.members:
            log.fatal("duplicate-id", f"{shard}: {member.name}", "the shard has it twice")
        sample.members.setdefault(end, member)
    entries = [_entry(sample, shard, content, log) for sample in samples.values()]
    return [entry for entry in entries if entry is not None]


def split_name(name: str) -> tuple[str, str]:
    """Key and ending of a member: a known ending, else the part after the first dot."""
    folder, slash, base = name.rpartition("/")
    for end in _KNOWN_ENDS:
        if base.lower().endswith("." + end):
            return folder + slash + base[: -len(end) - 1], end
    stem, _, end = base.partition(".")
    return (folder + slash + stem if stem else ""), end


def _entry(sample: _Sample, shard: Archive, content: Content, log: ProblemLog) -> Entry | None:
    members = sample.members
    where = f"{shard}: {sample.key}"
    record: Any = {}
    if "json" in members:
        record = parse_json(content(members["json"]), f"{where}.json", log)
        if record is not None and not isinstance(record, dict):
            log.fatal("bad-json", f"{where}.json", "expected an object")
            record = None
    record = record or {}
    image = next((members[end] for end in IMAGE_TYPES if end in members), None)
    if image is None and "json" not in members and "txt" not in members:
        return None
    caption_key = next((key for key in _CAPTION_KEYS if key in record), None)
    captions = _captions(record.get(caption_key), where, log) if caption_key else []
    if caption_key is None and "txt" in members:
        text = decode(content(members["txt"]), Path(f"{where}.txt"), 1, log)
        captions = [text.removesuffix("\n").removesuffix("\r")]
    id_key = next((key for key in ("id", "image_id") if record.get(key) is not None), None)
    entry = Entry(
        Item(
            id=str(record[id_key]) if id_key else sample.key.rpartition("/")[2],
            split=str(record.get("split") or split_in_name(shard.name) or ""),
            captions=captions,
            file=archive_path(shard),
            image=_image(image, record.get("file"), where, log),
        )
    )
    used = {id_key, "split", "file", "box_size", "fragments_by", caption_key}
    entry.item.extras = split_extras({k: v for k, v in record.items() if k not in used})
    if FRAGMENTS in members:
        entry.fragments = _array(members[FRAGMENTS], content(members[FRAGMENTS], HEADER_BYTES), log)
        made_by = record.get("fragments_by")
        entry.made_by = made_by if isinstance(made_by, str) else None
    if BOXES in members:
        entry.boxes = _array(members[BOXES], content(members[BOXES], HEADER_BYTES), log)
    if "box_size" in record:
        entry.box_size = _box_size(record["box_size"], where, log)
    return entry


def _box_size(value: Any, where: str, log: ProblemLog) -> tuple[float, float] | None:
    numbers = value if isinstance(value, list) and len(value) == 2 else [0]
    if all(isinstance(number, int | float) and number > 0 for number in numbers):
        return float(numbers[0]), float(numbers[1])
    log.fatal("bad-array", where, f"box_size is {value!r}, expected [width, height]")
    return None


def _image(
    member: TarMember | None, name: Any, where: str, log: ProblemLog
) -> MemberImage | MissingImage | None:
    label = name if isinstance(name, str) and name else None
    if label is not None and not is_safe_name(label):
        log.fatal("unsafe-path", where, f"image name {label!r} leads out of the image folder")
        label = None
    if member is None:
        return MissingImage(label) if label else None
    return MemberImage(member.archive, label or member.name, member.offset, member.size)


def _captions(value: Any, where: str, log: ProblemLog) -> list[str]:
    values = value if isinstance(value, list) else [value]
    for caption in values:
        if not isinstance(caption, str | None):
            log.skip("bad-caption", where, f"{caption!r} is not a text")
    return [caption or "" for caption in values if isinstance(caption, str | None)]


def _array(member: TarMember, head: bytes, log: ProblemLog) -> ArrayMember | None:
    where = f"{member.archive}: {member.name}"
    try:
        shape, dtype, start = parse_header(io.BytesIO(head), where)
    except ArrayError as error:
        log.fatal(error.kind, where, str(error).removeprefix(f"{where}: "))
        return None
    needed = start + math.prod(shape) * dtype.itemsize
    if isinstance(member.archive, RemoteFile) and needed > IMAGE_BYTES:
        log.fatal("large-member", where, f"{needed} bytes, at most {IMAGE_BYTES} are read")
        return None
    if member.size < needed:
        log.fatal("truncated-array", where, f"{member.size} bytes, its header promises {needed}")
        return None
    return ArrayMember(member.archive, member.name, member.offset + start, shape, dtype)


def _add_tables(draft: Draft, entries: list[Entry], log: ProblemLog) -> None:
    by_split: dict[str, list[Entry]] = {}
    for entry in entries:
        by_split.setdefault(entry.item.split, []).append(entry)
    for split, members in by_split.items():
        table = _table(members, log)
        if table is not None:
            draft.tables[split] = table
            for row, entry in enumerate(members):
                entry.item.row = row


def _table(entries: list[Entry], log: ProblemLog) -> FragmentTable | None:
    first = next((e.fragments for e in entries if e.fragments is not None), None)
    if first is None:
        return None
    for entry in entries:
        _check_shapes(entry, first, log)
    if all(entry.fragments is None for entry in entries):
        return None
    features = MemberRows([entry.fragments for entry in entries])
    lengths = features.lengths()
    boxes = sizes = None
    if any(entry.boxes is not None for entry in entries):
        boxes = MemberRows([entry.boxes for entry in entries])
        if any(entry.box_size is not None for entry in entries):
            sizes = np.array([entry.box_size or (1, 1) for entry in entries], dtype=np.float32)
    makers = {entry.made_by for entry in entries if entry.fragments is not None}
    full = len(features.shape) == 2 or (lengths == features.shape[1]).all()
    return FragmentTable(
        features,
        np.arange(len(entries), dtype=np.int64),
        None if full and all(entry.fragments for entry in entries) else lengths,
        boxes,
        sizes,
        next(iter(makers)) if len(makers) == 1 else None,
    )


def _check_shapes(entry: Entry, first: ArrayMember, log: ProblemLog) -> None:
    array = entry.fragments
    if array is not None:
        where = f"{array.archive}: {array.name}"
        fits = len(array.shape) == len(first.shape) and array.shape[-1] == first.shape[-1]
        if array.dtype.kind != "f":
            log.fatal("wrong-dtype", where, f"expected float features, found {array.dtype}")
            entry.fragments = None
        elif len(array.shape) not in (1, 2) or not fits:
            log.fatal("wrong-shape", where, f"{array.shape} does not go with {first.shape}")
            entry.fragments = None
    boxes = entry.boxes
    if boxes is not None:
        count = 0 if array is None else array.shape[0] if len(array.shape) == 2 else 1
        if boxes.shape != (count, 4) or boxes.dtype.kind not in "fiu":
            where = f"{boxes.archive}: {boxes.name}"
            log.fatal("wrong-shape", where, f"expected boxes {(count, 4)}, found {boxes.shape}")
            entry.boxes = None


@writers.register("shards")
class ShardWriter(Writer):
    """Writes tar files with ``shard_size`` images each."""

    def __init__(self, folder: Path, log: ProblemLog, *, shard_size: int = 1000) -> None:
        super().__init__(folder, log)
        if shard_size < 1:
            raise ConfigError(f"shard_size: expected at least 1, got {shard_size}")
        self.shard_size = shard_size

    def write_split(self, split: Split, images: Iterable[int]) -> None:
        archive: tarfile.TarFile | None = None
        keys: set[str] = set()
        try:
            for count, image in enumerate(images):
                if count % self.shard_size == 0:
                    if archive is not None:
                        archive.close()
                    path = self.folder / f"{split.name}-{count // self.shard_size:05d}.tar"
                    archive = tarfile.open(path, "w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115
                    keys.clear()
                if archive is not None:
                    self._write(archive, split, image, _free_key(split.ids[image], image, keys))
        except BaseException:
            # Closing the archive would write its end, but the disk may be full.
            if archive is not None and archive.fileobj is not None:
                archive.fileobj.close()
            raise
        if archive is not None:
            archive.close()

    def _write(self, archive: tarfile.TarFile, split: Split, image: int, key: str) -> None:
        record: dict[str, Any] = {"id": split.ids[image]}
        if split.pixels is not None:
            ref = split.pixels[image]
            record["file"] = ref.name
            self._write_image(archive, ref, key, f"split '{split.name}', image '{record['id']}'")
        record |= {"split": split.name, "captions": list(split.captions[image])}
        if split.fragments is not None:
            stored = split.fragments.stored(image)
            if split.fragments.made_by is not None:
                record["fragments_by"] = split.fragments.made_by
            _add(archive, f"{key}.{FRAGMENTS}", _npy_bytes(stored.features))
            if stored.boxes is not None:
                _add(archive, f"{key}.{BOXES}", _npy_bytes(stored.boxes))
            if stored.boxes is not None and stored.size is not None:
                record["box_size"] = [float(side) for side in stored.size]
        record = merge_extras(record, extras_of(split, image), RESERVED)
        _add(archive, f"{key}.json", json_bytes(record))

    def _write_image(self, archive: tarfile.TarFile, ref: ImageRef, key: str, where: str) -> None:
        try:
            data = ref.read()
        except DataError as error:
            self.log.skip("missing-image", where, str(error))
            return
        _add(archive, f"{key}.{_image_type(ref.name, data)}", data)


def _free_key(image_id: str, image: int, taken: set[str]) -> str:
    """The id if it can be a member's name, else the image's number."""
    key = image_id if re.fullmatch(r"[A-Za-z0-9_-]{1,80}", image_id) else f"{image:08d}"
    copy = 1
    while key.casefold() in taken:
        copy += 1
        key = f"{image:08d}_{copy}"
    taken.add(key.casefold())
    return key


def _image_type(name: str, data: bytes) -> str:
    suffix = name.rpartition(".")[2].lower()
    if suffix in IMAGE_TYPES:
        return suffix
    return next((kind for magic, kind in _MAGIC.items() if data.startswith(magic)), "img")


def _npy_bytes(values: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    npy.write_array(buffer, np.ascontiguousarray(values), version=(1, 0), allow_pickle=False)
    return buffer.getvalue()


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    """Add a member without owner and time, so that equal data give equal bytes."""
    member = tarfile.TarInfo(name)
    member.size = len(data)
    member.mode = 0o644
    archive.addfile(member, io.BytesIO(data))
