"""Correcting captions: the wrong word is found, the right one put there, and nothing made worse."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from counterfoil.core.config import build_config
from counterfoil.core.errors import ConfigError, DataError
from counterfoil.data.fragments import Fragments
from counterfoil.data.text.vocabulary import SPECIALS
from counterfoil.data.text.words import caption_words
from counterfoil.models import Model, create_model, from_pretrained, save_pretrained
from counterfoil.models.correct import CaptionReader, correct, correct_batch, exchanged
from counterfoil.models.correction_rule import CorrectionRule
from counterfoil.objectives.tags import discrimination_losses, word_losses
from tests.conftest import CONCEPTS, load_fixture, make_split
from tests.models.cross import model_of
from tests.objectives.test_tags import small


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    return make_split(tmp_path_factory.mktemp("correct"), "train", 24, seed=0)


def image_of(split, index: int = 0) -> Fragments:
    return split.fragments.read(index)


@pytest.fixture(scope="module")
def taught(split) -> tuple[Model, list[tuple[int, str, str]]]:
    """A model that knows the foils of a few captions by heart, and these: image, true, foil."""
    from counterfoil.data.batches.collate import pad_fragments, pad_texts

    torch.manual_seed(0)
    model = small(split)
    cases = []
    for image in range(6):
        true = split.captions[image][0]
        shown = [word for word in true.split() if word in CONCEPTS]
        absent = [word for word in CONCEPTS if word not in shown][image]
        cases.append((image, true, true.replace(shown[1], absent)))
    images = pad_fragments([image_of(split, image) for image, _, _ in cases])
    true = pad_texts([model.text.encode(text) for _, text, _ in cases], model.text.pad)
    foil = pad_texts([model.text.encode(text) for _, _, text in cases], model.text.pad)
    labels = torch.where(true.ids != foil.ids, true.ids, -1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(160):
        seen, loss = model.encode_images(images), torch.zeros(())
        for texts, wanted in ((true, 1.0), (foil, 0.0)):
            states = model.matcher.states(seen, model.encode_texts(texts))
            told = model.matcher.heads["discrimination"](states.words)
            fixes = model.matcher.heads["correction"](states.words, model.text_encoder.embed.weight)
            loss = loss + (model.matcher.score(states.pooled) - wanted).square().mean()
            loss = (
                loss
                + discrimination_losses(
                    told, texts.ids, true.ids, texts.mask, weights=(1.0, 1.0)
                ).mean()
            )
            if wanted == 0:
                loss = loss + word_losses(fixes, labels).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, cases


@pytest.mark.slow
def test_a_taught_model_finds_the_wrong_word_and_puts_the_right_one_there(split, taught) -> None:
    model, cases = taught
    for image, true, foil in cases:
        result = correct(model, image_of(split, image), foil)
        assert result.corrected == true
        assert result.corrected_score > result.score
        (changed,) = result.changes
        suspect = max(result.words, key=lambda word: word.wrong)
        assert (changed.word, changed.instead) == (suspect.word, suspect.suggestions[0])
        assert foil[slice(*suspect.span)] == suspect.word
        assert result.words[changed.position] == suspect


def test_a_caption_that_is_right_stays_as_it_is(split, taught) -> None:
    model, cases = taught
    image, true, _ = cases[0]
    result = correct(model, image_of(split, image), true)
    assert result.corrected == result.text == true
    assert result.changes == result.refused == ()
    assert max(word.wrong for word in result.words) < 0.5


def test_case_and_punctuation_are_kept(split, taught) -> None:
    model, cases = taught
    image, true, foil = cases[1]
    (old,) = set(foil.split()) - set(true.split())
    result = correct(model, image_of(split, image), foil.replace(old, old.title()))
    assert result.corrected.lower() == true
    assert result.changes[0].instead.istitle()


@pytest.mark.parametrize("seed", range(4))
def test_no_correction_scores_below_the_caption(split, seed) -> None:
    model = small(split)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    caption = "A dog, and a ZEBRA near the boat!"
    result = correct(model, image_of(split), caption, threshold=0.0, candidates=2)
    (score,) = model.score([image_of(split)], [result.corrected])[0].tolist()
    assert result.corrected_score == pytest.approx(score, abs=1e-5)
    assert result.corrected_score >= result.score
    assert result.changes or result.refused
    values = [result.score, *(change.score for change in result.changes)]
    assert values == sorted(values)
    assert all(change.score <= result.corrected_score for change in result.refused)
    assert len(caption_words(result.corrected)) == len(caption_words(caption))
    offered = {new.lower() for word in result.words for new in word.suggestions}
    assert offered.isdisjoint(SPECIALS)
    assert all(len(word.suggestions) <= 2 for word in result.words)
    assert [word.suggestions for word in result.words if word.word in ",!"] == [(), ()]
    assert json.loads(json.dumps(result.as_dict()))["corrected"] == result.corrected


def test_an_imported_tags_model_with_its_word_pieces_corrects_too(tmp_path) -> None:
    fixture = load_fixture("tags-heads")
    model = model_of(fixture, "tags", tmp_path)
    regions = np.random.default_rng(0).normal(size=(3, model.input_dim)).astype(np.float32)
    boxes = np.tile(np.array([0.1, 0.2, 0.5, 0.9], dtype=np.float32), (3, 1))
    caption = "Dog a doggy w12."
    result = correct(model, Fragments(regions, boxes), caption, threshold=0.0)
    assert [word.word for word in result.words] == ["Dog", "a", "doggy", "w12", "."]
    assert result.corrected_score >= result.score
    spelt = [*result.changes, *result.refused]
    assert spelt
    assert all("#" not in change.instead and "[" not in change.instead for change in spelt)
    assert all(0 < word.wrong < 1 for word in result.words[:-1])


def test_what_cannot_be_corrected_is_refused(split) -> None:
    with pytest.raises(ConfigError, match="tags-dc"):
        correct(small(split, ["mlm"]), image_of(split), "a dog")
    config = build_config({"model": {"name": "vse-fc", "embed_size": 8}, "data": {"min_count": 1}})
    with pytest.raises(ConfigError, match="tags-dc"):
        correct(create_model(config.model, split, config.data), image_of(split), "a dog")
    with pytest.raises(DataError, match="no words"):
        correct(small(split), image_of(split), "  ")
    with pytest.raises(ConfigError, match="at least 1"):
        correct(small(split), image_of(split), "a dog", candidates=0)


def test_a_change_below_the_margin_is_refused(split, taught) -> None:
    model, cases = taught
    image, true, foil = cases[0]
    made = correct(model, image_of(split, image), foil)
    gain = made.corrected_score - made.score
    within = correct(model, image_of(split, image), foil, margin=0.9 * gain)
    assert within.corrected == true
    beyond = correct(model, image_of(split, image), foil, margin=1.1 * gain)
    assert beyond.corrected == foil
    assert beyond.changes == ()
    assert [change.instead for change in beyond.refused] == [made.changes[0].instead]
    assert not any(word.suggestions for word in beyond.words)


def test_a_model_whose_changes_were_wrong_on_dev_suggests_nothing_unless_asked(
    split, taught, tmp_path
) -> None:
    model, cases = taught
    image, true, foil = cases[0]
    save_pretrained(model, tmp_path / "model")
    model = from_pretrained(tmp_path / "model")
    assert model.correction_rule is None
    model.correction_rule = CorrectionRule(usable=False, precision=0.2, made=40)
    save_pretrained(model, tmp_path / "unusable")
    model = from_pretrained(tmp_path / "unusable")
    assert model.correction_rule == CorrectionRule(usable=False, precision=0.2, made=40)
    refused = correct(model, image_of(split, image), foil)
    assert (refused.corrected, refused.changes) == (foil, ())
    assert correct(model, image_of(split, image), foil, margin=0.0).corrected == true


def test_a_noun_is_never_replaced_by_an_adjective_or_a_verb(split) -> None:
    captions = ["a man and a dog near the tree", "a red and tall dog jumps", "black large riding"]
    split = replace(split, captions=[captions] * len(split))
    model = small(split)
    for seed in range(4):
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.5 * torch.randn_like(parameter))
        result = correct(model, image_of(split), "a man near the tree", threshold=0.0, candidates=9)
        for change in [*result.changes, *result.refused]:
            if change.word in ("man", "tree"):
                assert change.instead in {"man", "dog", "tree"}


def test_captions_are_corrected_together_as_one_by_one(split, taught) -> None:
    model, cases = taught
    images = [image_of(split, image) for image, _, _ in cases]
    together = correct_batch(model, images, [foil for _, _, foil in cases], CorrectionRule())
    for (_, _, foil), image, batched in zip(cases, images, together, strict=True):
        alone = correct(model, image, foil)
        assert batched.corrected == alone.corrected
        assert batched.score == pytest.approx(alone.score, abs=1e-5)


@pytest.mark.parametrize(
    ("caption", "place", "new", "wanted"),
    [
        ("A dog runs.", 1, "elephant", "An elephant runs."),
        ("an old, OLD dog", 4, "cat", "an old, OLD cat"),
        ("an elephant", 1, "dog", "a dog"),
        ("the dog", 1, "owl", "the owl"),
    ],
)
def test_the_article_follows_a_replaced_word(caption, place, new, wanted) -> None:
    assert exchanged(caption, place, new) == wanted


@pytest.mark.parametrize(
    "wrong",
    [
        {"threshold": 1.5},
        {"threshold": "0.5"},
        {"threshold": True},
        {"margin": -1.0},
        {"margin": float("nan")},
        {"margin": float("inf")},
        {"margin": 10**400},
        {"margin": [0.1]},
        {"usable": "no"},
        {"usable": 1},
        {"precision": "high"},
        {"precision": float("nan")},
        {"made": 2.5},
        {"made": -1},
    ],
)
def test_a_senseless_rule_is_refused(wrong) -> None:
    with pytest.raises(ConfigError, match="must be"):
        CorrectionRule(**wrong)


@pytest.mark.parametrize("candidates", [0, 2.5, "3", True, 10**9])
def test_a_rule_tries_a_countable_number_of_candidates(candidates) -> None:
    with pytest.raises(ConfigError, match="at least 1 candidate"):
        CorrectionRule(candidates=candidates)


def test_a_word_in_capitals_is_not_replaced_by_itself_and_stays_in_capitals(split, taught) -> None:
    model, cases = taught
    for image, true, foil in cases:
        result = correct(model, image_of(split, image), foil.upper(), threshold=0.0, margin=0.0)
        for word in result.words:
            assert all(new.isupper() for new in word.suggestions)
            assert word.word.lower() not in {new.lower() for new in word.suggestions}
        assert correct(model, image_of(split, image), foil.upper()).corrected == true.upper()


def restless(split, captions: list[str], seed: int) -> Model:
    """A model that knows some captions' words and proposes any of them anywhere."""
    model = small(replace(split, captions=[captions] * len(split)))
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return model


