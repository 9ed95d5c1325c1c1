"""What a pickle may hold when it is read as data: errors, inert stand-ins, limits of the result.

`data.pickles` interprets the instructions; this module says what becomes of the values.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

DEPTH = 100
"""Containers inside containers; public files need fewer than ten."""

NUMBERS = frozenset({bool, int, float, type(None)})
CONTAINERS = frozenset({dict, OrderedDict, list, tuple, set})
PLAIN = NUMBERS | {complex, str, bytes, bytearray}
SPARSE_KEYS = 10_000
"""Numbers in one dictionary or set that are large for its size; as many that collide take 0.5 s."""

CHARACTERS = 64
"""Characters of a string or bytes that weigh as much as one value."""


class PickleError(Exception):
    """A pickle that is not read: refused, or damaged."""


class PickleRefusedError(PickleError):
    """Readable, but it asks for something that plain data never needs."""


class PickleDamagedError(PickleError):
    """Not a pickle, or cut short, or changed."""


class PickleEncodingError(PickleDamagedError):
    """A string of Python 2 that is not in the encoding it was read with."""


class TooManyInstructionsError(PickleRefusedError):
    """Longer than the files that its reader is for."""


class ForbiddenNameError(PickleRefusedError):
    """It names a function or a class that is not on the caller's list."""

    def __init__(self, name: str) -> None:
        super().__init__(f"it names {name!r}")
        self.name = name


PYTHON_2 = {"__builtin__": "builtins", "copy_reg": "copyreg"}
NUMPY_1 = "numpy.core."


def known_name(module: str, name: str) -> str:
    """``module.name`` as Python 3 and NumPy 2 say it.

    >>> known_name("__builtin__", "set"), known_name("numpy.core.multiarray", "scalar")
    ('builtins.set', 'numpy._core.multiarray.scalar')
    """
    module = PYTHON_2.get(module, module)
    if module.startswith(NUMPY_1):
        module = f"numpy._core.{module.removeprefix(NUMPY_1)}"
    return f"{module}.{name}"


@dataclass(frozen=True)
class Global:
    """What a pickle gets for a name. Without ``call`` it can be referred to and nothing else."""

    name: str
    call: Callable[..., Any] | None = None


class StandIn:
    """An inert object in the place of one of a real class; ``content`` is its pickled state."""

    content: Any = None

    def set_state(self, state: Any) -> None:
        self.content = state

    def finish(self, content: Any) -> Any:
        """The value to hand out, from the state with all stand-ins inside it finished."""
        raise NotImplementedError


class KeyGuard:
    """Checks the keys of dictionaries and the items of sets before they are hashed.

    Hashing nested tuples can take forever. Numbers hash to themselves, so a file can choose keys
    that collide: each dictionary or set may hold `SPARSE_KEYS` numbers, or any count of dense ones.
    """

    def __init__(self) -> None:
        self.sparse: dict[int, tuple[Any, int]] = {}  # holds the target, so its id stays its own

    def check(self, target: Any, key: Any) -> Any:
        """The key, if it may be put into ``target``."""
        kind = type(key)
        if kind is str or kind is bytes or kind is bool or key is None:
            return key
        if kind is float or (kind is int and abs(key) < 1 << 60):
            if (kind is float and not key.is_integer()) or abs(key) >= 4 * (len(target) + 1):
                self._count_sparse(target)
            return key
        described = "a very large number" if kind is int else f"a {kind.__name__}"
        raise PickleRefusedError(
            f"a dictionary key or an item of a set is {described}; expected a string or a number"
        )

    def _count_sparse(self, target: Any) -> None:
        count = self.sparse.get(id(target), (target, 0))[1] + 1
        self.sparse[id(target)] = target, count
        if count > SPARSE_KEYS:
            raise PickleRefusedError(
                f"a dictionary or a set holds more than {SPARSE_KEYS:,} numbers that are far apart"
            )


def resolve(value: Any, leaves: frozenset[type], most: int) -> Any:
    """The value with every stand-in finished; ``leaves`` are accepted beside plain values.

    Refused: containers that hold themselves, that are nested deeper than `DEPTH`, or that unfold
    to more than ``most`` values because they share parts.
    """
    return _Resolver(leaves, most).visit(value, 0)[0]


class _Resolver:
    def __init__(self, leaves: frozenset[type], most: int) -> None:
        self.leaves = leaves
        self.most = most
        self.open: set[int] = set()
        self.done: dict[int, tuple[Any, int]] = {}

    def visit(self, value: Any, depth: int) -> tuple[Any, int]:
        """A finished value and its weight: how many values it unfolds to."""
        kind = type(value)
        if kind in PLAIN:
            sized = kind in (str, bytes, bytearray)
            return value, 1 + (len(value) // CHARACTERS if sized else 0)
        if kind in self.leaves or (kind in CONTAINERS and not value):
            return value, 1
        key = id(value)  # the caller holds the whole tree, so no id is used twice
        if key in self.done:
            return self.done[key]
        if depth > DEPTH or key in self.open:
            raise PickleRefusedError(
                f"containers are nested more than {DEPTH} deep, or hold themselves"
            )
        self.open.add(key)
        found = self.done[key] = self._container(value, depth + 1)
        self.open.discard(key)
        return found

    def _container(self, value: Any, depth: int) -> tuple[Any, int]:
        if isinstance(value, StandIn):
            content, weight = self.visit(value.content, depth)
            return value.finish(content), weight + 1
        kind = type(value)
        weights = [1]
        if kind in (dict, OrderedDict):
            keys, items = (self._each(part, depth, weights) for part in (value, value.values()))
            found = kind(zip(keys, items, strict=True))
        elif kind in (list, tuple, set):
            found = kind(self._each(value, depth, weights))
        else:
            name = value.name if kind is Global else f"{kind.__module__}.{kind.__qualname__}"
            raise ForbiddenNameError(name)
        return found, weights[0]

    def _each(self, values: Any, depth: int, weights: list[int]) -> Iterator[Any]:
        for value in values:
            if type(value) in NUMBERS:  # most values are, so they take a shorter way
                found = value
                weights[0] += 1
            else:
                found, weight = self.visit(value, depth)
                weights[0] += weight
            if weights[0] > self.most:
                raise PickleRefusedError(
                    f"shared containers unfold to more than {self.most:,} values"
                )
            yield found
