"""The same training in 1, 2 and 4 processes, and processes of a run that die."""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from counterfoil.core.config import build_config
from counterfoil.core.errors import DataError
from counterfoil.core.storage.locks import LOCK
from counterfoil.data.batches import collate
from counterfoil.data.pairs import Pairs
from counterfoil.models import create_model
from counterfoil.models.store import save_pretrained
from counterfoil.objectives import objectives
from counterfoil.training.guides.build import build_guide
from counterfoil.training.trainer import Trainer
from tests.conftest import make_split
from tests.faults.children import STAGES, Child, Ended, Moment, import_all, import_as, stage_owner
from tests.faults.commands import EMBEDDING, FAST, SCENES, SMALL

BATCH, IMAGES, STEPS = 7, 48, 50
"""An odd batch, so that shares differ."""

FOILS = {"hardest": 1}
UNITER = {
    "name": "uniter-small",
    "text": {"dropout": 0.0},
    "image": {"dropout": 0.0},
    "matcher": {"layers": 1, "heads": 2, "dropout": 0.0},
}


def _uniter(extras: Sequence[str]) -> dict[str, Any]:
    return {**UNITER, "matcher": {**UNITER["matcher"], "extras": list(extras)}}


def _model(name: str, **parts: Any) -> dict[str, Any]:
    return {"name": name, **parts}


@dataclass(frozen=True)
class Case:
    """One objective with a model that it can train; ``captions`` as in data.captions."""

    objective: Mapping[str, Any]
    model: Mapping[str, Any]
    captions: str = "all"


def _plain(name: str) -> Case:
    return Case({name: {}}, _model("vse-fc"))


SMALL_TAGS = {"masks": 2, "samples": 3, "kept": 2, "mlm": 0.5, "rank": 0.5}
TAGS_DC = {**SMALL_TAGS, "discrimination": 0.5, "correction": 0.5}

CASES = {
    **{name: _plain(name) for name in objectives if not objectives[name].requires},
    "alignment": Case({"alignment": {}}, UNITER),
    "alignment, sampled negatives": Case({"alignment": {"kept": 2}}, UNITER),
    "aoq": Case({"aoq": {"first": "first", "candidates": 10}}, _model("vse-fc")),
    "captioning": Case(
        {"hardest": 1, "captioning": {"hidden": 8, "word_dim": 8, "dropout": 0.0}},
        _model("vse-fc"),
    ),
    "ce-clip": Case({"ce-clip": {}}, _model("vse-fc")),
    "cfm": Case({"hardest": 1, "cfm": {}}, _model("scan-t2i")),
    "foils": Case({"hardest": 1, "foils": {"count": 2}}, _model("vse-fc")),
    "fsc-clip": Case({"fsc-clip": {}}, _model("vse-fc")),
    "hard-candidates": Case({"hard-candidates": {"kept": 2}}, UNITER),
    "hard-candidates, 5 anchors": Case({"hard-candidates": {"kept": 2, "anchors": 5}}, UNITER),
    "hrem-graph": Case(
        {"hardest": 1, "hrem-graph": {"loss": "vse", "warmup": 0, "dropout": 0.0}}, _model("hrem")
    ),
    "lseh": Case({"lseh": {"dim": 8}}, _model("vse-fc")),
    "mlm": Case({"alignment": {}, "mlm": {}}, _uniter(["mlm"])),
    "mmd": Case({"hardest": 1, "mmd": 0.5}, _model("vse-fc")),
    "ncr": Case({"ncr": {"warmup_epochs": 1}}, _model("vse-fc", ensemble_size=2)),
    "ndgl": Case({"selhn": {}, "ndgl": {"guide": "guide"}}, _model("vse-fc")),
    "negclip": Case({"negclip": {}}, _model("vse-fc")),
    "siglip-foils": Case({"siglip-foils": {}}, _model("vse-fc")),
    "tags": Case({"hard-candidates": {"kept": 2}, "tags": SMALL_TAGS}, _uniter(["mlm"])),
    "tags, 5 anchors": Case(
        {"alignment": {}, "tags": {**SMALL_TAGS, "anchors": 5}}, _uniter(["mlm"])
    ),
    "tags-dc": Case(
        {"alignment": {}, "tags-dc": TAGS_DC}, _uniter(["mlm", "discrimination", "correction"])
    ),
    "triplet-clip": Case({"triplet-clip": {"images": "first"}}, _model("vse-fc")),
    "uniformity": Case(
        {"hardest": {"reduction": "mean"}, "mmd": 0.5, "uniformity": 0.5},
        _model("dive", image={"head_dim": 8}, text={"head_dim": 8}),
        "grouped",
    ),
    "vse-c": Case({"vse-c": {}}, _model("vse-fc")),
    # models whose batch statistics are over all processes
    "RVSE (MLP), batch norm": Case({"selhn": {}}, _model("rvse-mlp")),
    "VSE∞, batch norm": Case({"hardest": {}}, _model("vse-infty")),
    "VSE∞, batch norm of padding": Case(
        {"hardest": {}}, _model("vse-infty", image={"form": "reference"})
    ),
    "VSRN, batch norm": Case({"hardest": {}}, _model("vsrn", image={"final_norm": True})),
    "SGR, batch norm": Case({"hardest": {}}, _model("sgr", matcher={"sim_dim": 8})),
    "SAF, batch norm": Case({"hardest": {}}, _model("saf", matcher={"sim_dim": 8})),
    "CHAN, attention to padding": Case(
        {"hardest": {}}, _model("chan", image={"name": "self-attention", "form": "reference"})
    ),
    "NAAF": Case({"hardest": {}}, _model("naaf")),
}


