"""`convert`: write a data set in another format, without loss."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from counterfoil.core.errors import DataError
from counterfoil.core.progress import Progress, Silent
from counterfoil.core.storage.atomic import check_folder_target, staged_folder
from counterfoil.data.formats import Writer, writers
from counterfoil.data.formats.image_files import is_plain_name
from counterfoil.data.images import ImageRef
from counterfoil.data.pairs import Pairs, Problem, ProblemLog


@dataclass(frozen=True)
class ConversionReport:
    """What was written: images and captions per split, files, bytes, and problems."""

    target: Path
    format: str
    images: dict[str, int]
    captions: dict[str, int]
    files: int
    bytes: int
    problems: list[Problem] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        problems = [problem.as_dict() for problem in self.problems]
        return {**vars(self), "target": str(self.target), "problems": problems}


DATA_SET_FILES = re.compile(
    r"captions\.jsonl|images|features\.json|.+_(caps|ids|ims_made_by)\.txt|.+_items\.jsonl|"
    r".+_ims(_lens|_bbx|_size)?\.npy|.+-\d{5,}\.tar|\.features\.json\..+|"
    r"\.DS_Store|Thumbs\.db|desktop\.ini"
)
"""Names in the folder of a data set that was written here: only such a folder is overwritten."""


def refuse_loss(pairs: Pairs, target: Path, images: bool = True) -> None:
    """Refuse to replace the folder that images are read from, if not all of them are written again.

    ``images``: whether they are written at all.
    """
    inside = Path(os.path.realpath(target))
    files = {path for split in pairs for ref in split.pixels or () for path in _files_of(ref)}
    read = {path for path in map(_real, files) if inside in path.parents}
    if not read:
        return
    lost = sorted(read)
    if images:
        lost = sorted(
            path
            for path in inside.rglob("*")
            if path.is_file()
            and path not in read
            and path.parent != inside
            and not DATA_SET_FILES.fullmatch(path.name)
        )
    if lost:
        raise DataError(
            f"{target}: images are read from there, and replacing it would delete files that are "
            f"not written again ({len(lost):,}, such as {lost[0].name}); name another folder"
        )


def _files_of(ref: ImageRef) -> list[Path]:
    """The file that an image is read from, if it is on a disk."""
    array = getattr(ref, "array", ref)
    file = getattr(array, "path", getattr(array, "archive", None))
    return [file] if isinstance(file, Path) else []


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def convert(
    pairs: Pairs,
    target: str | Path,
    format: str = "jsonl",
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    shard_size: int = 1000,
) -> ConversionReport:
    """Write a data set as ``scan``, ``jsonl`` or ``shards`` into the folder ``target``.

    Loading the result gives the same data set: ids, order, captions, splits, extras, and pixels and
    features bit for bit. One image at a time is in memory. The folder appears when everything is
    written; an interruption or a full disk leaves nothing behind.
    """
    target = Path(target)
    _refuse_unwritable(pairs)
    log = ProblemLog()
    options = {"shard_size": shard_size} if "shard_size" in writers.options(format) else {}
    progress = progress or Silent()
    check_folder_target(target, overwrite=overwrite, replaceable=DATA_SET_FILES)
    refuse_loss(pairs, target)
    with staged_folder(target, overwrite=overwrite, replaceable=DATA_SET_FILES) as folder:
        writer: Writer = writers[format](folder, log, **options)
        for split in pairs:
            if not len(split):
                log.note("empty-split", f"split '{split.name}'", "it has no images; not written")
                continue
            images = progress.track(range(len(split)), f"writing {split.name}", len(split))
            writer.write_split(split, images)
        writer.close()
        written = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return ConversionReport(
        target=target,
        format=format,
        images={split.name: len(split) for split in pairs},
        captions={split.name: len(split.texts) for split in pairs},
        files=len(written),
        bytes=sum(written),
        problems=log.problems,
    )


def _refuse_unwritable(pairs: Pairs) -> None:
    if not any(len(split) for split in pairs):
        raise DataError(f"data set '{pairs.name}': has no images to convert")
    for split in pairs:
        if not is_plain_name(split.name):
            raise DataError(f"split {split.name!r}: the name cannot be part of a file name")
