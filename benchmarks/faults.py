"""What survives which fault: the table of docs/reliability.md, with the number of tries per row.

    python benchmarks/faults.py --json faults.json
    python benchmarks/faults.py --only 'train*' 'inside a save' --tries 100 --json faults.json
    python benchmarks/faults.py --print --json faults.json

Commands run on tiny scenes in forked processes that are ended by SIGKILL at random moments, or that
work on a disk that is full, read-only, limited, late or missing a file; training runs in 1, 2 and 4
processes. After a fault a command is repeated as its help says, and its files are compared with
those of an undisturbed run by SHA-256. Every try is written to the JSON file, and a second call
continues with the tries that are missing. Mounts need root; such rows are left out without.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from math import nan
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # `tests` is beside this folder

import torch
from rich.progress import track
from tests.faults.checkpoints import try_save
from tests.faults.commands import WORKLOADS, Try, Workplace, draw_moments
from tests.faults.disks import DiskTries, can_mount
from tests.faults.processes import CASES, compare, try_death

from counterfoil.core.storage.atomic import write_atomically
from counterfoil.evaluation.report import markdown_table

TRIES = {"train": 25, "inside": 100, "": 10}
"""Tries of a row by its first word."""

DRAWS = 4
"""Draws of a moment until one hits."""

DISK_ROWS = {
    "full disk": ("train RVSE", "features", "guide", "foils", "audit", "index build", "index add"),
    "read-only folder": ("train RVSE", "features", "guide", "foils", "audit", "index add"),
    "quota": ("train RVSE", "features", "guide", "index build"),
    "late drive": ("train RVSE", "features", "guide", "foils", "audit", "index add"),
    "file vanishes": ("train RVSE", "train SelHN + NDGL", "features", "guide", "audit"),
}
LOSS_LIMIT, WEIGHT_LIMIT, DEATH_SECONDS = 1e-6, 1e-5, 30.0


@dataclass(frozen=True)
class Row:
    """One row of the table: its name, and one try, numbered, as a JSON value."""

    name: str
    attempt: Callable[[int, int, int], dict[str, Any]]
    tries: int


def rows(root: Path) -> Iterator[Row]:
    """All rows in the order of the table."""
    place = Workplace(root / "commands")

    def prepared(name: str) -> Workplace:
        for made in place.prepare([name]):
            print(f"making {made}", file=sys.stderr)
        return place

    def kill(name: str) -> Callable[[int, int, int], dict[str, Any]]:
        def attempt(number: int, tries: int, seed: int) -> dict[str, Any]:
            workload, rng = WORKLOADS[name], random.Random(f"{seed} {name} {number}")
            reference = prepared(name).reference(workload)
            for draw in range(DRAWS):  # a run may be faster than the first, and end before
                moments = draw_moments(workload, reference.ended, number, tries, rng, 0.75**draw)
                outcome = place.try_kills(workload, moments, str(number))
                if outcome.kills or outcome.problems:
                    break
            return _plain(outcome)

        return attempt

    def disk(kind: str, name: str) -> Callable[[int, int, int], dict[str, Any]]:
        def attempt(number: int, tries: int, seed: int) -> dict[str, Any]:
            rng = random.Random(f"{seed} {kind} {name} {number}")
            return _plain(DiskTries(prepared(name), WORKLOADS[name], rng).try_one(kind))

        return attempt

    def save(number: int, tries: int, seed: int) -> dict[str, Any]:
        rng = random.Random(f"{seed} save {number}")
        outcome = try_save(root / "save", rng)
        return _plain(
            outcome if outcome.kills or outcome.problems else try_save(root / "save", rng)
        )

    def processes(
        name: str, count: int, double: bool = True
    ) -> Callable[[int, int, int], dict[str, Any]]:
        def attempt(number: int, tries: int, seed: int) -> dict[str, Any]:
            try:
                difference = compare(root / "processes", name, count, double)
            except AssertionError as error:
                return {"steps": 0, "loss": nan, "weight": nan, "problems": [str(error)]}
            bad = double and (difference.loss > LOSS_LIMIT or difference.weight > WEIGHT_LIMIT)
            return {**asdict(difference), "problems": [f"differs by {difference}"] if bad else []}

        return attempt

    def death(number: int, tries: int, seed: int) -> dict[str, Any]:
        return try_death(root / "death", random.Random(f"{seed} death {number}"))

    for name in WORKLOADS:
        yield Row(name, kill(name), TRIES.get(name.split()[0], TRIES[""]))
    yield Row("inside a save", save, TRIES["inside"])
    mounts = can_mount(root / "mount")
    for kind, names in DISK_ROWS.items():
        if mounts or kind not in ("full disk", "read-only folder"):
            for name in names:
                yield Row(f"{kind}: {name}", disk(kind, name), 5)
    for name in CASES:
        for count in (2, 4):
            yield Row(f"{count} processes: {name}", processes(name, count), 1)
    for name in CASES:  # only shown: sums of several processes are rounded differently
        yield Row(f"float32, 2 processes: {name}", processes(name, 2, double=False), 1)
    yield Row("a process dies", death, TRIES[""])


def _plain(outcome: Try) -> dict[str, Any]:
    return {
        "kills": outcome.kills,
        "problems": outcome.problems,
        "remains": outcome.remains,
    }


def _place(kill: list[str], has_stages: bool) -> str:
    """The stage that a kill hit or, of a command without stages, how its moment was drawn."""
    if has_stages:
        return kill[1]
    return "before a disk operation" if kill[0].startswith("operation") else "at a time"


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """The rows in Markdown: kills and faults first, then processes."""
    commands = [["killed with SIGKILL", "tries", "kills", "same bytes after", "where they hit"]]
    disks = [["fault", "tries", "clear error", "succeeded", "same bytes after"]]
    equal = [["trained in", "updates", "largest difference of a loss", "of a weight"]]
    others = [["fault", "tries", "all ended within", "resumed with"]]
    for name, tries in results.items():
        good = sum(not one["problems"] for one in tries)
        share = f"{good} of {len(tries)}"
        if name == "a process dies":
            slowest = max(one["seconds"] for one in tries)
            counts = ", ".join(sorted({str(one["resumed_with"]) for one in tries}))
            others.append(
                [name, str(len(tries)), f"{slowest:.0f} s", f"{counts} processes: {share}"]
            )
        elif " processes: " in name:
            (one,) = tries
            equal.append([name, str(one["steps"]), f"{one['loss']:.0e}", f"{one['weight']:.0e}"])
        elif ": " in name:
            ends = Counter(kill[1] == "succeeded" for one in tries for kill in one["kills"])
            disks.append([name, str(len(tries)), str(ends[False]), str(ends[True]), share])
        else:
            kills = [kill for one in tries for kill in one["kills"]]
            aimed = name.startswith("train") or name == "inside a save"
            where = Counter(_place(kill, aimed) for kill in kills)
            text = ", ".join(f"{place} {count}" for place, count in where.most_common())
            commands.append([name, str(len(tries)), str(where.total()), share, text])
    parts = [part for part in (commands, disks, others, equal) if len(part) > 1]
    return "\n\n".join("\n".join(markdown_table(list(map(tuple, part)))) for part in parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=["*"], help="Rows; wildcards are allowed.")
    parser.add_argument("--tries", type=int, help="Tries per row (one for equal processes).")
    parser.add_argument("--seed", type=int, default=0, help="Random seed of the moments.")
    parser.add_argument("--json", type=Path, required=True, help="Results, continued if it exists.")
    parser.add_argument("--folder", type=Path, help="Working folder. Default: a temporary one.")
    parser.add_argument("--print", action="store_true", help="Only print the table of the file.")
    options = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {}
    if options.json.exists():
        results = json.loads(options.json.read_text())
    if not options.print:
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory(prefix="counterfoil-faults-") as folder:
            _try_all(options, results, options.folder or Path(folder))
    print(table(results))
    failures = [(name, one) for name, tries in results.items() for one in tries if one["problems"]]
    for name, one in failures:
        print(f"\n{name}: {one['problems'][0][-2000:]}", file=sys.stderr)
    sys.exit(bool(failures))


def _try_all(options: argparse.Namespace, results: dict[str, Any], root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for row in rows(root.resolve()):
        if not any(fnmatchcase(row.name, pattern) for pattern in options.only):
            continue
        wanted = row.tries if row.tries == 1 else options.tries or row.tries
        done = results.setdefault(row.name, [])
        for number in track(range(len(done), wanted), row.name, disable=len(done) >= wanted):
            done.append(row.attempt(number, wanted, options.seed))
            write_atomically(options.json, json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