def train_case(folder: Path, name: str, double: bool) -> None:
    """Train a case as one of however many processes; the first writes losses and weights.

    With ``double``, in double precision: what differs then is not due to rounding.
    """
    case = CASES[name]
    rank = dist.get_rank() if dist.is_initialized() else 0
    data = folder / f"data-{rank}"
    data.mkdir(parents=True)
    sizes = {"train": IMAGES, "dev": 8}
    pairs = Pairs(
        "concepts", {s: make_split(data, s, n, i) for i, (s, n) in enumerate(sizes.items())}
    )
    os.chdir(folder.parent)  # where the first model and the guide are
    per_epoch = IMAGES * (1 if case.captions == "grouped" else 2) // BATCH
    config = build_config(
        {
            "model": {"embed_size": 16, **case.model},
            "data": {"min_count": 1, "captions": case.captions, "drop_regions": 0.2},
            "objective": dict(case.objective),
            "train": {"epochs": -(-STEPS // per_epoch), "batch_size": BATCH, "log_every": 1},
        }
    )
    torch.manual_seed(0)
    model = create_model(config.model, pairs.train, config.data)
    for module in model.modules():  # each process draws its own
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, (nn.MultiheadAttention, nn.GRU)):
            module.dropout = 0.0
    cache = folder.parent / f"cache-{folder.name}"
    trainer = Trainer(model, pairs, config, folder / "run", cache=cache)
    trainer._validate = lambda: (0.0, {})  # type: ignore[method-assign] # not what is compared
    if double:
        trainer.step_module.double()
        collate._common_type = lambda items: torch.float64
    trainer.run()
    if rank == 0:
        torch.save(trainer.step_module.state_dict(), folder / "weights.pt")


def save_first(folder: Path) -> None:
    """A first model, and a guide of it, that some objectives read."""
    (folder / "first-data").mkdir(parents=True)
    split = make_split(folder / "first-data", "train", IMAGES, 0)
    config = build_config({"model": {"name": "vse-fc", "embed_size": 16}, "data": {"min_count": 1}})
    torch.manual_seed(1)
    save_pretrained(create_model(config.model, split, config.data).eval(), folder / "first")
    build_guide(
        folder / "guide", [folder / "first"], split, form="matrix", device=torch.device("cpu")
    )


def in_processes(count: int, folder: Path, function: Any, *arguments: Any) -> None:
    """Call a function in forked processes joined by gloo; raises what one of them raised."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    children = []
    for rank in range(count):
        child = os.fork()
        if child:
            children.append(child)
            continue
        try:
            torch.set_num_threads(1)
            if count > 1:
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{folder}/{LOCK}-meeting",
                    rank=rank,
                    world_size=count,
                    timeout=timedelta(seconds=120),
                )
            function(folder, *arguments)
            if count > 1:
                dist.barrier()
            os._exit(0)
        except BaseException:
            (folder / f"error-{rank}.txt").write_text(traceback.format_exc())
            os._exit(1)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        texts = [path.read_text()[-3000:] for path in sorted(folder.glob("error-*.txt"))]
        raise AssertionError("\n".join(texts) or f"exit codes {codes}")


@dataclass(frozen=True)
class Difference:
    """Largest relative difference of a loss and largest difference of a weight; where that was.

    Weights are compared relative to their tensor's largest value, at least 1.
    """

    steps: int
    loss: float
    weight: float
    parameter: str


def compare(root: Path, name: str, count: int, double: bool) -> Difference:
    """Train a case in one process (once) and in several; how much they differ."""
    importlib.import_module("torch._dynamo")  # once, not by the optimizer of each process
    root = root / ("float64" if double else "float32")
    if not (root / "guide").exists():
        in_processes(1, root / "making", lambda _: save_first(root))
    one, many = root / f"{name}-1", root / f"{name}-{count}"
    if not (one / "weights.pt").exists():
        in_processes(1, one, train_case, name, double)
    in_processes(count, many, train_case, name, double)
    losses = [_losses(folder) for folder in (one, many)]
    assert len(losses[0]) == len(losses[1]) >= STEPS, [len(part) for part in losses]
    loss = max(abs(a - b) / max(1e-3, abs(a)) for a, b in zip(*losses, strict=True))
    worst, parameter = 0.0, ""
    first, second = (torch.load(folder / "weights.pt") for folder in (one, many))
    assert first.keys() == second.keys()
    for key, value in first.items():
        if not isinstance(value, Tensor):  # counters of an objective
            continue
        change = _difference(value, second[key])
        if change > worst:
            worst, parameter = change, key
    return Difference(len(losses[0]), loss, worst, parameter)


def _difference(one: Tensor, other: Tensor) -> float:
    if not one.numel():
        return 0.0
    scale = max(1.0, float(one.double().abs().max()))
    return float((one.double() - other.double()).abs().max()) / scale


def _losses(folder: Path) -> list[float]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [record["loss"] for record in records if record["kind"] == "step"]


MESSAGE = "the shelf of the third image has fallen down"
"""An error that a test raises in one process; all others must end with it."""


def start_ranks(
    work: Sequence[str] | Callable[[], None],
    folder: Path,
    count: int,
    dying: Mapping[int, Moment | str],
) -> list[Child]:
    """Start a command or a function as ``count`` processes, as torchrun does; some die or fail.

    A text instead of a moment is the stage in which a process raises an error.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(count):
        environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(count),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
        }
        death = dying.get(rank)
        fails = death if isinstance(death, str) else None

        def prepare(environment: dict[str, str] = environment, fails: str | None = fails) -> None:
            if environment["WORLD_SIZE"] != "1":
                os.environ.update(environment)
            if fails is not None:
                fail_in(fails)

        moment = death if isinstance(death, Moment) else None
        children.append(Child(work, folder / f"rank-{rank}", moment, prepare))
    return children


