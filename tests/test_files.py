"""Files and folders appear whole, with the rights of the user's umask, and stay after a crash."""

from __future__ import annotations

import ast
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from counterfoil.data.staging import staged_folder
from counterfoil.files import atomic_folder, put_in_place, replace_folder, write_atomically

SOURCE = Path(__file__).parents[1] / "src" / "counterfoil"


@pytest.fixture(params=[0o022, 0o002, 0o077])
def umask(request) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_written_files_have_the_rights_that_the_umask_leaves(tmp_path, umask) -> None:
    write_atomically(tmp_path / "a" / "file", "text")
    write_atomically(tmp_path / "a" / "file", "again")
    assert mode(tmp_path / "a" / "file") == 0o666 & ~umask
    assert mode(tmp_path / "a") == 0o777 & ~umask


def test_written_folders_have_the_rights_that_the_umask_leaves(tmp_path, umask) -> None:
    for _ in range(2):  # new, then in the place of an older one
        with atomic_folder(tmp_path / "model") as folder:
            (folder / "file").write_text("text")
        with staged_folder(tmp_path / "data", overwrite=True) as folder:
            (folder / "file").write_text("text")
    for name in ("model", "data"):
        assert mode(tmp_path / name) == 0o777 & ~umask
        assert mode(tmp_path / name / "file") == 0o666 & ~umask


def test_the_name_of_a_written_file_is_on_the_disk_too(tmp_path, monkeypatch) -> None:
    synced: list[Path] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write_atomically(tmp_path / "file", "text")
    assert synced[-1] == tmp_path
    with atomic_folder(tmp_path / "folder") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_text("text")
    inner = folder / "inner"
    assert {folder, inner, inner / "file"} <= set(synced)
    assert synced[-1] == tmp_path
    with staged_folder(tmp_path / "data", overwrite=False) as folder:
        (folder / "file").write_text("text")
    assert synced[-1] == tmp_path
    assert folder in synced


def test_an_interrupted_swap_does_not_cost_the_older_folder(tmp_path, monkeypatch) -> None:
    """A signal may come between the two renames."""
    old, new = tmp_path / "data", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "file").write_text(folder.name)
    real = os.replace

    def replace(source: Path, target: Path) -> None:
        if source == new:
            raise SystemExit(143)
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(SystemExit):
        replace_folder(new, old)
    assert (old / "file").read_text() == "data"
    monkeypatch.undo()
    replace_folder(new, old)
    assert (old / "file").read_text() == "new"
    assert list(tmp_path.iterdir()) == [old]


def test_a_link_is_put_in_place(tmp_path) -> None:
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "new").symlink_to("b")
    put_in_place(tmp_path / "new", tmp_path / "link")
    assert os.readlink(tmp_path / "link") == "b"


def test_nothing_but_this_module_renames() -> None:
    """Whoever renames by itself forgets to put the new name on the disk."""
    for path in SOURCE.rglob("*.py"):
        if path == SOURCE / "files.py":
            continue
        text = path.read_text(encoding="utf-8")
        if not any(word in text for word in ("os.replace", "rename", "shutil.move")):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                by = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
                name = node.func.attr
                moves = (by, name) in (("os", "replace"), ("os", "rename"), ("shutil", "move"))
                assert not moves, f"{path}:{node.lineno}"
                assert name != "rename", f"{path}:{node.lineno}"
