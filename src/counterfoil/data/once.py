"""What takes long to find and stays the same, found once a process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

MOST = 1 << 18
"""Results that are kept: of captions cut into tokens, a few hundred bytes each."""

Key = TypeVar("Key")
Value = TypeVar("Value")


class Once(Generic[Key, Value]):
    """A function whose results are kept, up to so many."""

    def __init__(self, find: Callable[[Key], Value]) -> None:
        self.find = find
        self.known: dict[Key, Value] = {}

    def __call__(self, key: Key) -> Value:
        if key in self.known:
            return self.known[key]
        found = self.find(key)
        if len(self.known) < MOST:
            self.known[key] = found
        return found
