"""Things at a path that are no regular files, and calls that must not hang on them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

SPECIAL = ["fifo", "link to a fifo", "link to a device"]


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """What a call returns or raises; a failure if it hangs."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((True, call()))
        except BaseException as error:
            outcome.append((False, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert outcome, "the call hangs"
    good, value = outcome[0]
    if not good:
        raise value
    return value


def make_special(kind: str, path: Path) -> Path:
    """Something that is no regular file, at a path that a test expects a file at."""
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link to a fifo":
        os.mkfifo(path.with_name(f"{path.name}.fifo"))
        path.symlink_to(path.with_name(f"{path.name}.fifo"))
    elif kind == "link to a device":
        path.symlink_to("/dev/null")
    else:
        path.mkdir()
    return path
