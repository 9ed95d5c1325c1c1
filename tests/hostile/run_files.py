"""Hostile runs and indexes."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from tests.data.hostile import BOMBS
from tests.hostile.corpus import Case, Content, Make, deep, device, fifo, files, sparse
from tests.hostile.model_files import BASE, Calls, archive, copied, edited, flip, replaced

CASES: list[Case] = []


def case(door: str, name: str, make: Make, phrase: str, error: str = "CheckpointError") -> None:
    CASES.append(Case(f"{door}: {name}", door, make, error, phrase))


# Runs that are resumed.


def state(name: str, content: Content, phrase: str, error: str = "CheckpointError") -> None:
    """The state of training, whose checksum is right."""

    def change(copy: Path) -> None:
        from counterfoil.core.storage.reading import digest_of

        last = (copy / "last").resolve()
        (last / "training_state.pt").unlink()
        files({"training_state.pt": content})(last)
        if (last / "training_state.pt").is_file():
            listed = f"{digest_of(last / 'training_state.pt')}  training_state.pt\n"
            (last / "training_state.sha256").write_text(listed)

    case("resume", name, copied("run", change), phrase, error)


state(
    "a state that calls",
    archive(pickle.dumps(Calls(os.system, "false"), 2)),
    "holds 'posix.system'; only tensors",
)
state(
    "a state of shared lists",
    archive(b"\x80\x02" + BOMBS["shared lists"]),
    "refused: shared containers unfold",
)
state("a state that is text", b"no state", "not a file of torch.save")
state("a state that is empty", b"", "not a file of torch.save")
state("a state that is a list", archive(pickle.dumps([], 2)), "damaged (no valid position of the")
state("a state that is a FIFO", fifo, "no checkpoint to resume from; start")
case(
    "resume",
    "a state that was changed",
    copied("run", lambda copy: flip((copy / "last").resolve() / "training_state.pt")),
    "damaged or changed since it was",
)
case(
    "resume",
    "a config that calls",
    replaced("run", "config.yaml", "a: !!python/object/apply:os.system ['false']\n"),
    "line 1: could not determine a",
    "ConfigError",
)
case(
    "resume",
    "a config of shared lists",
    replaced(
        "run",
        "config.yaml",
        "a: &a [1,1]\n"
        + "".join(
            f"{chr(98 + n)}: &{chr(98 + n)} [*{chr(97 + n)},*{chr(97 + n)}]\n" for n in range(24)
        ),
    ),
    "more than 10,000 values, aliases",
    "ConfigError",
)
case(
    "resume",
    "a config that is a FIFO",
    replaced("run", "config.yaml", fifo),
    "not a run (no config.yaml there)",
)
case(
    "resume",
    "no checkpoint",
    copied("run", lambda copy: (copy / "last").unlink()),
    "no checkpoint to resume from; start",
)

# Runs that are shown.


def shown(name: str, file_name: str, content: Content, phrase: str, error: str = "skip") -> None:
    case("runs", name, replaced("run", file_name, content), phrase, error)


shown("results 100,000 deep", "results.json", deep("["), "results: {}")
shown("results that are a FIFO", "results.json", fifo, "results: {}")
shown("results that are a device", "results.json", device, "results: {}")
shown("results that are a number", "results.json", "5", "results: {}")
shown("metrics 100,000 deep", "metrics.jsonl", deep("[") + "\n", "0 plots, []")
shown("metrics that are a FIFO", "metrics.jsonl", fifo, "0 plots, ['metrics.jsonl cannot be")
shown("metrics that are numbers", "metrics.jsonl", "5\n6\n", "0 plots, []")
shown("metrics that are no UTF-8", "metrics.jsonl", b"\xff\n", "0 plots, []")
shown("metrics of 32 GB", "metrics.jsonl", sparse(2**35), "0 plots, ['metrics.jsonl cannot be")
shown(
    "metrics with a text as loss",
    "metrics.jsonl",
    '{"kind": "step", "step": "x", "loss": "y"}\n',
    "0 plots, ['metrics.jsonl cannot be",
)
shown(
    "metrics with an epoch that is a list",
    "metrics.jsonl",
    '{"kind": "epoch", "epoch": []}\n',
    "0 plots, ['metrics.jsonl cannot be",
)

# Indexes.


def index(
    name: str, file_name: str, content: Content, phrase: str, error: str = "DataError"
) -> None:
    case("index", name, replaced("index", file_name, content), phrase, error)


def manifest(name: str, phrase: str, error: str = "DataError", /, **change: Any) -> None:
    case("index", name, edited("index", "index.json", **change), phrase, error)


index("a manifest 100,000 deep", "index.json", deep("["), "again (Invalid JSON: recursion limit")
index("a manifest that is cut", "index.json", '{"kind": "sea', "again (Invalid JSON: EOF while")
index("a manifest that is a FIFO", "index.json", fifo, "damaged, build the index again")
index("a manifest that is no UTF-8", "index.json", b"\xff", "damaged, build the index again")
manifest("another format", "written in format 99, this version", format=99)
manifest("another kind", "describes a x, expected a search", kind="x")
manifest("a generation that is a text", "again (generation: Input should be a", generation="x")
index(
    "an endless generation of vectors",
    "vectors/images.json",
    '{"generation": 1e400}',
    "hits",
    "skip",
)
manifest(
    "a backend that does not exist", "unknown search backend 'os' (known", header__backend="os"
)
manifest("a type that does not exist", "damaged (dtype: Input should be", header__dtype="object")
manifest(
    "a first stage that does not exist",
    "damaged (first_stage: Input should",
    header__first_stage="x",
)
manifest("no model", "damaged (a model without its", header__model={})
manifest("a shortlist of -1", "damaged (shortlist: Input should be", header__shortlist=-1)
EXTENT = "tables__images__segments__0__notes__extent__"
manifest("items of -1", "damaged (no valid extent)", **{f"{EXTENT}items": -1})
manifest("no items", "damaged (another extent)", **{f"{EXTENT}items": 0, f"{EXTENT}present": 0})
manifest("more items than vectors", "its manifest disagree", **{f"{EXTENT}present": 5})
manifest("vectors of 1 number", "damaged (another extent)", **{f"{EXTENT}widths": {"pooled": 1}})
manifest("vectors of -1 numbers", "damaged (no valid ext", **{f"{EXTENT}widths": {"pooled": -1}})

index(
    "vectors cut short",
    "vectors/images/segments/*/rows.bin",
    b"\0" * 7,
    "7 bytes, but 192 were written",
)
index(
    "vectors that are NaN",
    "vectors/images/segments/*/rows.bin",
    lambda path: _fill(path, "vectors/images/segments/*/rows.bin"),
    "0 hits",
    "skip",
)
index(
    "vectors that are a FIFO",
    "vectors/images/segments/*/rows.bin",
    fifo,
    "0 bytes, but 192 were written",
)
index(
    "vectors without a manifest",
    "vectors/images/manifest.json",
    b"",
    "again (Invalid JSON: EOF while",
)
index("items that are gone", "segments/captions-*/about.bin", b"", "0 bytes, but 3790 were written")
index(
    "descriptions that are noise",
    "segments/images-*/about.bin",
    lambda path: _noise(path),
    "damaged (not a description)",
)
case(
    "index",
    "a model that was changed",
    copied("index", lambda copy: flip(copy / "model" / "model.safetensors")),
    "not the model that this index was",
)
case("index", "an empty folder", files({}), "not a search index (there is no", "DataError")


def _honest_size(path: Path) -> int:
    inside = path.relative_to(next(p for p in path.parents if (p / "index.json").exists()))
    base = next(p for p in path.parents if (p.parent / BASE).is_dir()).parent / BASE
    return (base / "index" / inside).stat().st_size


def _fill(path: Path, _: str) -> None:
    path.write_bytes(np.full(_honest_size(path) // 2, np.nan, np.float16).tobytes())


def _noise(path: Path) -> None:
    path.write_bytes(b"\xff" * _honest_size(path))


def link_segments(copy: Path) -> None:
    """A commit deletes what it does not know among the segments: they must not lead elsewhere."""
    (copy / "segments").rename(copy.parent / "elsewhere")
    (copy / "segments").symlink_to(copy.parent / "elsewhere")


def rename_segment(copy: Path) -> None:
    tree = json.loads((copy / "index.json").read_text())
    tree["tables"]["images"]["segments"][0]["name"] = "../../elsewhere"
    (copy / "index.json").write_text(json.dumps(tree))


LINKED = copied("index", link_segments)
case("index", "segments behind a link", LINKED, "a link, expected a folder", "DataError")
CLIMBING = copied("index", rename_segment)
case("index", "a segment that climbs", CLIMBING, "String should match pattern", "DataError")
