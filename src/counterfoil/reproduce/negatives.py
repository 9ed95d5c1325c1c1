"""Margins, similarities and t-SNE maps of the negatives of trained models (NDGL, figures 1, 3)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from counterfoil.core.errors import ConfigError, DataError
from counterfoil.core.progress import Progress
from counterfoil.core.storage.atomic import write_atomically
from counterfoil.core.tensors.modes import eval_mode
from counterfoil.data.pairs import Split
from counterfoil.evaluation.report import Report
from counterfoil.models import Model
from counterfoil.reproduce.distributions import embed
from counterfoil.reproduce.measure import RunEvaluator
from counterfoil.reproduce.plan import PlannedRun
from counterfoil.reproduce.results import Curve, Plot, PointMap, RowResult, ShownMeasure, TableRow
from counterfoil.reproduce.runner import describe
from counterfoil.reproduce.spec import Negatives
from counterfoil.reproduce.spread import Measure
from counterfoil.scoring.encode import SplitScores, encode_images, encode_texts, score_split
from counterfoil.training.run_folder import load_model

BINS = 40
"""Bins of a histogram of margins."""
GRID = 101
"""Number of cosines from −1 to 1 at which the distribution of similarities is sampled."""
QUERY, POSITIVE, HARDEST, OTHER = "query image", "its captions", "hardest negative", "negatives"


class NegativeReport(Report):
    """Numbers of one run about the negatives of a split; a figure fills what it shows.

    ``margins``: one per query, by direction. ``below``: shares of cosines up to each value of the
    grid, for images and for texts. ``points``: positions on the map, by group.
    """

    numbers: dict[str, float]
    margins: dict[str, list[float]] = Field(default_factory=dict)
    below: dict[str, list[float]] = Field(default_factory=dict)
    points: dict[str, list[tuple[float, float]]] = Field(default_factory=dict)
    note: str = ""


def collect_negatives(
    artifact: Negatives, rows: list[RowResult], table: Sequence[TableRow], evaluator: RunEvaluator
) -> dict[str, Any]:
    """Add the numbers of finished runs to ``rows``; returns columns, plots and maps."""
    reports: dict[str, list[NegativeReport]] = {}
    for index, each in enumerate(table):
        by_seed = {one.seed: one for one in rows[index].each}
        errors = list(rows[index].errors)
        for seed, (run,) in zip(each.seeds, each.runs, strict=True):
            if seed not in by_seed:  # not finished, or its folder is damaged
                continue
            try:
                report = _report(artifact, run, evaluator)
            except Exception as error:  # a failed row must not hide the others
                errors.append(f"{run.title}: {describe(error)}")
                continue
            reports.setdefault(rows[index].name, []).append(report)
            numbers = {c.title: report.numbers[c.number] for c in artifact.measures}
            before = by_seed[seed]
            by_seed[seed] = before.model_copy(update={"numbers": before.numbers | numbers})
        changed = rows[index].with_each(list(by_seed.values()))
        rows[index] = changed.model_copy(update={"errors": errors})
    return {
        "measures": [ShownMeasure(title=c.title, decimals=c.decimals) for c in artifact.measures],
        "plots": _plots(artifact, reports),
        "maps": _maps(artifact, reports),
    }


def _report(artifact: Negatives, run: PlannedRun, evaluator: RunEvaluator) -> NegativeReport:
    """The report of a run, computed once and cached."""
    key = f"{artifact.show} {artifact.nearest} {run.digest}"
    path = evaluator.folder / f"negatives-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"
    if path.is_file():
        return NegativeReport.from_json(path.read_text(encoding="utf-8"))
    model = load_model(run.folder, run.config.train.device)
    split, size = evaluator.split_of(run), run.config.evaluation.batch_size
    if artifact.show == "margins":
        report = margin_report(score_split(model, split, size, evaluator.progress))
    else:
        vectors = _Vectors.of(model, split, size, evaluator.progress)
        show = similarity_report if artifact.show == "similarity" else map_report
        report = show(vectors, artifact.nearest)
    write_atomically(path, report.to_json())
    return report


def margin_report(scored: SplitScores) -> NegativeReport:
    """Per query, the score of the best positive minus that of the hardest negative."""
    own = _positives(scored.scores, torch.from_numpy(scored.image_of))
    margins = {}
    for direction, scores, positive in (
        ("i2t", scored.scores, own),
        ("t2i", scored.scores.T, own.T),
    ):
        margin = _margins(scores, positive)
        margins[direction] = margin[margin.isfinite()].tolist()
    if not all(margins.values()):
        raise DataError("margins: the test split needs at least two images with captions")
    numbers = {f"{key}_margin": float(np.mean(values)) for key, values in margins.items()}
    numbers |= {f"{k}_won": 100 * float(np.mean(np.array(v) > 0)) for k, v in margins.items()}
    return NegativeReport(numbers=numbers, margins=margins)


def _margins(scores: Tensor, positive: Tensor) -> Tensor:
    """Margins [n_queries] of scores [n_queries, n_items]; not finite without a negative."""
    best = scores.masked_fill(~positive, -torch.inf).amax(1)
    return best - scores.masked_fill(positive, -torch.inf).amax(1)


class _Vectors:
    """Unit vectors of all images and captions of a split, and the scores of all pairs."""

    def __init__(self, images: Tensor, texts: Tensor, image_of: Tensor, split: Split) -> None:
        self.images, self.texts, self.image_of, self.split = images, texts, image_of, split
        self.scores = images @ texts.T
        self.own = _positives(self.scores, image_of)

    @classmethod
    def of(cls, model: Model, split: Split, size: int, progress: Progress) -> _Vectors:
        with eval_mode(model):
            images, readable, _ = encode_images(model, split, size, progress)
            row_of = {image: row for row, image in enumerate(readable)}
            known = [t for t, image in enumerate(split.image_of) if int(image) in row_of]
            texts = encode_texts(model, [split.texts[t] for t in known], size, progress)
        if images.pooled is None or texts.pooled is None:
            raise ConfigError(
                f"the model '{model.spec.name}' has no vector per image and caption; choose one "
                "that compares such vectors, e.g. vse-infty"
            )
        image_of = torch.tensor([row_of[int(split.image_of[t])] for t in known])
        chosen = split.select(readable) if len(readable) < len(split) else split
        unit = [F.normalize(side.pooled.float().cpu(), dim=1) for side in (images, texts)]  # type: ignore[union-attr]
        return cls(unit[0], unit[1], image_of, chosen)

    def hardest(self, scores: Tensor, own: Tensor, nearest: int) -> list[Tensor]:
        """Per query, the indices of its highest-scoring negatives, hardest first."""
        negatives = scores.masked_fill(own, -torch.inf)
        best = negatives.topk(min(nearest, scores.shape[1]), dim=1)
        return [i[v.isfinite()] for i, v in zip(best.indices, best.values, strict=True)]


def similarity_report(vectors: _Vectors, nearest: int) -> NegativeReport:
    """Cosines between the hardest negative of each query and its other hard negatives."""
    cosines: dict[str, NDArray[np.float64]] = {}
    for name, side, scores, own in (
        ("image", vectors.images, vectors.scores.T, vectors.own.T),
        ("text", vectors.texts, vectors.scores, vectors.own),
    ):
        parts = [
            side[hardest[1:]] @ side[hardest[0]]
            for hardest in vectors.hardest(scores, own, nearest)
            if len(hardest) > 1
        ]
        if not parts:
            raise DataError("similarity: the test split needs at least three images with captions")
        cosines[name] = torch.cat(parts).clamp(-1, 1).double().numpy()
    grid = np.linspace(-1.0, 1.0, GRID)
    numbers = {f"{name}_below_half": 100 * float(np.mean(v < 0.5)) for name, v in cosines.items()}
    numbers |= {f"{name}_similarity": float(np.mean(v)) for name, v in cosines.items()}
    below = {
        name: [float(np.mean(values <= value)) for value in grid]
        for name, values in cosines.items()
    }
    return NegativeReport(numbers=numbers, below=below)


def map_report(vectors: _Vectors, nearest: int) -> NegativeReport:
    """t-SNE of the image with the median margin, its captions and its hardest negatives."""
    scores, own = vectors.scores, vectors.own
    margin = _margins(scores, own)
    usable = torch.nonzero(margin.isfinite())[:, 0]
    if not len(usable):
        raise DataError("map: the test split needs at least two images with captions")
    ordered = usable[margin[usable].argsort(stable=True)]
    query = int(ordered[(len(ordered) - 1) // 2])
    negatives = vectors.hardest(scores[query : query + 1], own[query : query + 1], nearest)[0]
    positives = torch.nonzero(own[query])[:, 0]
    chosen = torch.cat([vectors.images[query : query + 1], vectors.texts[positives]])
    chosen = torch.cat([chosen, vectors.texts[negatives]])
    positions = [(float(x), float(y)) for x, y in embed(chosen.numpy())]
    first = 1 + len(positives)
    others = vectors.texts[negatives[1:]] @ vectors.texts[negatives[0]]
    texts = [text for texts in vectors.split.captions for text in texts]
    return NegativeReport(
        numbers={
            "similarity_to_hardest": float(others.mean()) if len(others) else 1.0,
            "hardest_score": float(scores[query, negatives[0]]),
            "positive_score": float(scores[query, positives].max()),
        },
        points={
            QUERY: positions[:1],
            POSITIVE: positions[1:first],
            HARDEST: positions[first : first + 1],
            OTHER: positions[first + 1 :],
        },
        note=f"image {vectors.split.ids[query]} (\u201c{texts[int(positives[0])]}\u201d); hardest "
        f"negative: \u201c{texts[int(negatives[0])]}\u201d",
    )


def _positives(scores: Tensor, image_of: Tensor) -> Tensor:
    """Mask [n_images, n_texts] of each image's own captions."""
    return torch.arange(scores.shape[0])[:, None] == image_of[None]


