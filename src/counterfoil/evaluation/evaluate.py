"""A model, or an ensemble of them, judged on a split."""

from __future__ import annotations

from collections.abc import Sequence

from counterfoil.data.pairs import Split
from counterfoil.errors import ConfigError
from counterfoil.evaluation.ensemble import average
from counterfoil.evaluation.extended import ExtendedPositives
from counterfoil.evaluation.report import RetrievalReport
from counterfoil.evaluation.retrieval import Identical, retrieval
from counterfoil.evaluation.scoring import SplitScores, score_split
from counterfoil.models.model import Model
from counterfoil.progress import Progress


def evaluate(
    model: Model | Sequence[Model],
    split: Split,
    *,
    folds: int = 0,
    batch_size: int = 256,
    bootstrap: int = 1000,
    positives: ExtendedPositives | None = None,
    standardise: bool = False,
    identical_captions: Identical = "both",
    progress: Progress | None = None,
) -> RetrievalReport:
    """Retrieval both ways; several models are an ensemble that averages their scores.

    ``folds=5`` is COCO's 1K protocol on the 5K test images, ``folds=0`` the whole split.
    ``standardise`` divides each model's scores by their deviation before they are averaged.
    ``identical_captions`` says what captions that another image has, too, count as (`retrieval`).
    """
    models = [model] if isinstance(model, Model) else list(model)
    if not models:
        raise ConfigError("nothing to evaluate: no model given")
    found = [score_split(one, split, batch_size, progress) for one in models]
    return report_scores(
        found,
        split.name,
        folds=folds,
        bootstrap=bootstrap,
        positives=positives,
        standardise=standardise,
        captions=found[0].captions(split),
        identical_captions=identical_captions,
    )


def report_scores(
    found: Sequence[SplitScores],
    split: str,
    *,
    folds: int = 0,
    bootstrap: int = 1000,
    positives: ExtendedPositives | None = None,
    standardise: bool = False,
    captions: Sequence[str] | None = None,
    identical_captions: Identical = "both",
) -> RetrievalReport:
    """The report of one score matrix, or of the average of several over the same pairs.

    ``captions`` are the texts of its columns; without them none is known to be identical.
    """
    matrices = [one.scores for one in found]
    scores = matrices[0] if len(found) == 1 else average(matrices, standardise=standardise)
    return retrieval(
        scores,
        found[0].image_of,
        split=split,
        protocol="folds" if folds else "full",
        folds=folds or 1,
        bootstrap=bootstrap,
        positives=positives,
        captions=captions,
        identical_captions=identical_captions,
    )


def flat_metrics(report: RetrievalReport) -> dict[str, float]:
    """The numbers of a report under short names, for logs: ``i2t_r1`` … ``rsum``."""
    numbers = {"rsum": report.rsum}
    for name, side in (("i2t", report.i2t), ("t2i", report.t2i)):
        numbers |= {f"{name}_r{k}": recall for k, recall in side.recalls.items()}
        numbers |= {f"{name}_medr": side.median_rank, f"{name}_meanr": side.mean_rank}
        numbers |= {f"{name}_mrr": side.mrr}
    return numbers
