"""Write stored tables into a page, between marks that name them.

    python reproduction/words/page.py docs/results/which-word docs/results/which-word.md

A mark ``<!-- table: NAME -->`` … ``<!-- /table -->`` gets the table of NAME.json. Without that
file, the text between the marks stays as it is. `alarms.svg` beside the tables draws the rates of
false alarms, nominal and actual.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from counterfoil.evaluation.report import markdown_table
from counterfoil.evaluation.words.methods import MethodTable
from counterfoil.plots.charts import line_chart, save_figure

MARK = re.compile(r"(<!-- table: ([a-z-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)


def table(path: Path) -> str:
    """The Markdown of a stored table of methods, or of rows."""
    text = path.read_text(encoding="utf-8")
    stored = json.loads(text)
    if isinstance(stored, dict):
        return MethodTable.from_json(text).to_markdown()
    return "\n".join([*markdown_table([tuple(row) for row in stored]), ""])


def draw_alarms(folder: Path) -> None:
    """A line for each table of false alarms, and the line on which a rate is what it says."""
    series: dict[str, list[tuple[float, float]]] = {}
    for path in sorted(folder.glob("alarms-*.json")):
        (_, captions, words, *_), *rows = json.loads(path.read_text(encoding="utf-8"))
        data = path.stem.partition("-")[2]
        for column, name in ((1, captions), (2, words)):
            series[f"{data}: {name}"] = [(float(row[0]), float(row[column])) for row in rows]
    if series:
        nominal = [x for x, _ in next(iter(series.values()))]
        series["nominal = actual"] = [(x, x) for x in nominal]
        title = "False alarms on test, with thresholds from dev"
        figure = line_chart(series, title, "nominal rate, %", "actual rate, %")
        save_figure(figure, folder / "alarms.svg")


def main(folder: Path, page: Path) -> None:
    def filled(match: re.Match[str]) -> str:
        path = folder / f"{match[2]}.json"
        return f"{match[1]}{table(path)}{match[3]}" if path.is_file() else match[0]

    draw_alarms(folder)
    page.write_text(MARK.sub(filled, page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
