"""Values of pickles that are read as data: errors, limits, and inert stand-ins for classes.

`data.pickles` interprets the instructions; this module builds the values. A pickle never gets a
class or function of NumPy: a forged state makes `numpy.dtype` treat bytes of the file as object
pointers. Instead, a stand-in checks the type code against a list and makes the array from bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

DEPTH = 100
"""Deepest nesting of containers; public files need fewer than ten."""

NUMBERS = frozenset({bool, int, float, type(None)})
CONTAINERS = frozenset({dict, OrderedDict, list, tuple, set})
PLAIN = NUMBERS | {complex, str, bytes, bytearray}
SPARSE_KEYS = 10_000
"""Limit of sparse number keys in one dictionary or set; this many colliding keys take 0.5 s."""

CHARACTERS = 64
"""Characters of a string or bytes that count as one value."""

PYTHON_2 = {"__builtin__": "builtins", "copy_reg": "copyreg"}
NUMPY_1 = "numpy.core."

NUMBER_CODES = frozenset(
    {"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"}
)

OBJECTS = frozenset({"O", "O4", "O8"})
DIMENSIONS = 32


class PickleError(Exception):
    """A pickle that is refused or damaged."""


class PickleRefusedError(PickleError):
    """Readable, but uses something that plain data never need."""


class PickleDamagedError(PickleError):
    """Not a pickle, or cut short, or changed."""


class PickleEncodingError(PickleDamagedError):
    """A string of Python 2 that is not in the encoding it was read with."""


class TooManyInstructionsError(PickleRefusedError):
    """More instructions than the reader allows."""


class ForbiddenNameError(PickleRefusedError):
    """It names a function or a class that is not on the caller's list."""

    def __init__(self, name: str) -> None:
        super().__init__(f"it names {name!r}")
        self.name = name


def known_name(module: str, name: str) -> str:
    """``module.name`` as in Python 3 and NumPy 2.

    >>> known_name("__builtin__", "set"), known_name("numpy.core.multiarray", "scalar")
    ('builtins.set', 'numpy._core.multiarray.scalar')
    """
    module = PYTHON_2.get(module, module)
    if module.startswith(NUMPY_1):
        module = f"numpy._core.{module.removeprefix(NUMPY_1)}"
    return f"{module}.{name}"


@dataclass(frozen=True)
class Global:
    """What a pickle gets for a name. Without ``call`` it can only be referred to."""

    name: str
    call: Callable[..., Any] | None = None


class StandIn:
    """An inert replacement for an instance of a class; ``content`` is its pickled state."""

    content: Any = None

    def set_state(self, state: Any) -> None:
        self.content = state

    def finish(self, content: Any) -> Any:
        """The final value, from the state with all its stand-ins finished."""
        raise NotImplementedError


class KeyGuard:
    """Checks the keys of dictionaries and the items of sets before they are hashed.

    Hashing nested tuples can take exponential time, so tuples are refused. Numbers hash to
    themselves, so a file can choose colliding keys. Each dictionary or set may therefore have at
    most `SPARSE_KEYS` numbers that are large for its size.
    """

    def __init__(self) -> None:
        self.sparse: dict[int, tuple[Any, int]] = {}  # the reference keeps the id valid

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
    """The value with every stand-in finished; types in ``leaves`` are accepted as they are.

    Refused are containers that contain themselves, that are nested deeper than `DEPTH`, or that
    have more than ``most`` values when shared parts are counted each time.
    """
    return _Resolver(leaves, most).visit(value, 0)[0]


