"""Images by name in one or a few folders; a name that leads out of them is refused."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from counterfoil.data.images import FileImage, MissingImage
from counterfoil.data.problems import ProblemLog
from counterfoil.printable import is_encodable


class ImageFolder:
    """Looks names up in folders, listing each of those once."""

    def __init__(self, bases: Sequence[Path]) -> None:
        self.bases = bases
        self._listings: dict[Path, frozenset[str]] = {}

    def find(
        self, names: Sequence[str], where: str, log: ProblemLog, label: str | None = None
    ) -> FileImage | MissingImage:
        """The file of the first name that exists; `MissingImage` if none does."""
        missing = MissingImage(label or Path(names[0]).name, names[0])
        for name in names:
            if not is_safe_name(name):
                log.fatal(
                    "unsafe-path",
                    where,
                    f"image name {name!r} leads out of the image folder; use names inside it",
                )
                return missing
        if not all(map(is_encodable, names)):  # no file can have that name
            return missing
        for base in self.bases:
            for name in names:
                path = base / name
                if path.name in self._listing(path.parent):
                    return FileImage(path, label if label != path.name else None)
        return missing

    def has_any(self, names: Iterable[str]) -> bool:
        """Whether one of these names exists, to tell an absent folder from a few lost files."""
        log = ProblemLog()
        return any(isinstance(self.find([name], "", log), FileImage) for name in names)

    def _listing(self, folder: Path) -> frozenset[str]:
        if folder not in self._listings:
            try:
                self._listings[folder] = frozenset(os.listdir(folder))
            except OSError:
                self._listings[folder] = frozenset()
        return self._listings[folder]


def is_safe_name(name: str) -> bool:
    """Whether a relative file name stays where it is looked up, on any system.

    >>> is_safe_name("train2014/a.jpg"), is_safe_name("../a.jpg"), is_safe_name("/etc/passwd")
    (True, False, False)
    """
    if not name or "\0" in name or name.startswith(("/", "\\")) or re.match("[A-Za-z]:", name):
        return False
    return ".." not in re.split(r"[/\\]", name)


def image_folder(
    option: str | Path | None,
    root: Path,
    candidates: Sequence[str],
    log: ProblemLog,
) -> ImageFolder:
    """The folder the user named, else those of the usual ones that exist under ``root``."""
    if option is not None:
        chosen = Path(option)
        if not chosen.is_dir():
            log.fatal("missing-file", chosen, "no such image folder")
        return ImageFolder([chosen])
    return ImageFolder([root / name for name in candidates if (root / name).is_dir()])
