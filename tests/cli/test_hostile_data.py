"""A data set is data: whatever its files hold, no command runs it or dies of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

import counterfoil as cf
from tests.data.hostile import forged_pointer, marker_call, write_hostile_scan
from tests.data.tiny import write_scan

COMMANDS = """
import sys
from typer.testing import CliRunner
from counterfoil.cli import app
model, out, *folders = sys.argv[1:]
for data in folders:
    for arguments in (
        ["data", "inspect", data],
        ["train", f"data.source={data}", "data.min_count=1", "--out", out + "/run"],
        ["features", data, "--backbone", "segments", "--out", out + "/features"],
        ["evaluate", model, "--data", data],
    ):
        done = CliRunner().invoke(app, arguments)
        print(arguments[0], done.exit_code, repr(done.exception), flush=True)
"""


@pytest.mark.slow
def test_a_data_set_with_a_hostile_pickle_ends_every_command_with_an_error(tmp_path) -> None:
    for split in ("train", "dev", "test"):
        write_scan(tmp_path / "honest", split, 2)
    model = cf.create("vse-fc", cf.load_pairs(tmp_path / "honest"), embed_size=8)
    cf.save_pretrained(model, tmp_path / "model")
    payloads = {
        "pointer": forged_pointer("numpy.core"),
        "pointer-numpy-2": forged_pointer("numpy._core"),
        "call": marker_call(tmp_path / "marker"),
    }
    for name, payload in payloads.items():
        write_hostile_scan(tmp_path / name, payload)
    arguments = [str(tmp_path / name) for name in ("model", "out", *payloads)]
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, *arguments], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{done.returncode} {done.stdout} {done.stderr}"
    assert not (tmp_path / "marker").exists()
    lines = done.stdout.splitlines()
    verbs = ["data", "train", "features", "evaluate"]
    assert [line.split()[0] for line in lines] == verbs * len(payloads)
    for line in lines:
        inspected = line.startswith("data 3 ")
        assert inspected or ("DataError" in line and "unsafe-pickle" in line), line
