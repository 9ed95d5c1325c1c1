"""The cells of the benchmark as tables, curves and a page: an overview, then a table per noise."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from counterfoil.audit.detection import METHODS, Detection
from counterfoil.core.errors import DataError
from counterfoil.core.storage.atomic import write_atomically
from counterfoil.core.storage.reading import read_text
from counterfoil.evaluation.report import Report, markdown_table
from counterfoil.plots.charts import line_chart, save_figure

RESULTS = "results.json"

ON_LABELS = "tuned on labels"
"""How the names of the methods end that read the labels of a share."""

COLUMNS = {
    "auroc": "AUROC",
    "auprc": "AUPRC",
    "f1_clean": "F1, clean share",
    "f1_labeled": "F1, labeled share",
    "f1_best": "F1, best",
}


class Cell(Report):
    """What the methods detect in one noisy split with one model.

    ``settings`` identify the cell; ``captions`` is the number of measured captions and ``wrong``
    that of the wrong ones among them.
    """

    settings: dict[str, Any]
    model: str
    split: str
    noise: str
    rate: float
    seed: int
    captions: int
    wrong: int
    seconds: float
    methods: dict[str, Detection]


def write_results(folder: Path, cells: Sequence[Cell], drawn: Sequence[Cell] = ()) -> None:
    """All cells as one JSON file, their tables as Markdown, the curves of some as pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(cell.as_dict(), ensure_ascii=False) for cell in cells)
    write_atomically(folder / RESULTS, f'{{"cells": [\n{lines}\n]}}\n')
    write_atomically(folder / "results.md", to_markdown(cells))
    for name, (title, cell) in curves(drawn).items():
        series = {method: list(score.curve) for method, score in cell.methods.items()}
        figure = line_chart(series, title, "recall (%)", "precision (%)")
        save_figure(figure, folder / f"{name}.svg")


def settings_digest(settings: dict[str, Any]) -> str:
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


Group = tuple[str, bool, str, float, str, str]


def groups(cells: Iterable[Cell]) -> dict[Group, list[Cell]]:
    """Cells by split, captions per image, noise, rate, captions and donors: a table each."""
    result: dict[Group, list[Cell]] = {}
    for cell in cells:
        one = bool(cell.settings.get("one_caption"))
        source = str(cell.settings.get("donors", ""))
        key = (cell.split, one, cell.noise, cell.rate, str(cell.settings.get("captions")), source)
        result.setdefault(key, []).append(cell)
    return result


def table_title(group: Group, cells: Sequence[Cell]) -> str:
    split, one, noise, rate, _, donors = group
    seeds = len({cell.seed for cell in cells})
    each = ", one caption per image" if one else ""
    count = f"{cells[0].wrong:,} of {cells[0].captions:,} measured captions wrong"
    runs = f"{seeds} seeds" if seeds > 1 else f"seed {cells[0].seed}"
    return f"{split}{each}: {_noise_name(noise, donors)}, {100 * rate:g} % ({count}, {runs})"


def _noise_name(noise: str, donors: str) -> str:
    return f"{noise} from {donors}" if donors else noise


