"""What SIGTERM ends, and what it leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from counterfoil.__main__ import main
from counterfoil.cli.signals import StopSignals
from tests.conftest import thinned
from tests.training.test_run_folder import children, is_alive

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")


def test_a_terminated_command_exits_with_143_and_leaves_neither_files_nor_workers(
    tmp_path,
) -> None:
    target, cache = tmp_path / "scenes", tmp_path / "cache"
    words = ["data", "scenes", target, "--images", 1_000_000, "--cache", cache]
    process = subprocess.Popen(
        [sys.executable, "-m", "counterfoil", *map(str, words)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        workers: list[int] = []
        end = time.monotonic() + 60
        while not workers and time.monotonic() < end and process.poll() is None:
            time.sleep(0.05)
            workers = children(process.pid)
        assert workers
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 143, told
    assert "Traceback" not in told
    assert not any(map(is_alive, workers))
    assert list(cache.iterdir()) == []
    assert not target.exists()


def test_ctrl_c_while_commands_are_imported_is_no_traceback(monkeypatch) -> None:
    class Interrupted:
        def find_spec(self, name, path=None, target=None):
            if name == "counterfoil.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "counterfoil.cli", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_exit_code_says_which_signal_stopped_training(sent, code) -> None:
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    signals = StopSignals()
    try:
        signals.listen()
        signal.raise_signal(sent)
        assert signals.stop_requested
        assert signals.exit_code == code
        with pytest.raises(SystemExit) as twice:
            signal.raise_signal(sent)
        assert twice.value.code == code
        with pytest.raises(SystemExit) as late:  # evaluating may take hours
            signals.stop_listening()
        assert late.value.code == code
        assert {each: signal.getsignal(each) for each in before} == before
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@pytest.mark.parametrize("place", thinned(["destructor", "fork"], "fork"))
def test_a_signal_that_comes_where_python_ignores_errors_ends_the_command_all_the_same(
    place,
) -> None:
    script = f"""
import os, signal, time
from counterfoil.cli.signals import end_on_sigterm

def terminate(*_):
    signal.raise_signal(signal.SIGTERM)

class Item:
    __del__ = terminate

end_on_sigterm()
if {place!r} == "destructor":
    Item()
else:
    os.register_at_fork(after_in_parent=terminate)
    if os.fork() == 0:
        os._exit(0)
time.sleep(10)
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert process.returncode == 143, process.stderr
    assert b"Traceback" not in process.stderr
