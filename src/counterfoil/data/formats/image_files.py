"""Find image files by name in folders, and write images to files; names that lead out are refused.

Tables often come from other machines. A name is therefore also found with another case or ending,
in a subfolder, or if it begins with the folder's own name.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from counterfoil.core.errors import DataError
from counterfoil.core.printable import is_encodable
from counterfoil.data.formats.base import LABEL
from counterfoil.data.images import FileImage, ImageRef, MissingImage
from counterfoil.data.pairs import ProblemLog, Split

ENDINGS = frozenset(
    {".jpg", ".jpeg", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".ppm"}
)
MAX_FILES = 500_000
"""Limit of files that are listed in the search for a name; the rest is not searched."""

FOLDER = "images"
IMAGE_FOLDERS = ("images", "Images", "photos", "img", "imgs")
"""Folders beside a table of captions in which its images are looked for."""

_MAX_NAME_LENGTH = 200
_UP = re.compile(r"(?:\.[/\\])*\.\.[/\\]")


class ImageFolder:
    """Looks names up in folders; each folder is listed once.

    With ``deep``, subfolders are searched for names that are in none of the folders. A name such
    as ``../photos/a.jpg`` starts at ``root``, the folder of the captions, and may lead into them.
    """

    def __init__(self, bases: Sequence[Path], deep: bool = False, root: Path | None = None) -> None:
        self.bases, self.deep, self.root = bases, deep, root
        self._listings: dict[Path, _Listing] = {}
        self._by_name: dict[str, list[Path]] | None = None

    def find(
        self, names: Sequence[str], where: str, log: ProblemLog, label: str | None = None
    ) -> FileImage | MissingImage:
        """The file of the first name that exists; `MissingImage` if none does."""
        names = [self._relative(name) for name in names]
        missing = MissingImage(label or Path(names[0]).name, names[0], self._folders())
        for name in names:
            if not is_safe_name(name):
                log.fatal(
                    "unsafe-path",
                    where,
                    f"image name {name!r} leads out of the image folder ({self._folders()[0]}); "
                    "use names inside it, or name the folder that holds it with the option "
                    "images=FOLDER",
                )
                return missing
        if not all(map(is_encodable, names)):  # no file can have that name
            return missing
        path = self._exact(names) or self._similar(names)
        candidates, others = ([path], []) if path is not None else self._below(names)
        if len(candidates) == 1:
            path = candidates[0]
            return FileImage(path, label if label != path.name else None)
        for paths, what in (
            (candidates, "several have that name"),
            (others, "in another folder than the name says"),
        ):
            if paths:
                return replace(missing, hint=f"{what}: {', '.join(map(str, paths[:3]))}")
        return missing

    def has_any(self, names: Iterable[str]) -> bool:
        """Whether one of these names exists: distinguishes an absent folder from missing files."""
        return any(is_safe_name(name) and self._exact([name]) for name in names)

    def plain_name(self, name: str) -> str:
        """The name of an image within its folder, with slashes, however its path is written."""
        plain = self._relative(name).removeprefix("./")
        slashed = plain.replace("\\", "/").removeprefix("./")
        if slashed == plain or not is_safe_name(plain):
            return plain
        image = self.find([plain], "", ProblemLog())
        has_backslash = isinstance(image, FileImage) and image.path.as_posix().endswith(plain)
        return plain if has_backslash else slashed

    def _folders(self) -> tuple[str, ...]:
        return tuple(str(base) for base in self.bases) or ("no folder",)

    def _relative(self, name: str) -> str:
        """A path that leads into one of the folders, relative to it; other names unchanged."""
        if self.root is not None and _UP.match(name):
            path = os.path.join(os.path.abspath(self.root), name.replace("\\", "/"))
            return self._below_base(os.path.normpath(path)) or name
        return (self._below_base(name) if os.path.isabs(name) else None) or name

    def _below_base(self, path: str) -> str | None:
        """The part of an absolute path below one of the folders; None if it is in none of them."""
        for base in self.bases:
            root = os.path.join(os.path.abspath(base), "")
            if path.startswith(root) and len(path) > len(root):
                return path[len(root) :]
        return None

    def _exact(self, names: Sequence[str]) -> Path | None:
        for base in self.bases:
            for name in names:
                path = base / name
                if is_encodable(name) and path.name in self._listing(path.parent).names:
                    return path
        return None

    def _similar(self, names: Sequence[str]) -> Path | None:
        """A file whose name differs in case, ending, kind of slashes or Unicode form."""
        for base in self.bases:
            for name in names:
                for variant in _variants(name, base):
                    path = base / variant
                    match = self._listing(path.parent).similar(path.name)
                    if match is not None:
                        return path.with_name(match)
        return None

    def _below(self, names: Sequence[str]) -> tuple[list[Path], list[Path]]:
        """The files in subfolders that the first possible of these names may mean.

        The second list has files of such a name in other folders, if none agrees: ``test/1.jpg`` is
        not ``train/1.jpg``, but may be ``photos/test/1.jpg``, ``test/a/1.jpg`` or ``1.jpg``.
        """
        if not self.deep:
            return [], []
        if self._by_name is None:
            self._by_name = defaultdict(list)
            for path in files_below(self.bases):
                for name in (path.name, path.stem):  # an ending may be missing
                    self._by_name[folded(name)].append(path)
        others: list[Path] = []
        for name in names:
            slashed = folded(name.replace("\\", "/"))
            stated = PurePosixPath(slashed)
            if slashed.endswith("/"):  # the name of a folder
                continue
            paths = self._by_name.get(stated.name, [])
            if fit := [path for path in paths if self._agree(stated.parent.parts, path)]:
                return fit, []
            others += paths
        return [], others

    def _agree(self, stated: Sequence[str], path: Path) -> bool:
        """Whether the folders in a name are among those of a file, in order, or the other way."""
        base = next(base for base in self.bases if path.is_relative_to(base))
        below = [_spelt(part) for part in path.relative_to(base).parent.parts]
        above = _spelt(Path(os.path.abspath(base)).name)
        named = [_spelt(part) for part in stated]
        return _in_order(named, [above, *below]) or _in_order(below, named)

    def _listing(self, folder: Path) -> _Listing:
        if folder not in self._listings:
            self._listings[folder] = _Listing(folder)
        return self._listings[folder]


def _spelt(folder: str) -> str:
    """The name of a folder by its letters and digits: ``my_photos`` for ``My photos``."""
    return re.sub(r"[\W_]+", "_", folded(folder))


def _in_order(parts: Sequence[str], among: Sequence[str]) -> bool:
    """Whether all parts are among others, in the same order."""
    left = iter(among)
    return all(part in left for part in parts)


class _Listing:
    """The names in a folder, by exact name or without case and ending."""

    def __init__(self, folder: Path) -> None:
        try:
            self.names = frozenset(os.listdir(folder))
        except (OSError, ValueError):
            self.names = frozenset()
        self._folded: dict[str, list[str]] | None = None

    def similar(self, name: str) -> str | None:
        """The only image with this name apart from case and a missing ending; None if ambiguous."""
        if name in self.names:
            return name
        if self._folded is None:
            self._folded = defaultdict(list)
            for one in sorted(self.names):
                stem, ending = os.path.splitext(folded(one))
                if ending in ENDINGS:
                    self._folded[folded(one)].append(one)
                    self._folded[stem].append(one)
        candidates = self._folded.get(folded(name), [])
        return candidates[0] if len(candidates) == 1 else None


def folded(name: str) -> str:
    """A name in lower case, with accents composed: archives of macOS have them decomposed."""
    return unicodedata.normalize("NFC", name).lower()


def _variants(name: str, base: Path) -> Iterator[str]:
    """Other ways to write a name; those that lead out of the folder are left out."""
    slashed = name.replace("\\", "/").strip()
    first, _, rest = slashed.removeprefix("./").partition("/")
    has_prefix = first == Path(os.path.abspath(base)).name
    return filter(is_safe_name, (slashed, rest) if has_prefix else (slashed,))


def files_below(bases: Sequence[Path]) -> Iterator[Path]:
    """The images in folders and their subfolders, each once; links to folders are not followed."""
    seen: set[str] = set()
    listed = 0
    for base in bases:
        for folder, _, files in os.walk(base):
            real = os.path.realpath(folder)
            if real in seen:
                continue
            seen.add(real)
            listed += len(files)
            if listed > MAX_FILES:
                return
            for name in sorted(files):
                if os.path.splitext(name)[1].lower() in ENDINGS:
                    yield Path(folder) / name


def is_safe_name(name: str) -> bool:
    """Whether a relative file name stays inside its folder, on any system.

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
    deep: bool = False,
) -> ImageFolder:
    """The folder given by the user, else those of the candidates that exist in ``root``."""
    if option is not None:
        chosen = Path(option)
        if not chosen.is_dir():
            log.fatal("missing-file", chosen, "no such image folder")
        return ImageFolder([chosen], deep, root)
    return ImageFolder([root / name for name in candidates if (root / name).is_dir()], deep, root)


