"""Metrics of hand-made scores, whose answers are known; ties count against the scorer."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from counterfoil.core.errors import DataError
from counterfoil.evaluation.compositional.accuracy import (
    Bootstrap,
    Mean,
    Scored,
    chance,
    from_outcomes,
    measure,
    measured,
    metric_names,
)
from counterfoil.evaluation.compositional.readers import Item, Subset, read_benchmark
from tests.evaluation.compositional.small_files import write_results

SHARED = Path(__file__).parents[4] / "shared" / "data" / "bench" / "bivlc"


def choice(true: int = 1, foils: int = 1, image: str = "a", label: str = "") -> Item:
    captions = tuple(f"caption {n}" for n in range(true))
    return Item("k", (image,), captions, tuple(f"foil {n}" for n in range(foils)), label)


def scored(*scores: float, **parts) -> Scored:
    return Scored(np.array([scores], dtype=float), **parts)


def value(metric, items) -> float:
    return float(Bootstrap(items, 0, 0).values(metric)[0])


def test_a_tie_of_caption_and_foil_counts_against_the_scorer() -> None:
    items = [choice(image=str(n)) for n in range(4)]
    scores = [scored(2, 1), scored(1, 2), scored(1, 1), scored(0.5, 0.25)]
    metrics = measure(["accuracy"], items, scores)
    assert value(metrics["accuracy"], items) == 50.0
    assert chance(["accuracy"], items) == {"accuracy": 50.0}


def test_all_true_captions_must_score_above_all_foils() -> None:
    items = [choice(2, 1, "a"), choice(2, 1, "b"), choice(2, 1, "c")]
    scores = [scored(3, 2, 1), scored(3, 1, 2), scored(3, 1, 1)]
    metrics = measure(["image-text"], items, scores)
    assert value(metrics["image-text"], items) == pytest.approx(100 / 3)
    assert chance(["image-text"], items)["image-text"] == pytest.approx(100 / 3)
    one_of_five = [choice(1, 4)]
    assert chance(["accuracy"], one_of_five) == {"accuracy": 20.0}


def test_text_only_compares_the_true_captions_with_each_other_and_with_the_foil() -> None:
    items = [choice(2, 1, str(n)) for n in range(3)]
    near = np.array([[1, 0.9, 0.8], [0.9, 1, 0.7], [0.8, 0.7, 1]])
    far = np.array([[1, 0.9, 0.8], [0.9, 1, 0.95], [0.8, 0.95, 1]])
    scores = [
        scored(1, 1, 0, similarity=near),
        scored(1, 1, 0, similarity=far),
        scored(1, 1, 0),
    ]
    metrics = measure(["image-text", "text-only"], items, scores)
    assert value(metrics["text-only"], items) == 50.0  # the third has no text vectors


def test_valse_accuracy_calls_the_higher_half_true() -> None:
    items = [choice(image=str(n)) for n in range(3)]
    # median of 9 8 7 3 2 1: 5. The second item is right as a pair, but its foil is above 5.
    scores = [scored(9, 3), scored(8, 7), scored(2, 1)]
    metrics = measure(["pairwise accuracy", "accuracy"], items, scores)
    assert value(metrics["pairwise accuracy"], items) == 100.0
    assert value(metrics["accuracy"], items) == pytest.approx(100 * (1 + 0.5 + 0.5) / 3)


def test_equal_scores_of_all_texts_are_never_right() -> None:
    items = [choice(), choice(image="b")]
    metrics = measure(["pairwise accuracy", "accuracy"], items, [scored(1, 1), scored(1, 1)])
    assert [value(metric, items) for metric in metrics.values()] == [0.0, 0.0]


def square(a: float, b: float, c: float, d: float) -> Scored:
    """Scores of (image 0, caption 0), (0, 1), (1, 0), (1, 1)."""
    return Scored(np.array([[a, b], [c, d]], dtype=float))


def test_text_image_and_group_with_ties() -> None:
    scores = [
        square(4, 1, 2, 3),  # all right
        square(4, 1, 4, 5),  # caption 0: both images tie
        square(4, 4, 1, 5),  # image 0: both captions tie
        square(1, 0, 9, 10),  # captions right, caption 0 prefers image 1
        square(1, 1, 1, 1),  # all tie
    ]
    items = [Item(str(n), (f"{n}a", f"{n}b"), ("one", "two")) for n in range(5)]
    metrics = measure(["text", "image", "group"], items, scores)
    result = {name: value(metric, items) for name, metric in metrics.items()}
    assert result == {"text": 60.0, "image": 40.0, "group": 20.0}
    assert chance(["text", "image", "group"], items)["group"] == pytest.approx(100 / 6)


def test_chance_of_the_square_is_that_of_random_orders() -> None:
    """All 24 orders of four scores, counted."""
    from itertools import permutations

    scores = [square(*order) for order in permutations(range(4))]
    items = [Item(str(n), (f"{n}a", f"{n}b"), ("one", "two")) for n in range(24)]
    metrics = measure(["text", "image", "group"], items, scores)
    expected = chance(["text", "image", "group"], items)
    assert {name: value(m, items) for name, m in metrics.items()} == pytest.approx(expected)


def test_stored_outcomes_give_the_same_metrics_as_scores(tmp_path) -> None:
    (subset,) = read_benchmark("bivlc", [write_results(tmp_path)]).subsets
    assert subset.results is not None
    metrics = from_outcomes(subset.results)
    result = {name: value(metric, subset.items) for name, metric in metrics.items()}
    assert result == {"text": 50.0, "image": 50.0, "group": 25.0}


@pytest.mark.skipif(not SHARED.is_dir(), reason="the results are not beside the repository")
def test_the_published_scores_follow_from_the_published_results() -> None:
    published = {
        "BiVLC_ViT-B-32.csv.gz": [75.83, 52.40, 49.06],
        "BiVLC_CLIP_TROHN-Img.csv.gz": [88.54, 71.84, 69.25],
    }
    for file, expected in published.items():
        (subset,) = read_benchmark("bivlc", [SHARED / file]).subsets
        assert subset.results is not None
        metrics = from_outcomes(subset.results)
        assert [round(value(m, subset.items), 2) for m in metrics.values()] == expected


def marked(caption: str, *spans: tuple[int, int], image: str = "a") -> Item:
    return Item("k", (image,), (caption,), wrong=tuple(spans))


def test_detection_is_the_average_precision_of_low_scores() -> None:
    items = [
        marked("a red ball", (2, 5), image="a"),
        marked("a dog", image="b"),
        marked("a blue cat", (7, 10), image="c"),
    ]
    # suspicion 3, 2, 1: wrong, right, wrong: (1/1 + 2/3) / 2
    scores = [scored(-3, effects=[]), scored(-2), scored(-1, effects=[])]
    metrics = measure(["detection AP", "localization"], items, scores)
    assert value(metrics["detection AP"], items) == pytest.approx(100 * (1 + 2 / 3) / 2)
    expected = chance(["detection AP", "localization"], items)
    assert expected == pytest.approx({"detection AP": 100 * 2 / 3, "localization": 100 / 3})


@pytest.mark.parametrize(
    ("effects", "expected"),
    [
        ([(0, 1, 0.0), (2, 5, -1.0), (6, 10, 0.5)], 100.0),
        ([(0, 1, 0.0), (2, 5, 1.0), (6, 10, 0.5)], 0.0),
        ([(0, 1, -1.0), (2, 5, -1.0), (6, 10, 0.5)], 0.0),  # a tie with a right word
        ([], 0.0),  # the model knows no word
    ],
)
def test_the_word_with_the_lowest_effect_must_be_wrong(effects, expected) -> None:
    items = [marked("a red ball", (2, 5)), marked("a dog", image="b")]
    scores = [scored(1, effects=effects), scored(2, effects=[(0, 1, 0.0)])]
    metrics = measure(["detection AP", "localization"], items, scores)
    assert value(metrics["localization"], items) == expected


def test_classes_weigh_the_same_whatever_their_size() -> None:
    items = [*(choice(image=str(n), label="on") for n in range(3)), choice(image="x", label="in")]
    metrics = measure(["accuracy"], items, [scored(2, 1)] * 3 + [scored(1, 2)])
    assert value(metrics["accuracy"], items) == 50.0  # 100 % of "on", 0 % of "in"


def test_metrics_follow_from_the_form_of_the_items() -> None:
    assert metric_names("cola", Subset("s", "square", ())) == ("text", "image", "group")
    assert metric_names("foil", Subset("s", "words", ())) == ("detection AP", "localization")
    assert metric_names("aro", Subset("s", "choice", (choice(),))) == ("accuracy",)
    assert metric_names("x", Subset("s", "choice", (choice(2),))) == ("image-text", "text-only")
    valse = Subset("s", "choice", (choice(),))
    assert metric_names("valse", valse) == ("pairwise accuracy", "accuracy")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_score_that_is_no_number_is_refused_with_its_item(bad) -> None:
    with pytest.raises(DataError, match="item 'k'"):
        measure(["accuracy"], [choice()], [scored(bad, 1)])


def test_the_interval_is_that_of_resampled_images() -> None:
    """Against a loop over resamples, with several items of some images."""
    rng = np.random.default_rng(3)
    items = [choice(image=str(rng.integers(12))) for _ in range(40)]
    values = (rng.random(40) < 0.6).astype(float)
    bootstrap = Bootstrap(items, 4000, 1)
    drawn = bootstrap.values(Mean(values, np.ones(40)))
    assert drawn[0] == pytest.approx(100 * values.mean())
    names = sorted({item.images[0] for item in items})
    by_image = {
        n: [v for i, v in zip(items, values, strict=True) if i.images[0] == n] for n in names
    }
    loop = []
    for _ in range(4000):
        chosen = rng.choice(names, len(names))
        loop.append(100 * np.mean([v for name in chosen for v in by_image[name]]))
    bounds = measured(drawn).interval
    assert bounds == pytest.approx(tuple(np.percentile(loop, [2.5, 97.5])), abs=2.5)


def test_the_same_seed_gives_the_same_interval_and_none_without_resamples() -> None:
    items = [choice(image=str(n)) for n in range(30)]
    metric = Mean(np.arange(30) % 3 / 2, np.ones(30))
    one, two, other = (Bootstrap(items, 50, seed).values(metric) for seed in (0, 0, 1))
    assert one.tolist() == two.tolist() != other.tolist()
    assert measured(Bootstrap(items, 0, 0).values(metric)).interval is None
