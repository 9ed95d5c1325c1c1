"""Safe pickle reader: interprets pickles as data and never calls what they name.

A pickle is a program. `pickle.Unpickler` imports its names and calls them; this reader builds
numbers, strings and containers itself and accepts only names that its caller lists, each with an
inert `Global`. Every instruction takes time and memory in proportion to its own bytes. Calls with
shared arguments, forged lengths and memo numbers, which could multiply these, are limited. All
protocols from 0 to 5 are read, as Python 2 and 3 write them.
"""

from __future__ import annotations

import codecs
import pickletools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from struct import Struct
from typing import Any, BinaryIO

from counterfoil.data.pickle_values import (
    ForbiddenNameError,
    Global,
    KeyGuard,
    PickleDamagedError,
    PickleEncodingError,
    PickleError,
    PickleRefusedError,
    StandIn,
    TooManyInstructionsError,
    known_name,
)

OPERATIONS = 1_000_000
"""Limit of instructions per pickle; a vocabulary of 100,000 words takes 300,000."""

NUMBER_BYTES = 17
"""Bytes of the largest integer: 128 bits, as in a state of PCG64, and a sign."""

NUMBER_DIGITS = 44
MARKS = 1000
"""Limit of open marks; containers are nested at most a tenth of that deep."""

LINE = 1 << 24
NAME = 500
READ_BYTES = 1 << 16

Find = Callable[[str], Global | None]
"""From ``module.name`` (as in Python 3) to what a pickle gets for it; None: refused."""


class PickleReader:
    """Reads one pickle from the current position of ``file``; ``end`` bounds its bytes.

    ``persistent`` gives the value for a persistent id; without it such ids are refused.
    ``encoding`` is that of Python 2 strings.
    """

    def __init__(
        self,
        file: BinaryIO,
        end: int,
        find: Find,
        *,
        persistent: Callable[[Any], Any] | None = None,
        encoding: str = "latin1",
        operations: int = OPERATIONS,
    ) -> None:
        self.file, self.end, self.find = file, end, find
        self.persistent, self.encoding, self.operations = persistent, encoding, operations
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.keys = KeyGuard()
        self.spent = 0
        self.bytes_left = 4 * max(0, end - file.tell()) + (1 << 20)

    def load(self) -> Any:
        """The value, with stand-ins that `resolve` finishes."""
        read, handler_of, most = self.file.read, HANDLERS.get, self.operations
        try:
            while (code := read(1)) != b".":
                self.spent += 1
                handler = handler_of(code)
                if handler is None or self.spent > most:
                    self.spend(0)
                    raise _unknown(code)
                handler(self)
            return self.stack.pop()
        except PickleError:
            raise
        except Exception as error:  # a damaged stream may fail anywhere
            reason = str(error) or type(error).__name__
            raise PickleDamagedError(f"damaged or cut short ({reason[:200]})") from None

    def spend(self, operations: int) -> None:
        self.spent += operations
        if self.spent > self.operations:
            raise TooManyInstructionsError(f"it takes more than {self.operations:,} instructions")

    def read(self, count: int) -> bytes:
        if count > READ_BYTES and count > self.end - self.file.tell():
            raise PickleDamagedError(f"damaged or cut short ({count:,} bytes are announced)")
        data = self.file.read(count) if count > 0 else b""
        if len(data) != count:
            raise PickleDamagedError("damaged or cut short (it ends within a value)")
        return data

    def line(self, most: int) -> bytes:
        line = self.file.readline(most + 1)
        if not line.endswith(b"\n"):
            raise PickleDamagedError("damaged or cut short (a line without an end)")
        return line[:-1]

    def python_2_string(self, data: bytes) -> str:
        try:
            return data.decode(self.encoding)
        except UnicodeDecodeError:
            raise PickleEncodingError(f"a string is not in {self.encoding}") from None

    def items(self) -> list[Any]:
        """The values pushed since the last mark."""
        items, self.stack = self.stack, self.marks.pop()
        return items

    def named(self, module: str, name: str) -> Global:
        known = known_name(module, name)[: 2 * NAME]
        entry = self.find(known)
        if entry is None:
            raise ForbiddenNameError(known)
        return entry

    def call(self, target: Any, arguments: Any) -> Any:
        if type(target) is not Global or target.call is None or type(arguments) is not tuple:
            what = target.name if type(target) is Global else type(target).__name__
            raise PickleRefusedError(f"it wants to call {what!r}")
        self.charge(arguments)
        return target.call(*arguments)

    def build(self, target: Any, state: Any) -> None:
        if type(target) is OrderedDict:
            return  # attributes of a dictionary, such as `_metadata` of a state dict
        if not isinstance(target, StandIn):
            raise PickleRefusedError(f"it wants to change a {type(target).__name__}")
        self.charge(state if type(state) is tuple else (state,))
        target.set_state(state)

    def charge(self, arguments: tuple[Any, ...]) -> None:
        """Count what a stand-in may copy, as one large argument can be passed many times."""
        self.spend(len(arguments))
        for argument in arguments:
            if type(argument) in (str, bytes, bytearray):
                self.bytes_left -= len(argument)
            elif type(argument) in (list, tuple, dict, set, OrderedDict):
                self.spend(len(argument))
        if self.bytes_left < 0:
            raise PickleRefusedError("it copies the same bytes many times over")


