"""How processes of runs begin: as copies of one that has imported all, or from nothing."""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection

import pytest

from counterfoil.reproduce import workers


def look(sender: Connection) -> None:
    sender.send(("counterfoil.training.run" in sys.modules, os.getppid()))


def die(sender: Connection) -> None:
    os._exit(1)


def say_spoilt(sender: Connection) -> None:
    sender.send(True)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="copies are made on Linux alone")
def test_a_process_begins_with_everything_imported_and_is_no_copy_of_this_one() -> None:
    context = workers.own_processes()
    assert context.get_start_method() == "forkserver"
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=look, args=(sender,))
    process.start()
    imported, parent = receiver.recv()
    process.join()
    assert imported
    assert parent != os.getpid()


@pytest.mark.parametrize("odd", [die, say_spoilt])
def test_where_copies_cannot_use_a_gpu_processes_begin_from_nothing(monkeypatch, odd) -> None:
    monkeypatch.setattr(workers, "_tell", odd)
    assert workers.own_processes.__wrapped__().get_start_method() == "spawn"
