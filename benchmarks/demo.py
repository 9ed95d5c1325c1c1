"""How long the demo takes until its table, its page, its audit and its trained model.

Runs `counterfoil demo` once in a terminal of its own, with an empty home and cache, and ends it.
Prints the seconds from the start of the command, and the CPU seconds of all its processes.

    python benchmarks/demo.py
"""

from __future__ import annotations

import argparse
import os
import pty
import resource
import select
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

MARKS = {
    "table": "First results ready",
    "page": "http://",
    "audit": "Report with pictures",
    "trained model": "times chance",
}
"""What the demo prints when each part is there."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600, help="Give up after these seconds.")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seconds = measure(Path(folder), args.seconds)
    for name in MARKS:
        print(f"{name:14} {seconds[name]:6.1f} s" if name in seconds else f"{name:14}  never")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{'CPU, all':14} {used.ru_utime + used.ru_stime:6.1f} s")
    print(f"{'load average':14} {os.getloadavg()[0]:6.1f} at the end, on {os.cpu_count()} cores")
    if "page" in seconds and "trained model" in seconds:
        after = seconds["trained model"] - seconds["page"]
        print(f"The trained model's table came {after:.0f} s after the page.")
    if len(seconds) < len(MARKS):
        sys.exit(1)


def measure(folder: Path, limit: float) -> dict[str, float]:
    """Seconds until each of `MARKS`; those that did not come before ``limit`` are missing."""
    started = time.monotonic()
    process, terminal = pty.fork()
    if process == 0:
        _become_demo(folder)
    printed, seconds = "", {}
    try:
        for part in _output(terminal, started + limit):
            printed += part
            for name, mark in MARKS.items():
                if name not in seconds and mark in printed:
                    seconds[name] = time.monotonic() - started
            if len(seconds) == len(MARKS):
                break
    finally:
        os.kill(process, signal.SIGINT)
        for _ in _output(terminal, time.monotonic() + 60):  # a full terminal would block it
            pass
        os.waitpid(process, 0)
    return seconds


def _become_demo(folder: Path) -> None:
    """Replace this process by a demo that finds nothing in its home and its cache."""
    os.chdir(folder)
    hidden = {"CI", "COUNTERFOIL_CACHE", "XDG_CACHE_HOME"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"HOME": str(folder), "TERM": "xterm", "COLUMNS": "120"}
    command = [sys.executable, "-m", "counterfoil", "demo", "--port", "0"]
    os.execve(sys.executable, command, environment)  # noqa: S606 - the same Python


def _output(terminal: int, deadline: float) -> Iterator[str]:
    while time.monotonic() < deadline:
        readable, _, _ = select.select([terminal], [], [], 1.0)
        if not readable:
            continue
        try:
            part = os.read(terminal, 1 << 16)
        except OSError:  # how a terminal without a process ends
            return
        if not part:
            return
        yield part.decode(errors="replace")


if __name__ == "__main__":
    main()
