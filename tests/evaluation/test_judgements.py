"""Kendall's τ against naive counting; human judgements from file to number."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import counterfoil as cf
from counterfoil.core.errors import ConfigError, DataError, MissingExtraError
from counterfoil.evaluation.judgements import evaluate_judgements, kendall_tau, read_judgements

few_levels = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), min_size=2, max_size=150)


def naive(pairs) -> tuple[int, int, int]:
    lead = tied_x = tied_y = 0
    for i, (a, b) in enumerate(pairs):
        for c, d in pairs[:i]:
            product = (a - c) * (b - d)
            lead += (product > 0) - (product < 0)
            tied_x += a == c
            tied_y += b == d
    return lead, tied_x, tied_y


@given(few_levels)
def test_tau_is_what_a_loop_over_pairs_gives(pairs) -> None:
    x, y = [a for a, _ in pairs], [b for _, b in pairs]
    lead, tied_x, tied_y = naive(pairs)
    count, every = len(pairs), len(pairs) * (len(pairs) - 1) // 2
    levels = min(len(set(x)), len(set(y)))
    whole = math.sqrt((every - tied_x) * (every - tied_y))
    tau_b = lead / whole if whole else math.nan
    tau_c = 2 * lead * levels / (count**2 * (levels - 1)) if levels > 1 else math.nan
    assert kendall_tau(x, y, "b") == pytest.approx(tau_b, abs=1e-12, nan_ok=True)
    assert kendall_tau(x, y, "c") == pytest.approx(tau_c, abs=1e-12, nan_ok=True)


def test_the_extra_is_named_when_scipy_is_missing(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(MissingExtraError, match=r"counterfoil\[judge\]"):
        kendall_tau([1.0, 2.0], [1.0, 2.0], "b")


def write(path, rows):
    path.write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def model(concepts):
    return cf.create("scan-t2i", concepts, embed_size=16, text={"word_dim": 8})


def test_a_file_is_recognized_by_its_numbers(tmp_path) -> None:
    expert = write(
        tmp_path / "a.txt", [("1.jpg", "2.jpg#0", 1, 2, 4), ("1.jpg", "1.jpg#1", 4, 4, 4)]
    )
    crowd = write(tmp_path / "b.txt", [("1.jpg", "2.jpg#3", "0.333333333333333", 1, 2)])
    kind, result = read_judgements(expert)
    assert kind == "expert"
    assert result[0].ratings == (1.0, 2.0, 4.0)
    assert (result[1].caption_of, result[1].number) == ("1.jpg", 1)
    kind, result = read_judgements(crowd)
    assert kind == "crowd"
    assert result[0].ratings == (0.333333333333333,)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (("1.jpg", "2.jpg#0", 1, 2), "4 columns"),
        (("1.jpg", "2.jpg", 1, 2, 3), "image#number"),
        (("1.jpg", "2.jpg#0", 1, 2, 5), "neither"),
        (("1.jpg", "2.jpg#0", 0.9, 1, 2), "neither"),
        (("1.jpg", "2.jpg#0", "x", 1, 2), "x"),
        (("1.jpg", "2.jpg#0", 0, 0, 0), "neither"),
        (("1.jpg", "2.jpg#0", "nan", 1, 2), "neither"),
    ],
)
def test_a_line_that_is_no_judgement_is_refused_with_its_place(tmp_path, row, said) -> None:
    path = write(tmp_path / "a.txt", [("1.jpg", "2.jpg#0", 1, 2, 4), row])
    with pytest.raises(DataError, match=f"a.txt:2.*{said}"):
        read_judgements(path)


def test_files_that_mix_kinds_or_hold_nothing_are_refused(tmp_path) -> None:
    mixed = [("1.jpg", "2.jpg#0", 1, 2, 4), ("1.jpg", "2.jpg#0", 0, 0, 3)]
    with pytest.raises(DataError, match="expert and crowd"):
        read_judgements(write(tmp_path / "a.txt", mixed))
    with pytest.raises(DataError, match="no judgements"):
        read_judgements(write(tmp_path / "b.txt", []))


def test_expert_ratings_are_items_and_own_captions_are_left_out(model, concepts, tmp_path) -> None:
    rng = np.random.default_rng(3)
    rows, x, y = [], [], []
    splits = {"test": concepts.test, "dev": concepts["dev"]}
    for name, other in (("test", "dev"), ("dev", "test")):
        for image in range(5):
            target = (image * 7 + 1) % 30
            ratings = rng.integers(1, 5, size=3).tolist()
            rows.append((f"{name}-{image}.jpg", f"{other}-{target}.jpg#1", *ratings))
            text = splits[other].captions[target][1]
            score = float(model.score([splits[name].fragments.read(image)], [text])[0, 0])
            x += [score] * 3
            y += ratings
    rows.append(("test-3.jpg", "test-3.jpg#0", 4, 4, 4))
    rows.append(("absent.jpg", "test-3.jpg#0", 1, 1, 1))
    rows.append(("test-3.jpg", "test-4.jpg#9", 1, 1, 1))
    result = evaluate_judgements(model, concepts, write(tmp_path / "a.txt", rows))
    assert (result.kind, result.variant) == ("expert", "c")
    assert (result.pairs, result.ratings, result.images) == (10, 30, 10)
    assert (result.own_left_out, result.not_found) == (1, 2)
    assert result.tau == pytest.approx(100 * kendall_tau(np.round(x, 5), y, "c"))
    assert "10 pairs" in result.headline()
    assert result.rows()[1] == ("this model", f"{result.tau:.1f}")


def test_the_crowd_is_one_share_a_pair_and_judges_own_captions_too(
    model, concepts, tmp_path
) -> None:
    rows = [(f"test-{i}", f"test-{(i * k) % 30}#0", 0.25 * (i % 4), i % 4, 4 - i % 4)
            for i in range(1, 6) for k in (1, 5)]  # fmt: skip
    result = evaluate_judgements(model, concepts, write(tmp_path / "a.txt", rows))
    assert (result.kind, result.variant, result.pairs, result.ratings) == ("crowd", "b", 10, 10)
    assert result.own_left_out == 0
    assert -100 <= result.tau <= 100


def test_several_models_are_an_ensemble_of_averaged_scores(model, concepts, tmp_path) -> None:
    other = cf.create("scan-t2i", concepts, embed_size=24, text={"word_dim": 8})
    rng = np.random.default_rng(4)
    rows = [
        (f"dev-{i}.jpg", f"test-{i + 1}.jpg#0", *rng.integers(1, 5, size=3).tolist())
        for i in range(12)
    ]
    path = write(tmp_path / "a.txt", rows)
    dev, texts = concepts["dev"].fragments, concepts.test.captions
    scores = [
        [round(float(one.score([dev.read(i)], [texts[i + 1][0]])[0, 0]), 5) for i in range(12)]
        for one in (model, other)
    ]
    y = [rating for row in rows for rating in row[2:]]
    for standardize in (False, True):
        shares = [1 / np.std(own) if standardize else 1.0 for own in scores]
        mean = sum(share * np.array(own) for share, own in zip(shares, scores, strict=True))
        expected = 100 * kendall_tau(np.repeat(mean, 3), y, "c")
        result = evaluate_judgements([model, other], concepts, path, standardize=standardize)
        assert result.tau == pytest.approx(expected)
    alone = evaluate_judgements(model, concepts, path).tau
    assert evaluate_judgements([model], concepts, path).tau == alone != result.tau
    with pytest.raises(ConfigError, match="no model given"):
        evaluate_judgements([], concepts, path)


def test_unreadable_images_are_counted(model, concepts, tmp_path) -> None:
    table = concepts.test.fragments
    broken = np.array(np.load(table.features.path))
    broken[2] = np.nan
    np.save(tmp_path / "broken.npy", broken)
    fragments = replace(table, features=type(table.features)(tmp_path / "broken.npy"))
    pairs = replace(concepts, splits={"test": replace(concepts.test, fragments=fragments)})
    rows = [(f"test-{i}.jpg", f"test-{i + 5}.jpg#0", 1, 1 + i, 3) for i in range(4)]
    result = evaluate_judgements(model, pairs, write(tmp_path / "a.txt", rows))
    assert (result.pairs, result.unreadable) == (3, 1)
    with pytest.raises(DataError, match="no image of its 1 pairs can be read"):
        evaluate_judgements(model, pairs, write(tmp_path / "b.txt", rows[2:3]))


def test_judgements_of_other_data_are_refused(model, concepts, tmp_path) -> None:
    with pytest.raises(DataError, match="1 are not in the data set 'concepts'"):
        evaluate_judgements(
            model, concepts, write(tmp_path / "a.txt", [("x.jpg", "y.jpg#0", 1, 1, 1)])
        )


def test_unknown_words_of_judged_captions_are_left_out_and_pairs_of_such_alone_counted(
    model, concepts, tmp_path
) -> None:
    def odd(captions):
        return [["zorp blah", f"zorp {texts[1]}"] for texts in captions]

    test = concepts.test
    splits = {**concepts.splits, "test": replace(test, captions=odd(test.captions))}
    rng = np.random.default_rng(3)
    rows = [
        (f"dev-{image}.jpg", f"test-{image + 1}.jpg#{number}", *rng.integers(1, 5, size=3).tolist())
        for image in range(8)
        for number in (0, 1)
    ]
    plain = evaluate_judgements(
        model, concepts, write(tmp_path / "a.txt", [row for row in rows if "#1" in row[1]])
    )
    result = evaluate_judgements(
        model, replace(concepts, splits=splits), write(tmp_path / "b.txt", rows)
    )
    assert (result.pairs, result.unknown) == (8, 8)
    assert result.tau == pytest.approx(plain.tau)
    assert "8 without a known word" in result.headline()
