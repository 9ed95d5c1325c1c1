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
from tests.objectives.live import prepare
from tests.objectives.test_tags import SMALL, batch_of, logits_one_by_one, remembered, small, step


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
