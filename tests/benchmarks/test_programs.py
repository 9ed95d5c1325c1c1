"""Every program in benchmarks/ can start, and some are run in their smallest form."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
PROGRAMS = sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))

SMALLEST = {
    "caption_by_caption": "--batch 4 --dim 16 --regions 4 --repeat 1 --rounds 1",
    "cross_encoder": "--images 4 --rounds 1 --layers 1 --embed 32",
    "diagnostics": "--batch 8 --embed 16 --regions 4 --repeats 1 --warmup 1",
    "epoch": "--folder {folder} --images 128 --dev 16 --embed 16 --regions 4 --dim 16 --epochs 1 "
    "--device cpu data.workers=0",
    "masking_share": "--count 20",
    "retrieval_metrics": "--images 50",
    "scene_graphs": "--count 20",
    "score_all": "--images 12 --captions 20 --dim 16 --rounds 1 --repeat 1 --loop-captions 4 "
    "--check 4 4",
    "training_scores": "--batch 4 --dim 16 --regions 4 --steps 1 --loop-steps 1 --methods all",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_finds_what_it_imports(name, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(os, "environ", os.environ.copy())
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    assert callable(module.main)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLEST)
def test_its_smallest_run_ends_well(name, tmp_path) -> None:
    options = SMALLEST[name].format(folder=tmp_path / "data").split()
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py"), *options],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()
