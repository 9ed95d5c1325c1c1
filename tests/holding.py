"""A lock that somebody else holds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from counterfoil.core.storage.locks import LOCK

HOLD = (
    "import sys\nfrom pathlib import Path\nfrom counterfoil.core.storage.locks import Lock\n"
    "lock = Lock(Path(sys.argv[1]))\nassert lock.try_acquire()\n"
    "print('held', flush=True)\nsys.stdin.read()\nlock.release()\n"
)


@contextmanager
def held(path: Path) -> Iterator[int]:
    """Hold a lock file in another process, whose id this is."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:  # leaving the block closes its input, and waits for it
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process.pid


def content(folder: Path) -> dict[str, bytes]:
    """The files below a folder, but for locks."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.endswith(LOCK)
    }