class _Resolver:
    def __init__(self, leaves: frozenset[type], most: int) -> None:
        self.leaves = leaves
        self.most = most
        self.open: set[int] = set()
        self.done: dict[int, tuple[Any, int]] = {}

    def visit(self, value: Any, depth: int) -> tuple[Any, int]:
        """A finished value and its weight: its number of values, shared parts counted each time."""
        kind = type(value)
        if kind in PLAIN:
            sized = kind in (str, bytes, bytearray)
            return value, 1 + (len(value) // CHARACTERS if sized else 0)
        if kind in self.leaves or (kind in CONTAINERS and not value):
            return value, 1
        key = id(value)  # unique, as the caller holds the whole tree
        if key in self.done:
            return self.done[key]
        if depth > DEPTH or key in self.open:
            raise PickleRefusedError(
                f"containers are nested more than {DEPTH} deep, or hold themselves"
            )
        self.open.add(key)
        result = self.done[key] = self._container(value, depth + 1)
        self.open.discard(key)
        return result

    def _container(self, value: Any, depth: int) -> tuple[Any, int]:
        if isinstance(value, StandIn):
            content, weight = self.visit(value.content, depth)
            return value.finish(content), weight + 1
        kind = type(value)
        weights = [1]
        if kind in (dict, OrderedDict):
            keys, items = (self._each(part, depth, weights) for part in (value, value.values()))
            result = kind(zip(keys, items, strict=True))
        elif kind in (list, tuple, set):
            result = kind(self._each(value, depth, weights))
        else:
            name = value.name if kind is Global else f"{kind.__module__}.{kind.__qualname__}"
            raise ForbiddenNameError(name)
        return result, weights[0]

    def _each(self, values: Any, depth: int, weights: list[int]) -> Iterator[Any]:
        for value in values:
            weight = 1
            if type(value) not in NUMBERS:  # a shortcut, as most values are numbers
                value, weight = self.visit(value, depth)
            weights[0] += weight
            if weights[0] > self.most:
                raise PickleRefusedError(
                    f"shared containers unfold to more than {self.most:,} values"
                )
            yield value


class NumpyType(StandIn):
    """Stands in for `numpy.dtype`; accepts only plain numbers."""

    codes = NUMBER_CODES

    def __init__(self, code: Any = None, *_: Any) -> None:
        code = code.decode("latin1", "replace") if isinstance(code, bytes) else code
        if not isinstance(code, str) or code not in self.codes:
            name = f"{code[:20]!r}" if isinstance(code, str) else type(code).__name__
            raise PickleRefusedError(f"it holds a NumPy value of the type {name}, not numbers")
        self.code, self.big_endian = code, False

    @property
    def is_object(self) -> bool:
        return self.code in OBJECTS

    def set_state(self, state: Any) -> None:
        """Of (version, byte order, subtype, names, fields, …) only the byte order is used."""
        if not isinstance(state, tuple) or len(state) < 5 or state[2:5] != (None, None, None):
            raise PickleRefusedError("it holds a NumPy type with fields, or a forged one")
        order = _bytes(state[1])
        if order not in (b"<", b">", b"|", b"="):
            raise PickleRefusedError(f"it holds a NumPy type of the byte order {order[:20]!r}")
        self.big_endian = order == b">"

    def numbers(self, data: Any) -> NDArray[Any]:
        """The numbers in these bytes, without a copy."""
        if self.is_object:
            raise PickleRefusedError("it holds Python objects in a NumPy value, not numbers")
        kind = np.dtype(self.code).newbyteorder(">" if self.big_endian else "<")
        data = _bytes(data)
        if len(data) % kind.itemsize:
            raise PickleRefusedError(f"{len(data)} bytes are no NumPy values of {kind}")
        return np.frombuffer(data, kind)

    def finish(self, content: Any) -> Any:
        raise PickleRefusedError("it holds a type of NumPy as a value")


class NumpyTypeOrObject(NumpyType):
    """Also accepts objects, for a reader of arrays of records."""

    codes = NUMBER_CODES | OBJECTS


class ObjectArray(list[Any]):
    """The items of an array of objects, in the order of the file."""


class NumpyArray(StandIn):
    """Stands in for `numpy.ndarray`."""

    def __init__(self) -> None:
        self.shape: tuple[int, ...] = (0,)
        self.numbers: NDArray[Any] | None = np.zeros(0)
        self.order: Any = "C"

    def set_state(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) not in (4, 5):
            raise PickleRefusedError("it holds a NumPy array with a forged state")
        shape, kind, by_column, data = state[-4:]
        self.fill(shape, kind, data, "F" if by_column is True or by_column == 1 else "C")

    def fill(self, shape: Any, kind: Any, data: Any, order: str) -> None:
        if not isinstance(kind, NumpyType):
            raise PickleRefusedError("it holds a NumPy array with a forged type")
        self.shape, self.order = _shape(shape), order
        if kind.is_object:
            if type(data) is not list:
                raise PickleRefusedError("it holds a NumPy array of objects without a list of them")
            self.numbers, self.content, count = None, data, len(data)
        else:
            self.numbers = kind.numbers(data)
            self.content, count = None, self.numbers.size
        if prod(self.shape) != count:
            raise PickleRefusedError(
                f"it holds a NumPy array of the shape {self.shape} with {count:,} values"
            )

    def finish(self, content: Any) -> Any:
        if self.numbers is None:
            return ObjectArray(content)
        shaped = self.numbers.reshape(self.shape, order=self.order)
        return shaped.astype(shaped.dtype.newbyteorder("="))


def _shape(shape: Any) -> tuple[int, ...]:
    usable = (
        isinstance(shape, tuple)
        and len(shape) <= DIMENSIONS
        and all(type(side) is int and 0 <= side < 1 << 31 for side in shape)
    )
    if not usable or prod(side for side in shape if side) >= 1 << 48:
        raise PickleRefusedError("it holds a NumPy array with a shape that cannot be")
    return tuple(shape)


def _bytes(data: Any) -> bytes:
    """Python 2 wrote bytes as a string, which was read as Latin-1."""
    if isinstance(data, str):
        try:
            return data.encode("latin1")
        except UnicodeEncodeError:
            pass
    elif isinstance(data, (bytes, bytearray)):
        return bytes(data)
    raise PickleRefusedError("it holds a NumPy value without its bytes")


def _new_array(*_: Any) -> NumpyArray:
    return NumpyArray()


def _array_of(data: Any, kind: Any, shape: Any, order: Any) -> NumpyArray:
    """`numpy._core.numeric._frombuffer`, which protocol 5 uses."""
    array = NumpyArray()
    array.fill(shape, kind, data, "F" if order == "F" else "C")
    return array


def _scalar(kind: Any, data: Any) -> Any:
    """A Python number."""
    if not isinstance(kind, NumpyType):
        raise PickleRefusedError("it holds a NumPy number with a forged type")
    values = kind.numbers(data)
    if values.size != 1:
        raise PickleRefusedError(f"it holds a NumPy number made of {values.size:,} values")
    return values[0].item()


def _encode(text: Any, encoding: Any = None) -> bytes:
    """`_codecs.encode`, by which protocol 2 writes bytes; only Latin-1."""
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise PickleRefusedError("it wants to call '_codecs.encode' on something else than bytes")
    return text.encode("latin1")


def _new_bytes(*arguments: Any) -> bytes:
    if arguments:
        raise PickleRefusedError("it wants to call 'bytes' with arguments")
    return b""


def _new_bytearray(data: Any = b"", encoding: Any = "latin1") -> bytearray:
    if isinstance(data, (bytes, bytearray)):
        return bytearray(data)
    return bytearray(_encode(data, encoding))


def _new_complex(real: Any = 0.0, imaginary: Any = 0.0) -> complex:
    if not all(type(part) in (int, float) for part in (real, imaginary)):
        raise PickleRefusedError("it wants to call 'complex' on something else than numbers")
    return complex(real, imaginary)


def _new_set(items: Any = ()) -> set[Any]:
    if type(items) not in (list, tuple):
        raise PickleRefusedError("it wants to make a set of something else than a list")
    result: set[Any] = set()
    keys = KeyGuard()
    for item in items:
        result.add(keys.check(result, item))
    return result


def _new_ordered(pairs: Any = ()) -> OrderedDict[Any, Any]:
    result: OrderedDict[Any, Any] = OrderedDict()
    keys = KeyGuard()
    if type(pairs) not in (list, tuple):
        raise PickleRefusedError("it wants to make a dictionary of something else than pairs")
    for pair in pairs:
        if type(pair) not in (list, tuple) or len(pair) != 2:
            raise PickleRefusedError("it wants to make a dictionary of something else than pairs")
        result[keys.check(result, pair[0])] = pair[1]
    return result


def _reconstructor(kind: Any = None, base: Any = None, state: Any = None) -> Any:
    """`copyreg._reconstructor`: an object without arguments (protocols 0 and 1)."""
    if type(kind) is not Global or kind.call is None or state is not None:
        raise PickleRefusedError("it wants to make an object of a built-in class")
    return kind.call()


def by_name(*entries: Global) -> dict[str, Global]:
    return {entry.name: entry for entry in entries}


PYTHON: dict[str, Global] = by_name(
    Global("_codecs.encode", _encode),
    Global("builtins.object"),
    Global("builtins.bytes", _new_bytes),
    Global("builtins.bytearray", _new_bytearray),
    Global("builtins.complex", _new_complex),
    Global("builtins.set", _new_set),
    Global("collections.OrderedDict", _new_ordered),
    Global("copyreg._reconstructor", _reconstructor),
)
NUMPY: dict[str, Global] = by_name(
    Global("numpy.dtype", NumpyType),
    Global("numpy.ndarray"),
    Global("numpy._core.multiarray._reconstruct", _new_array),
    Global("numpy._core.multiarray.scalar", _scalar),
    Global("numpy._core.numeric._frombuffer", _array_of),
)
"""Keys are names in Python 3 and NumPy 2; `known_name` translates those of older pickles."""
NUMPY_WITH_OBJECTS = NUMPY | by_name(Global("numpy.dtype", NumpyTypeOrObject))
