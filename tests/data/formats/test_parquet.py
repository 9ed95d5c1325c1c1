"""Parquet files of a few kilobytes that stand for gigabytes of text, and honest ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from counterfoil.data.formats.text_files import read_rows
from counterfoil.data.pairs import ProblemLog
from tests.conftest import thinned

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

READ = """
import resource, sys
from pathlib import Path
from counterfoil.data.pairs import ProblemLog
from counterfoil.data.formats.text_files import read_rows
resource.setrlimit(resource.RLIMIT_AS, (3 * 2**30, 3 * 2**30))
log = ProblemLog()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
rows = list(read_rows(Path(sys.argv[1]), log))
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(len(rows), (after - before) // 1024, *(p.kind for p in log.problems))
"""


def write(path: Path, columns: dict[str, object], **options: object) -> Path:
    parquet.write_table(pyarrow.table(columns), path, compression="zstd", **options)
    return path


@pytest.mark.parametrize(
    "encoding", thinned(["dictionary", "difference", "dictionary in lists"], "dictionary")
)
@pytest.mark.slow
def test_a_text_stored_once_for_many_rows_does_not_fill_the_memory(encoding, tmp_path) -> None:
    text, rows = "x" * 2**18, 3000
    captions = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * rows, pyarrow.int32()), pyarrow.array([text])
    )
    options: dict[str, object] = {}
    if encoding == "difference":
        captions = pyarrow.array([text] * 1000)  # what a writer of ours can hold
        options = {"use_dictionary": False, "column_encoding": {"caption": "DELTA_BYTE_ARRAY"}}
    columns = {"caption": captions}
    if encoding == "dictionary in lists":
        texts = [[text] * 2] * 800
        columns = {"caption": pyarrow.array(texts)}
    path = write(tmp_path / "captions.parquet", columns, **options)
    assert path.stat().st_size < 100_000
    done = subprocess.run(
        [sys.executable, "-c", READ, str(path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    count, grown, *kinds = done.stdout.split()
    assert int(count) == (800 if "lists" in encoding else len(captions)), kinds
    assert int(grown) < 250


def test_a_text_beyond_the_limit_of_a_line_is_fatal(tmp_path) -> None:
    path = write(tmp_path / "captions.parquet", {"caption": ["x" * (2**24 + 1)] * 3})
    log = ProblemLog()
    assert list(read_rows(path, log)) == []
    assert [problem.kind for problem in log.problems] == ["large-table"]


@pytest.mark.parametrize("dictionary", [True, False])
def test_rows_are_the_same_however_their_texts_are_stored(dictionary, tmp_path) -> None:
    columns = {
        "image": [f"{n}.png" for n in range(9000)],
        "caption": [["a dog", "two cats"][n % 2] if n % 7 else None for n in range(9000)],
        "tags": [["x", "y"][: n % 3] for n in range(9000)],
        "about": [{"path": "p", "size": n} for n in range(9000)],
        "data": [b"ab"] * 9000,
    }
    path = write(tmp_path / "captions.parquet", columns, use_dictionary=dictionary)
    log = ProblemLog()
    rows = list(read_rows(path, log))
    assert not log.problems
    assert [number for number, _ in rows] == list(range(1, 9001))
    for number in (0, 1, 7, 4095, 4096, 8999):
        expected = {key: values[number] for key, values in columns.items()}
        assert rows[number][1] == {**expected, "data": "b'ab'"}
