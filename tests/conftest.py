"""Small data that can be learned: images are sets of concepts, captions name them."""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer.testing
from _pytest.mark import ParameterSet
from _pytest.runner import runtestprotocol
from hypothesis import settings
from safetensors import safe_open

from counterfoil.core.storage.arrays import ArrayFile
from counterfoil.core.storage.locks import locked_in_turn
from counterfoil.data.fragments import FragmentTable
from counterfoil.data.pairs import Pairs, Split
from counterfoil.evaluation.words import evaluate as word_evaluation
from counterfoil.models import yardstick
from counterfoil.training import report
from counterfoil.training.plots import plots_of
from tests.two_processes import Forker, TwoProcesses

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported

# Imported libraries and collected tests are objects by the million. Python's collector goes through
# them again and again, unless it runs less often and leaves out what was there before the tests.
gc.set_threshold(20_000, 10, 10)

torch.set_num_threads(1)  # tiny tensors: threads only wait for each other

# no deadline: machines are busy, and no test is about time
settings.register_profile("fast", deadline=None, max_examples=10, derandomize=True, database=None)
settings.register_profile("thorough", settings.get_profile("fast"), max_examples=200)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))

ORACLE = Path(__file__).parent / "oracle"
CONCEPTS = [
    "dog",
    "cat",
    "horse",
    "car",
    "bus",
    "tree",
    "house",
    "ball",
    "kite",
    "boat",
    "lamp",
    "chair",
]


def thinned(cases: Iterable[Any], *first: Any) -> list[ParameterSet]:
    """All cases for `parametrize`: the first in every run of the tests, the others marked slow.

    A tuple is a case of several arguments.
    """
    cases = list(cases)
    assert set(first) <= set(cases), f"{first} are not all among {cases}"
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[] if case in first else pytest.mark.slow,
        )
        for case in cases
    ]


@dataclass(frozen=True)
class Fixture:
    """One file of reference inputs, weights and outputs."""

    tensors: dict[str, torch.Tensor]
    hyper: dict
    options: dict

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.tensors[key]

    def weights(self) -> dict[str, torch.Tensor]:
        return {key[2:]: value for key, value in self.tensors.items() if key.startswith("w.")}


def load_fixture(name: str) -> Fixture:
    with safe_open(ORACLE / f"{name}.safetensors", "pt") as file:
        meta = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return Fixture(tensors, json.loads(meta["hyper"]), json.loads(meta.get("options", "{}")))


@pytest.fixture(scope="session")
def oracle():
    return load_fixture


def assert_close(mine: torch.Tensor, stored: torch.Tensor, tolerance: float = 1e-5) -> None:
    """|mine − stored| relative to the largest stored value (at least 1 for outputs)."""
    scale = max(1.0, float(stored.abs().max()))
    error = float((mine.detach().double() - stored.double()).abs().max()) / scale
    assert error <= tolerance, f"differs by {error:.2e}"


def assert_gradient_close(
    mine: torch.Tensor, stored: torch.Tensor, tolerance: float = 1e-4
) -> None:
    error = float((mine.double() - stored.double()).abs().max() / stored.double().abs().max())
    assert error <= tolerance, f"gradient differs by {error:.2e}"


def make_split(
    folder: Path, name: str, images: int, seed: int, fragments: int = 6, dim: int = 16
) -> Split:
    table = np.random.default_rng(7).normal(size=(len(CONCEPTS), dim))
    rng = np.random.default_rng(seed)
    features = np.zeros((images, fragments, dim), dtype=np.float32)
    lengths = rng.integers(3, fragments + 1, size=images)
    captions = []
    for image in range(images):
        shown = rng.choice(len(CONCEPTS), size=3, replace=False)
        for place in range(lengths[image]):
            features[image, place] = table[shown[place % 3]] + 0.2 * rng.normal(size=dim)
        named = [[CONCEPTS[c] for c in rng.permutation(shown)] for _ in range(2)]
        captions.append([f"a {a} and a {b} near the {c}" for a, b, c in named])
    np.save(folder / f"{name}_ims.npy", features)
    corners = np.random.default_rng(seed + 1000).random((2, images, fragments, 2))
    boxes = np.concatenate([corners.min(0), corners.max(0)], axis=-1).astype(np.float32)
    np.save(folder / f"{name}_ims_bbx.npy", boxes)
    table_of = FragmentTable(
        ArrayFile(folder / f"{name}_ims.npy"),
        np.arange(images),
        lengths.astype(np.int64),
        ArrayFile(folder / f"{name}_ims_bbx.npy"),
    )
    ids = [f"{name}-{i}" for i in range(images)]
    return Split(name=name, ids=ids, captions=captions, fragments=table_of)


