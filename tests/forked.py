"""Run pytest with worker processes that share their imports.

    python -m tests.forked WORKERS [ARGUMENTS OF PYTEST]

Each worker of pytest-xdist is a new Python, which imports PyTorch, transformers and this package
anew. Here one process imports them, and pytest and its workers are forked from it.
"""

from __future__ import annotations

import gc
import importlib
import os
import shlex
import shutil
import signal
import socket
import sys
import tempfile
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

import torch

SHARED = (
    "torch._dynamo",  # by the first optimizer of a process
    "transformers.models.bert.modeling_bert",
    "transformers.models.roberta.modeling_roberta",
    "transformers.models.clip.modeling_clip",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "hypothesis.strategies",
    "counterfoil.api",
    "counterfoil.app.application",
    "counterfoil.cli",
    "counterfoil.reproduce.measure",
    "counterfoil.training.run",
)
"""Imported before the forks, if installed. None of them starts a thread."""

CLIENT = """
import os, socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
socket.send_fds(connection, [sys.argv[-1].encode()], [0, 1, 2])
os.close(0), os.close(1)
connection.recv(1)
"""
"""What pytest-xdist starts as a worker: it passes its pipes on and waits until the worker ends."""


def serve(listener: socket.socket, pytest_lives: int) -> tuple[socket.socket, str] | None:
    """The role of this process: a connection and the code to run in a worker, None in the parent.

    Forks a worker for each connection, until pytest has ended; pytest has waited for the workers.
    """
    workers = []
    while listener in wait([listener, pytest_lives]):
        connection, _ = listener.accept()
        code, pipes, _, _ = socket.recv_fds(connection, 4096, 3)
        worker = os.fork()
        if not worker:
            for number, pipe in enumerate(pipes):
                os.dup2(pipe, number)
                os.close(pipe)
            listener.close()
            os.close(pytest_lives)
            return connection, code.decode()
        workers.append(worker)
        connection.close()
        for pipe in pipes:
            os.close(pipe)
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
    return None


def main(workers: int, *arguments: str) -> int:
    if sys.platform != "linux":  # elsewhere, system libraries may not survive a fork
        import pytest

        return pytest.main([f"--numprocesses={workers}", *arguments])
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # as in tests/conftest.py
    for name in SHARED:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()
    folder = Path(tempfile.mkdtemp(prefix="forked-"))
    (folder / "client.py").write_text(CLIENT)
    address = str(folder / "socket")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(workers)
    pytest_lives, lives = os.pipe()  # closed, at one end, with pytest
    controller = os.fork()
    if not controller:
        import pytest

        listener.close()
        os.close(pytest_lives)
        command = [sys.executable, "-E", "-S", str(folder / "client.py"), address]
        spec = f"{workers}*popen//python={shlex.join(command)}"
        # plugins imported before the fork hold no assertions of tests
        quiet = "ignore::pytest.PytestAssertRewriteWarning"
        restarts = f"--max-worker-restart={4 * workers}"  # as with --numprocesses
        return pytest.main(["--tx", spec, restarts, "-W", quiet, *arguments])
    os.close(lives)
    handlers = {
        signal.SIGINT: signal.SIG_IGN,  # pytest gets it, too
        signal.SIGTERM: lambda *_: os.kill(controller, signal.SIGTERM),
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    role = serve(listener, pytest_lives)
    if role is not None:
        for number, handler in before.items():
            signal.signal(number, handler)
        exec(role[1], {})  # noqa: S102 - execnet's own, as of `python -c`
        return 0
    shutil.rmtree(folder)
    return os.waitstatus_to_exitcode(os.waitpid(controller, 0)[1])


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]))
