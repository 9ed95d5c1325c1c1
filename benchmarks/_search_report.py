"""The page of `search_scale.py`: its tables, and what 100 million images take by arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from counterfoil.evaluation.report import markdown_table

MANY = 100_000_000
CORES, MEMORY_GB, LATENCY_S = 16, 64, 0.1
"""A machine of the plan, and the time that the first stage of a query may take."""

DOLLARS = 0.05
"""Of a core for an hour, an assumption."""

FRAGMENTS, WIDTH = 36, 384
"""Of an image in `photos-naaf`."""

IMAGES_PER_S = 8000 / 435
"""`counterfoil features` in docs/flickr8k-walkthrough.md: 8,000 images in 7 min 15 s."""

WORDS = {
    "half": "every vector, half precision (`--dtype float16`)",
    "int8": "every vector, 8 bits (`--dtype int8`)",
    "binary": "every vector, 1 bit; 800 again with 8 bits (`--dtype binary`)",
    "faiss ivfpq": "FAISS IVF-PQ, 800 again with 8 bits",
    "faiss hnsw": "FAISS HNSW, 800 again in half precision",
}

INTRO = """\
# Search at scale

How many of the right results each way of storing and searching vectors finds, how fast, and in how
much space. [Search](../search.md) explains the options.

```sh
counterfoil index photos-naaf flickr8k/ --split test --first-stage fitted --out flickr8k-test
python benchmarks/search_scale.py --index flickr8k-test --folder scale --minutes 150 \\
    --page docs/results/search.md
```

**Data.** The images and captions are synthetic, made from real ones: the fragments of the 1,000
test images of Flickr8k and of their 5,000 captions, as `photos-naaf` encodes them. A new item draws
three quarters of its fragments from one real item and the rest from another; each is moved by a
random vector of 0.3 of its length. Queries are real captions (for images) and real images (for
captions), {queries} of each.
"""

FIRST = """
## Which vectors

{items:,} items, 20 queries, a shortlist of {shortlist}. The columns give the share of the ten best
items by the matcher's own score, and by MaxSim, that the shortlist has. The backend is `exact`.
"""

SCALE = """
## How to store and search them

Fitted vectors of {dim} numbers, a shortlist of {shortlist}, one query at a time, two cores.
Recall@10 is the share of the ten best of comparing all vectors in float32 that are the first ten
of the shortlist. The forms take turns, {rounds} rounds of all queries; the fastest round counts.
Bytes are those of the first stage on disk, per vector. "×" is the speed relative to half precision
in the same run. "Memory" leaves out mapped files.
"""

PLAN = """
## 100 million images

By arithmetic, from the largest size measured above, for machines of {cores} cores and {memory} GB,
a first stage of at most {latency:.1f} s, and {dollars} $ per core and hour (an assumption). The
time of a scan, and of an inverted file, is taken as proportional to the number of vectors and
inverse to that of cores; that of HNSW as constant.
"""

SECOND = """
The second stage reads the fragments of the shortlist from disk. {fragments} fragments of {width}
numbers take {half:,} bytes per image in half precision, {half_tb:.2f} TB for 100 million images,
and {int8_tb:.2f} TB in 8 bits. A shortlist of 200 is {shortlist_mb:.1f} MB of them in 8 bits.