DIRECTIONS = {"i2t": "image to text", "t2i": "text to image"}


def _plots(artifact: Negatives, reports: dict[str, list[NegativeReport]]) -> list[Plot]:
    if artifact.show == "margins":
        return [
            Plot(
                metric=f"margin-{key}",
                title=artifact.panels.get(key, f"Margins, {title}"),  # type: ignore[call-overload]
                x_label="margin: positive minus hardest negative",
                y_label="number of queries",
                curves=_histograms(
                    {name: [r.margins[key] for r in of] for name, of in reports.items()}
                ),
            )
            for key, title in DIRECTIONS.items()
        ]
    if artifact.show == "similarity":
        return [_distribution(artifact, reports)]
    return []


def _histograms(by_row: dict[str, list[list[float]]]) -> list[Curve]:
    """Counts per bin, mean and deviation over seeds; all rows share the bins."""
    every = [value for runs in by_row.values() for values in runs for value in values]
    if not every:
        return []
    edges = np.histogram_bin_edges(every, BINS)
    middles = (edges[:-1] + edges[1:]) / 2
    curves = []
    for name, runs in by_row.items():
        counts = np.array([np.histogram(values, edges)[0] for values in runs], dtype=float)
        curves.append(Curve(name=name, points=_points(middles, counts)))
    return curves