def short_names(names: Sequence[str]) -> list[str]:
    """Names of images, each without its ending if no other name is then the same.

    >>> short_names(["a/dog.jpg", "cat.jpg", "cat.png"])
    ['a/dog', 'cat.jpg', 'cat.png']
    """
    whole = set(names)
    stems = Counter(map(_stem, whole))
    return [
        stem if stems[stem] == 1 and (stem == name or stem not in whole) else name
        for name, stem in zip(names, map(_stem, names), strict=True)
    ]


def spelling_key(name: str) -> str:
    """The same for names that may mean one file: case, ending, slashes and Unicode form differ.

    >>> spelling_key("A\\\\Dog.JPG") == spelling_key("a/dog")
    True
    """
    return folded(_stem(name.replace("\\", "/")).removeprefix("./"))


def _stem(name: str) -> str:
    return name.rsplit(".", 1)[0] if "." in name.rsplit("/", 1)[-1][1:] else name


class ImageWriter:
    """Writes image files; an image that two splits share is written once."""

    def __init__(self, folder: Path, log: ProblemLog) -> None:
        self.folder = folder
        self.log = log
        self._taken: set[str] = set()
        self._written: dict[ImageRef, str] = {}

    def describe(self, split: Split, image: int) -> dict[str, Any]:
        """Write an image; returns its part of the record: file, and name if that differs."""
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
        """The wanted name, made safe and unique even on file systems that ignore case."""
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
    """Whether a string can be a file name on every system.

    >>> is_plain_name("a b.jpg"), is_plain_name("../a"), is_plain_name("")
    (True, False, False)
    """
    if not name or name != name.strip() or name.startswith(".") or name.endswith("."):
        return False
    if re.search(r'[\x00-\x1f\x7f/\\:*?"<>|\ud800-\udfff]', name):
        return False
    return len(name.encode()) <= _MAX_NAME_LENGTH
