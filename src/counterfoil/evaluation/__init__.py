"""Retrieval metrics over score matrices, their reports, and charts of them."""

from counterfoil.evaluation.charts import bar_chart, histogram, line_chart, save_line_chart_png
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
    "bar_chart",
    "count_ranks",
    "count_ranks_of",
    "direction_metrics",
    "eccv_positives",
    "extended_metrics",
    "histogram",
    "line_chart",
    "read_cxc_pairs",
    "retrieval",
    "save_line_chart_png",
    "top_k",
]
