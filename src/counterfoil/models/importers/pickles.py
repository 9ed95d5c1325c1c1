"""Files of `torch.save`, read without running anything that is in them.

A pickle is a program. Of the old projects' files only the inert part is accepted: tensors,
containers, numbers, strings, NumPy values, and the `argparse.Namespace` in which those projects
keep their options. Everything else is refused, and named.
"""

from __future__ import annotations

import argparse
import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from counterfoil.errors import CheckpointError
from counterfoil.models.importers.numpy_pickles import NUMPY_GLOBALS, NumpyArray

ZIP = b"PK\x03\x04"
LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the magic number before torch 1.6
PLAIN = (bool, int, float, complex, str, bytes, bytearray, type(None), np.generic)
CONTAINERS = (dict, OrderedDict, list, tuple, set, torch.Size)
HINTS = {
    b"version https://git-lfs": "a Git LFS pointer, not the file itself: fetch it with 'git lfs'",
    b"<": "a web page, not a checkpoint: the download went wrong",
    b"\x80": "a plain pickle; importers read what torch.save wrote",
}


def read_checkpoint(path: str | Path) -> Any:
    """What `torch.save` wrote, on the CPU; anything but inert values is a `CheckpointError`.

    Both containers are read, the zip file of today and the stream of before torch 1.6, also as
    Python 2 wrote it (its strings as Latin-1) and with storages that were on a GPU.
    """
    path = Path(path)
    legacy = _is_legacy(path)
    if not legacy:
        _check_zip(path)
    allowed = [(argparse.Namespace, "argparse.Namespace"), *NUMPY_GLOBALS]
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(allowed):
            warnings.simplefilter("ignore")
            # mapped, because a record read whole is believed to be as long as the pickle says
            content = torch.load(
                str(path), map_location="cpu", weights_only=True, mmap=not legacy, encoding="latin1"
            )
    except Exception as error:  # a damaged or hostile stream may fail anywhere
        raise CheckpointError(f"{path}: {_explain(error)}") from None
    return _Checked(path).value(content)


def _is_legacy(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            head = file.read(32)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such checkpoint") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    if head.startswith((LEGACY, ZIP)):
        return head.startswith(LEGACY)
    found = "an empty file" if not head else f"it begins with {head[:8]!r}"
    for start, hint in HINTS.items():
        if head.lstrip().startswith(start):
            found = hint
            break
    raise CheckpointError(f"{path}: not a file of torch.save ({found})")


def _check_zip(path: Path) -> None:
    """Refuse records that unpack to more than the file holds; `torch.save` never compresses."""
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise CheckpointError(f"{path}: damaged or cut short ({error})") from None
    size = path.stat().st_size
    for record in records:
        if record.compress_type != zipfile.ZIP_STORED or record.file_size > size:
            raise CheckpointError(
                f"{path}: the record '{record.filename}' claims {record.file_size:,} bytes in a "
                f"file of {size:,}; torch.save writes no such file"
            )


def _explain(error: Exception) -> str:
    text = str(error)
    named = re.search(r"GLOBAL (\S+)", text)
    if named:
        return (
            f"holds '{named[1]}'; only tensors, containers, numbers, strings and an "
            "argparse.Namespace are accepted, as anything else could run code (nothing was run)"
        )
    unknown = re.search(r"Unsupported operand (\d+)", text)
    if unknown:
        return (
            f"damaged, or written with pickle instructions that torch.save does not use by default "
            f"(opcode {unknown[1]}); save it again with torch.save where it was made"
        )
    refused = re.search(r"Can only .+|Trying to call .+|.*persistent_load.+", text)
    if refused:
        return f"refused ({refused[0][:200]})"
    reason = text.strip().splitlines()
    return f"damaged or cut short ({reason[0][:200] if reason else type(error).__name__})"


class _Checked:
    """Walks what was read, once per object; copies tensors out of the mapped file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.limit = path.stat().st_size
        self.held: dict[int, int] = {}
        self.done: dict[int, Any] = {}
        self.kept: list[Any] = []

    def value(self, found: Any, depth: int = 0) -> Any:
        if isinstance(found, PLAIN):
            return found
        if id(found) in self.done:
            return self.done[id(found)]
        if depth > 100:
            raise CheckpointError(f"{self.path}: containers are nested more than 100 deep")
        self.kept.append(found)  # an id is only unique while its object lives
        checked = self._value(found, depth)
        self.done[id(found)] = checked
        return checked

    def _value(self, found: Any, depth: int) -> Any:
        if isinstance(found, Tensor):
            return self._tensor(found)
        if isinstance(found, NumpyArray):
            return found.array()
        if type(found) is argparse.Namespace:
            return argparse.Namespace(**self._items(vars(found), depth))
        if type(found) not in CONTAINERS:
            name = f"{type(found).__module__}.{type(found).__qualname__}"
            raise CheckpointError(f"{self.path}: holds '{name}', which no importer reads")
        if isinstance(found, dict):
            return type(found)(self._items(found, depth))
        return (
            tuple(self._each(found, depth))
            if isinstance(found, tuple)
            else (type(found)(self._each(found, depth)))
        )

    def _each(self, found: Any, depth: int) -> Iterator[Any]:
        return (self.value(item, depth + 1) for item in found)

    def _items(self, found: dict[Any, Any], depth: int) -> dict[Any, Any]:
        return {
            self.value(key, depth + 1): self.value(item, depth + 1) for key, item in found.items()
        }

    def _tensor(self, found: Tensor) -> Tensor:
        tensor = found.detach()
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
            raise CheckpointError(f"{self.path}: holds a tensor of another kind: {type(found)}")
        storage = tensor.untyped_storage()
        wanted = tensor.numel() * tensor.element_size()
        self.held[storage.data_ptr()] = storage.nbytes()
        if tensor.device.type != "cpu" or wanted > storage.nbytes():
            raise CheckpointError(
                f"{self.path}: a tensor of shape {tuple(tensor.shape)} claims {wanted:,} bytes, "
                f"its storage holds {storage.nbytes():,}"
            )
        if sum(self.held.values()) > self.limit:
            raise CheckpointError(
                f"{self.path}: its tensors claim {sum(self.held.values()):,} bytes, the file has "
                f"{self.limit:,}"
            )
        return tensor.clone()
