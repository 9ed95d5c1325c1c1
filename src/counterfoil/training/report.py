"""The report of a run: one HTML page with everything in it, and its plots as PNG files."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from counterfoil.config import RunConfig
from counterfoil.data.images import open_image
from counterfoil.data.pairs import Split
from counterfoil.errors import DataError, MissingExtraError
from counterfoil.evaluation.charts import line_chart, save_line_chart_png
from counterfoil.evaluation.gallery import Gallery, Search
from counterfoil.evaluation.report import RetrievalReport
from counterfoil.files import write_atomically
from counterfoil.training.metrics import read_metrics
from counterfoil.training.report_style import STYLE

Series = dict[str, list[tuple[float, float]]]


def write_report(
    folder: Path,
    config: RunConfig,
    report: RetrievalReport,
    split: Split,
    gallery: Gallery,
    notes: Sequence[str] = (),
) -> Path:
    """Write ``report.html`` and, where matplotlib is installed, the plots as PNG files."""
    plots = curves(read_metrics(folder / "metrics.jsonl"), config.evaluation.split)
    for name, (title, x_label, y_label, series) in plots.items():
        try:
            save_line_chart_png(folder / f"{name}.png", series, title, x_label, y_label)
        except MissingExtraError:
            break
    charts = "".join(
        f"<figure>{line_chart(series, title, x_label, y_label)}</figure>"
        for title, x_label, y_label, series in plots.values()
    )
    page = PAGE.format(
        style=STYLE,
        title=html.escape(f"{config.model.name} on {Path(config.data.source).name}"),
        headline=html.escape(report.headline()),
        table=_table(report),
        tie_rule=html.escape(report.tie_rule),
        by_text="".join(_text_search(s, split) for s in gallery.text_to_image),
        by_image="".join(_image_search(s, split) for s in gallery.image_to_text),
        charts=charts,
        notes="".join(f"<p>{html.escape(note)}</p>" for note in notes),
        config=html.escape(config.to_yaml()),
    )
    path = folder / "report.html"
    write_atomically(path, page)
    return path


def curves(
    records: Sequence[dict[str, Any]], split: str
) -> dict[str, tuple[str, str, str, Series]]:
    """The plots of a run by file name: title, axis labels, series."""
    steps = [r for r in records if r["kind"] == "step"]
    epochs = [r for r in records if r["kind"] == "epoch"]

    def over_steps(key: str) -> list[tuple[float, float]]:
        return [(r["step"], r[key]) for r in steps if r.get(key) is not None]

    recalls = {
        "image → text R@1": [(r["epoch"], r[split]["i2t_r1"]) for r in epochs if split in r],
        "text → image R@1": [(r["epoch"], r[split]["t2i_r1"]) for r in epochs if split in r],
    }
    rsum = [(r["epoch"], r[split]["rsum"]) for r in epochs if split in r]
    scores = {
        "positive": over_steps("positive"),
        "hardest negative": over_steps("hardest_negative"),
    }
    plots = {
        "loss": ("Training loss", "step", "loss", {"loss": over_steps("loss")}),
        "rsum": (f"RSUM ({split})", "epoch", "RSUM", {"RSUM": rsum}),
        "recall": (f"R@1 ({split})", "epoch", "%", recalls),
        "learning-rate": ("Learning rate", "step", "rate", {"rate": over_steps("lr")}),
        "scores": ("Scores in the batch", "step", "score", scores),
        "gradient": (
            "Gradient norm before clipping",
            "step",
            "norm",
            {"norm": over_steps("grad_norm")},
        ),
    }
    mining = mismatch_curves(steps)
    if mining:
        title = "Matched and mismatched similarities, and the boundary (NAAF)"
        plots["boundary"] = (title, "step", "similarity", mining)
    return plots


def mismatch_curves(steps: Sequence[dict[str, Any]]) -> Series:
    """NAAF's two distributions over training, each as mean and mean ± deviation, and t."""
    series: Series = {}
    for name, label in (("pos", "matched"), ("neg", "mismatched")):
        for sign, suffix in ((0, ""), (-1, " − σ"), (1, " + σ")):
            series[label + suffix] = [
                (r["step"], r[f"mismatch/mean_{name}"] + sign * r[f"mismatch/std_{name}"])
                for r in steps
                if r.get(f"mismatch/std_{name}")
            ]
    series["boundary t"] = [
        (r["step"], r["mismatch/boundary"]) for r in steps if "mismatch/boundary" in r
    ]
    return series if series["boundary t"] else {}


def _table(report: RetrievalReport) -> str:
    header, *rows = report.rows()
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _text_search(search: Search, split: Split) -> str:
    cards = "".join(
        f'<figure class="{_verdict(hit.right)}">{picture(split, hit.index)}'
        f"<figcaption>{hit.score:.3f}</figcaption></figure>"
        for hit in search.hits
    )
    query = html.escape(split.texts[search.query])
    return (
        f'<section class="search"><h3>“{query}”</h3>'
        f'<div class="row">{cards}</div>'
        f'<p class="rank">true image at rank {search.rank}</p></section>'
    )


def _image_search(search: Search, split: Split) -> str:
    lines = "".join(
        f'<li class="{_verdict(hit.right)}">{html.escape(split.texts[hit.index])} '
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
    """An image as an inline JPEG; its id where there are no pixels to show."""
    name = html.escape(split.ids[image])
    if split.pixels is None:
        return f'<div class="nopixels">{name}</div>'
    try:
        shown = open_image(split.pixels[image])
    except DataError:
        return f'<div class="nopixels">{name} (unreadable)</div>'
    shown.thumbnail((side, side))
    buffer = io.BytesIO()
    shown.save(buffer, format="JPEG", quality=88)
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    return f'<img alt="{name}" title="{name}" src="data:image/jpeg;base64,{data}">'


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Counterfoil: {title}</title><style>{style}</style></head><body><main>
<header><p class="brand">Counterfoil</p><h1>{title}</h1><p>{headline}</p></header>
{table}
<p class="rule">{tie_rule}; brackets are bootstrap 95 % intervals.</p>
<h2>Searching images with a sentence</h2>{by_text}
<h2>Searching sentences with an image</h2>{by_image}
<h2>Training</h2><div class="charts">{charts}</div>
{notes}
<details><summary>Configuration</summary><pre>{config}</pre></details>
</main></body></html>
"""
