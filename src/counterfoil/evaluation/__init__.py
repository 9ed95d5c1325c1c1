"""Retrieval metrics over score matrices, and their reports."""

from counterfoil.evaluation.cxc import read_cxc_pairs
from counterfoil.evaluation.eccv import eccv_positives
from counterfoil.evaluation.ensemble import average
from counterfoil.evaluation.extended import ExtendedPositives, direction_metrics, extended_metrics
from counterfoil.evaluation.positives import Positives
from counterfoil.evaluation.ranks import Ranks, count_ranks, count_ranks_of
from counterfoil.evaluation.report import (
    DirectionReport,
    ExtendedDirection,
    ExtendedReport,
    RetrievalReport,
)
from counterfoil.evaluation.retrieval import retrieval
from counterfoil.evaluation.topk import top_k

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
