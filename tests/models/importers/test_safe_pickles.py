"""Checkpoints are read without running anything in them, whatever that is."""

from __future__ import annotations

import pickle
import zipfile

import numpy as np
import pytest
import torch

from counterfoil.core.errors import CheckpointError
from counterfoil.models.importers import read_checkpoint
from tests.models.pickling import Touch, content_of, fake_pickle, file_of, write


class Evaluates(Touch):
    def __reduce__(self):
        return eval, (f"open({str(self.path)!r}, 'w').close()",)


class Innocent:
    pass


def nested(value) -> dict:
    content = content_of("scan")
    content["opt"].callback = [{"deep": (value,)}]
    return content


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("place", [lambda value: value, nested])
@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (lambda mark: Touch(mark), "'(posix|nt).system'"),
        (lambda mark: Evaluates(mark), "'builtins.eval'"),
        (lambda mark: Innocent(), "Innocent'"),
        (lambda mark: torch.nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
        (lambda mark: torch.device("cpu"), "'torch.device'"),
        (lambda mark: np.array([None, "a"], dtype=object), "NumPy"),
    ],
)
def test_what_is_not_inert_is_refused_by_name_and_not_run(
    kind, named, place, legacy, tmp_path
) -> None:
    mark = tmp_path / "was-run"
    path = write(place(kind(mark)), tmp_path / "c.pth", legacy)
    with pytest.raises(CheckpointError, match=named):
        read_checkpoint(path)
    assert not mark.exists()


def test_numbers_of_numpy_and_all_containers_come_through(tmp_path) -> None:
    value = {
        "array": np.arange(6, dtype=">f4").reshape(2, 3),
        "by column": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "scalar": np.float32(0.5),
        "rest": [1, 2.5, "é", b"\xff", None, True, (1, {2}), torch.Size([3])],
    }
    for legacy in (False, True):
        result = read_checkpoint(write(value, tmp_path / "c.pth", legacy))
        assert np.array_equal(result["array"], value["array"])
        assert np.array_equal(result["by column"], value["by column"])
        assert result["scalar"] == 0.5
        assert result["rest"] == value["rest"]


@pytest.mark.parametrize("name", ["scan", "vse_infty"])
@pytest.mark.parametrize("share", [0.0, 0.0001, 0.001, 0.02, 0.3, 0.9, 0.9999])
def test_a_file_cut_short_is_named_as_such(name, share, tmp_path) -> None:
    data = file_of(name).read_bytes()
    path = tmp_path / "cut.pth.tar"
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(
        CheckpointError, match=r"cut\.pth\.tar: (damaged|not a file of torch\.save)"
    ):
        read_checkpoint(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "an empty file"),
        (bytes(range(256)) * 20, "not a file of torch.save"),
        (b"<!DOCTYPE html><html>", "a web page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (pickle.dumps({"model": []}), "a plain pickle"),
        (b"PK\x03\x04" + bytes(range(256)), "damaged or cut short"),
    ],
)
def test_another_kind_of_file_is_named(data, message, tmp_path) -> None:
    (tmp_path / "f.pth").write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(tmp_path / "f.pth")


def test_a_missing_file_and_a_folder_are_named(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        read_checkpoint(tmp_path / "nothing.pth")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_checkpoint(tmp_path)


class Boaster(pickle._Pickler):
    """Claims that every storage holds 2³⁸ numbers."""

    def save_pers(self, pid) -> None:
        super().save_pers((*pid[:4], 1 << 38, *pid[5:]))


def test_a_storage_is_never_read_beyond_the_file_whatever_it_claims(tmp_path) -> None:
    path, boast = tmp_path / "c.pth", fake_pickle(Boaster)
    write({"a": torch.ones(4)}, path, pickle_module=boast)
    assert read_checkpoint(path)["a"].tolist() == [1, 1, 1, 1]
    write({"a": torch.ones(4)}, path, legacy=True, pickle_module=boast)
    with pytest.raises(CheckpointError, match=r"c\.pth: damaged"):
        read_checkpoint(path)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_tensor_larger_than_its_storage_is_refused(legacy, tmp_path) -> None:
    path = write({"a": torch.ones(1).expand(10**6, 10**6)}, tmp_path / "c.pth", legacy)
    with pytest.raises(CheckpointError, match="claims 4,000,000,000,000 bytes"):
        read_checkpoint(path)


def test_a_compressed_record_is_refused(tmp_path) -> None:
    with zipfile.ZipFile(tmp_path / "c.pth", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10**7))
    with pytest.raises(CheckpointError, match="claims 10,000,000 bytes"):
        read_checkpoint(tmp_path / "c.pth")


def test_containers_in_containers_end_somewhere(tmp_path) -> None:
    circle: list = []
    circle.append(circle)
    with pytest.raises(CheckpointError, match="more than 100 deep"):
        read_checkpoint(write(circle, tmp_path / "c.pth"))
