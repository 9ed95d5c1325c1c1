"""Faults of the disk: full, read-only, over quota, late and failing, and files that vanish.

After each of them a command must have ended with an error that a person can act on, or with the
right result. Once the fault is gone, the same command must finish with the same bytes as without.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import random
import re
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.children import Ended, digests, remains, run_child
from tests.faults.commands import Try, Workload, Workplace

PATCHED = (
    "open", "replace", "fsync", "mkdir", "unlink", "rmdir", "preadv", "pread", "write", "symlink",
    "scandir", "listdir",
)  # fmt: skip
DELAY_SECONDS = 0.002
SHARED = ("cache", "runs", "photos", "guide")
"""Folders of a workplace that commands read."""


@dataclass(frozen=True)
class Fault:
    """A fault: its name, its number as drawn, and what is done in the child before the command."""

    kind: str
    drawn: str
    prepare: Callable[[], None] = lambda: None


def can_mount(folder: Path) -> bool:
    """Whether small file systems can be mounted here: by root, outside most containers."""
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(folder)], capture_output=True)
    if done.returncode == 0:
        subprocess.run(["umount", str(folder)], check=True)
    return done.returncode == 0


@contextmanager
def mounted(folder: Path, kib: int) -> Iterator[None]:
    """A file system of so many KiB at a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    options = ["-t", "tmpfs", "-o", f"size={kib}k"]
    subprocess.run(["mount", *options, "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


def limit_file_size(size: int) -> Callable[[], None]:
    """No file may become larger, as by a quota: writes fail with EFBIG."""

    def prepare() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    return prepare


def failing_drive(places: Sequence[Path], number: int, forever: bool) -> Callable[[], None]:
    """A network drive with these folders: every call is late, and the ``number``-th one fails.

    With ``forever``, all later ones fail, too.
    """

    def prepare() -> None:
        prefixes, count = tuple(map(os.fspath, places)), 0

        def late(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal count
                path = _path_of(args[0] if args else None)
                if path.startswith(prefixes):
                    time.sleep(DELAY_SECONDS)
                    count += 1
                    if count == number or (forever and count > number):
                        raise OSError(errno.EIO, os.strerror(errno.EIO), path)
                return real(*args, **kwargs)

            return call

        for name in PATCHED:
            setattr(os, name, late(getattr(os, name)))
        io.open = builtins.open = late(builtins.open)

    return prepare


def _path_of(given: Any) -> str:
    """The path of a call's first argument, which may be a descriptor."""
    if isinstance(given, int):
        try:
            return os.readlink(f"/proc/self/fd/{given}")
        except OSError:
            return ""
    return os.path.abspath(os.fspath(given)) if isinstance(given, (str, os.PathLike)) else ""


def _size(folder: Path) -> int:
    """Bytes of a folder's files in blocks of a file system."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return sum(-(-size // 4096) * 4096 for size in sizes)


def is_clear(ended: Ended) -> bool:
    """Whether a command that failed said why in one message, without a traceback."""
    return "error: " in ended.output and "Traceback" not in ended.output


COUNTED = re.compile(r"left out, [a-z-]+: [1-9]|\b[1-9][0-9]* failed")
"""How `counterfoil features` says that images are missing or unreadable."""


class DiskTries:
    """Tries one workload under faults of the disk."""

    def __init__(self, place: Workplace, workload: Workload, rng: random.Random) -> None:
        self.place, self.workload, self.rng = place, workload, rng
        self.folder = place.root / "disk"

    def try_one(self, kind: str) -> Try:
        """One try of a kind of fault."""
        kinds: dict[str, Callable[[], Try]] = {
            "full disk": self.full_disk,
            "read-only folder": self.read_only,
            "quota": self.quota,
            "late drive": self.late_drive,
            "file vanishes": self.vanishing,
        }
        return kinds[kind]()

    def full_disk(self) -> Try:
        used, start = _size(self._reference_folder()), 0
        if self.workload.start is not None:
            start = _size(self.place.root / self.workload.start) + 65536  # folders take room, too
        room = start + int(max(0, used - start) * self.rng.random())
        with mounted(self.folder, max(4, room // 1024)):
            self._begin()
            first = self._run()
            remount(self.folder, f"size={4 * used // 1024 + 8192}k")
            return self._judge(first, f"{room // 1024} of {used // 1024} KiB")

    def read_only(self) -> Try:
        with mounted(self.folder, 4 * _size(self._reference_folder()) // 1024 + 8192):
            self._begin()
            remount(self.folder, "ro")
            first = run_child(self._words(), self.place.root / "read-only")
            remount(self.folder, "rw")
            outcome = self._judge(first, "")
        if first.code == 0:
            outcome.problems.append("wrote to a read-only folder")
        return outcome

    def quota(self) -> Try:
        sizes = [path.stat().st_size for path in self._reference_folder().rglob("*")]
        limit = self.rng.randint(1, max(sizes))
        self._begin(fresh=True)
        return self._judge(self._run(limit_file_size(limit)), f"{limit} bytes a file")

    def late_drive(self) -> Try:
        calls = 4 * self.place.reference(self.workload).ended.operations()
        number, forever = self.rng.randint(1, calls), self.rng.random() < 0.5
        self._begin(fresh=True)
        places = [self.folder, *(self.place.root / name for name in SHARED)]
        first = self._run(failing_drive(places, number, forever))
        return self._judge(first, f"call {number}{' and all after it' if forever else ''}")

    def vanishing(self) -> Try:
        """A file that the command reads is gone; once it is back, the command goes on."""
        self._begin(fresh=True)
        inputs = self._inputs()
        victim = self.rng.choice(inputs)
        aside = self.place.root / "aside"
        victim.rename(aside)
        try:
            first = self._run()
        finally:
            if victim.is_dir() and not victim.is_symlink():
                shutil.rmtree(victim)
            victim.unlink(missing_ok=True)
            aside.rename(victim)
        return self._judge(first, str(victim.relative_to(self.place.root)))

    def _inputs(self) -> list[Path]:
        root, own = self.place.root, self.folder
        folders = {"features": [root / "photos"], "index": [own / "index"]}
        name = self.workload.name
        chosen = folders.get(name.split()[0]) if name != "index build" else None
        if chosen is None:
            chosen = [root / "cache", *([root / "guide"] if "NDGL" in name else [])]
            if not name.startswith("train") and name != "reproduce":
                run = "tags-dc" if name == "foils" else "vse"
                chosen = [root / "runs" / run / "checkpoints"]
        return sorted(
            path for folder in chosen for path in folder.rglob("*")
            if path.is_file() and not path.name.startswith(".")
        )  # fmt: skip

    def _begin(self, fresh: bool = False) -> None:
        if fresh:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
        if self.workload.start is not None:
            shutil.copytree(self.place.root / self.workload.start, self.folder / "index")

    def _words(self, after: bool = False) -> list[str]:
        words = self.workload.words_after_kill if after else self.workload.words
        return words(self.place.root, self.folder)

    def _run(self, prepare: Callable[[], None] = lambda: None) -> Ended:
        return run_child(self._words(), self.place.root / "faulty", prepare=prepare)

    def _reference_folder(self) -> Path:
        self.place.reference(self.workload)
        return self.place.root / "tries" / f"{self.workload.name.replace(' ', '-')}-reference"

    def _judge(self, first: Ended, drawn: str) -> Try:
        """The first run failed clearly, counted what it left out, or was right; the next is."""
        outcome, expected = Try(), self.place.reference(self.workload).files
        state = "succeeded" if first.code == 0 else f"exit code {first.code}"
        outcome.kills.append((drawn, state))
        if first.code != 0 and not is_clear(first):
            outcome.problems.append(f"{drawn}: no clear error: {first.output[-1500:]}")
        files = digests(self.folder, self.workload.result)
        counted = first.code == 0 and COUNTED.search(first.output) is not None
        if (first.code != 0 or counted) and files != expected:
            again = run_child(self._words(after=True), self.place.root / "again")
            if again.code != 0:
                outcome.problems.append(f"{drawn}: not resumable: {again.output[-1500:]}")
            files = digests(self.folder, self.workload.result)
        different = sorted(n for n in {*files, *expected} if files.get(n) != expected.get(n))
        if different:
            told = "" if first.code else f" (without an error: {first.output[-300:]})"
            outcome.problems.append(f"{drawn}: differs: {', '.join(different)}{told}")
        outcome.remains = remains(self.folder)
        return outcome
