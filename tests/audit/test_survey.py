"""The survey of a split, block by block, against the whole matrix of scores."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from unittest import mock

import numpy as np
import pytest
import torch

import counterfoil as cf
from counterfoil.audit import survey
from counterfoil.audit import survey as blocks
from counterfoil.audit.survey import POOL_SIZE, survey_split
from counterfoil.core.errors import DataError
from counterfoil.core.progress import Silent
from counterfoil.matchers.cross_encoder import CrossEncoder
from counterfoil.scoring import plan as score_plan
from counterfoil.scoring.encode import score_split
from tests.audit.conftest import with_unreadable
from tests.conftest import thinned

SMALL = {"embed_size": 16, "text": {"word_dim": 8}}


def expected(model, split):
    """Own scores, ranks, best others and pools from the matrix, by loops."""
    result = score_split(model, split)
    scores, owner = result.scores.numpy(), result.image_of
    own = scores[owner, np.arange(len(owner))]
    ranks, others = [], []
    for text, image in enumerate(owner):
        rest = np.delete(scores[:, text], image)
        ranks.append(1 + int((rest > own[text] + 1e-6).sum()))
        others.append(rest.max())
    pools = [np.sort(row[owner != image])[::-1][:POOL_SIZE] for image, row in enumerate(scores)]
    return result, own, ranks, others, pools


@pytest.mark.parametrize(
    ("name", "block"),
    thinned(
        product(["rvse-mlp", "naaf", "scan-i2t"], [None, 7, 1]),
        *[("rvse-mlp", None), ("naaf", 7)],
    ),
)
def test_blocks_find_what_the_whole_matrix_says(concepts, monkeypatch, name, block) -> None:
    monkeypatch.setattr(blocks, "BATCH", 5)  # captions in small blocks, too
    monkeypatch.setattr(score_plan, "CPU_CELLS", 300)  # and these in small tiles
    split = concepts.test.select(range(16))
    model = cf.create(name, concepts, **SMALL)
    result = survey_split(model, split, block_size=block)
    _, own, ranks, others, pools = expected(model, split)
    np.testing.assert_allclose(result.own, own, atol=1e-5)
    assert result.rank.tolist() == ranks
    np.testing.assert_allclose(result.other_score, others, atol=1e-5)
    np.testing.assert_allclose(result.pool_score, pools, atol=1e-5)
    for text, (image, best) in enumerate(zip(result.other, result.other_score, strict=True)):
        assert image != split.image_of[text]
        fragments = split.fragments.read(int(image))
        assert float(model.score([fragments], [split.texts[text]])[0, 0]) == pytest.approx(
            best, abs=1e-5
        )
    for image, captions in enumerate(result.pool):
        assert all(split.image_of[caption] != image for caption in captions)
    assert (result.compared, result.skipped) == (16, [])


def test_no_more_than_a_block_of_scores_is_held(concepts, monkeypatch) -> None:
    monkeypatch.setattr(blocks, "BATCH", 6)
    monkeypatch.setattr(survey, "OWN_PAIR_BATCH", 4)
    held: list[int] = []
    model = cf.create("rvse-mlp", concepts, **SMALL)
    model.matcher.register_forward_hook(lambda *call: held.append(call[2].numel()))
    split = concepts.test.select(range(20))
    many = replace(split, captions=[[*texts, *texts[:1] * 9] for texts in split.captions])
    survey_split(model, many, block_size=10)
    assert max(held) <= 6 * 10
    assert sum(held) < 20 * 220 + 4 * 220 + 1  # every pair once, besides the own ones


def test_no_more_similarities_are_held_than_memory_has_room_for(concepts, monkeypatch) -> None:
    """A block of images with a block of captions would be 20 × 40 pairs of words and regions."""
    monkeypatch.setattr(score_plan, "CPU_CELLS", 1000)
    monkeypatch.setattr(survey, "OWN_PAIR_BATCH", 1)
    held: list[int] = []

    def hold(_, sides, __) -> None:
        images, texts = sides
        held.append(images.mask.numel() * texts.mask.numel())

    model = cf.create("naaf", concepts, **SMALL)
    model.matcher.register_forward_hook(hold)
    survey_split(model, concepts.test.select(range(20)))
    assert len(held) > 1
    assert max(held) <= 1000


def test_progress_goes_on_within_a_block_of_images(concepts, monkeypatch) -> None:
    monkeypatch.setattr(blocks, "BATCH", 6)
    monkeypatch.setattr(survey, "OWN_PAIR_BATCH", 6)
    told: dict[str, tuple[int, int | None]] = {}

    class Told(Silent):
        def track(self, items, description, total=None, done=0):
            made = list(items)
            told[description] = (len(made), total)
            return iter(made)

    model = cf.create("rvse-mlp", concepts, **SMALL)
    survey_split(model, concepts.test.select(range(20)), Told())  # two captions each
    assert told == {"own scores (test)": (7, 7), "scoring (test)": (7, 7)}


def test_own_scores_are_as_precise_as_those_they_are_ranked_by(concepts) -> None:
    split = concepts.test.select(range(6))
    model = cf.create("uniter-small", concepts, embed_size=16, matcher={"layers": 1, "heads": 2})
    full = expected(model, split)[1]
    with mock.patch.object(CrossEncoder, "rounds", return_value=True):
        result, rough = survey_split(model, split).own, expected(model, split)[1]
    assert abs(result - rough).mean() < 0.2 * abs(result - full).mean()


def test_other_scores_that_are_not_numbers_are_refused(concepts) -> None:
    split = concepts.test.select(range(6))
    model = cf.create("rvse-mlp", concepts, **SMALL)

    score_block = model.matcher.score_block

    def spoil(*block):
        scores = score_block(*block)
        return scores.masked_fill(~torch.eye(*scores.shape, dtype=torch.bool), torch.nan)

    with (
        mock.patch.object(model.matcher, "score_block", spoil),
        mock.patch.object(survey, "OWN_PAIR_BATCH", 1),
        pytest.raises(DataError, match="not finite"),
    ):
        survey_split(model, split, block_size=2)


def test_a_cross_encoder_is_asked_for_its_own_pairs_alone(concepts) -> None:
    split = concepts.test.select(range(4))
    model = cf.create("uniter-small", concepts, embed_size=16, matcher={"layers": 1, "heads": 2})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    result = survey_split(model, split)
    _, own, ranks, _, _ = expected(model, split)
    np.testing.assert_allclose(result.own, own, atol=1e-5)
    assert result.rank.tolist() == ranks


@pytest.mark.parametrize("block", [None, 5])
def test_unreadable_images_are_left_out_and_named(concepts, tmp_path, block) -> None:
    split = with_unreadable(concepts.test.select(range(12)), [0, 1, 2, 3, 4, 9], tmp_path)
    model = cf.create("rvse-mlp", concepts, **SMALL)
    result = survey_split(model, split, block_size=block)
    assert result.compared == 6
    assert len(result.skipped) == 6
    assert result.skipped[5].startswith("image test-9: ")
    assert set(split.image_of[result.captions].tolist()) == {5, 6, 7, 8, 10, 11}
    assert np.isnan(result.own[split.image_of == 9]).all()
    assert not set(result.other[result.captions].tolist()) & {0, 1, 2, 3, 4, 9}


def test_ties_count_against_the_own_image(concepts) -> None:
    model = cf.create("rvse-mlp", concepts, **SMALL)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    result = survey_split(model, concepts.test.select(range(6)))
    assert set(result.rank.tolist()) == {6}


def test_a_single_image_has_no_rival(concepts) -> None:
    model = cf.create("rvse-mlp", concepts, **SMALL)
    result = survey_split(model, concepts.test.select([3]))
    assert result.rank.tolist() == [1, 1]
    assert result.other.tolist() == [-1, -1]
    assert (result.pool == -1).all()


def test_images_without_captions_are_rivals_but_not_judged(concepts) -> None:
    split = concepts.test.select(range(4))
    bare = replace(split, captions=[split.captions[0], [], split.captions[2], []])
    result = survey_split(cf.create("rvse-mlp", concepts, **SMALL), bare)
    assert result.compared == 4
    assert len(result.captions) == 4


def test_a_split_with_nothing_to_judge_is_refused(concepts, tmp_path) -> None:
    model = cf.create("rvse-mlp", concepts, **SMALL)
    split = with_unreadable(concepts.test.select(range(2)), [0, 1], tmp_path)
    with pytest.raises(DataError, match="no readable image"):
        survey_split(model, split)


def test_a_broken_model_is_refused(concepts) -> None:
    model = cf.create("rvse-mlp", concepts, **SMALL)
    with torch.no_grad():
        next(model.text_encoder.parameters()).fill_(float("nan"))
    with pytest.raises(DataError, match="finite"):
        survey_split(model, concepts.test.select(range(3)))


def test_the_mode_of_the_model_is_kept(concepts) -> None:
    model = cf.create("rvse-mlp", concepts, **SMALL).train()
    survey_split(model, concepts.test.select(range(3)))
    assert model.training
