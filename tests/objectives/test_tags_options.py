"""Options of TAGS and TAGS-DC: static generators, the control without foils, the paper's forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from counterfoil.core.errors import ConfigError
from counterfoil.data.pairs import Split
from counterfoil.data.text.vocabulary import SPECIALS
from counterfoil.foils.generation import expected_share, token_units
from counterfoil.models import save_pretrained
from counterfoil.objectives.tags import MLM, TAGS, TAGSDC
from counterfoil.training.step import TrainingBatchServices, score_batch
from tests.conftest import make_split
from tests.objectives.live import prepare, score, small_model
from tests.objectives.test_tags import (
    SMALL,
    batch_of,
    logits_one_by_one,
    remembered,
    small,
    step,
    words_of,
)


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> Split:
    return make_split(tmp_path_factory.mktemp("tags"), "train", 24, seed=0)


@pytest.mark.parametrize("kind", [TAGS, TAGSDC])
def test_a_static_generator_leaves_the_matcher_without_a_masked_word_loss(
    split, kind, tmp_path
) -> None:
    save_pretrained(small(split), tmp_path / "generator")
    model = small(split)
    objective = kind(**SMALL, rank=1.0, generator=str(tmp_path / "generator"))
    prepare(objective, split, model)
    torch.manual_seed(2)
    loss, seen = step(objective, model, batch_of(split, model, [0, 3, 5]))
    assert "tags/mlm" not in seen
    loss.backward()
    assert all(p.grad is None for p in model.matcher.heads["mlm"].parameters())
    assert model.matcher.pooler.weight.grad.abs().sum() > 0


def test_a_matcher_with_a_static_generator_needs_no_head_that_fills_masks(split, tmp_path) -> None:
    save_pretrained(small(split), tmp_path / "generator")
    model = small(split, [])
    objective = TAGS(**SMALL, rank=1.0, generator=str(tmp_path / "generator"))
    prepare(objective, split, model)
    loss, diagnostics = step(objective, model, batch_of(split, model, [0, 3, 5]))
    assert float(diagnostics["tags/kept"]) > 0
    assert loss.item() == pytest.approx(float(diagnostics["tags/rank"]))
    with pytest.raises(ConfigError, match="nothing to learn"):
        TAGS(rank=0.0, generator=str(tmp_path / "generator"))


def test_without_a_rank_loss_masks_are_filled_and_no_foils_are_written(split) -> None:
    model = small(split)
    whole, control = TAGS(**SMALL, mlm=0.5, rank=1.0), TAGS(**SMALL, mlm=0.5, rank=0.0)
    result = {}
    for objective in (whole, control):
        prepare(objective, split, model)
        result[objective] = step(objective, model, batch_of(split, model, [0, 3, 5]))
    filled = result[whole][1]["tags/mlm"]  # the same masks, so the same loss
    assert result[control][0].item() == pytest.approx(0.5 * float(filled), rel=1e-5)
    assert set(result[control][1]) & set(result[whole][1]) >= {"tags/mlm"}
    assert "tags/kept" not in result[control][1]


@pytest.mark.parametrize("over", ["masked", "sentence"])
def test_word_correction_learns_from_masked_words_or_as_equation_8_from_all(split, over) -> None:
    model, captions = small(split), [0, 3, 5]
    objective = TAGSDC(
        **SMALL, mlm=0.0, rank=0.0, discrimination=0.0, correction=2.0, correct_over=over
    )
    written = remembered(objective, split, model)
    loss, diagnostics = step(objective, model, batch_of(split, model, captions))
    made, table, head = written.last, model.text_encoder.embed.weight, model.matcher.heads
    losses, right = [], []
    for row, caption in enumerate(captions):
        length = int(made.captions.mask[row].sum())
        true = made.captions.ids[row][:length]
        real = made.real[row]
        for foil, labels in zip(made.foils[row][real], made.foil_labels[row][real], strict=True):
            states = logits_one_by_one(model, split, caption // 2, foil[:length])
            for place, state in enumerate(states):
                logits = head["correction"](state, table)
                if labels[place] != -1:
                    right.append(float(logits.argmax() == true[place]))
                if over == "sentence" or labels[place] != -1:
                    losses.append(F.cross_entropy(logits, true[place]).item())
    assert loss.item() == pytest.approx(2.0 * np.mean(losses), rel=1e-4)
    assert float(diagnostics["tags/woc"]) == pytest.approx(np.mean(right))


def tags(**options) -> TAGS:
    return TAGS(samples=1, kept=1, rank=0.0, **options)


@pytest.mark.parametrize("kind", [tags, MLM])
def test_masks_may_take_their_share_of_the_whole_sentence(split, kind) -> None:
    model, captions = small(split), list(range(0, 40, 2))
    batch = batch_of(split, model, captions)
    live = TrainingBatchServices(model, batch, score_batch(model, batch, scored=False), None)
    objective = kind(masks=400, mask_share="sentence")
    prepare(objective, split, model)
    made, masker = objective._generator.mask(live, 0), objective._generator.masker
    special = torch.tensor([model.text.vocabulary.index[word] for word in SPECIALS])
    words = (made.captions.mask & ~torch.isin(made.captions.ids, special)).sum(1)
    shares = (made.masked_labels != -1).float().mean(1).sum(1) / words
    for caption, share, count in zip(captions, shares.tolist(), words.tolist(), strict=True):
        units = masker.units(split.texts[caption])
        assert count == len(token_units(masker._words(split.texts[caption])))
        most = len({place for unit in units for place in unit}) / count
        expected = min(max(0.15, expected_share(units, count, 0.0)), most)
        assert share == pytest.approx(expected, abs=0.05), split.texts[caption]


def gaps_one_by_one(scorer, model, split, made, captions, images) -> list[float]:
    """How far captions score above their foils, for the given images."""
    gaps = []
    for row, (caption, image) in enumerate(zip(captions, images, strict=True)):
        own = score(scorer, split, image, split.texts[caption])
        foils = made.foils[row][made.real[row]]
        gaps += [own - score(scorer, split, image, words_of(model, ids)) for ids in foils]
    return gaps


@pytest.mark.parametrize("kind", ["vse-fc", "naaf"])
def test_what_a_judge_scores_as_high_as_the_caption_is_no_foil(split, kind, tmp_path) -> None:
    judge, model, captions = small_model(split, kind), small(split), [0, 3, 5, 9]
    save_pretrained(judge, tmp_path / "judge")
    images, gaps = [caption // 2 for caption in captions], {}
    for folder in ("", str(tmp_path / "judge")):
        objective = TAGS(**SMALL, rank=1.0, judge=folder)
        written = remembered(objective, split, model)
        step(objective, model, batch_of(split, model, captions))
        gaps[folder] = gaps_one_by_one(judge, model, split, written.last, captions, images)
    plain, judged = gaps.values()
    assert min(plain) < 0 < max(plain)
    assert judged
    assert min(judged) > 0


def test_a_judge_must_read_the_same_words(split, tmp_path) -> None:
    few = split.select(range(2))
    save_pretrained(small_model(few, "vse-fc"), tmp_path / "judge")
    with pytest.raises(ConfigError, match="another vocabulary"):
        prepare(TAGS(**SMALL, judge=str(tmp_path / "judge")), split, small(split))


@pytest.mark.parametrize("kind", [TAGS, TAGSDC])
def test_the_gap_to_a_foil_counts_beyond_the_one_for_another_image(split, kind) -> None:
    model, captions = small(split), [0, 1, 4, 9]  # the first two share their image
    objective = kind(**SMALL, mlm=0.0, rank=1.0, margin=0.02, other_images=True)
    written = remembered(objective, split, model)
    _, diagnostics = step(objective, model, batch_of(split, model, captions))
    own = gaps_one_by_one(model, model, split, written.last, captions, [0, 0, 2, 4])
    other = gaps_one_by_one(model, model, split, written.last, captions, [2, 2, 4, 0])
    costs = [max(0, 0.02 - a + b) for a, b in zip(own, other, strict=True)]
    assert float(diagnostics["tags/rank"]) == pytest.approx(np.mean(costs), abs=1e-5)
    assert float(diagnostics["tags/gap"]) == pytest.approx(np.mean(own), abs=1e-5)


OTHERS = {"other_images": True}


@pytest.mark.parametrize(
    ("kind", "options"), [(TAGS, {"judge": "runs/naaf"}), (TAGS, OTHERS), (TAGSDC, OTHERS)]
)
def test_options_of_the_ranking_are_refused_without_it(kind, options) -> None:
    with pytest.raises(ConfigError, match="rank=0"):
        kind(**SMALL, rank=0.0, **options)


def test_without_another_image_the_gap_counts_alone(split) -> None:
    model = small(split)
    costs = []
    for other_images in (False, True):
        objective = TAGS(**SMALL, rank=1.0, other_images=other_images)
        prepare(objective, split, model)
        torch.manual_seed(2)
        costs.append(step(objective, model, batch_of(split, model, [0, 1]))[0].item())
    assert costs[0] == pytest.approx(costs[1])
