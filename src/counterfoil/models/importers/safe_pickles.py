"""Safe reader of `torch.save` files: never runs code of the file.

A pickle is a program. Only inert values are accepted: tensors, containers, numbers, strings, NumPy
values, and the `argparse.Namespace` in which older projects store options. Anything else raises an
error with its name. `data.pickles` interprets the instructions.

Tensor data is in a zip archive, or in a stream (before torch 1.6). No declared length is trusted:
a storage has the length of its bytes in the file, and all storages together fit into the file.
"""

from __future__ import annotations

import argparse
import os
import zipfile
from math import prod
from pathlib import Path
from struct import unpack
from typing import Any, BinaryIO

import torch
from torch import Tensor

from counterfoil.core.errors import CheckpointError
from counterfoil.core.storage.reading import open_regular
from counterfoil.data.pickle_values import (
    NUMPY,
    PYTHON,
    ForbiddenNameError,
    Global,
    PickleDamagedError,
    PickleError,
    PickleRefusedError,
    StandIn,
    by_name,
    resolve,
)
from counterfoil.data.pickles import OPERATIONS, PickleReader

DIMENSIONS = 64
DTYPES = {
    "Float": torch.float32,
    "Double": torch.float64,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexFloat": torch.complex64,
    "ComplexDouble": torch.complex128,
}
STORAGES = {
    f"{module}.{name}Storage": dtype
    for module in ("torch", "torch.cuda")
    for name, dtype in DTYPES.items()
}

ZIP = b"PK\x03\x04"
LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the magic number before torch 1.6

HINTS = {
    b"version https://git-lfs": "a Git LFS pointer, not the file itself: fetch it with 'git lfs'",
    b"<": "a web page, not a checkpoint: the download went wrong",
    b"\x80": "a plain pickle; importers read what torch.save wrote",
}


class Storage(StandIn):
    """Contiguous numbers in the file, read when a tensor needs them."""

    def __init__(self, source: Archive | LegacyStream, key: str, dtype: torch.dtype) -> None:
        self.source, self.key, self.dtype = source, key, dtype
        self._values: Tensor | None = None

    def values(self) -> Tensor:
        """All numbers, flat; read once and shared by its tensors."""
        if self._values is None:
            self._values = self.source.values(self.key, self.dtype)
        return self._values

    def finish(self, content: Any) -> Any:
        raise PickleRefusedError("it holds a storage that belongs to no tensor")


class StorageView(Storage):
    """A slice of another storage, as written before torch 0.4."""

    def __init__(self, root: Storage, start: int, count: int) -> None:
        super().__init__(root.source, root.key, root.dtype)
        self.root, self.start, self.count = root, start, count

    def values(self) -> Tensor:
        return self.root.values()[self.start : self.start + self.count]


class TensorView(StandIn):
    """Replaces `_rebuild_tensor_v2`: a checked view of a storage."""

    def __init__(self, *arguments: Any) -> None:
        if len(arguments) < 4 or not isinstance(arguments[0], Storage):
            raise PickleRefusedError("it holds a tensor without a storage")
        if len(arguments) > 7 or any(arguments[6:]):  # such as conjugated or negated
            raise PickleRefusedError(
                "it holds a tensor with metadata; resolve it (resolve_conj, resolve_neg) and save "
                "it again"
            )
        self.storage: Storage = arguments[0]
        offset, size, stride = arguments[1:4]
        sides = [offset, *_numbers(size), *_numbers(stride)]
        if len(size) != len(stride) or not all(
            type(side) is int and 0 <= side < 1 << 48 for side in sides
        ):
            raise PickleRefusedError("it holds a tensor whose shape is not made of numbers")
        self.offset, self.size, self.stride = int(offset), tuple(size), tuple(stride)

    def set_state(self, state: Any) -> None:
        raise PickleRefusedError("it wants to change a tensor")

    def finish(self, content: Any) -> Tensor:
        values, count = self.storage.values(), prod(self.size)
        wanted, there = count * values.element_size(), values.numel() * values.element_size()
        if wanted > there:
            raise PickleRefusedError(
                f"a tensor of shape {self.size} claims {wanted:,} bytes, its storage holds "
                f"{there:,}"
            )
        if not count:
            return torch.empty(self.size, dtype=values.dtype)
        last = sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        if self.offset + last >= values.numel():
            raise PickleRefusedError(f"a tensor of shape {self.size} reaches beyond its storage")
        return torch.as_strided(values, self.size, self.stride, self.offset)


