"""Files of `torch.save`, read without running anything that is in them.

A pickle is a program. Of the old projects' files only the inert part is accepted: tensors,
containers, numbers, strings, NumPy values, and the `argparse.Namespace` in which those projects
keep their options. Everything else is refused, and named. `data.pickles` reads the instructions,
`torch_storages` the bytes of the tensors.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, BinaryIO

import torch

from counterfoil.data.pickle_globals import NUMPY, PYTHON, by_name
from counterfoil.data.pickle_values import (
    ForbiddenNameError,
    Global,
    PickleDamagedError,
    PickleError,
    PickleRefusedError,
    StandIn,
    resolve,
)
from counterfoil.data.pickles import OPERATIONS, PickleReader
from counterfoil.errors import CheckpointError
from counterfoil.models.importers.torch_storages import (
    STORAGES,
    Archive,
    LegacyStream,
    TensorView,
)
from counterfoil.reading import open_regular

ZIP = b"PK\x03\x04"
LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the magic number before torch 1.6
HINTS = {
    b"version https://git-lfs": "a Git LFS pointer, not the file itself: fetch it with 'git lfs'",
    b"<": "a web page, not a checkpoint: the download went wrong",
    b"\x80": "a plain pickle; importers read what torch.save wrote",
}


def read_checkpoint(path: str | Path, operations: int = OPERATIONS) -> Any:
    """What `torch.save` wrote, on the CPU; anything but inert values is a `CheckpointError`.

    Both containers are read, the zip file of today and the stream of before torch 1.6, also as
    Python 2 wrote it (its strings as Latin-1) and with storages that were on a GPU. Tensors that
    share a storage in the file share memory here. A pickle of more ``operations`` is refused.
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
    found = "an empty file" if not head else f"it begins with {head[:8]!r}"
    for start, hint in HINTS.items():
        if head.lstrip().startswith(start):
            found = hint
            break
    raise CheckpointError(f"{path}: not a file of torch.save ({found})")


def _read(file: BinaryIO, legacy: bool, operations: int) -> Any:
    size = os.fstat(file.fileno()).st_size
    source: LegacyStream | Archive
    if legacy:
        source, end = LegacyStream(file, size), size
        file.seek(len(LEGACY))
        for _ in range(2):  # the version of the layout, the sizes of numbers where it was written
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
        found = argparse.Namespace()
        found.__dict__.update(content or {})
        return found


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
"""All that a checkpoint may name."""
