"""NAAF and its ablations: SCAN's encoders under the negative-aware matcher."""

from __future__ import annotations

from typing import Any

from counterfoil.models.spec import ModelSpec, models


def _naaf(**matcher: Any) -> ModelSpec:
    return ModelSpec(
        image={"name": "fc", "pooling": "none"},
        text={"name": "bigru", "pooling": "none"},
        matcher={"name": "naaf", **matcher},
    )


@models.register("naaf")
def naaf() -> ModelSpec:
    """NAAF: mismatched words count against a pair, around a learned boundary (CVPR 2022)."""
    return _naaf()


@models.register("naaf-no-intra")
def naaf_no_intra() -> ModelSpec:
    """NAAF without intra-modal propagation; average it with 'naaf' for the paper's ensemble."""
    return _naaf(intra="none")


@models.register("naaf-positive")
def naaf_positive() -> ModelSpec:
    """NAAF without its negative branch: the ablation."""
    return _naaf(negative=False)
