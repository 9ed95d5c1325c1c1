"""Parts of a long job: made by separate processes or machines, then merged.

The parts of ``TARGET`` are folders ``TARGET.parts/part-1-of-4`` … Each has a manifest (`part.json`)
that names what the part was made from, so that parts of other data or models are refused.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from counterfoil.core.errors import ConfigError, DataError, first_problem
from counterfoil.core.storage.atomic import write_atomically
from counterfoil.core.storage.locks import LOCK, locked_folder
from counterfoil.core.storage.reading import GIB, read_text

MANIFEST = "part.json"
AUTO = "auto"
MAX_PARTS = 100_000
_NAME = re.compile(r"part-(\d{1,6})-of-(\d{1,6})")


@dataclass(frozen=True)
class Part:
    """Part ``number`` (from 1) of ``total``.

    >>> Part.parse("2/3").share(10)
    range(3, 6)
    """

    number: int
    total: int

    @classmethod
    def parse(cls, text: str, environment: Mapping[str, str] | None = None) -> Part:
        """``2/4``, or ``auto``: the rank and the number of processes that torchrun states."""
        if text == AUTO:
            stated = environment or {}
            if "RANK" not in stated or "WORLD_SIZE" not in stated:
                raise ConfigError(
                    "--part auto: no RANK and WORLD_SIZE in the environment; start it with "
                    "torchrun, or name the part, such as --part 1/4"
                )
            number, total = stated["RANK"], stated["WORLD_SIZE"]
            if not (number.isascii() and number.isdigit() and total.isascii() and total.isdigit()):
                raise ConfigError(f"--part auto: RANK={number!r}, WORLD_SIZE={total!r}: no numbers")
            return cls.checked(int(number) + 1, int(total), f"RANK={number} of {total}")
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text, re.ASCII)
        if match is None:
            raise ConfigError(f"--part {text}: expected NUMBER/TOTAL, such as 1/4, or auto")
        return cls.checked(int(match[1]), int(match[2]), text)

    @classmethod
    def checked(cls, number: int, total: int, text: str) -> Part:
        if not 1 <= number <= total <= MAX_PARTS:
            raise ConfigError(
                f"--part {text}: expected a number from 1 to the number of parts (at most "
                f"{MAX_PARTS:,})"
            )
        return cls(number, total)

    def __str__(self) -> str:
        return f"part {self.number} of {self.total}"

    def share(self, count: int) -> range:
        """The consecutive items, of ``count``, that belong to this part."""
        return range(
            count * (self.number - 1) // self.total,
            count * self.number // self.total,
        )

    def folder(self, target: Path) -> Path:
        return parts_folder(target) / f"part-{self.number}-of-{self.total}"


def part_of_item(item: int, count: int, total: int) -> Part:
    """The part whose `share` has an item."""
    return Part(((item + 1) * total - 1) // count + 1, total)


def parts_folder(target: Path) -> Path:
    return target.with_name(f"{target.name}.parts")


class PartManifest(BaseModel):
    """What a part was made from (``identity``), whether it is complete, and its owner's notes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    kind: str
    number: int
    total: int
    identity: dict[str, str]
    complete: bool = False
    notes: dict[str, Any] = Field(default_factory=dict)


def digest_of_values(values: Any) -> str:
    """A digest of plain values, for an identity."""
    text = json.dumps(values, ensure_ascii=True, sort_keys=True)
    return sha256(text.encode()).hexdigest()[:32]


@contextmanager
def begun_part(
    part: Part, target: Path, kind: str, identity: Mapping[str, str], *, overwrite: bool = False
) -> Iterator[Path]:
    """The locked folder of a part; an unfinished one of the same identity is continued.

    `BusyError` if another process is making this part.
    """
    folder = part.folder(target)
    with locked_folder(folder, f"making {part}", "wait for it, or make another part"):
        if overwrite and (folder / MANIFEST).exists():  # it may be damaged
            _clear(folder)
        manifest = _try_read(folder)
        if manifest is None and not all(_is_own(path) for path in folder.iterdir()):
            raise DataError(f"{folder}: not empty and not a part; delete it, or change --out")
        if manifest is None:
            _write(folder, PartManifest(kind=kind, **vars(part), identity=dict(identity)))
        else:
            _check_identity(folder, manifest, part, kind, identity)
        yield folder


