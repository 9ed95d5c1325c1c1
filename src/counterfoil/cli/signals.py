"""Ctrl-C (SIGINT) and SIGTERM: what ends at once, and what is saved first.

A command that a signal ends has 128 plus the signal's number as its exit code, as in a shell.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn

import typer

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

    from counterfoil.core.progress import Progress


ENDED_BY = {signal.SIGINT: 130, signal.SIGTERM: 143}
"""Exit codes."""


@contextmanager
def interruptible(bars: Progress, can_continue: Callable[[], bool]) -> Iterator[None]:
    """If interrupted inside, say whether the same command would continue."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        bars.say("interrupted; repeat the command to continue" if can_continue() else "interrupted")
        if isinstance(error, SystemExit):
            raise
        raise typer.Exit(ENDED_BY[signal.SIGINT]) from None


def end_on_sigterm() -> None:
    """Let SIGTERM end the program as an error does: locks, temporary folders and workers go, too.

    Forked workers keep the default, which ends them at once.
    """
    with suppress(ValueError):  # not the main thread: whoever owns it decides
        signal.signal(signal.SIGTERM, _end)
        if sys.unraisablehook is not _send_again:
            sys.unraisablehook = _send_again
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_restore_default)


def _end(signum: int, frame: object) -> NoReturn:
    raise SystemExit(ENDED_BY[signal.Signals(signum)])


def _send_again(ignored: UnraisableHookArgs) -> None:
    """Python ignores errors in destructors and around a fork: a signal that came then comes again.

    Not at once, as this is called from there.
    """
    codes = {code: signum for signum, code in ENDED_BY.items()}
    error = ignored.exc_value
    if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code in codes:
        again = threading.Timer(0.1, os.kill, (os.getpid(), codes[error.code]))
        again.daemon = True
        again.start()
    else:
        sys.__unraisablehook__(ignored)


def _restore_default() -> None:
    with suppress(ValueError):
        if signal.getsignal(signal.SIGTERM) is _end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


class StopSignals:
    """Ctrl-C and SIGTERM ask training to stop after the current step, once saved.

    They do so between `listen` and `stop_listening`. At other times, or if they come twice, they
    end the program at once.
    """

    stop_requested = False
    exit_code = ENDED_BY[signal.SIGINT]
    _before: dict[signal.Signals, Any] | None = None

    def listen(self) -> None:
        if self._before is None:
            self._before = {each: signal.signal(each, self._remember) for each in ENDED_BY}

    def stop_listening(self) -> None:
        """Restore the previous handlers, and exit if a stop was requested since the last step."""
        for each, handler in (self._before or {}).items():
            signal.signal(each, handler)
        self._before = None
        if self.stop_requested:
            raise SystemExit(self.exit_code)

    def _remember(self, signum: int, frame: object) -> None:
        self.exit_code = ENDED_BY[signal.Signals(signum)]
        if self.stop_requested:
            raise SystemExit(self.exit_code)
        self.stop_requested = True