Handler = Callable[[PickleReader], object]


def _unknown(code: bytes) -> PickleError:
    known = {operation.code: operation.name for operation in pickletools.opcodes}
    name = known.get(code.decode("latin1"))
    if not code:
        return PickleDamagedError("damaged or cut short (it has no end)")
    if name is None:
        return PickleDamagedError(f"damaged or not a pickle (it holds the instruction {code!r})")
    return PickleRefusedError(
        f"it uses the pickle instruction {name}, which plain data never needs"
    )


def _skip(count: int) -> Handler:
    def skip(reader: PickleReader) -> None:
        reader.read(count)

    return skip


def _constant(make: Callable[[], Any]) -> Handler:
    return lambda reader: reader.stack.append(make())


def _number(form: str) -> Callable[[PickleReader], Any]:
    layout = Struct(form)
    size, decode = layout.size, layout.unpack

    def number(reader: PickleReader) -> Any:
        data = reader.file.read(size)
        if len(data) != size:
            raise PickleDamagedError("damaged or cut short (it ends within a number)")
        return decode(data)[0]

    return number


def _fixed(form: str) -> Handler:
    number = _number(form)
    return lambda reader: reader.stack.append(number(reader))


def _counted(form: str, decode: Callable[[bytes], Any]) -> Handler:
    """A value with its length in bytes before it."""
    number = _number(form)
    return lambda reader: reader.stack.append(decode(reader.read(number(reader))))


def _from_line(decode: Callable[[bytes], Any], most: int = LINE) -> Handler:
    return lambda reader: reader.stack.append(decode(reader.line(most)))


def _text(data: bytes) -> str:
    return str(data, "utf-8", "surrogatepass")


def _unicode_line(line: bytes) -> str:
    return str(line, "raw-unicode-escape")


def _counted_string(form: str) -> Handler:
    """A Python 2 string with its length in bytes before it."""
    number = _number(form)
    return lambda reader: reader.stack.append(reader.python_2_string(reader.read(number(reader))))


def _quoted_string(reader: PickleReader) -> None:
    line = reader.line(LINE)
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
        raise PickleDamagedError("damaged (a string without quotes)")
    reader.stack.append(reader.python_2_string(codecs.escape_decode(line[1:-1])[0]))


def _integer(data: bytes) -> int:
    if len(data) > NUMBER_BYTES:
        raise PickleRefusedError(f"it holds an integer of {len(data):,} bytes")
    return int.from_bytes(data, "little", signed=True)


def _integer_line(line: bytes) -> int:
    if line in (b"00", b"01"):  # how protocols 0 and 1 write False and True
        return line == b"01"
    number = int(line.rstrip(b"L"))
    if number.bit_length() >= 8 * NUMBER_BYTES:
        raise PickleRefusedError(f"it holds an integer of {number.bit_length()} bits")
    return number


def _get(index: Callable[[PickleReader], int]) -> Handler:
    return lambda reader: reader.stack.append(reader.memo[index(reader)])


def _put(index: Callable[[PickleReader], int]) -> Handler:
    def put(reader: PickleReader) -> None:
        reader.memo[index(reader)] = reader.stack[-1]

    return put


def _line_number(reader: PickleReader) -> int:
    return int(reader.line(20))


def _mark(reader: PickleReader) -> None:
    if len(reader.marks) == MARKS:
        raise PickleRefusedError(f"containers are nested, {MARKS:,} of them begun and none ended")
    reader.marks.append(reader.stack)
    reader.stack = []


def _pop(reader: PickleReader) -> None:
    if reader.stack:
        reader.stack.pop()
    else:
        reader.items()


def _tuple_of(count: int) -> Handler:
    def take(reader: PickleReader) -> None:
        if len(reader.stack) < count:
            raise PickleDamagedError("damaged (a tuple of nothing)")
        reader.stack[-count:] = [tuple(reader.stack[-count:])]

    return take


def _sequence(kind: type) -> Handler:
    def take(reader: PickleReader) -> None:
        items = reader.items()  # which changes the stack
        reader.stack.append(kind(items))

    return take


def _dict(reader: PickleReader) -> None:
    items = reader.items()
    reader.stack.append({})
    _set_all(reader, items)


def _extend(reader: PickleReader, items: list[Any]) -> None:
    target = reader.stack[-1]
    if type(target) is not list:
        raise PickleRefusedError(f"it appends to a {type(target).__name__}")
    target.extend(items)


