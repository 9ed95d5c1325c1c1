"""Files as others write them: old, foreign, hostile."""

from __future__ import annotations

import os
import pickle
import types
import warnings
from typing import ClassVar

import torch

from counterfoil.models.importers import read_checkpoint
from tests.conftest import ORACLE


def file_of(name: str):
    return ORACLE / f"{name}-checkpoint.pth.tar"


def content_of(name: str) -> dict:
    return read_checkpoint(file_of(name))


def write(content, path, legacy: bool = False, **how):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(content, path, _use_new_zipfile_serialization=not legacy, **how)
    return path


class Python2Pickler(pickle._Pickler):
    """Writes strings as Python 2 did, and storages as if they had been on a GPU."""

    dispatch: ClassVar[dict] = dict(pickle._Pickler.dispatch)

    def save_string(self, text: str) -> None:
        data = text.encode("latin1")
        self.write(pickle.SHORT_BINSTRING + bytes([len(data)]) + data)
        self.memoize(text)

    dispatch[str] = save_string

    def save_pers(self, pid) -> None:
        storage = {torch.FloatStorage: torch.cuda.FloatStorage}.get(pid[1], pid[1])
        super().save_pers(("storage", storage, pid[2], "cuda:0", *pid[4:]))


def fake_pickle(pickler):
    return types.SimpleNamespace(
        Pickler=pickler,
        __name__="fake",
        dump=lambda value, file, protocol=2: pickler(file, protocol).dump(value),
    )


class Touch:
    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)