def test_a_and_an_are_not_suggested_in_place_of_each_other(split) -> None:
    model = restless(split, ["a dog near an elephant", "the owl", "an apple"], 0)
    result = correct(
        model, image_of(split), "a dog near an elephant", threshold=0.0, margin=0.0, candidates=9
    )
    for word in result.words:
        if word.word in ("a", "an"):
            assert set(word.suggestions) <= {"the"}


def test_a_suggestion_never_swallows_the_sign_after_it(split) -> None:
    """*u.k* before a full stop is read as *u.k.*, so that later words change their places."""
    captions = ["a dog near the u.k", "the dog and a tree"]
    for seed in range(3):
        model = restless(split, captions, seed)
        for caption in ("a dog near the tree.", 'the "dog". And a tree.'):
            read = CaptionReader(model, [image_of(split)], 9).read([0], [caption], 0.0)[0].words
            assert any(word.suggestions for word in read)
            for place, word in enumerate(read):
                for new in word.suggestions:
                    text = exchanged(caption, place, new)
                    assert len(caption_words(text)) == len(caption_words(caption))


def test_a_rule_of_one_candidate_tries_the_first_of_several(split) -> None:
    """The rule is chosen with five candidates read: fewer must not read fewer tokens."""
    colors = ["red blue green yellow black white orange purple", "small large old young tall big"]
    model = restless(split, [*colors, "the dog and a cat"], 1)
    captions = ["the dog and a cat", "a dog"]
    one = CaptionReader(model, [image_of(split)], 1).read([0, 0], captions, 0.0)
    five = CaptionReader(model, [image_of(split)], 5).read([0, 0], captions, 0.0)
    for few, many in zip(one, five, strict=True):
        assert [word.suggestions for word in few.words] == [
            word.suggestions[:1] for word in many.words
        ]


def test_what_is_refused_would_not_raise_the_score_of_the_corrected_caption(split) -> None:
    for seed in range(4):
        model = restless(split, ["a man and a dog near the tree", "the cat and a car"], seed)
        result = correct(
            model, image_of(split), "a cat and a man near the car", threshold=0.0, margin=0.0
        )
        assert all(change.score <= result.corrected_score for change in result.refused)
        assert {one.position for one in result.refused}.isdisjoint(
            one.position for one in result.changes
        )


def test_a_rule_that_allows_nothing_names_no_candidate_either(split) -> None:
    model = restless(split, ["a man and a dog near the tree"], 0)
    model.correction_rule = CorrectionRule(0.0, usable=False, precision=0.0, made=0)
    result = correct(model, image_of(split), "a man near the tree")
    assert result.changes == result.refused == ()
    assert not any(word.suggestions for word in result.words)
