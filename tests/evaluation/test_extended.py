"""Extended positives: CxC, ECCV Caption, mAP@R and R-precision."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import load_file

from counterfoil.core.errors import ConfigError, DataError, MissingExtraError
from counterfoil.evaluation import (
    ExtendedPositives,
    ExtendedReport,
    Positives,
    direction_metrics,
    eccv_positives,
    extended_metrics,
    read_cxc_pairs,
    retrieval,
)

ORACLE = load_file(Path(__file__).parents[1] / "oracle" / "retrieval-metrics.safetensors")
IMAGES = ORACLE["in.emb_images"].astype(np.float64)
CAPTIONS = ORACLE["in.emb_captions"].astype(np.float64)
IMAGE_OF = np.arange(250) // 5


def judged(name: str, queries: int, targets: int, threshold: float = 0.0) -> Positives:
    rows = ORACLE[f"in.cxc_{name}"]
    return Positives.from_pairs(rows[rows[:, 2] >= threshold][:, :2], queries, targets)


def looped(scores: NDArray, right: list[set[int]]) -> tuple[list[float], list[float], list[int]]:
    """AP@R, R-precision and best rank per query; wrong answers first among equals."""
    precisions, within, ranks = [], [], []
    for row, positives in zip(scores, right, strict=True):
        if positives:
            order = sorted(range(len(row)), key=lambda j: (-row[j], j in positives))
            hits = [j in positives for j in order]
            size = len(positives)
            at_hits = [sum(hits[: r + 1]) / (r + 1) for r in range(size) if hits[r]]
            precisions.append(sum(at_hits) / size)
            within.append(sum(hits[:size]) / size)
            ranks.append(hits.index(True))
    return precisions, within, ranks


@given(st.integers(1, 6), st.integers(1, 12), st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_metrics_equal_those_of_a_naive_loop_with_ties(queries, targets, seed, chunk_rows):
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 4, size=(queries, targets)).astype(np.float32)
    mask = rng.random((queries, targets)) < rng.random()
    precisions, within, ranks = looped(scores, [set(np.flatnonzero(row)) for row in mask])
    positives = Positives.from_pairs(np.argwhere(mask), queries, targets)
    result = direction_metrics(scores, positives, (1, 3), chunk_rows=chunk_rows)
    assert result.queries == len(ranks)
    assert result.left_out == queries - len(ranks)
    if ranks:
        assert result.map_at_r == pytest.approx(100 * np.mean(precisions))
        assert result.r_precision == pytest.approx(100 * np.mean(within))
        expected = [100 * np.mean(np.array(ranks) < k) for k in (1, 3)]
        assert list(result.recalls.values()) == pytest.approx(expected)


def test_with_the_data_sets_own_pairs_recalls_are_those_of_plain_retrieval():
    sims = ORACLE["in.sims"]
    positives = ExtendedPositives.from_image_of(IMAGE_OF, 50)
    report = retrieval(sims, IMAGE_OF, bootstrap=0, positives=positives)
    assert report.extended.i2t.recalls == pytest.approx(report.i2t.recalls)
    assert report.extended.t2i.recalls == pytest.approx(report.t2i.recalls)
    assert report.extended.t2i.map_at_r == pytest.approx(report.t2i.recalls[1])
    assert "mAP@R" in report.to_markdown()


def test_metrics_of_torch_and_numpy_scores_agree():
    positives = ExtendedPositives.from_image_of(IMAGE_OF, 50)
    ours = extended_metrics(ORACLE["in.sims"], positives)
    assert extended_metrics(torch.from_numpy(ORACLE["in.sims"]), positives) == ours


def test_cross_modal_cxc_recalls_match_the_public_implementation():
    positives = ExtendedPositives(judged("i2t", 50, 250), judged("t2i", 250, 50))
    report = extended_metrics(IMAGES @ CAPTIONS.T, positives)
    assert list(report.i2t.recalls.values()) == pytest.approx(ORACLE["out.cxc.i2t"].tolist())
    assert list(report.t2i.recalls.values()) == pytest.approx(ORACLE["out.cxc.t2i"].tolist())


def test_a_report_without_any_query_survives_json():
    report = extended_metrics(np.zeros((2, 2)), ExtendedPositives.from_pairs([], 2, 2))
    assert np.isnan(report.i2t.map_at_r)
    again = ExtendedReport.from_json(report.to_json())
    assert np.isnan(again.i2t.map_at_r)
    assert np.isnan(ExtendedReport.from_dict(json.loads(report.to_json())).t2i.recalls[1])


IMAGE_IDS = ["COCO_val2014_000000000007.jpg", "COCO_val2014_000000000009.jpg"]
TEXT_IDS = ["70", "71", "90"]


def test_released_csv_files_are_read_with_their_threshold(tmp_path):
    path = tmp_path / "sits_test.csv"
    path.write_text(
        "caption,image,agg_score,sampling_method\n"
        "COCO_val2014:sentid:70,COCO_val2014_000000000007.jpg,4.9,c2i_original\n"
        "COCO_val2014:sentid:71,COCO_val2014_000000000009.jpg,3.0,c2i_intrasim\n"
        "COCO_val2014:sentid:90,COCO_val2014_000000000007.jpg,2.99,c2i_intrasim\n"
        "COCO_val2014:sentid:12345,COCO_val2014_000000000007.jpg,5.0,c2i_intrasim\n"
    )
    positives = read_cxc_pairs(path, IMAGE_IDS, TEXT_IDS)
    assert positives.i2t.pairs().tolist() == [[0, 0], [1, 1]]
    assert positives.t2i.pairs().tolist() == [[0, 0], [1, 1]]
    own = ExtendedPositives.from_image_of([0, 0, 1], 2)
    assert own.union(positives).i2t.counts().tolist() == [2, 2]


def test_the_json_of_vse_infty_is_read_with_each_direction_apart(tmp_path):
    path = tmp_path / "cxc_it.json"
    table = {"i2t": {"7": [[70, 5], [71, 1.5]]}, "t2i": {"90": [["9", 4.0], ["8", 4.0]]}}
    path.write_text(json.dumps(table))
    positives = read_cxc_pairs(path, ["7", "9"], TEXT_IDS)
    assert positives.i2t.pairs().tolist() == [[0, 0], [0, 1]]
    assert positives.t2i.pairs().tolist() == [[2, 1]]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "caption,image,score\n", "line 1"),
        ("a.csv", "caption,image,agg_score\n1,7,high\n", "line 2"),
        ("a.csv", "caption,image,agg_score\nnone,7,5\n", "end with a number"),
        ("a.json", "{", "JSON"),
        ("a.json", "[]", "map"),
        ("a.json", '{"i2t": {}}', "t2i"),
        ("a.json", '{"i2t": {"7": [70]}, "t2i": {}}', "expected"),
    ],
)
def test_damaged_files_are_refused_with_their_place(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        read_cxc_pairs(tmp_path / name, ["7"], ["70"])


def test_a_missing_file_and_ids_given_twice_are_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        read_cxc_pairs(tmp_path / "none.csv", ["7"], ["70"])
    with pytest.raises(DataError, match="different"):
        read_cxc_pairs(tmp_path / "none.csv", ["7", "007"], ["70"])


def test_eccv_caption_asks_for_its_package_when_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "eccv_caption", None)
    with pytest.raises(MissingExtraError, match="eccv_caption"):
        eccv_positives(["1"], ["1"])


class FakeJudge:
    """Stands for ``eccv_caption.Metrics``: its positives."""

    eccv_gts: ClassVar = {"i2t": {7: [70, 71, 90]}, "t2i": {90: [9, 7], 555: [7]}}


def test_positives_of_eccv_caption_are_those_of_its_queries_in_the_split(monkeypatch):
    package = types.SimpleNamespace(Metrics=FakeJudge)
    monkeypatch.setitem(sys.modules, "eccv_caption", package)
    positives = eccv_positives(["7", "9"], TEXT_IDS)
    assert positives.i2t.counts().tolist() == [3, 0]
    assert positives.t2i.pairs().tolist() == [[2, 0], [2, 1]]


def test_positives_of_another_size_or_with_folds_are_refused():
    positives = ExtendedPositives.from_pairs([(0, 0)], 2, 2)
    with pytest.raises(DataError, match="positives are of 2"):
        extended_metrics(np.zeros((3, 3)), positives)
    with pytest.raises(ConfigError, match="folds"):
        retrieval(np.eye(2), [0, 1], protocol="folds", folds=2, positives=positives)
    with pytest.raises(DataError, match="names target 9"):
        Positives.from_pairs([(0, 9)], 2, 2)