def by_label(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """Cells of a table that differ by nothing but the seed, by the name of their model.

    If one model was measured with several settings, such as epochs, these are numbered.
    """
    alike: dict[str, dict[str, list[Cell]]] = {}
    for cell in cells:
        digest = settings_digest(
            {key: value for key, value in cell.settings.items() if key != "seed"}
        )
        alike.setdefault(cell.model, {}).setdefault(digest, []).append(cell)
    return {
        f"{model} ({number})" if len(parts) > 1 else model: own
        for model, parts in alike.items()
        for number, own in enumerate(parts.values(), start=1)
    }


def rows(cells: Sequence[Cell]) -> list[tuple[str, ...]]:
    """A header, and a row per model and method: means over the seeds, with their deviations."""
    table: list[tuple[str, ...]] = [("model", "method", *COLUMNS.values())]
    for model, own in by_label(cells).items():
        for method in dict.fromkeys(name for cell in own for name in cell.methods):
            each = [cell.methods[method] for cell in own if method in cell.methods]
            values = [[getattr(one, column) for one in each] for column in COLUMNS]
            table.append((model, method, *map(_mean, values)))
    return table


def _mean(values: Sequence[float]) -> str:
    mean = f"{np.mean(values):.1f}"
    return f"{mean} ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else mean


def to_markdown(cells: Sequence[Cell]) -> str:
    parts = []
    for group, own in groups(cells).items():
        parts.append(f"### {table_title(group, own)}\n")
        parts.append("\n".join(markdown_table(rows(own))) + "\n")
    return "\n".join(parts)


def overview(cells: Sequence[Cell]) -> list[tuple[str, ...]]:
    """A header, and a row per model and noise: each method's AUROC, as a mean over the seeds.

    The best is bold, apart for the methods that read labels and for those that do not.
    """
    free = [method for method in METHODS if not method.endswith(ON_LABELS)]
    labeled = [method for method in METHODS if method.endswith(ON_LABELS)]
    table = [("model", "noise", *free, *labeled)]
    for (split, one, noise, rate, _, donors), own in sorted(groups(cells).items()):
        for model, alike in by_label(own).items():
            row = []
            for methods in (free, labeled):
                means = [_mean_auroc(alike, method) for method in methods]
                best = max((mean for mean in means if mean is not None), default=None)
                row += [_marked(mean, mean == best) for mean in means]
            each = ", one caption per image" if one else ""
            kind = f"{_noise_name(noise, donors)}, {100 * rate:g} % of {split}"
            table.append((f"{model}{each}", kind, *row))
    return [table[0], *sorted(table[1:], key=lambda row: row[0])]


def _mean_auroc(cells: Sequence[Cell], method: str) -> float | None:
    """None if an older version measured these cells, without this method."""
    values = [cell.methods[method].auroc for cell in cells if method in cell.methods]
    return round(float(np.mean(values)), 1) if values else None


def _marked(mean: float | None, best: bool) -> str:
    if mean is None:
        return "–"
    return f"**{mean:.1f}**" if best else f"{mean:.1f}"


OVERVIEW, TABLES = "audit-overview", "audit-results"
"""Sections of a page: one line per setting and all pictures, and a table per setting.

Each stands between ``<!-- audit-overview -->`` and ``<!-- /audit-overview -->``, say.
"""


def fill_page(page: Path, cells: Sequence[Cell], folder: str = "") -> int:
    """Rewrite the sections that a Markdown page has; returns the number of tables.

    ``folder`` has the pictures, from the page.
    """
    if not cells:
        raise DataError("there are no stored results to write; measure some first")
    try:
        text = read_text(page)
    except OSError as error:
        raise DataError(f"{page}: cannot be read ({error.strerror})") from None
    sections = [name for name in (OVERVIEW, TABLES) if f"<!-- {name} -->" in text]
    if not sections:
        both = f"'<!-- {OVERVIEW} -->' or '<!-- {TABLES} -->'"
        raise DataError(f"{page}: expected the marks {both}, each with its end '<!-- /… -->'")
    pictures = [
        f"    ![{title}]({folder}/{name}.svg)\n"
        for name, (title, _) in curves(cells).items()
        if (page.parent / folder / f"{name}.svg").is_file()
    ]
    charts = ['??? note "Precision at each recall"\n', *pictures] if pictures else []
    bodies = {
        OVERVIEW: "\n".join([*markdown_table(overview(cells)), "", *charts]),
        TABLES: to_markdown(cells),
    }
    for name in sections:
        text = _replaced(text, name, bodies[name], page)
    write_atomically(page, text)
    return (OVERVIEW in sections) + (len(groups(cells)) if TABLES in sections else 0)


def _replaced(text: str, name: str, body: str, page: Path) -> str:
    """The page with another body of one section."""
    before, start, rest = text.partition(f"<!-- {name} -->")
    _, end, after = rest.partition(f"<!-- /{name} -->")
    if not end:
        raise DataError(f"{page}: expected the mark '<!-- /{name} -->' after '{start}'")
    return f"{before}{start}\n\n{body}\n{end}{after}"


def curves(cells: Sequence[Cell]) -> dict[str, tuple[str, Cell]]:
    """Precision over recall: the name and title of each chart, and its cell.

    There is one for each model and kind of noise, at the highest rate and of the first seed.
    """
    chosen: dict[tuple[Any, ...], tuple[str, str, Cell]] = {}
    for (split, one, noise, rate, captions, donors), own in groups(cells).items():
        for label, alike in by_label(own).items():
            cell = min(alike, key=lambda each: each.seed)
            key = (split, one, noise, captions, label, donors)
            if key in chosen and chosen[key][2].rate >= rate:
                continue
            slug = re.sub(r"[^\w.-]+", "-", label).strip("-")
            each = "-one" if one else ""
            source = f"-from-{donors}" if donors else ""
            name = f"{split}{each}-{noise}{source}-{100 * rate:g}-{cell.captions}-{slug}"
            title = (
                f"{label}: {_noise_name(noise, donors)}, {100 * rate:g} % of {split}, "
                f"{cell.captions:,} captions, seed {cell.seed}"
            )
            chosen[key] = (name, title, cell)
    return {name: (title, cell) for name, title, cell in chosen.values()}
