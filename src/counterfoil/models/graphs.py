"""The graph family: alignments or fragments of a pair, reasoned over as nodes of a graph."""

from __future__ import annotations

from typing import Any

from counterfoil.models.spec import ModelSpec, models


def _graph(matcher: dict[str, Any], dropout: float = 0.0) -> ModelSpec:
    """Unpooled encoders of the SCAN family; ``dropout`` is that of word vectors."""
    return ModelSpec(
        image={"name": "fc", "pooling": "none"},
        text={"name": "bigru", "pooling": "none", "dropout": dropout},
        matcher=matcher,
    )


@models.register("sgr")
def sgr() -> ModelSpec:
    """SGR: similarity graph reasoning over local and global alignments (Diao et al. 2021)."""
    return _graph({"name": "sgr"}, dropout=0.4)


@models.register("saf")
def saf() -> ModelSpec:
    """SAF: similarity attention filtration of these alignments (Diao et al. 2021)."""
    return _graph({"name": "saf"}, dropout=0.4)


@models.register("sgraf")
def sgraf() -> ModelSpec:
    """SGRAF: SGR and SAF on one pair of encoders, averaged (Diao et al. 2021)."""
    return _graph({"name": "sgraf"}, dropout=0.4)


@models.register("gsmn")
def gsmn() -> ModelSpec:
    """GSMN-dense: region and word graphs matched with their neighbours (Liu et al. 2020)."""
    return _graph({"name": "gsmn", "graph": "dense"})


@models.register("gsmn-sparse")
def gsmn_sparse() -> ModelSpec:
    """GSMN-sparse: the same, words linked by the dependencies of the caption (Liu et al. 2020)."""
    return _graph({"name": "gsmn", "graph": "sparse", "parser": "rules"})