def _fail() -> None:
    raise DataError(MESSAGE)


def fail_in(stage: str, number: int = 1, fail: Callable[[], None] = _fail) -> None:
    """Let a call of a stage's function, counted from 0, raise an error or do what is given."""
    owner, name = stage_owner(STAGES[stage])
    real, calls = getattr(owner, name), iter(range(1_000_000))

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            fail()
        return real(*args, **kwargs)

    setattr(owner, name, call)


def wait_all(children: Sequence[Child], limit: float = 300.0) -> tuple[list[Ended], float]:
    """How they ended, and the seconds from the first end to the last."""
    ends: dict[int, float] = {}
    with ThreadPoolExecutor(len(children)) as pool:

        def wait(number: int) -> Ended:
            ended = children[number].wait(limit)
            ends[number] = time.monotonic()
            return ended

        results = list(pool.map(wait, range(len(children))))
    return results, max(ends.values()) - min(ends.values())


def train_words(root: Path, name: str, resume: bool = False) -> list[str]:
    """A tiny training run without dropout in the folder ``name``."""
    settings = [*SCENES, *SMALL, *FAST, *EMBEDDING, "model.text.dropout=0"]
    out = ["--out", f"{root}/{name}", "--cache", f"{root}/cache"]
    return ["train", "scenes/rvse-mlp", *settings, *(["--resume"] if resume else []), *out]


def train_alone(root: Path) -> None:
    """The run ``one`` in a single process, undisturbed; made once."""
    import_all()
    if not (root / "one" / "report.html").exists():
        whole = Child(train_words(root, "one"), root / "one-child").wait()
        assert whole.code == 0, whole.output
        import_as(root / "one-child")


def difference_from_alone(root: Path) -> float:
    """How much the weights of ``run`` differ from those of `train_alone`."""
    weights = [load_file(root / name / "last" / "model.safetensors") for name in ("one", "run")]
    return max(_difference(value, weights[1][key]) for key, value in weights[0].items())


def try_death(root: Path, rng: random.Random) -> dict[str, Any]:
    """One process of several dies or fails; the others end, and the run resumes with more or fewer.

    The resumed run must have the weights of an undisturbed one in a single process.
    """
    words = partial(train_words, root)
    train_alone(root)
    shutil.rmtree(root / "run", ignore_errors=True)
    count, resumed = rng.sample([2, 4], 1)[0], rng.choice([1, 2, 4])
    victim, fails = rng.randrange(count), rng.random() < 0.4
    stage = rng.choice(["step", "validation", "save"] if victim == 0 else ["step"])
    death = stage if fails else Moment(stage=stage, occurrence=2, seconds=rng.uniform(0, 0.05))
    results, seconds = wait_all(start_ranks(words("run"), root / "ranks", count, {victim: death}))
    problems = []
    cause = MESSAGE if fails else f"process {victim} of this run"
    for rank, ended in enumerate(results):
        if rank == victim and not fails:
            continue
        told = " ".join(ended.output.split())  # the console breaks lines
        if ended.code in (0, None) or cause not in told or "Traceback" in told:
            problems.append(f"process {rank} of {count}: code {ended.code}: {ended.output[-800:]}")
    if seconds > 30:
        problems.append(f"the last of {count} processes ended after {seconds:.0f} s")
    again, _ = wait_all(start_ranks(words("run", resume=True), root / "ranks", resumed, {}))
    problems += [f"not resumed: {ended.output[-800:]}" for ended in again if ended.code != 0]
    if not problems and (worst := difference_from_alone(root)) > 1e-4:  # in single precision
        problems.append(f"weights differ by {worst:.1e} after a resume")
    how = "an error" if fails else "SIGKILL"
    return {
        "kills": [(f"process {victim} of {count}: {how}", stage)],
        "seconds": seconds,
        "resumed_with": resumed,
        "problems": problems,
    }
