"""Files and folders appear whole, with the rights of the user's umask, and stay after a crash."""

from __future__ import annotations

import ast
import errno
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from counterfoil.core.errors import BusyError, DataError
from counterfoil.core.storage.atomic import (
    atomic_folder,
    check_folder_target,
    file_obstacle,
    home_folder,
    put_in_place,
    remove_unfinished,
    replace_folder,
    staged_folder,
    write_atomically,
)
from tests.special import SPECIAL, make_special, within
from tests.unprivileged import open_folder, run_without_write_permission

SOURCE = Path(__file__).parents[3] / "src" / "counterfoil"


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


@pytest.mark.parametrize("kind", [*SPECIAL, "folder"])
def test_only_a_regular_file_is_replaced(kind, tmp_path) -> None:
    path = make_special(kind, tmp_path / "a.json")
    before = sorted((one.name, one.lstat().st_mode) for one in tmp_path.iterdir())
    with pytest.raises(OSError, match="name a file to write to") as error:
        within(20, lambda: write_atomically(path, "{}"))
    assert error.value.filename == str(path)
    assert sorted((one.name, one.lstat().st_mode) for one in tmp_path.iterdir()) == before


def test_a_path_that_cannot_be_written_is_known_before_it_is(tmp_path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for path, reason in (
        (tmp_path, "is a folder"),
        (tmp_path / "file" / "a.json", "file is not a folder"),
        (tmp_path / "link" / "deep" / "a.json", "link is not a folder"),
    ):
        assert reason in (file_obstacle(path) or "")
        with pytest.raises(OSError):  # noqa: PT011 (its text is the system's)
            write_atomically(path, "{}")
        with pytest.raises(DataError, match=r"not a folder|not empty"):
            check_folder_target(path, overwrite=False)
    for path in (tmp_path / "file", tmp_path / "new" / "deep" / "a.json"):
        assert file_obstacle(path) is None
        write_atomically(path, "{}")


def test_a_folder_without_write_permission_is_known_before_the_work() -> None:
    imports = "from counterfoil.core.storage.atomic import check_folder_target, file_obstacle"
    imports += "\nfrom counterfoil.core.errors import DataError"
    body = """
print(file_obstacle(folder / "new" / "a.json"))
try:
    check_folder_target(folder / "data", overwrite=False)
except DataError as error:
    print(error)
print(file_obstacle(folder / "closed" / "a.json"))
"""
    with open_folder() as folder:
        (folder / "closed").mkdir(mode=0)
        lines = run_without_write_permission(imports, body, folder).splitlines()
        (folder / "closed").chmod(0o755)
        assert lines[0] == f"the folder {folder} is not writable; name another path"
        assert lines[1] == f"{folder / 'data'}: cannot be written: {lines[0]}"
        assert lines[2] == f"the folder {folder / 'closed'} is not writable; name another path"


@pytest.mark.parametrize("name", ["open", "fsync", "replace"])
def test_an_error_names_the_file_and_not_the_temporary_one(name, tmp_path, monkeypatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", ".a.json.0123")

    monkeypatch.setattr(Path if name == "open" else os, name, fail)
    with pytest.raises(OSError, match="No space left") as error:
        write_atomically(tmp_path / "a.json", "{}")
    assert error.value.filename == str(tmp_path / "a.json")
    assert str(error.value).endswith("a.json'")
    assert not list(tmp_path.iterdir())


def test_a_user_without_a_home_folder_has_the_current_one(tmp_path, monkeypatch) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.chdir(tmp_path)
    assert home_folder() == Path.home()
    monkeypatch.setattr(Path, "home", unknown)
    assert home_folder().resolve() == tmp_path.resolve()


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
        if path == SOURCE / "core" / "storage" / "atomic.py":
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


KILL = """
import os, signal, sys
from pathlib import Path
from counterfoil.core.storage.atomic import staged_folder
from counterfoil.core.storage.atomic import atomic_folder
real, when = os.replace, int(sys.argv[3])

def replace(source, target):
    global when
    real(source, target)
    when -= 1
    if not when:
        os.kill(os.getpid(), signal.SIGKILL)

os.replace = replace
target = Path(sys.argv[1])
staged = sys.argv[2] == "staged"
with staged_folder(target, overwrite=True) if staged else atomic_folder(target) as folder:
    (folder / "file").write_text("new")
    if when == 0:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def killed_while_replacing(target: Path, kind: str, renames: int) -> None:
    """Replace a folder in a process that is killed after so many renames."""
    command = [sys.executable, "-c", KILL, str(target), kind, str(renames)]
    assert subprocess.run(command, timeout=180, check=False).returncode == -signal.SIGKILL


@pytest.mark.parametrize("kind", ["atomic", "staged"])
@pytest.mark.parametrize(("renames", "expected"), [(0, "old"), (1, "old"), (2, "new")])
def test_the_next_write_finds_the_folder_that_a_kill_between_two_renames_moved_aside(
    tmp_path, kind, renames, expected
) -> None:
    target = tmp_path / "da*ta"  # no pattern
    target.mkdir()
    (target / "file").write_text("old")
    killed_while_replacing(target, kind, renames)
    assert target.exists() == (renames != 1)
    with (
        pytest.raises(DataError, match=r"is not empty.*--overwrite"),
        staged_folder(target, overwrite=False),
    ):
        pass
    if renames == 1:  # the first look was before the lock was taken
        assert (target / "file").read_text() == "old"
    with pytest.raises(KeyError), atomic_folder(target):
        raise KeyError  # also a write that fails puts things in order
    assert (target / "file").read_text() == expected
    assert list(tmp_path.iterdir()) == [target]
    with atomic_folder(target) as folder:
        (folder / "file").write_text("newest")
    assert (target / "file").read_text() == "newest"
    assert list(tmp_path.iterdir()) == [target]


def test_what_a_living_process_writes_and_what_only_looks_like_it_is_not_swept(tmp_path) -> None:
    target = tmp_path / "data"
    others = [tmp_path / name for name in (".data.new.backup", ".data.x.old.00000000", ".data.old")]
    for other in others:
        other.mkdir()
    (tmp_path / ".data.new.12345678").write_text("a file")
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from counterfoil.core.storage.atomic import atomic_folder\n"
        "with atomic_folder(Path(sys.argv[1])) as folder:\n"
        "    print(folder, flush=True)\n    sys.stdin.read()\n"
        "    (folder / 'file').write_text('from there')\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(target)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        new = Path(process.stdout.readline().strip())
        with pytest.raises(BusyError, match=f"process {process.pid} "), atomic_folder(target):
            pass
        assert new.is_dir()
    assert (target / "file").read_text() == "from there"
    with atomic_folder(target):
        pass
    assert {*others, target, tmp_path / ".data.new.12345678"} == set(tmp_path.iterdir())


def test_what_killed_writers_left_is_removed_and_nothing_else(tmp_path) -> None:
    for name in (".a.json.0123abcd", ".a.json.tmp", ".b.json.0123abcd", "a.json"):
        (tmp_path / name).write_text("x")
    (tmp_path / ".a.json.00000000").mkdir()
    remove_unfinished(tmp_path / "a.json")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {".a.json.tmp", ".b.json.0123abcd", "a.json", ".a.json.00000000"}