def _set_all(reader: PickleReader, items: list[Any]) -> None:
    target = reader.stack[-1]
    if type(target) not in (dict, OrderedDict) or len(items) % 2:
        raise PickleRefusedError(f"it sets items of a {type(target).__name__}")
    check = reader.keys.check
    for key, value in zip(items[::2], items[1::2], strict=True):
        target[check(target, key)] = value


def _append(reader: PickleReader) -> None:
    item = reader.stack.pop()
    _extend(reader, [item])


def _set_item(reader: PickleReader) -> None:
    value, key = reader.stack.pop(), reader.stack.pop()
    _set_all(reader, [key, value])


def _add_items(reader: PickleReader) -> None:
    items = reader.items()
    target = reader.stack[-1]
    if type(target) is not set:
        raise PickleRefusedError(f"it adds to a {type(target).__name__}")
    for item in items:
        target.add(reader.keys.check(target, item))


def _global(reader: PickleReader) -> None:
    module, name = (reader.line(NAME).decode() for _ in range(2))
    reader.stack.append(reader.named(module, name))


def _stack_global(reader: PickleReader) -> None:
    name, module = reader.stack.pop(), reader.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise PickleDamagedError("damaged (a name that is not a string)")
    reader.stack.append(reader.named(module, name))


def _reduce(reader: PickleReader) -> None:
    arguments, target = reader.stack.pop(), reader.stack.pop()
    reader.stack.append(reader.call(target, arguments))


def _new_with_keywords(reader: PickleReader) -> None:
    keywords = reader.stack.pop()
    if type(keywords) is not dict or keywords:
        raise PickleRefusedError("it passes named arguments to a class")
    _reduce(reader)


def _object(reader: PickleReader) -> None:
    """An instance of an old-style class of Python 2 that is on the stack."""
    target, *arguments = reader.items()
    reader.stack.append(reader.call(target, tuple(arguments)))


def _instance(reader: PickleReader) -> None:
    """An instance of an old-style class that the instruction names."""
    module, name = (reader.line(NAME).decode() for _ in range(2))
    arguments = tuple(reader.items())
    reader.stack.append(reader.call(reader.named(module, name), arguments))


def _build(reader: PickleReader) -> None:
    state = reader.stack.pop()
    reader.build(reader.stack[-1], state)


def _persistent(reader: PickleReader) -> None:
    if reader.persistent is None:
        raise PickleRefusedError("it refers to objects outside the file (a persistent id)")
    reader.stack.append(reader.persistent(reader.stack.pop()))


HANDLERS: Mapping[bytes, Handler] = {
    b"\x80": _skip(1),  # PROTO
    b"\x95": _skip(8),  # FRAME
    b"N": _constant(lambda: None),
    b"\x88": _constant(lambda: True),
    b"\x89": _constant(lambda: False),
    b")": _constant(tuple),
    b"]": _constant(list),
    b"}": _constant(dict),
    b"\x8f": _constant(set),
    b"J": _fixed("<i"),
    b"K": _fixed("<B"),
    b"M": _fixed("<H"),
    b"G": _fixed(">d"),
    b"X": _counted("<I", _text),
    b"\x8c": _counted("<B", _text),
    b"\x8d": _counted("<Q", _text),
    b"T": _counted_string("<i"),
    b"U": _counted_string("<B"),
    b"B": _counted("<I", bytes),
    b"C": _counted("<B", bytes),
    b"\x8e": _counted("<Q", bytes),
    b"\x96": _counted("<Q", bytearray),
    b"\x8a": _counted("<B", _integer),
    b"\x8b": _counted("<i", _integer),
    b"I": _from_line(_integer_line, NUMBER_DIGITS),
    b"L": _from_line(_integer_line, NUMBER_DIGITS),
    b"F": _from_line(float, 40),
    b"S": _quoted_string,
    b"V": _from_line(_unicode_line),
    b"g": _get(_line_number),
    b"h": _get(_number("<B")),
    b"j": _get(_number("<I")),
    b"p": _put(_line_number),
    b"q": _put(_number("<B")),
    b"r": _put(_number("<I")),
    b"\x94": _put(lambda reader: len(reader.memo)),
    b"(": _mark,
    b"0": _pop,
    b"1": PickleReader.items,
    b"2": lambda reader: reader.stack.append(reader.stack[-1]),
    b"t": _sequence(tuple),
    b"\x85": _tuple_of(1),
    b"\x86": _tuple_of(2),
    b"\x87": _tuple_of(3),
    b"l": _sequence(list),
    b"d": _dict,
    b"a": _append,
    b"e": lambda reader: _extend(reader, reader.items()),
    b"s": _set_item,
    b"u": lambda reader: _set_all(reader, reader.items()),
    b"\x90": _add_items,
    b"c": _global,
    b"\x93": _stack_global,
    b"R": _reduce,
    b"\x81": _reduce,  # NEWOBJ: calls the stand-in of the class
    b"\x92": _new_with_keywords,
    b"o": _object,
    b"i": _instance,
    b"b": _build,
    b"Q": _persistent,
}
"""One function per instruction; an instruction that is not here is refused."""
