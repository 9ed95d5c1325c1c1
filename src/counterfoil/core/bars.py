"""Progress bars for people: on a terminal, in a notebook, and as lines in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from counterfoil.core.printable import printable
from counterfoil.core.progress import Silent

T = TypeVar("T")

LINE_EVERY = 60.0
"""Seconds between two lines about long work, if there is no terminal for a bar."""


class Bars:
    """Progress bars with rate and remaining time on a terminal, a line a minute elsewhere."""

    def __init__(self, quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = Console(stderr=True)
        self.quiet = quiet
        self._clock = clock
        self._note = ""
        self._progress: Progress | None = None
        self._task: Any = None

    def track(
        self, items: Iterable[T], description: str, total: int | None = None, done: int = 0
    ) -> Iterator[T]:
        if self.quiet:
            yield from items
            return
        if not self.console.is_terminal:
            yield from self._lines(items, description, total, done)
            return
        if self._progress is not None:  # a bar inside a bar would only flicker
            yield from items
            return
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            transient=True,
        ) as self._progress:
            try:
                self._task = self._progress.add_task(
                    description, total=total, completed=done, note=""
                )
                for item in items:
                    yield item
                    self._progress.advance(self._task)
            finally:
                self._progress = None

    def _lines(
        self, items: Iterable[T], description: str, total: int | None, done: int
    ) -> Iterator[T]:
        """For logs: what begins and, each minute, how far it is and how long it will take."""
        self.say(f"{description} …")
        self._note = ""
        began = last = self._clock()
        for count, item in enumerate(items, 1):
            yield item
            now = self._clock()
            if now - last >= LINE_EVERY:
                last = now
                rate = count / (now - began)
                self.say("  ".join(filter(None, [_how_far(done + count, total, rate), self._note])))

    def note(self, text: str) -> None:
        self._note = text
        if self._progress is not None:
            self._progress.update(self._task, note=escape(printable(text)))

    def say(self, text: str) -> None:
        if not self.quiet:
            # In a log, a line stays one line.
            wrapped = self.console.is_terminal
            self.console.print(
                printable(text, keep="\n"), highlight=False, markup=False, soft_wrap=not wrapped
            )


def _how_far(count: int, total: int | None, rate: float) -> str:
    if not total:
        return f"  {count:,}"
    left = max(0, total - count) / rate
    time_left = f"{left / 60:.0f} min" if left >= 90 else f"{left:.0f} s"
    return f"  {count:,} of {total:,} ({count / total:.0%}), about {time_left} left"


def default_progress() -> Bars | Silent:
    """Bars if a person is watching, on a terminal or in a notebook; else nothing."""
    console = Console(stderr=True)
    return Bars() if console.is_terminal or console.is_jupyter else Silent()
