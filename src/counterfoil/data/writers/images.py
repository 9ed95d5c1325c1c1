"""Writes images under `images/`, byte for byte, each once and under a name of its own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from counterfoil.data.images import ImageRef
from counterfoil.data.pairs import Split
from counterfoil.data.problems import ProblemLog
from counterfoil.data.sources.columns import LABEL
from counterfoil.errors import DataError

FOLDER = "images"
_LONGEST = 200


class ImageWriter:
    """Gives every image a file; an image that two splits share is written once."""

    def __init__(self, folder: Path, log: ProblemLog) -> None:
        self.folder = folder
        self.log = log
        self._taken: set[str] = set()
        self._written: dict[ImageRef, str] = {}

    def describe(self, split: Split, image: int) -> dict[str, Any]:
        """Write an image; what its record says of it: the file, and its name if that differs."""
        if split.pixels is None:
            return {}
        ref = split.pixels[image]
        name = self._written.get(ref)
        if name is None:
            name = self._written[ref] = self._free_name(ref.name, len(self._written))
            self._write(ref, name, f"split '{split.name}', image '{split.ids[image]}'")
        record = {"image": f"{FOLDER}/{name}"}
        return record if name == ref.name else {**record, LABEL: ref.name}

    def _write(self, ref: ImageRef, name: str, where: str) -> None:
        try:
            data = ref.read()
        except DataError as error:
            self.log.skip("missing-image", where, str(error))
            return
        path = self.folder / FOLDER / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)

    def _free_name(self, wanted: str, number: int) -> str:
        """The wanted name, made safe, and told apart from others even where case does not count."""
        name = re.split(r"[/\\]", wanted)[-1]
        if not is_plain_name(name):
            suffix = Path(name).suffix
            name = f"{number:08d}{suffix if re.fullmatch('[.][A-Za-z0-9]{1,8}', suffix) else ''}"
        stem, dot, suffix = name.rpartition(".")
        copy = 1
        while name.casefold() in self._taken:
            copy += 1
            name = f"{stem}~{copy}.{suffix}" if dot else f"{suffix}~{copy}"
        self._taken.add(name.casefold())
        return name


def is_plain_name(name: str) -> bool:
    """Whether a string can be a file name everywhere.

    >>> is_plain_name("a b.jpg"), is_plain_name("../a"), is_plain_name("")
    (True, False, False)
    """
    if not name or name != name.strip() or name.startswith(".") or name.endswith("."):
        return False
    if re.search(r'[\x00-\x1f\x7f/\\:*?"<>|\ud800-\udfff]', name):
        return False
    return len(name.encode()) <= _LONGEST
