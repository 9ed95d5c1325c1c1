"""A kill at any moment leaves an index as it was before a change, or as it is after it.

A child process makes the change and kills itself at the n-th thing it does to the disk; this is
repeated for every n until the change comes through.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from counterfoil.search import SearchIndex, Vectors, backends
from tests.conftest import thinned
from tests.search.test_index import contents

STEPS = ("fsync", "replace", "unlink", "mkdir", "rmdir", "truncate")


def killed_at(step: int, work: Callable[[], None]) -> bool:
    """Run ``work`` in a child that dies by SIGKILL just before its n-th step; did it?"""
    child = os.fork()
    if child == 0:
        count = 0

        def deadly(real: Callable) -> Callable:
            def call(*args, **kwargs):
                nonlocal count
                count += 1
                if count == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)

            return call

        for name in STEPS:
            setattr(os, name, deadly(getattr(os, name)))
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def every_kill(make: Callable[[], Path], work: Callable[[Path], None], look: Callable) -> int:
    """Kill at step 1, 2, …; each time the state must be the old or the new one."""
    old = look(make())
    folder = make()
    work(folder)
    new = look(folder)
    assert old != new
    seen, step = [], 0
    while True:
        step += 1
        folder = make()
        if not killed_at(step, lambda: work(folder)):  # noqa: B023 - called at once
            assert look(folder) == new
            break
        result = look(folder)
        assert result in (old, new), f"killed at step {step}"
        seen.append(result == new)
        work_again = look(folder)
        assert work_again == result
    assert seen == sorted(seen)  # once it is there, it stays
    assert not all(seen)
    assert any(seen)
    return step


def vectors_of(seed: int, count: int) -> Vectors:
    return Vectors.single(np.random.default_rng(seed).normal(size=(count, 4)))


CHANGES = {
    "add": lambda index: index.add([10, 11], vectors_of(1, 2)),
    "delete": lambda index: index.delete([0, 3]),
    "update": lambda index: index.update([1, 4], vectors_of(2, 2)),
}


@pytest.mark.parametrize("change", thinned(CHANGES, "update"))
def test_vectors_survive_a_kill_at_any_step(change, tmp_path) -> None:
    backends["exact"].create(tmp_path / "start", 4, False, "float32", {}).add(
        range(6), vectors_of(0, 6)
    )

    def make() -> Path:
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(tmp_path / "start", tmp_path / "copy")
        return tmp_path / "copy"

    def work(folder: Path) -> None:
        CHANGES[change](backends["exact"].open(folder, {}))

    def look(folder: Path) -> tuple:
        index = backends["exact"].open(folder, {})
        assert index.check() == []
        ids, scores = index.search(vectors_of(3, 2), 20)
        return ids.tolist(), scores.round(4).tolist()

    assert every_kill(make, work, look) > 5


@pytest.mark.slow
def test_compaction_survives_a_kill_at_any_step(tmp_path) -> None:
    index = backends["exact"].create(tmp_path / "index", 4, False, "float32", {})
    index.add(range(6), vectors_of(0, 6))
    index.delete([1, 2])
    answer = index.search(vectors_of(3, 2), 20)[0].tolist()
    step = 0
    while True:
        step += 1
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(tmp_path / "index", tmp_path / "copy")
        work = backends["exact"].open(tmp_path / "copy", {}).compact
        killed = killed_at(step, work)
        again = backends["exact"].open(tmp_path / "copy", {})
        assert again.search(vectors_of(3, 2), 20)[0].tolist() == answer
        again.add([50], vectors_of(4, 1))  # and it can be changed
        assert len(again) == 5
        names = {path.name for path in (tmp_path / "copy" / "segments").iterdir()}
        assert names == again.store.manifest.folders_and_files()  # nothing is left behind
        if not killed:
            break
    assert step > 5


@pytest.mark.slow
@pytest.mark.parametrize("change", ["add", "update", "remove"])
def test_an_index_survives_a_kill_at_any_step(change, models, concepts, tmp_path) -> None:
    model = models["naaf"]
    SearchIndex.build(tmp_path / "start", model, concepts.test.select(range(4)))
    more = concepts.test.select(range(3, 6))

    def make() -> Path:
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(tmp_path / "start", tmp_path / "copy")
        return tmp_path / "copy"

    def work(folder: Path) -> None:
        index = SearchIndex.open(folder, device="cpu")
        if change == "remove":
            index.remove(["test-1", "test-2#0"])
        else:
            index.add(more, existing={"add": "skip", "update": "update"}[change])

    def look(folder: Path) -> dict:
        index = SearchIndex.open(folder, device="cpu")
        hits = index.search("a dog and a cat", k=9).hits
        assert {hit.id for hit in hits} == set(index.items["images"].names)
        assert index.check() == []
        keys = [sorted(items.names.values()) for items in index.items.values()]
        return {**contents(index), "keys": keys}

    assert every_kill(make, work, look) > 10


def test_an_index_that_was_cut_off_between_its_stages_makes_up_for_it(fresh, concepts) -> None:
    """The slow test above in one step: the commit is there, the first stage has not seen it."""
    child = os.fork()
    if child == 0:
        fresh.sync_backend = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
        fresh.add(concepts.test.select(range(10, 20)), existing="update")
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    again = SearchIndex.open(fresh.folder, device="cpu")
    assert len(again) == 20
    assert len(contents(again)["captions"]) == 40  # and that the first stage holds the same keys
    assert {hit.id for hit in again.search("a dog", k=99).hits} == set(concepts.test.ids[:20])
