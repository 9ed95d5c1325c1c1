"""Inert stand-ins for the names that pickles of plain data use: of Python itself and of NumPy.

No class or function of NumPy is ever given to a pickle: `numpy.dtype` takes a forged state that
turns the bytes of a file into object pointers. A stand-in compares a type's code with a list, takes
bytes, and makes the array itself.
"""

from __future__ import annotations

from collections import OrderedDict
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from counterfoil.data.pickle_values import Global, KeyGuard, PickleRefusedError, StandIn

NUMBERS = frozenset(
    {"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"}
)
OBJECTS = frozenset({"O", "O4", "O8"})
DIMENSIONS = 32


class NumpyType(StandIn):
    """Stands in for `numpy.dtype`; knows plain numbers and nothing else."""

    codes = NUMBERS

    def __init__(self, code: Any = None, *_: Any) -> None:
        code = code.decode("latin1", "replace") if isinstance(code, bytes) else code
        if not isinstance(code, str) or code not in self.codes:
            shown = f"{code[:20]!r}" if isinstance(code, str) else type(code).__name__
            raise PickleRefusedError(f"it holds a NumPy value of the type {shown}, not numbers")
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
        """The numbers in some bytes; nothing is copied."""
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
    """One that also knows objects, for a reader that takes arrays of records."""

    codes = NUMBERS | OBJECTS


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
    """`_codecs.encode`, by which protocol 2 writes bytes; it knows Latin-1 and nothing else."""
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
    found: set[Any] = set()
    keys = KeyGuard()
    for item in items:
        found.add(keys.check(found, item))
    return found


def _new_ordered(pairs: Any = ()) -> OrderedDict[Any, Any]:
    found: OrderedDict[Any, Any] = OrderedDict()
    keys = KeyGuard()
    if type(pairs) not in (list, tuple):
        raise PickleRefusedError("it wants to make a dictionary of something else than pairs")
    for pair in pairs:
        if type(pair) not in (list, tuple) or len(pair) != 2:
            raise PickleRefusedError("it wants to make a dictionary of something else than pairs")
        found[keys.check(found, pair[0])] = pair[1]
    return found


def _reconstructor(kind: Any = None, base: Any = None, state: Any = None) -> Any:
    """`copyreg._reconstructor`: an object without arguments (protocols 0 and 1)."""
    if type(kind) is not Global or kind.call is None or state is not None:
        raise PickleRefusedError("it wants to make an object of a built-in class")
    return kind.call()


def by_name(*found: Global) -> dict[str, Global]:
    return {entry.name: entry for entry in found}


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
"""By their names in Python 3 and NumPy 2; `known_name` gives those of older pickles."""
NUMPY_WITH_OBJECTS = NUMPY | by_name(Global("numpy.dtype", NumpyTypeOrObject))
