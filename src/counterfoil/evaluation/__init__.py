"""Retrieval metrics over score matrices, and their reports."""

from counterfoil.evaluation.annotations import eccv_positives, read_cxc_pairs
from counterfoil.evaluation.evaluate import average
from counterfoil.evaluation.extended import ExtendedPositives, direction_metrics, extended_metrics
from counterfoil.evaluation.ranks import Positives, Ranks, count_ranks, count_ranks_of, top_k
from counterfoil.evaluation.report import (
    DirectionReport,
    ExtendedDirection,
    ExtendedReport,
    RetrievalReport,
)
from counterfoil.evaluation.retrieval import retrieval

__all__ = [
    "DirectionReport",
    "ExtendedDirection",
    "ExtendedPositives",
    "ExtendedReport",
    "Positives",
    "Ranks",
    "RetrievalReport",
    "average",
    "count_ranks",
    "count_ranks_of",
    "direction_metrics",
    "eccv_positives",
    "extended_metrics",
    "read_cxc_pairs",
    "retrieval",
    "top_k",
]
