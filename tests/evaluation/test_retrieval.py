"""The retrieval report: recalls, chance, intervals, folds, ensembles."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from counterfoil.core.errors import ConfigError, DataError
from counterfoil.evaluation import (
    DirectionReport,
    ExtendedPositives,
    RetrievalReport,
    average,
    count_ranks,
    retrieval,
)
from counterfoil.evaluation.retrieval import chance_recall, cluster_bootstrap

ORACLE = load_file(Path(__file__).parents[1] / "oracle" / "retrieval-metrics.safetensors")
SIMS, IMAGE_OF = ORACLE["in.sims"], np.arange(250) // 5


def five(direction: DirectionReport) -> list[float]:
    """(R@1, R@5, R@10, median rank, mean rank), as the public implementations return it."""
    return [*direction.recalls.values(), direction.median_rank, direction.mean_rank]


@pytest.mark.parametrize("source", ["scan", "vse_infty"])
def test_both_directions_match_the_public_implementations(source):
    report = retrieval(SIMS, IMAGE_OF, bootstrap=0)
    assert five(report.i2t) == pytest.approx(ORACLE[f"out.{source}.i2t"].tolist(), abs=1e-9)
    assert five(report.t2i) == pytest.approx(ORACLE[f"out.{source}.t2i"].tolist(), abs=1e-9)
    assert report.rsum == pytest.approx(float(ORACLE["out.rsum"]), abs=1e-9)


def test_folds_are_the_mean_of_the_public_implementations_folds():
    report = retrieval(SIMS, IMAGE_OF, protocol="folds", folds=5, bootstrap=0)
    for side in ("i2t", "t2i"):
        folds = [ORACLE[f"out.fold{fold}.{side}"] for fold in range(5)]
        assert five(getattr(report, side)) == pytest.approx(np.mean(folds, axis=0).tolist())
    sums = [
        sum(ORACLE[f"out.fold{fold}.{side}"][:3].sum() for side in ("i2t", "t2i"))
        for fold in range(5)
    ]
    assert report.fold_rsums == pytest.approx(sums)
    assert report.rsum == pytest.approx(np.mean(sums))


def test_one_caption_per_image_matches_the_public_implementation():
    report = retrieval(SIMS[:, ::5], np.arange(50), bootstrap=0)
    assert five(report.i2t) == pytest.approx(ORACLE["out.one_caption.i2t"].tolist())
    assert five(report.t2i) == pytest.approx(ORACLE["out.one_caption.t2i"].tolist())


def test_uniters_image_recall_differs_by_exactly_the_row_numbers_it_counts_as_hits():
    # It counts (value < k) over both columns of nonzero(): the rank and the query's row number.
    report = retrieval(SIMS, IMAGE_OF, bootstrap=0)
    ours = np.array(list(report.t2i.recalls.values())) / 100
    theirs = ORACLE["out.uniter.img_r"]
    assert (theirs > ours).any()
    # nonzero() lists the queries whose image is among the first 10, each with its row number.
    ranks = count_ranks(SIMS, IMAGE_OF).t2i
    listed = np.flatnonzero(ranks < 10)
    extra = np.array([np.count_nonzero(listed < k) for k in (1, 5, 10)])
    assert (ours * 250 + extra).tolist() == pytest.approx((theirs * 250).tolist())
    text = np.array(list(report.i2t.recalls.values())) / 100
    assert text.tolist() == pytest.approx(ORACLE["out.uniter.txt_r"].tolist())


@given(st.integers(2, 8), st.integers(1, 4), st.floats(-5, 5))
def test_a_model_that_scores_everything_equal_finds_nothing(n_images, captions, value):
    scores = np.full((n_images, n_images * captions), value)
    report = retrieval(scores, np.repeat(np.arange(n_images), captions), ks=(1,), bootstrap=0)
    assert report.rsum == 0.0


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8).filter(any))
def test_a_perfect_model_finds_everything(captions):
    image_of = np.repeat(np.arange(len(captions)), captions)
    scores = (image_of == np.arange(len(captions))[:, None]).astype(np.float16)
    report = retrieval(scores, image_of, bootstrap=20)
    assert report.rsum == pytest.approx(600.0)
    assert report.rsum_interval == pytest.approx((600.0, 600.0))
    assert (report.i2t.mrr, report.t2i.median_rank) == (1.0, 1.0)
    assert report.i2t.left_out == captions.count(0)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(1, 6))
def test_chance_equals_the_enumeration_of_all_top_ks(counts, k):
    total = sum(counts)
    tops = list(combinations(range(total), min(k, total)))
    expected = np.mean([np.mean([min(top) < c for top in tops]) for c in counts])
    assert chance_recall(counts, total, k) == pytest.approx(100 * expected)


def test_random_scores_score_what_chance_says():
    rng = np.random.default_rng(3)
    image_of = np.repeat(np.arange(1000), rng.integers(0, 7, size=1000))
    report = retrieval(rng.standard_normal((1000, len(image_of))), image_of, bootstrap=200)
    low, high = report.rsum_interval
    assert low - 1 < report.rsum_chance < high + 1


def test_the_bootstrap_is_the_same_for_a_seed_and_covers_the_estimate():
    first, again, other = (retrieval(SIMS, IMAGE_OF, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.rsum_interval != other.rsum_interval
    for side in (first.i2t, first.t2i):
        for k, recall in side.recalls.items():
            low, high = side.intervals[f"R@{k}"]
            assert low <= recall <= high
            assert low < high
        low, high = side.intervals["mean_rank"]
        assert low < side.mean_rank < high
    assert first.rsum_interval[0] < first.rsum < first.rsum_interval[1]


def test_the_bootstrap_keeps_the_captions_of_an_image_together():
    # Every image all right or all wrong: drawing captions one by one would look five times surer.
    sums = np.repeat([[5.0], [0.0]], 50, axis=0)
    means = cluster_bootstrap(sums, np.full((100, 1), 5.0), 4000, np.random.default_rng(0))
    assert means.std() == pytest.approx(0.05, rel=0.1)


def test_folds_take_captions_in_any_order():
    order = np.random.default_rng(0).permutation(250)
    straight = retrieval(SIMS, IMAGE_OF, protocol="folds", bootstrap=0)
    mixed = retrieval(SIMS[:, order], IMAGE_OF[order], protocol="folds", bootstrap=0)
    assert five(mixed.i2t) + five(mixed.t2i) == five(straight.i2t) + five(straight.t2i)
    assert mixed.t2i.mrr == pytest.approx(straight.t2i.mrr)


def test_folds_of_a_torch_matrix_equal_those_of_a_numpy_one():
    tensor = retrieval(torch.from_numpy(SIMS), IMAGE_OF, protocol="folds", folds=3)
    assert tensor == retrieval(SIMS, IMAGE_OF, protocol="folds", folds=3)


def test_folds_without_their_protocol_are_refused():
    for folds in (2, -1, 9):
        with pytest.raises(ConfigError, match=f"folds={folds} has no effect with protocol='full'"):
            retrieval(SIMS, IMAGE_OF, folds=folds, bootstrap=0)
    five = retrieval(SIMS, IMAGE_OF, protocol="folds", bootstrap=0)
    assert five == retrieval(SIMS, IMAGE_OF, protocol="folds", folds=5, bootstrap=0)


def test_scores_that_are_no_matrix_are_refused():
    with pytest.raises(DataError, match=r"got list; convert it with np\.array"):
        retrieval(SIMS.tolist(), IMAGE_OF, bootstrap=0)
    with pytest.raises(DataError, match=r"got shape \(50,\)"):
        retrieval(np.zeros(50), IMAGE_OF, bootstrap=0)


def test_one_fold_is_the_full_protocol():
    whole = retrieval(SIMS, IMAGE_OF, bootstrap=50)
    fold = retrieval(SIMS, IMAGE_OF, protocol="folds", folds=1, bootstrap=50)
    assert (fold.i2t, fold.t2i, fold.rsum_interval) == (whole.i2t, whole.t2i, whole.rsum_interval)


def test_a_report_survives_json_and_dict():
    positives = ExtendedPositives.from_image_of(IMAGE_OF, 50)
    report = retrieval(SIMS, IMAGE_OF, split="dev", bootstrap=10, positives=positives)
    assert RetrievalReport.from_json(report.to_json()) == report
    assert RetrievalReport.from_dict(json.loads(json.dumps(report.as_dict()))) == report
    with pytest.raises(DataError, match="rsum"):
        RetrievalReport.from_dict({**report.as_dict(), "rsum": "high"})


def test_the_markdown_names_split_protocol_sizes_chance_and_tie_rule():
    text = retrieval(SIMS, IMAGE_OF, split="testall", protocol="folds").to_markdown()
    for part in ("testall", "5 folds", "50 images", "250 captions", "chance", "ties", "RSUM"):
        assert part in text
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1


def test_rows_are_a_rectangle_of_text():
    rows = retrieval(SIMS, IMAGE_OF, ks=(1, 3), bootstrap=0).rows()
    assert {len(row) for row in rows} == {6}
    assert rows[0][1:3] == ("R@1", "R@3")


def test_left_out_images_are_counted_and_named():
    report = retrieval(np.eye(3)[:, :2], [0, 1], bootstrap=10)
    assert (report.i2t.queries, report.i2t.left_out, report.t2i.queries) == (2, 1, 2)
    assert "left out: 1" in report.headline()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"protocol": "1k"}, ConfigError),
        ({"protocol": "folds", "folds": 51}, ConfigError),
        ({"ks": ()}, ConfigError),
        ({"ks": (0, 1)}, ConfigError),
        ({"bootstrap": -1}, ConfigError),
    ],
)
def test_options_that_make_no_sense_are_refused(options, error):
    with pytest.raises(error):
        retrieval(SIMS, IMAGE_OF, **options)


def test_a_matrix_without_captions_is_refused():
    with pytest.raises(DataError, match="nothing to evaluate"):
        retrieval(np.zeros((3, 0)), np.zeros(0, dtype=np.int64))


def test_the_average_of_matrices_is_their_weighted_mean_in_the_widest_type():
    one, two = SIMS, torch.from_numpy(SIMS[::-1].copy()).half()
    mean = average([one, two], weights=[1, 3])
    assert mean.dtype == np.float32
    expected = SIMS / 4 + 3 * two.float().numpy() / 4
    assert np.allclose(mean, expected, atol=1e-6)
    assert average([one, one.astype(np.float64)]).dtype == np.float64


@pytest.mark.parametrize("cells", [1, 1_000_000])
def test_standardized_scores_have_the_same_say_however_wide_they_are(monkeypatch, cells):
    monkeypatch.setattr("counterfoil.evaluation.evaluate.CHUNK_CELLS", cells)
    rng = np.random.default_rng(3)
    one, two = rng.normal(size=(7, 11)), rng.normal(size=(7, 11))
    expected = one / one.std() / 4 + 3 * two / two.std() / 4
    for width, offset in ((1, 0), (50, 7), (1e-3, -2)):
        result = average([one, width * two + offset], weights=[1, 3], standardize=True)
        moved = result - result.mean() + expected.mean()
        np.testing.assert_allclose(moved, expected, atol=1e-9)
    for same in (0.5, 0.1, 0.0):
        flat = average([one, np.full((7, 11), same)], standardize=True)
        np.testing.assert_allclose(flat, one / one.std() / 2 + same / 2, atol=1e-12)
    assert average([one[:0], one[:0]], standardize=True).shape == (0, 11)


@pytest.mark.parametrize(
    ("matrices", "weights", "message"),
    [
        ([], None, "no score matrices"),
        ([np.zeros((2, 3)), np.zeros((3, 2))], None, "matrix 1 has shape"),
        ([np.zeros((2, 3))], [1, 2], "1 matrices but 2 weights"),
        ([np.zeros((2, 3))], [0.0], "positive sum"),
    ],
)
def test_an_average_that_makes_no_sense_is_refused(matrices, weights, message):
    with pytest.raises(DataError, match=message):
        average(matrices, weights)


def alike(images: int = 40, kinds: int = 4) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Scores by kind: each image has a caption of its kind, and one that nobody else has."""
    captions, image_of = [], []
    for image in range(images):
        captions += [f"A photo of kind {image % kinds}.", f"this is number {image}"]
        image_of += [image, image]
    owner = np.array(image_of)
    own_kind = (np.arange(images)[:, None] % kinds) == (owner % kinds)
    scores = np.where(own_kind & (np.arange(2 * images) % 2 == 0), 1.0, 0.0)
    return scores + 1e-4 * np.random.default_rng(0).random(scores.shape), owner, captions


