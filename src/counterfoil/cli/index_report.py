"""What `counterfoil index` prints: what was added, what an index has, how good its search is."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from counterfoil.cli.output import MAX_NAMED, print_json, print_line, print_table

if TYPE_CHECKING:
    from counterfoil.core.progress import Progress
    from counterfoil.data.pairs import Pairs
    from counterfoil.search import SearchIndex
    from counterfoil.search.parts import PartReport
    from counterfoil.search.query import Recall
    from counterfoil.search.update import Added


def report_part(report: PartReport, as_json: bool) -> None:
    if as_json:
        print_json(report.as_dict())
        return
    print_line(
        f"{report.folder}: {report.part} is complete, {report.images:,} images and "
        f"{report.captions:,} captions; when all parts are: the same command with --merge"
    )


def report_build(
    index: SearchIndex, added: Added, data: Pairs, queries: int, bars: Progress, as_json: bool
) -> None:
    from counterfoil.training.run_data import skipped_items

    # items that were dropped while reading the data, of any split, never reach the index
    unread = [*map(str, skipped_items(data))]
    measured = queries > 0 and all(len(items) for items in index.items.values())
    recalls = index.recall(queries, progress=bars) if measured else []
    if as_json:
        ways = [way.as_dict() for way in recalls]
        print_json({"added": vars(added), "unread": unread, "recall": ways, **index.info()})
        return
    _say_some(bars, "left out of the data", unread, "--json lists them")
    _say_some(bars, "left out of the index", added.left_out, "--json lists them")
    print_line(str(added))
    print_info(index.info())
    if recalls:
        print_recall(recalls)
    command = shlex.join(["counterfoil", "search", str(index.folder), _example(index)])
    print_line(f"search it: {command}")


def _say_some(bars: Progress, title: str, lines: Sequence[str], where: str) -> None:
    for line in lines[:MAX_NAMED]:
        bars.say(f"{title}: {line}")
    if len(lines) > MAX_NAMED:
        bars.say(f"{title}: {len(lines) - MAX_NAMED:,} more ({where})")


def _example(index: SearchIndex) -> str:
    """A caption of the index: its words are in the model's vocabulary."""
    texts = index.items["captions"]
    return (
        str(texts.about(texts.table.live_ids[:1])[0]["text"]) if len(texts) else "a dog on a beach"
    )


def print_info(tree: dict[str, Any]) -> None:
    print_table(
        [
            ["index", str(tree["folder"])],
            ["model", f"{tree['model']['name']} ({tree['model']['sha256'][:12]})"],
            ["images", f"{tree['images']:,}"],
            ["captions", f"{tree['captions']:,}"],
            ["first stage", f"{tree['backend']}, {_first_stage(tree)}, {tree['dtype']}"],
            ["shortlist", f"{tree['shortlist']:,}"],
            ["size", f"{tree['bytes'] / 1e6:,.1f} MB"],
        ]
    )


def _first_stage(tree: dict[str, Any]) -> str:
    if "first_model" not in tree:
        return str(tree["first_stage"])
    return f"vectors of {tree['first_model']['name']} ({tree['first_model']['sha256'][:12]})"


def print_recall(recalls: list[Recall]) -> None:
    rows = [
        [
            f"{way.asked_with} → {way.target}",
            *(f"{100 * value:.1f}" for value in way.at.values()),
            f"{way.shortlist:,} of {way.items:,}",
            f"{way.queries:,}",
        ]
        for way in recalls
    ]
    header = ["", *(f"recall@{k}" for k in recalls[0].at), "shortlist", "queries"]
    print_table([header, *rows], title="two-stage search against scoring every item (%)")
