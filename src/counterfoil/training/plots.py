"""The plots of a run, from the records of its `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Points = list[tuple[float, float]]
Series = dict[str, Points]
Record = dict[str, Any]


class Plot(NamedTuple):
    """A line chart: what `line_chart` draws."""

    title: str
    x_label: str
    y_label: str
    series: Series


def plots_of(records: Sequence[Record], split: str) -> dict[str, Plot]:
    """The plots of a run by file name, without empty ones."""
    steps = [r for r in records if r["kind"] == "step"]
    epochs = [r for r in records if r["kind"] == "epoch"]
    plots = {
        "loss": Plot("Training loss", "step", "loss", _over(steps, {"loss": "loss"})),
        "loss-terms": Plot("Terms of the loss, unweighted", "step", "loss", loss_terms(steps)),
        **_metrics(epochs, split),
        "learning-rate": Plot("Learning rate", "step", "rate", _over(steps, {"lr": "rate"})),
        "scores": Plot(
            "Scores in the batch",
            "step",
            "score",
            _over(steps, {"positive": "positive", "hardest_negative": "hardest negative"}),
        ),
        "gradient": Plot(
            "Gradient norm before clipping", "step", "norm", _over(steps, {"grad_norm": "norm"})
        ),
        **_hardness(steps),
        "margins": Plot(
            "Margins over all negatives (NDGL fig. 3b)",
            "positive − negative (the ends hold what lies beyond)",
            "density",
            margin_lines(epochs),
        ),
        **_boundaries(steps),
        **_similarities(epochs),
    }
    drawn = {name: plot._replace(series=_known(plot.series)) for name, plot in plots.items()}
    return {name: plot for name, plot in drawn.items() if plot.series}


def _metrics(epochs: Sequence[Record], split: str) -> dict[str, Plot]:
    """Retrieval on the dev split after each epoch."""

    def over_epochs(key: str) -> Points:
        return [(r["epoch"], r[split][key]) for r in epochs if split in r]

    recalls = {"image → text R@1": over_epochs("i2t_r1"), "text → image R@1": over_epochs("t2i_r1")}
    return {
        "rsum": Plot(f"RSUM ({split})", "epoch", "RSUM", {"RSUM": over_epochs("rsum")}),
        "recall": Plot(f"R@1 ({split})", "epoch", "%", recalls),
    }


def _hardness(steps: Sequence[Record]) -> dict[str, Plot]:
    """Diagnostics of hard negatives, after the figures of SelHN."""
    sides = {"anchor": "anchor", "positive": "positive", "negative": "hardest negative"}
    gap = {
        "gap/abs": "mean",
        "gap/p05": "5 %",
        "gap/p25": "25 %",
        "gap/p75": "75 %",
        "gap/p95": "95 %",
    }
    projection = {"gradient/projection": "norm"}
    tangent = {f"tangent/{key}": name for key, name in sides.items()}
    printed = {f"eq8/{key}": name for key, name in sides.items()}
    return {
        "gap": Plot(
            "|Δs| of positive and hardest negative (SelHN fig. 3d)",
            "step",
            "|Δs|",
            _over(steps, gap),
        ),
        "branches": Plot(
            "Anchors on each branch of SelHN (fig. 7)", "step", "%", branch_shares(steps)
        ),
        "gradient-projection": Plot(
            "Gradient norm of the image projection (SelHN fig. 3b)",
            "step",
            "norm",
            _over(steps, projection),
        ),
        "tangent": Plot(
            "Tangential gradient of the active hinges", "step", "norm", _over(steps, tangent)
        ),
        "eq8": Plot(
            "SelHN eq. 8 as printed (the radial part)", "step", "value", _over(steps, printed)
        ),
    }


def loss_terms(steps: Sequence[Record]) -> Series:
    """The loss of each term of a composite."""
    keys = dict.fromkeys(key for r in steps for key in r if key.startswith("loss/"))
    return _over(steps, {key: key.removeprefix("loss/") for key in keys})


def branch_shares(steps: Sequence[Record]) -> Series:
    """Percentages of anchors that average over all negatives or use the hardest."""
    averaged = [(x, 100 * y) for x, y in _over(steps, {"selhn/averaged": ""})[""]]
    return {
        "every negative": averaged,
        "hardest negative": [(x, 100 - y) for x, y in averaged],
    }


def margin_lines(epochs: Sequence[Record]) -> Series:
    """Densities of the margins in the first, the middle and the last epoch with counts."""
    counted = [r for r in epochs if sum(r.get("margin_histogram", {}).get("counts", ()))]
    chosen = sorted({0, (len(counted) - 1) // 2, len(counted) - 1}) if counted else []
    return {
        f"epoch {counted[i]['epoch']}": density(**counted[i]["margin_histogram"]) for i in chosen
    }


def density(low: float, high: float, counts: Sequence[float]) -> Points:
    """A histogram as points at the centers of its bins, with an area of one.

    >>> density(0.0, 1.0, [1, 3])
    [(0.25, 0.5), (0.75, 1.5)]
    """
    width = (high - low) / len(counts)
    area = sum(counts) * width
    return [(low + (i + 0.5) * width, count / area) for i, count in enumerate(counts)]


def _boundaries(steps: Sequence[Record]) -> dict[str, Plot]:
    """NAAF's boundary, in one or both directions."""
    title = "Matched and mismatched similarities, and the boundary (NAAF"
    sides = {"": ")", "t2i": ", words ask)", "i2t": ", regions ask)"}
    return {
        f"boundary-{side}" if side else "boundary": Plot(
            title + ending, "step", "similarity", mismatch_curves(steps, side)
        )
        for side, ending in sides.items()
    }


