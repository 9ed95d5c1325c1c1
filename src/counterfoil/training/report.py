"""The report of a run: one self-contained HTML page, and its plots as PNG files."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from counterfoil.core.config import RunConfig
from counterfoil.core.errors import DataError
from counterfoil.core.printable import clean, page_policy
from counterfoil.core.storage.atomic import write_atomically
from counterfoil.data.images import open_image
from counterfoil.data.pairs import Split
from counterfoil.evaluation.evaluate import Gallery, Search
from counterfoil.evaluation.report import RetrievalReport
from counterfoil.plots.charts import line_chart, save_figure, to_svg
from counterfoil.training.logs import read_metrics
from counterfoil.training.plots import Plot, plots_of, thin

STYLE = (Path(__file__).parent / "report.css").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Section:
    """A result besides retrieval: a title, sentences, a table with a header, and a chart (SVG)."""

    title: str
    sentences: Sequence[str]
    rows: Sequence[Sequence[str]] = ()
    chart: str = ""


def write_report(
    folder: Path,
    config: RunConfig,
    report: RetrievalReport,
    split: Split,
    gallery: Gallery,
    notes: Sequence[str] = (),
    sections: Sequence[Section] = (),
    png: bool = True,
) -> Path:
    """Write ``report.html`` and, if ``png``, the plots as PNG files."""
    records = read_metrics(folder / "metrics.jsonl")
    page = PAGE.format(
        policy=escape(page_policy()),
        style=STYLE,
        title=clean(f"{config.model.name} on {Path(config.data.source).name}"),
        headline=clean(report.headline()),
        warnings=warning_box(records),
        table="".join(_table(title, rows) for title, rows in _titled(report)),
        tie_rule=clean(report.tie_rule),
        by_text="".join(_text_search(s, split) for s in gallery.text_to_image),
        by_image="".join(_image_search(s, split) for s in gallery.image_to_text),
        sections="".join(map(_section, sections)),
        charts=draw(plots_of(records, config.evaluation.split), folder if png else None),
        notes="".join(f"<p>{clean(note)}</p>" for note in notes),
        config=clean(config.to_yaml()),
    )
    path = folder / "report.html"
    write_atomically(path, page)
    return path


def draw(plots: Mapping[str, Plot], folder: Path | None) -> str:
    """The plots as HTML figures with fewer points; with a folder, also as PNG files."""
    figures = []
    for name, (title, x_label, y_label, series) in plots.items():
        light = {line: thin(points) for line, points in series.items()}
        figure = line_chart(light, title, x_label, y_label)
        if folder is not None:
            save_figure(figure, folder / f"{name}.png")
        figures.append(_figure(title, to_svg(figure)))
    return "".join(figures)


def _figure(title: str, svg: str) -> str:
    # As an image, because the ids of several inline SVGs would clash.
    data = base64.b64encode(svg.encode()).decode("ascii")
    image = f'<img alt="{clean(title)}" src="data:image/svg+xml;base64,{data}">'
    return f"<figure>{image}</figure>"


def warning_box(records: Sequence[dict[str, Any]], most: int = 8) -> str:
    """Warnings of the run, for the top of the page; empty without any."""
    warnings = [r for r in records if r["kind"] == "warning"]
    if not warnings:
        return ""
    lines = [
        f"<p><strong>Step {int(r['step']):,}.</strong> {clean(r['text'])}</p>"
        for r in warnings[:most]
    ]
    if len(warnings) > most:
        lines.append(f"<p>… and {len(warnings) - most} more in metrics.jsonl.</p>")
    return f'<aside class="warning" role="note"><h2>Warnings</h2>{"".join(lines)}</aside>'


def _titled(report: RetrievalReport) -> list[tuple[str, list[tuple[str, ...]]]]:
    """Titles and tables of a report; a single table has no title."""
    tables = report.tables()
    return tables if len(tables) > 1 else [("", tables[0][1])]


def _section(section: Section) -> str:
    sentences = "".join(f"<p>{clean(sentence)}</p>" for sentence in section.sentences)
    table = _table("", section.rows) if section.rows else ""
    chart = _figure(section.title, section.chart) if section.chart else ""
    return f"<h2>{clean(section.title)}</h2>{sentences}{table}{chart}"


def _table(title: str, table: Sequence[Sequence[str]]) -> str:
    header, *rows = table
    above = f"<p>{clean(title)}</p>" if title else ""
    head = "".join(f"<th>{clean(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{clean(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"{above}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _text_search(search: Search, split: Split) -> str:
    cards = "".join(
        f'<figure class="{_verdict(hit.right)}">{picture(split, hit.index)}'
        f"<figcaption>{hit.score:.3f}</figcaption></figure>"
        for hit in search.hits
    )
    query = clean(split.texts[search.query])
    return (
        f'<section class="search"><h3>“{query}”</h3>'
        f'<div class="row">{cards}</div>'
        f'<p class="rank">true image at rank {search.rank}</p></section>'
    )


def _image_search(search: Search, split: Split) -> str:
    lines = "".join(
        f'<li class="{_verdict(hit.right)}">{clean(split.texts[hit.index])} '
        f"<small>{hit.score:.3f}</small></li>"
        for hit in search.hits
    )
    return (
        f'<section class="search pair">{picture(split, search.query)}'
        f'<div><ol>{lines}</ol><p class="rank">first true caption at rank {search.rank}</p></div>'
        "</section>"
    )


def _verdict(right: bool) -> str:
    return "right" if right else "wrong"


def picture(split: Split, image: int, side: int = 224) -> str:
    """An image as an inline JPEG; its id if there are no pixels."""
    name = clean(split.ids[image])
    if split.pixels is None:
        return f'<div class="nopixels">{name}</div>'
    try:
        thumbnail = open_image(split.pixels[image])
    except DataError:
        return f'<div class="nopixels">{name} (unreadable)</div>'
    thumbnail.thumbnail((side, side))
    buffer = io.BytesIO()
    thumbnail.save(buffer, format="JPEG", quality=88)
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    return f'<img alt="{name}" title="{name}" src="data:image/jpeg;base64,{data}">'


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Counterfoil: {title}</title><style>{style}</style></head><body><main>
<header><p class="brand">Counterfoil</p><h1>{title}</h1><p>{headline}</p></header>
{warnings}
{table}
<p class="rule">{tie_rule}; brackets are bootstrap 95 % intervals.</p>
<h2>Searching images with a sentence</h2>{by_text}
<h2>Searching sentences with an image</h2>{by_image}
{sections}
<h2>Training</h2><div class="charts">{charts}</div>
{notes}
<details><summary>Configuration</summary><pre>{config}</pre></details>
</main></body></html>
"""