@pytest.mark.parametrize("folds", [0, 5])
def test_identical_captions_count_as_wrong_and_as_right_in_one_report(folds) -> None:
    scores, image_of, captions = alike()
    how = {"protocol": "folds", "folds": folds} if folds else {}
    plain = retrieval(scores, image_of, bootstrap=50, **how)
    report = retrieval(scores, image_of, captions=captions, bootstrap=50, **how)
    twins = report.identical_captions
    assert (twins.captions, twins.share, twins.counted_as) == (40, 50.0, "negatives")
    assert (report.i2t, report.t2i, report.rsum) == (plain.i2t, plain.t2i, plain.rsum)
    assert twins.negatives.i2t == plain.i2t
    assert twins.positives.i2t.recalls[1] == 100.0
    assert twins.positives.t2i.recalls[1] > plain.t2i.recalls[1]
    assert twins.positives.rsum > plain.rsum
    assert twins.positives.i2t.chance[1] > plain.i2t.chance[1]
    assert "40 of 80 captions (50.0 %) stand word for word" in report.warning()
    assert len(report.tables()) == 2
    page = report.to_markdown()
    assert "identical captions as negatives" in page
    assert "identical captions as positives" in page
    tree = json.loads(report.to_json())["identical_captions"]
    assert tree["positives"]["i2t"]["recalls"]["1"] == 100.0
    assert tree["negatives"]["rsum"] == plain.rsum
    assert RetrievalReport.from_json(report.to_json()) == report