def _numbers(sides: Any) -> tuple[Any, ...] | list[Any]:
    if type(sides) not in (tuple, list) or len(sides) > DIMENSIONS:
        raise PickleRefusedError("it holds a tensor with a forged shape")
    return sides


class _Source:
    """Base of both containers: storages by key, read within the size of the file."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.size = file, size
        self.storages: dict[str, Storage] = {}
        self.left = size

    def named(self, pid: Any) -> Storage:
        """The storage of a persistent id ('storage', type, key, device, count, …)."""
        if type(pid) is not tuple or len(pid) < 5 or pid[0] not in ("storage", b"storage"):
            raise PickleRefusedError("it refers to something else than a storage")
        kind, key = pid[1:3]
        dtype = STORAGES.get(kind.name) if type(kind) is Global else None
        if dtype is None or type(key) not in (str, int):
            raise PickleRefusedError("it refers to a storage of an unknown type")
        storage = self.storages.setdefault(str(key), Storage(self, str(key), dtype))  # type: ignore[arg-type]
        if storage.dtype != dtype:
            raise PickleRefusedError("it reads the same storage as numbers of two types")
        return storage

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """The next bytes of the file as numbers."""
        self.left -= count
        if count > self.size - self.file.tell() or self.left < 0:
            raise PickleDamagedError(
                f"damaged or cut short (its tensors claim more than the {self.size:,} bytes it has)"
            )
        data = bytearray(count)
        if self.file.readinto(data) != count:  # type: ignore[attr-defined]
            raise PickleDamagedError("damaged or cut short (it ends within a tensor)")
        numbers = count // dtype.itemsize
        return (
            torch.frombuffer(data, dtype=dtype, count=numbers)
            if numbers
            else torch.empty(0, dtype=dtype)
        )


class Archive(_Source):
    """An uncompressed zip file: ``NAME/data.pkl`` and ``NAME/data/KEY`` per storage."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        super().__init__(file, size)
        try:
            with zipfile.ZipFile(file) as archive:
                records = archive.infolist()
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
            raise PickleDamagedError(f"damaged or cut short ({error})") from None
        for record in records:
            if record.compress_type != zipfile.ZIP_STORED or record.file_size > size:
                raise PickleRefusedError(
                    f"the record {record.filename[:100]!r} claims {record.file_size:,} bytes in a "
                    f"file of {size:,}; torch.save writes no such file"
                )
        self.records = {record.filename: record for record in records}
        names = [name for name in self.records if name.count("/") == 1]
        pickled = next((name for name in names if name.endswith("/data.pkl")), None)
        if pickled is None:
            raise PickleDamagedError("damaged or cut short (there is no data.pkl in it)")
        self.folder = pickled.removesuffix("data.pkl")

    def seek_pickle(self) -> int:
        """Seek to the pickle; returns its end."""
        return self._seek("data.pkl") + self.file.tell()

    def storage(self, pid: Any) -> Storage:
        return self.named(pid)

    def values(self, key: str, dtype: torch.dtype) -> Tensor:
        values = self.take(self._seek(f"data/{key}"), dtype)
        if f"{self.folder}byteorder" in self.records:
            order = self.file.read(min(10, self._seek("byteorder")))
            if order == b"big" and dtype.itemsize > 1:
                values.untyped_storage().byteswap(dtype)
        return values

    def _seek(self, name: str) -> int:
        """Seek to the bytes of a record; returns their number."""
        record = self.records.get(f"{self.folder}{name}")
        if record is None:
            raise PickleDamagedError(f"damaged (there is no record {name[:100]!r} in it)")
        self.file.seek(record.header_offset)
        header = self.file.read(30)
        if len(header) != 30 or header[:4] != b"PK\x03\x04":
            raise PickleDamagedError(f"damaged (the record {name[:100]!r} has no header)")
        self.file.seek(sum(unpack("<HH", header[26:])), 1)
        return record.file_size


