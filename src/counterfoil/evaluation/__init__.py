"""Retrieval metrics over score matrices, and their reports."""

from counterfoil.evaluation.cxc import (
    IMAGE_THRESHOLD,
    TEXT_THRESHOLD,
    read_cxc_pairs,
    read_cxc_similar,
)
from counterfoil.evaluation.eccv import eccv_caption_metrics, eccv_positives, retrieved_items
from counterfoil.evaluation.ensemble import average
from counterfoil.evaluation.extended import ExtendedPositives, direction_metrics, extended_metrics
from counterfoil.evaluation.intra import (
    IntraReport,
    Products,
    intra_recalls,
    self_ranks,
    sibling_positives,
)
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
    "IMAGE_THRESHOLD",
    "TEXT_THRESHOLD",
    "DirectionReport",
    "ExtendedDirection",
    "ExtendedPositives",
    "ExtendedReport",
    "IntraReport",
    "Positives",
    "Products",
    "Ranks",
    "RetrievalReport",
    "average",
    "count_ranks",
    "count_ranks_of",
    "direction_metrics",
    "eccv_caption_metrics",
    "eccv_positives",
    "extended_metrics",
    "intra_recalls",
    "read_cxc_pairs",
    "read_cxc_similar",
    "retrieval",
    "retrieved_items",
    "self_ranks",
    "sibling_positives",
    "top_k",
]
