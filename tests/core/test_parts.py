"""The folder of a part: continued, overwritten, and usable after a kill at any step."""

from __future__ import annotations

from pathlib import Path

import pytest

from counterfoil.core import parts
from counterfoil.core.errors import DataError
from counterfoil.core.parts import MANIFEST, Part, begun_part

PART, IDENTITY = Part(1, 2), {"data set": "a"}


def begin(target: Path, *, overwrite: bool = False) -> Path:
    with begun_part(PART, target, "index", IDENTITY, overwrite=overwrite) as folder:
        return folder


def test_a_part_killed_in_its_first_write_is_begun_again(tmp_path) -> None:
    folder = PART.folder(tmp_path / "out")
    folder.mkdir(parents=True)
    (folder / f".{MANIFEST}.0a1b2c3d").write_text('{"kind": "ind')
    begin(tmp_path / "out")
    assert (folder / MANIFEST).is_file()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_of_something_else_is_refused(tmp_path, overwrite: bool) -> None:
    folder = PART.folder(tmp_path / "out")
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match="not empty and not a part"):
        begin(tmp_path / "out", overwrite=overwrite)
    assert (folder / "notes.txt").read_text() == "mine"


def test_a_damaged_manifest_is_overwritten_on_request(tmp_path) -> None:
    folder = begin(tmp_path / "out")
    (folder / MANIFEST).write_text("{")
    (folder / "data.bin").write_bytes(b"old")
    with pytest.raises(DataError, match=r"part\.json: damaged"):
        begin(tmp_path / "out")
    begin(tmp_path / "out", overwrite=True)
    assert not (folder / "data.bin").exists()
    begin(tmp_path / "out")


def test_a_kill_while_a_part_is_cleared_leaves_a_part(tmp_path, monkeypatch) -> None:
    class Killed(BaseException):
        pass

    def kill(path: Path) -> None:
        raise Killed

    folder = begin(tmp_path / "out")
    for name in ("a", "z"):
        (folder / name).mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(parts.shutil, "rmtree", kill)
        with pytest.raises(Killed):
            begin(tmp_path / "out", overwrite=True)
    assert (folder / MANIFEST).is_file()
    begin(tmp_path / "out", overwrite=True)
    assert not (folder / "a").exists()
    assert not (folder / "z").exists()
