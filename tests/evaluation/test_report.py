"""Tables of retrieval, as text."""

from __future__ import annotations

import numpy as np

from counterfoil.evaluation.retrieval import retrieval


def test_median_ranks_have_at_most_one_decimal() -> None:
    scores = np.random.default_rng(0).normal(size=(21, 21))
    report = retrieval(scores, np.arange(21), protocol="folds", folds=7, bootstrap=0)
    medians = [row[-3] for row in report.rows()[1:3]]
    assert any("." in median for median in medians)
    assert all(len(median.partition(".")[2]) <= 1 for median in medians)