def mismatch_curves(steps: Sequence[Record], side: str = "") -> Series:
    """NAAF's two distributions over training, as mean and mean ± deviation, and t.

    ``side`` is the direction, for a run with both.
    """
    prefix = f"mismatch/{side}/" if side else "mismatch/"
    series: Series = {}
    for name, label in (("pos", "matched"), ("neg", "mismatched")):
        for sign, suffix in ((0, ""), (-1, " − σ"), (1, " + σ")):
            series[label + suffix] = [
                (r["step"], r[f"{prefix}mean_{name}"] + sign * r[f"{prefix}std_{name}"])
                for r in steps
                if r.get(f"{prefix}std_{name}")
            ]
    series["boundary t"] = _over(steps, {f"{prefix}boundary": "t"})["t"]
    return series if series["boundary t"] else {}


def _similarities(epochs: Sequence[Record]) -> dict[str, Plot]:
    """Histograms of NAAF's samples in the last epoch with samples, per direction."""
    sampled = [r["mismatch_histogram"] for r in epochs if r.get("mismatch_histogram")]
    plots = {}
    for side, record in sampled[-1].items() if sampled else ():
        queries = "words" if side == "t2i" else "regions"
        title = f"Similarities sampled in the last epoch, {queries} ask (NAAF fig. 3)"
        ends = {"low": record["low"], "high": record["high"]}
        kinds = [kind for kind in ("matched", "mismatched") if any(record[kind])]
        series = {kind: density(counts=record[kind], **ends) for kind in kinds}
        plots[f"similarities-{side}"] = Plot(title, "similarity", "density", series)
    return plots


def thin(points: Points, most: int = 400) -> Points:
    """At most ``most`` points with all peaks: the lowest and the highest of each interval.

    >>> thin([(0, 1.0), (1, 5.0), (2, 3.0), (3, 0.0)], most=2)
    [(1, 5.0), (3, 0.0)]
    """
    if len(points) <= most:
        return points
    stretch = -(-len(points) // (most // 2))
    selected: Points = []
    for start in range(0, len(points), stretch):
        part = range(start, min(start + stretch, len(points)))
        ends = {min(part, key=lambda i: points[i][1]), max(part, key=lambda i: points[i][1])}
        selected += [points[i] for i in sorted(ends)]
    return selected


def _over(steps: Sequence[Record], names: Mapping[str, str]) -> Series:
    """Series over steps, by the labels of record keys."""
    return {
        name: [(r["step"], r[key]) for r in steps if r.get(key) is not None]
        for key, name in names.items()
    }


def _known(series: Series) -> Series:
    return {name: points for name, points in series.items() if points}
