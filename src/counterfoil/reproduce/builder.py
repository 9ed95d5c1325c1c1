"""Builds a planned guide from its finished runs; stopped, it goes on where it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from counterfoil.device import choose_device
from counterfoil.progress import Progress
from counterfoil.reproduce.planned import PlannedGuide
from counterfoil.training.guide_build import build_guide
from counterfoil.training.guide_runs import shared_train_split

T = TypeVar("T")


def build_planned(
    guide: PlannedGuide, cache: Path, progress: Progress, should_stop: Callable[[], bool]
) -> bool:
    """Build a guide to its end; False where the user stopped it between two blocks."""
    watched = _Watched(progress, should_stop)
    runs = [run.folder for run in guide.teachers]
    device = choose_device(guide.config.train.device)
    try:
        split = shared_train_split(runs, cache, progress)
        build_guide(guide.folder, runs, split, device=device, progress=watched)
    except _Stopped:
        return False
    return True


class _Stopped(Exception):
    """The user wants to stop. What was built so far is on disk."""


class _Watched:
    """Progress of a build that ends between two blocks when it is asked to."""

    def __init__(self, progress: Progress, should_stop: Callable[[], bool]) -> None:
        self.progress, self.should_stop = progress, should_stop

    def track(
        self, items: Iterable[T], description: str, total: int | None = None, done: int = 0
    ) -> Iterator[T]:
        for item in self.progress.track(items, description, total, done):
            if self.should_stop():
                raise _Stopped
            yield item

    def note(self, text: str) -> None:
        self.progress.note(text)

    def say(self, text: str) -> None:
        self.progress.say(text)