def _distribution(artifact: Negatives, reports: dict[str, list[NegativeReport]]) -> Plot:
    grid = np.linspace(-1.0, 1.0, GRID)
    every = np.array([side for of in reports.values() for one in of for side in one.below.values()])
    # start the curves where the first share is positive
    first = max(0, int((every > 0).any(0).argmax()) - 1) if len(every) else 0
    curves = []
    for name, of_row in reports.items():
        for side, title in (("image", "images"), ("text", "captions")):
            shares = np.array([report.below[side] for report in of_row])
            label = title if len(reports) == 1 else f"{name}, {title}"
            curves.append(Curve(name=label, points=_points(grid[first:], shares[:, first:])))
    return Plot(
        metric="similarity",
        title=f"Hardest negative and the {artifact.nearest} negatives nearest to the query",
        x_label="cosine similarity s",
        y_label="share of negatives up to s",
        curves=curves,
    )


def _points(
    positions: NDArray[np.float64], of_seeds: NDArray[np.float64]
) -> list[tuple[float, float, float | None]]:
    measures = [Measure.over(column.tolist()) for column in of_seeds.T]
    return [(float(x), one.mean, one.std) for x, one in zip(positions, measures, strict=True)]


def _maps(artifact: Negatives, reports: dict[str, list[NegativeReport]]) -> list[PointMap]:
    """The map of each row's first seed; positions of different runs are not comparable."""
    if artifact.show != "map":
        return []
    return [
        PointMap(
            name=f"map-{number}" if len(reports) > 1 else "map",
            title=f"{artifact.title}: {name}" if len(reports) > 1 else artifact.title,
            groups=of_row[0].points,
            note=f"{name}, the first of its seeds: {of_row[0].note}.",
        )
        for number, (name, of_row) in enumerate(reports.items(), start=1)
    ]