def finish_part(folder: Path, notes: Mapping[str, Any]) -> None:
    """Mark a part as complete; its lock must be held."""
    manifest = _read(folder)
    _write(folder, manifest.model_copy(update={"complete": True, "notes": dict(notes)}))


@dataclass(frozen=True)
class FinishedPart:
    """A complete part, as `finished_parts` returns it."""

    part: Part
    folder: Path
    notes: dict[str, Any]


def finished_parts(target: Path, kind: str, identity: Mapping[str, str]) -> list[FinishedPart]:
    """All parts of a target in order; `DataError` names a missing, unfinished or other one."""
    folder = parts_folder(target)
    names = {path.name: path for path in folder.iterdir()} if folder.is_dir() else {}
    present: dict[Part, Path] = {}
    for name, path in names.items():
        match = _NAME.fullmatch(name)
        if match is not None and (path / MANIFEST).is_file():
            present[Part(int(match[1]), int(match[2]))] = path
    if not present:
        raise DataError(f"{folder}: no parts to merge; make them with --part 1/4, --part 2/4, …")
    totals = sorted({part.total for part in present})
    if len(totals) > 1:
        listed = " and ".join(f"of {total}" for total in totals)
        raise DataError(f"{folder}: parts {listed}; delete those that do not belong")
    wanted = [Part(number + 1, totals[0]) for number in range(totals[0])]
    missing = [part for part in wanted if part not in present]
    if missing:
        listed = ", ".join(f"{part}" for part in missing[:5])
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise DataError(
            f"{folder}: {listed}{more} missing; make it with --part "
            f"{missing[0].number}/{missing[0].total}"
        )
    finished = []
    for part in wanted:
        manifest = _read(present[part])
        _check_identity(present[part], manifest, part, kind, identity)
        if not manifest.complete:
            raise DataError(
                f"{present[part]}: {part} is not complete; continue it with --part "
                f"{part.number}/{part.total}"
            )
        finished.append(FinishedPart(part, present[part], manifest.notes))
    return finished


def _check_identity(
    folder: Path, manifest: PartManifest, part: Part, kind: str, identity: Mapping[str, str]
) -> None:
    if manifest.kind != kind or (manifest.number, manifest.total) != (part.number, part.total):
        raise DataError(
            f"{folder}: holds part {manifest.number} of {manifest.total} of {manifest.kind}, "
            f"expected {part} of {kind}; delete it, and make it again"
        )
    for key in dict.fromkeys([*identity, *manifest.identity]):
        one, other = manifest.identity.get(key), identity.get(key)
        if one != other:
            raise DataError(
                f"{folder}: {part} was made with another {key} ({one}, expected {other}); delete "
                "it and make it again, or give the options that it was made with"
            )


def _try_read(folder: Path) -> PartManifest | None:
    return _read(folder) if (folder / MANIFEST).exists() else None


def _read(folder: Path) -> PartManifest:
    try:
        return PartManifest.model_validate_json(read_text(folder / MANIFEST, GIB))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        problem = first_problem(error)
        raise DataError(
            f"{folder / MANIFEST}: damaged ({problem}); delete the part, and make it again"
        ) from None


def _write(folder: Path, manifest: PartManifest) -> None:
    write_atomically(folder / MANIFEST, manifest.model_dump_json(indent=1))


def _is_own(path: Path) -> bool:
    """Whether a folder with nothing else is a part that was killed before its manifest appeared."""
    return path.name == LOCK or path.name.startswith(f".{MANIFEST}.")


def _clear(folder: Path) -> None:
    """Delete all but the lock; the manifest last, so that after a kill the rest is still a part."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name == MANIFEST):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()
