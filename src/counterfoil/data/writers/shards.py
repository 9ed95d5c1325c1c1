"""WebDataset shards: `{split}-{00000}.tar`, as `sources.shards` describes them."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from counterfoil.data.images import ImageRef
from counterfoil.data.json_lines import json_bytes, merge_extras
from counterfoil.data.pairs import Split
from counterfoil.data.problems import ProblemLog
from counterfoil.data.sources.shards import BOXES, FRAGMENTS, IMAGE_TYPES, RESERVED
from counterfoil.data.writers.base import Writer, extras_of, writers
from counterfoil.errors import ConfigError, DataError

_MAGIC = {b"\xff\xd8\xff": "jpg", b"\x89PNG": "png", b"RIFF": "webp", b"GIF8": "gif"}


@writers.register("shards")
class ShardWriter(Writer):
    """Tar files that can be streamed; ``shard_size`` is the number of images in each."""

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
            # Closing would write the end of the archive, to a disk that may be full.
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


def _free_key(identity: str, image: int, taken: set[str]) -> str:
    """The id where it can be a member's name, else the image's number."""
    key = identity if re.fullmatch(r"[A-Za-z0-9_-]{1,80}", identity) else f"{image:08d}"
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
    """Add a member with no trace of who wrote it when: the same data, the same bytes."""
    member = tarfile.TarInfo(name)
    member.size = len(data)
    member.mode = 0o644
    archive.addfile(member, io.BytesIO(data))