Extracting features comes before all this. At {rate:.1f} images per second on two cores
([walkthrough](../flickr8k-walkthrough.md)), 100 million photos take {hours:,.0f} core hours, or
{dollars:,.0f} $.
"""


def write_page(path: Path, steps: dict[str, Any], settings: dict[str, Any]) -> None:
    """Write the report of the steps that are finished."""
    lines = [INTRO.format(**settings)]
    if "first stages" in steps:
        lines += [FIRST.format(**settings), *_first_stages(steps["first stages"])]
    rows = _measured(steps)
    if rows:
        dim = next(step["dim"] for name, step in steps.items() if name.startswith("truth"))
        settings = settings | {"dim": dim}
        loads = [one["load"] for ways in rows.values() for one in ways.values() if "load" in one]
        lines += [SCALE.format(**settings), *_scale(rows)]
        if loads:
            lines.append(f"\nLoad average during the fastest rounds: at most {max(loads):.1f}.")
        plan = PLAN.format(cores=CORES, memory=MEMORY_GB, latency=LATENCY_S, dollars=DOLLARS)
        lines += [plan, *_plan(rows, dim)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def _first_stages(ways: dict[str, Any]) -> list[str]:
    head = ("first stage", "bytes per image", "ms per query")
    columns = [(way, truth) for way in ways for truth in ("matcher", "maxsim")]
    rows = [head + tuple(f"{way} query, {truth} %" for way, truth in columns)]
    for stage, row in next(iter(ways.values())).items():
        values = [f"{100 * ways[way][stage][truth]:.1f}" for way, truth in columns]
        rows.append((stage, f"{row['bytes']:,.0f}", f"{row['ms']:.1f}", *values))
    return markdown_table(rows)


def _measured(steps: dict[str, Any]) -> dict[tuple[int, str], dict[str, Any]]:
    """By size and form, the rounds and builds of each direction."""
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    for name, result in steps.items():
        kind, _, rest = name.partition(" ")
        if kind != "rounds":
            continue
        way, count = rest.split()
        for form, numbers in result.items():
            built = steps[f"build {form} {way} {count}"]
            row = rows.setdefault((int(count), form), {})
            half = result.get("half", {}).get("mean_ms")
            row[way] = built | numbers | {"speed": half and half / numbers["mean_ms"]}
    return dict(sorted(rows.items(), key=lambda entry: entry[0][0]))


def _scale(rows: dict[tuple[int, str], dict[str, Any]]) -> list[str]:
    head = ("vectors", "form", "text recall@10", "image recall@10", "bytes", "queries per s", "×")
    table = [(*head, "p95 ms", "CPU ms", "memory MB", "build s")]
    for (count, form), ways in rows.items():
        one = ways.get("text") or ways["image"]
        recalls = [f"{ways[w]['recall']:.3f}" if w in ways else "–" for w in ("text", "image")]
        numbers = (
            f"{one['bytes'] / count:,.0f}",
            f"{1000 / one['mean_ms']:,.1f}",
            f"{one['speed']:.1f}" if one["speed"] else "–",
            f"{one['p95_ms']:,.1f}",
            f"{one['cpu_ms']:,.1f}" if "cpu_ms" in one else "–",
            f"{one['anonymous_mb']:,.0f}",
            f"{one['build_s']:,.0f}",
        )
        table.append((f"{count:,}", WORDS[form], *recalls, *numbers))
    return markdown_table(table)


def _plan(rows: dict[tuple[int, str], dict[str, Any]], dim: int) -> list[str]:
    """What each form takes for `MANY` images."""
    head = ("form", "memory GB", "s per query, two cores", "machines", "s per query on these")
    table = [(*head, "$ per hour", "core hours to build")]
    largest = {form: (count, ways) for (count, form), ways in rows.items()}
    for form, (count, ways) in largest.items():
        one = ways.get("text") or ways["image"]
        per_vector = _resident_bytes(form, dim)
        gigabytes = MANY * per_vector / 1e9
        seconds = one["mean_ms"] / 1000 * MANY / count
        on_machine = seconds * 2 / CORES
        machines = max(-(-gigabytes // (0.8 * MEMORY_GB)), -(-on_machine // LATENCY_S), 1)
        if form == "faiss hnsw":  # its steps grow with the logarithm of the items
            seconds, on_machine = one["mean_ms"] / 1000, one["mean_ms"] / 1000
            machines = max(-(-gigabytes // (0.8 * MEMORY_GB)), 1)
        building = one["build_s"] * 2 / 3600 * MANY / count
        table.append(
            (
                f"{WORDS[form]}, from {count:,}",
                f"{gigabytes:,.0f}",
                f"{seconds:.2f}",
                f"{machines:.0f}",
                f"{on_machine / (1 if form == 'faiss hnsw' else machines):.2f}",
                f"{machines * CORES * DOLLARS:.2f}",
                f"{building:,.0f}",
            )
        )
    numbers, hours = FRAGMENTS * WIDTH, MANY / IMAGES_PER_S * 2 / 3600
    text = SECOND.format(
        fragments=FRAGMENTS,
        width=WIDTH,
        half=2 * numbers,
        half_tb=2 * numbers * MANY / 1e12,
        int8_tb=numbers * MANY / 1e12,
        shortlist_mb=200 * numbers / 1e6,
        rate=IMAGES_PER_S,
        hours=hours,
        dollars=hours * DOLLARS,
    )
    return [*markdown_table(table), text.rstrip()]


def _resident_bytes(form: str, dim: int) -> int:
    """Bytes per vector that queries read all the time, with the ids of the index.

    The vectors beside signs and beside FAISS's codes are read for 800 candidates only, and may stay
    on disk.
    """
    own = {
        "half": 2 * dim,
        "int8": dim + 4,
        "binary": dim // 8 + 4,
        "faiss ivfpq": 32 + 8,  # a code and an id of FAISS
        "faiss hnsw": 2 * dim + 4 * 64,  # 64 links on the lowest level
    }
    return own[form] + 9  # the id, and whether it is deleted