class LegacyStream(_Source):
    """Consecutive pickles, then the storages in the order given by the last pickle."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        super().__init__(file, size)
        self.counts: dict[str, Any] = {}
        self.loaded: dict[str, Tensor] = {}

    def storage(self, pid: Any) -> Storage:
        storage = self.named(pid)
        self.counts[storage.key] = pid[4]
        part = pid[5] if len(pid) > 5 else None
        if part is None:
            return storage
        if type(part) is not tuple or len(part) != 3:
            raise PickleRefusedError("it refers to a forged part of a storage")
        if not all(type(number) is int and number >= 0 for number in part[1:]):
            raise PickleRefusedError("it refers to a forged part of a storage")
        return StorageView(storage, part[1], part[2])

    def read_storages(self) -> None:
        keys = PickleReader(self.file, self.size, PYTHON.get).load()
        if type(keys) is not list or len(keys) != len(self.storages):
            raise PickleDamagedError("damaged (its list of storages is not the one of its tensors)")
        for key in keys:
            storage = self.storages.get(str(key)) if type(key) in (str, int) else None
            head = self.file.read(8)
            count = unpack("<q", head)[0] if len(head) == 8 else -1
            if storage is None or count != self.counts[storage.key] or storage.key in self.loaded:
                raise PickleDamagedError("damaged or cut short (a storage is not as announced)")
            if not 0 <= count <= self.size:
                raise PickleDamagedError(f"damaged (a storage claims {count:,} numbers)")
            self.loaded[storage.key] = self.take(count * storage.dtype.itemsize, storage.dtype)

    def values(self, key: str, _: torch.dtype) -> Tensor:
        return self.loaded[key]


def read_checkpoint(path: str | Path, operations: int = OPERATIONS) -> Any:
    """Read a `torch.save` file to the CPU; raises `CheckpointError` for anything but inert values.

    Reads zip files and the streams of before torch 1.6, also from Python 2 (strings as Latin-1) and
    with GPU storages. Tensors that share a storage share memory. A pickle of more than
    ``operations`` instructions is refused.
    """
    path = Path(path)
    try:
        with open_regular(path) as file:
            return _read(file, _is_legacy(file, path), operations)
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such checkpoint") from None
    except ForbiddenNameError as error:
        raise CheckpointError(
            f"{path}: holds {error.name!r}; only tensors, containers, numbers, strings and an "
            "argparse.Namespace are accepted, as anything else could run code (nothing was run)"
        ) from None
    except PickleDamagedError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except PickleError as error:
        raise CheckpointError(
            f"{path}: refused: {error} (nothing was run); save it again with torch.save where it "
            "was made, if you trust it"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except Exception as error:  # a damaged or hostile file may fail anywhere
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path}: damaged or cut short ({reason[:200]})") from None


def _is_legacy(file: BinaryIO, path: Path) -> bool:
    head = file.read(32)
    if head.startswith((LEGACY, ZIP)):
        return head.startswith(LEGACY)
    reason = "an empty file" if not head else f"it begins with {head[:8]!r}"
    for start, hint in HINTS.items():
        if head.lstrip().startswith(start):
            reason = hint
            break
    raise CheckpointError(f"{path}: not a file of torch.save ({reason})")


def _read(file: BinaryIO, legacy: bool, operations: int) -> Any:
    size = os.fstat(file.fileno()).st_size
    source: LegacyStream | Archive
    if legacy:
        source, end = LegacyStream(file, size), size
        file.seek(len(LEGACY))
        for _ in range(2):  # the layout version, and the sizes of integers
            PickleReader(file, size, PYTHON.get, operations=1000).load()
    else:
        source = Archive(file, size)
        end = source.seek_pickle()
    raw = PickleReader(
        file, end, GLOBALS.get, persistent=source.storage, operations=operations
    ).load()
    if isinstance(source, LegacyStream):
        source.read_storages()
    return resolve(raw, frozenset({torch.Size}), 4 * operations)


class _Namespace(StandIn):
    def set_state(self, state: Any) -> None:
        if type(state) is not dict or not all(type(key) is str for key in state):
            raise PickleRefusedError("it holds an argparse.Namespace whose names are not strings")
        self.content = state

    def finish(self, content: Any) -> argparse.Namespace:
        # not by setattr, nor by keywords: a name may be 'self' or '__class__'
        namespace = argparse.Namespace()
        namespace.__dict__.update(content or {})
        return namespace


def _new_size(sides: Any = ()) -> torch.Size:
    if type(sides) not in (tuple, list) or not all(type(side) is int for side in sides):
        raise PickleRefusedError("it holds a torch.Size of something else than numbers")
    return torch.Size(sides)


def _parameter(data: Any = None, *_: Any) -> TensorView:
    if not isinstance(data, TensorView):
        raise PickleRefusedError("it holds a parameter that is not a tensor")
    return data


GLOBALS = (
    PYTHON
    | NUMPY
    | by_name(
        Global("argparse.Namespace", _Namespace),
        Global("torch.Size", _new_size),
        Global("torch._utils._rebuild_tensor", TensorView),
        Global("torch._utils._rebuild_tensor_v2", TensorView),
        Global("torch._utils._rebuild_parameter", _parameter),
        Global("torch._utils._rebuild_parameter_with_state", _parameter),
        *(Global(name) for name in STORAGES),
    )
)
"""Globals that a checkpoint may use."""
