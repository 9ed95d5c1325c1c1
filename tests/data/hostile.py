"""Pickles that no honest program writes: forged types, bombs, calls."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from tests.data.tiny import write_scan


def write_pickled(path: Path, data: bytes, shape: tuple[int, ...] = (1,)) -> None:
    """A `.npy` file whose header announces objects, with any pickle behind it."""
    with path.open("wb") as file:
        npy.write_array_header_1_0(file, {"descr": "|O", "fortran_order": False, "shape": shape})
        file.write(data)


def forged_pointer(core: str = "numpy.core", address: bytes = b"\x41" * 8) -> bytes:
    """A record whose width is a Python object at an address that the file chooses.

    ``dtype('O8')`` gets a state that clears its object flags; then `scalar` takes the bytes of the
    file for the pointer itself.
    """
    forged = (
        b"cnumpy\ndtype\n(X\x02\x00\x00\x00O8\x89\x88tR"
        b"(K\x03X\x01\x00\x00\x00|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    )
    number = b"c" + f"{core}.multiarray\nscalar\n".encode() + b"(" + forged
    number += b"C\x08" + address + b"tR"
    return b"\x80\x03" + array_of(b"}(X\x07\x00\x00\x00image_w" + number, core)


def array_of(record: bytes, core: str = "numpy.core") -> bytes:
    """An array of one object: a dictionary that ``record`` begins, up to its width."""
    start = f"c{core}.multiarray\n_reconstruct\ncnumpy\nndarray\n".encode()
    kind = b"cnumpy\ndtype\n(X\x02\x00\x00\x00O8\x89\x88tR"
    kind += b"(K\x03X\x01\x00\x00\x00|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK?tb"
    height = b"X\x07\x00\x00\x00image_hK\x05u"
    return (
        start
        + b"K\x00\x85C\x01b\x87R(K\x01K\x01\x85"
        + kind
        + b"\x89]("
        + record
        + height
        + b"etb."
    )


def marker_call(marker: Path) -> bytes:
    """Records, one of which makes a folder when it is built."""

    class Makes:
        def __reduce__(self):
            return os.mkdir, (str(marker),)

    return pickle.dumps(np.array([{"image_w": 1, "image_h": 1, "x": Makes()}], dtype=object))


def write_hostile_scan(folder: Path, data: bytes) -> None:
    """A SCAN folder with boxes in pixels, whose image sizes are the pickle ``data``."""
    for split in ("train", "dev", "test"):
        write_scan(folder, split, 2)
        np.save(folder / f"{split}_ims_bbx.npy", np.full((2, 3, 4), 9, np.float32))
        write_pickled(folder / f"{split}_ims_size.npy", data, (2,))


def doubled(kind: str, times: int) -> bytes:
    """Shared containers that unfold to 2**times values; the last is left on the stack."""
    step = {
        "list": b"](h\x00h\x00e",
        "tuple": b"h\x00h\x00\x86",
        "dict": b"}(K\x00h\x00K\x01h\x00u",
    }
    return b"]q\x000" + b"0".join(step[kind] + b"q\x00" for _ in range(times))


def repeated(before: bytes, numbers: np.ndarray, after: bytes) -> bytes:
    """Each number as its bytes, between the same instructions."""
    rows = np.frombuffer(numbers.tobytes(), np.uint8).reshape(len(numbers), -1)
    sides = [np.tile(np.frombuffer(side, np.uint8), (len(rows), 1)) for side in (before, after)]
    return np.hstack([sides[0], rows, sides[1]]).tobytes()


COLLIDING = np.arange(110_000, dtype="<i8")
TRILLION = b"\x8a\x06\x00\x10\xa5\xd4\xe8\x00"
BOMBS = {
    "shared lists": doubled("list", 60) + b".",
    "shared tuples": doubled("tuple", 60) + b".",
    "shared dictionaries": doubled("dict", 60) + b".",
    "a key that takes forever to hash": b"}" + doubled("tuple", 60) + b"K\x01s.",
    "an item of a set that takes forever to hash": b"\x8f(" + doubled("tuple", 60) + b"\x90.",
    "keys with one hash": b"}("
    + b"".join(
        b"\x8a\x0b" + (number * ((1 << 61) - 1)).to_bytes(11, "little") + b"N"
        for number in range(1, 60_000)
    )
    + b"u.",
    "small keys that collide": b"}(" + repeated(b"\x8a\x08", COLLIDING << 20, b"N") + b"u.",
    "small keys that collide, one at a time": b"}"
    + repeated(b"G", (COLLIDING << 30).astype(">f8"), b"Ns")
    + b".",
    "items of a set that collide": b"\x8f("
    + repeated(b"\x8a\x08", COLLIDING << 20, b"")
    + b"\x90.",
    "nearly a million marks": b"(" * 999_000 + b".",
    "deep nesting": b"]" * 300_000 + b"a" * 299_999 + b".",
    "a list that holds itself": b"]q\x00h\x00a.",
    "a memo number of two billion": b"]r\xff\xff\xff\x7f" + b"r\xff\xff\xff\xff" + b"h\x00.",
    "a string of four gigabytes": b"X\xf0\xff\xff\xffabc.",
    "bytes of nine exabytes": b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7fabc.",
    "a byte array of nine exabytes": b"\x96\xff\xff\xff\xff\xff\xff\xff\x7fabc.",
    "a string of negative length": b"T\xff\xff\xff\xffabc.",
    "a frame of nine exabytes": b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f]h\x07.",
    "an integer of many bytes": b"\x8b\x40\x42\x0f\x00" + b"\x7f" * 1_000_000 + b".",
    "an integer of many digits": b"L" + b"9" * 1_000_000 + b"L\n.",
    "a byte array of a trillion bytes": b"cbuiltins\nbytearray\n" + TRILLION + b"\x85R.",
    "bytes of a trillion bytes": b"c__builtin__\nbytes\n" + TRILLION + b"\x85R.",
    "a range": b"cbuiltins\nrange\n" + TRILLION + b"\x85R.",
    "the same bytes encoded many times": b"(c_codecs\nencode\nq\x00X\x00\x00\x01\x00"
    + b"a" * (1 << 16)
    + b"q\x01X\x06\x00\x00\x00latin1\x86q\x02"
    + b"h\x00h\x02R" * 30_000
    + b"l.",
    "the same set made many times": b"](ccollections\nOrderedDict\nq\x00](K\x01K\x02\x86q\x02"
    + b"h\x02" * 20_000
    + b"e\x85q\x03"
    + b"h\x00h\x03R" * 20_000
    + b"l.",
    "more instructions than any file needs": b"N0" * 1_500_000 + b"N.",
    "an encoding that imports a module": b"c_codecs\nencode\n"
    + b"X\x01\x00\x00\x00aX\x04\x00\x00\x00idna\x86R.",
    "a reduction of a number": b"K\x01)R.",
    "a state for a list": b"]}b.",
    "an extension": b"\x82\x01.",
    "an unknown instruction": b"\xff.",
    "no end": b"](K\x01",
    "nothing on the stack": b".",
    "a mark too few": b"K\x01e.",
}
"""Complete pickles without their protocol; each must end in an error, soon."""
