"""How long work tells the outside how far it is, without printing anything itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

T = TypeVar("T")


class Progress(Protocol):
    """What the command line (a rich bar) and the web app implement."""

    def track(
        self, items: Iterable[T], description: str, total: int | None = None, done: int = 0
    ) -> Iterator[T]:
        """Yield ``items``, showing rate and remaining time; ``done`` items were done before."""
        ...

    def note(self, text: str) -> None:
        """Show ``text`` beside the current bar (a loss, a count of skipped items)."""
        ...

    def say(self, text: str) -> None:
        """Show one line above the bar, and keep it."""
        ...


class Silent:
    """The default: no output."""

    def track(
        self, items: Iterable[T], description: str, total: int | None = None, done: int = 0
    ) -> Iterator[T]:
        yield from items

    def note(self, text: str) -> None:
        return None

    def say(self, text: str) -> None:
        return None
