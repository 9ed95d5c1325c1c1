"""The errors that Counterfoil raises on purpose, and their exit codes.

A message says what was given, what was expected, and what to do. Each class has its own exit code,
so that scripts can tell a bad config from bad data. Code 7 belongs to no error: `counterfoil audit`
exits with it if it finds more than the limit. A process ended by a signal exits with 128 plus its
number: 130 for Ctrl-C, 143 for SIGTERM.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable


class CounterfoilError(Exception):
    """Base of all errors that the user can act on."""

    exit_code = 1


class ConfigError(CounterfoilError):
    """A key, value or name in a configuration that is not valid."""

    exit_code = 2


class ArgumentError(ConfigError, ValueError):
    """An argument of a call from Python that has the wrong type, shape or values."""


def require_path(call: str, given: object) -> None:
    """Refuse an argument of a call from Python that is neither text nor a path."""
    if not isinstance(given, (str, os.PathLike)):
        raise ArgumentError(f"{call}: expected a path or a name, got {type(given).__name__}")


def require_batch_size(given: object) -> None:
    """Refuse what is no number of items."""
    if not hasattr(given, "__index__") or isinstance(given, bool) or int(given) < 1:
        raise ArgumentError(f"batch_size: expected at least 1, got {given!r:.40}")


class DataError(CounterfoilError):
    """Images, captions or features that cannot be used."""

    exit_code = 3


class RemoteError(CounterfoilError):
    """Remote data that cannot be read now: a broken connection, a server that fails."""

    exit_code = 9


class CheckpointError(CounterfoilError):
    """A saved model or run that is missing, damaged, hostile or of another kind."""

    exit_code = 4


class TrainingError(CounterfoilError):
    """Training that cannot continue: a non-finite loss, a full disk."""

    exit_code = 5


class DivergedError(TrainingError):
    """A loss or a gradient that is not finite: usually the learning rate is too high."""


class LostLoaderError(TrainingError):
    """A loader process ended. torchrun ends them, too, when another process of the run has died."""


class MissingExtraError(CounterfoilError):
    """An optional dependency that is not installed."""

    exit_code = 6

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package '{package}', which is not installed: "
            f'pip install "counterfoil[{extra}]" (in a clone: ".[{extra}]")'
        )


class BusyError(CounterfoilError):
    """Another process is writing to the same file or folder."""

    exit_code = 8


def first_problem(error: Exception) -> str:
    """An error in one line; of pydantic's, the first field that is wrong, and why."""
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return " ".join(str(error).split())
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" if where else first["msg"]


class UnknownNameError(ConfigError):
    """A name that no part is registered under."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint such as ``; did you mean 'epochs'?``, or an empty string."""
    given, names = str(name), list(known)
    by_lower = {each.lower(): each for each in names}
    close = difflib.get_close_matches(given.lower(), list(by_lower), n=1, cutoff=0.5)
    same_case = difflib.get_close_matches(given, names, n=1, cutoff=0.5)
    if close and same_case and same_case[0].lower() == close[0]:
        return f"; did you mean '{same_case[0]}'?"
    return f"; did you mean '{by_lower[close[0]]}'?" if close else ""