def test_one_way_to_count_identical_captions_can_be_chosen() -> None:
    scores, image_of, captions = alike()
    both = retrieval(scores, image_of, captions=captions, bootstrap=0).identical_captions
    for way in ("positives", "negatives"):
        report = retrieval(scores, image_of, captions=captions, identical_captions=way, bootstrap=0)
        assert (report.i2t, report.t2i) == (getattr(both, way).i2t, getattr(both, way).t2i)
        assert (report.warning(), len(report.tables())) == ("", 1)
        assert f"identical captions as {way}" in report.to_markdown()
    with pytest.raises(ConfigError, match="expected 'positives', 'negatives' or 'both'"):
        retrieval(scores, image_of, captions=captions, identical_captions="right")


def test_captions_that_are_all_different_make_one_table_and_no_warning() -> None:
    scores, image_of, _ = alike()
    captions = [f"caption {number}" for number in range(80)]
    plain = retrieval(scores, image_of, bootstrap=20)
    for way in ("both", "positives", "negatives"):
        report = retrieval(
            scores, image_of, captions=captions, identical_captions=way, bootstrap=20
        )
        assert report.warning() == ""
        assert (report.i2t, report.t2i, len(report.tables())) == (plain.i2t, plain.t2i, 1)


def test_chance_knows_how_many_answers_are_right_with_identical_captions() -> None:
    image_of, captions = np.array([0, 1, 2, 2]), ["a", "A.", "b", "c"]
    report = retrieval(np.eye(3, 4), image_of, captions=captions, bootstrap=0, ks=(1,))
    result = report.identical_captions.positives
    assert result.i2t.chance[1] == pytest.approx(50.0)  # two of four captions for each image
    assert result.t2i.chance[1] == pytest.approx(100 * (2 + 2 + 1 + 1) / (4 * 3))


@pytest.mark.parametrize(
    "wrong",
    [
        {"ks": 5},
        {"ks": ("1",)},
        {"ks": (1.5,)},
        {"ks": "15"},
        {"ks": (0,)},
        {"bootstrap": 1.5},
        {"bootstrap": -1},
        {"protocol": "folds", "folds": 2.5},
        {"protocol": "none"},
    ],
    ids=str,
)
def test_wrong_settings_are_value_errors_that_name_them(wrong) -> None:
    name = "folds" if "folds" in wrong else next(iter(wrong))
    with pytest.raises(ValueError, match=f"{name}: expected"):
        retrieval(np.eye(4), np.arange(4), **wrong)