@pytest.fixture(scope="session")
def concepts(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    folder = tmp_path_factory.mktemp("concepts")
    sizes = {"train": 96, "dev": 32, "test": 32}
    return Pairs(
        "concepts",
        {name: make_split(folder, name, n, seed) for seed, (name, n) in enumerate(sizes.items())},
    )


def shared_folder(factory: pytest.TempPathFactory, name: str) -> Path:
    """A folder of this session that the workers of pytest-xdist have in common."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    return folder


def built_once(factory: pytest.TempPathFactory, name: str, build: Callable[[Path], object]) -> Path:
    """This worker's own copy of a folder that the first worker to ask for it fills."""
    shared = shared_folder(factory, name)
    complete = shared.with_name(f"{name}.complete")
    with locked_in_turn(shared.with_name(f"{name}.lock"), "another worker"):
        if not complete.exists():
            build(shared)
            complete.touch()
    return Path(shutil.copytree(shared, factory.mktemp(name) / "copy", symlinks=True))


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scenes and features, made once for all tests: files of a cache are never changed."""
    return shared_folder(tmp_path_factory, "cache")


LONGEST = (
    "app/test_application_page.py",
    "test_options.py",
    "hostile/test_corpus.py",
    "reproduce/test_reproduce.py",
    "cli/test_demo.py",
    "app/test_review.py",
    "core/test_hub.py",
    "training/test_trainer.py",
    "reproduce/test_columns.py",
    "reproduce/test_examples.py",
    "cli/test_cli.py",
    "kernels/triton/test_maxsim_training.py",
    "kernels/test_dispatch.py",
    "kernels/triton/test_triton_compiling.py",
    "test_api.py",
    "test_layers.py",
)
"""Files of more than ten seconds, which begin first: the last one of a run has a core idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {Path(__file__).parent / name: at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


FORKER = pytest.StashKey[Forker]()


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # see above
    if any("in_two_processes" in getattr(item, "fixturenames", ()) for item in session.items):
        importlib.import_module("torch._dynamo")  # DistributedDataParallel does: once for all
        session.config.stash[FORKER] = Forker()


REPORTED_SECONDS = 0.1


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """In a worker: a test that passes is one report to the main process, not three.

    Packing and unpacking a report takes longer than most set-ups. A report of a slow phase is sent
    for the list of the slowest, one with properties for `tests/cpu_time.py`.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for phase in runtestprotocol(item, log=False, nextitem=nextitem):
        quick = phase.passed and phase.duration < REPORTED_SECONDS and not phase.user_properties
        if phase.when == "call" or not quick:
            item.ihook.pytest_runtest_logreport(report=phase)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-scores", action="store_true", help="see tests/models/test_same_scores"
    )


@pytest.fixture(scope="session")
def in_two_processes(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[TwoProcesses]:
    """Runs a function of a module in two joined processes: started once, torch is slow to load."""
    joined = TwoProcesses(tmp_path_factory.mktemp("processes"), pytestconfig.stash[FORKER])
    yield joined
    joined.stop()


def pytest_unconfigure(config: pytest.Config) -> None:
    if (forker := config.stash.get(FORKER, None)) is not None:
        forker.close()


@pytest.fixture(scope="session", autouse=True)
def cheap_runs() -> Iterator[None]:
    """Runs draw no charts and explain few pairs, and nothing is flushed to the disk.

    All charts of a tiny run take four times as long as its training, and to explain 50 pairs for
    its yardstick, or the words of 200 captions, takes longer, too. Typer takes 0.1 s to build the
    commands: they are built once. Tests of durability replace `os.fsync` or watch another process.
    `torch.manual_seed` formats three stack traces, one for each kind of device that is absent.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "plots_of", lambda records, split: {})
        command = functools.cache(typer.testing._get_command)
        patch.setattr(typer.testing, "_get_command", command)
        patch.setattr(yardstick, "EXPLAINED", 2)
        patch.setattr(word_evaluation, "CHOICE_CAPTIONS", 4)
        patch.setattr(os, "fsync", lambda descriptor: None)
        if not torch.cuda.is_available():
            for devices in (torch.cuda, torch.xpu, torch.mtia):
                patch.setattr(devices, "manual_seed_all", lambda seed: None)
        yield


@contextmanager
def all_charts() -> Iterator[None]:
    """Within it, a run draws every chart."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "plots_of", plots_of)
        yield
