"""An audit of data whose errors are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import counterfoil as cf
from counterfoil.audit import audit_split
from counterfoil.audit.audit import _rival_leads
from counterfoil.audit.planted_errors import corrupt, measure_audit
from counterfoil.audit.suspicion import SIGNS, WordEffects
from counterfoil.core.errors import ConfigError
from counterfoil.data.duplicates import Duplicate
from counterfoil.data.load import load_pairs
from counterfoil.data.text.words import MOST_WORDS, caption_words
from counterfoil.evaluation.words.evaluate import roc_auc
from tests.audit.conftest import with_unreadable
from tests.conftest import thinned


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    return load_pairs("scenes", options={"images": [4, 4, 16]}, cache_dir=cache)["test"]


@pytest.fixture(scope="module")
def truth(concepts):
    return corrupt(concepts.test, 0.2, 0.0, seed=1)


@pytest.fixture(scope="module")
def audit(learned, truth):
    return audit_split(learned, truth.split)


def test_captions_of_other_images_are_found(audit, truth, learned, concepts) -> None:
    assert roc_auc(audit.suspicion, truth.labels) > 0.9
    clean = audit_split(learned, concepts.test)
    found = measure_audit(audit, truth, SIGNS, clean)
    assert found.clean_listed == 100 * clean.summary.share < 100 * audit.summary.share
    assert found.captions.recall > 50
    assert found.captions.precision > 2 * found.captions.chance
    assert found.swapped is not None
    assert found.exchanged is None
    assert found.words is None
    assert found.rows()[1][0] == "wrong captions"


def test_findings_come_in_order_with_their_facts(audit) -> None:
    wrong = [finding for finding in audit.findings if finding.kind == "mismatch"]
    assert wrong == audit.findings[: len(wrong)]
    assert [f.suspicion for f in wrong] == sorted((f.suspicion for f in wrong), reverse=True)
    assert all(finding.suspicion >= 0.5 for finding in wrong)
    assert all(finding.reasons for finding in audit.findings)
    split = audit.split
    for finding in audit.findings:
        image = list(split.ids).index(finding.image)
        assert split.captions[image][finding.caption] == finding.text
        assert finding.compared == len(split)
        if finding.near_duplicate is None:
            assert (finding.rank > 1) == (finding.better_image is not None)
        assert finding.margin is not None
        for word in finding.wrong_words:
            assert finding.text[slice(*word.span)] == word.word
            assert word.effect < word.usual
        if finding.better_caption is not None:
            assert finding.better_caption.image != finding.image
            assert finding.better_caption.score > finding.score


def test_the_summary_counts_what_was_found(audit) -> None:
    summary = audit.summary
    assert summary.captions == len(audit.split.texts)
    assert summary.suspicious == sum(f.kind == "mismatch" for f in audit.findings)
    assert summary.false_negatives == sum(f.near_duplicate is not None for f in audit.findings)
    assert summary.share == summary.suspicious / summary.captions
    assert summary.words_examined == summary.captions
    assert max(summary.signs.values()) <= summary.suspicious
    near = {f.image for f in audit.findings if f.near_duplicate is not None}
    assert summary.false_negative_images == len(near)


@pytest.mark.parametrize("threshold", thinned([0.05, 0.5, 0.95], 0.05))
def test_the_summary_counts_what_the_chosen_threshold_lists(
    audit, learned, truth, threshold
) -> None:
    other = audit_split(learned, truth.split, threshold=threshold)
    wrong = [finding for finding in other.findings if finding.kind == "mismatch"]
    count = int((audit.suspicion >= threshold).sum())
    assert len(wrong) == other.listed == other.summary.suspicious == count
    reasons = [sign for finding in wrong for sign in finding.signs if sign in SIGNS]
    assert other.summary.signs == {sign: reasons.count(sign) for sign in SIGNS}
    assert other.summary.threshold == other.threshold == threshold
    counted = {"threshold", "suspicious", "share", "signs"}
    rest = audit.summary.model_dump(exclude=counted)
    assert other.summary.model_dump(exclude=counted) == rest


def test_the_same_said_of_another_image_is_a_likely_false_negative(learned, concepts) -> None:
    split = concepts.test.select(range(20))
    captions = [list(texts) for texts in split.captions]
    captions[7][0] = f"There is {captions[3][0]}!"
    audit = audit_split(learned, replace(split, captions=captions))
    by_text = {(f.image, f.text): f for f in audit.findings}
    found = by_text[split.ids[3], captions[3][0]]
    assert "near-duplicate" in found.signs
    assert found.near_duplicate is not None
    assert found.near_duplicate_images >= 1


def test_a_better_image_that_says_the_same_is_no_rival(learned, concepts) -> None:
    split = concepts.test.select(range(20))
    captions = [list(texts) for texts in split.captions]
    captions[7][0] = captions[3][0]
    survey = audit_split(learned, replace(split, captions=captions)).survey
    number = 2 * 7
    assert survey.other[number] == 3
    plain = (survey.other_score - survey.own).astype(np.float64)
    same = Duplicate(frozenset({3, 7}), 7, 2 * 3, 1.0)
    next_best = survey.rival_score[number, 1] - survey.own[number]
    leads = _rival_leads(survey, {number: same})
    assert leads[number] == pytest.approx(next_best)
    assert leads[number] < plain[number]
    np.testing.assert_array_equal(np.delete(leads, number), np.delete(plain, number))
    everywhere = replace(same, images=frozenset(range(20)))
    assert np.isnan(_rival_leads(survey, {number: everywhere})[number])


def test_words_of_the_most_suspicious_captions_are_examined_first(learned, truth) -> None:
    audit = audit_split(learned, truth.split, examined=20)
    assert audit.summary.words_examined == len(audit.word_doubts) == 20
    scores_only = 1 - np.prod(1 - audit.signs[:, :2], axis=1)
    assert set(np.argsort(-scores_only, kind="stable")[:8].tolist()) <= set(audit.word_doubts)
    assert "20 of 64" in " ".join(audit.summary.notes)
    examined = {f.text: f.words_examined for f in audit.findings}
    assert examined[truth.split.texts[int(np.argmax(scores_only))]]


def test_unreadable_images_are_counted_and_their_captions_not_judged(
    learned, concepts, tmp_path
) -> None:
    split = with_unreadable(concepts.test, [4, 5], tmp_path)
    audit = audit_split(learned, split)
    assert audit.summary.skipped_images == 2
    assert audit.summary.skipped_captions == 4
    assert np.isnan(audit.suspicion).sum() == 4
    assert all(f.image not in (split.ids[4], split.ids[5]) for f in audit.findings)


def test_captions_of_any_kind_are_judged_or_skipped(learned, concepts) -> None:
    odd = ["", "!!!", "a dog \ud800", "x" * 3000, "犬 と 猫", "=1+1", "a\x00b"]
    split = concepts.test.select(range(len(odd)))
    audit = audit_split(learned, replace(split, captions=[[text] for text in odd]), threshold=1e-6)
    assert audit.summary.captions + audit.summary.unknown_captions == len(odd)
    assert audit.summary.unknown_captions == 4
    assert "too few" in audit.summary.notes[0]
    assert [f.to_json() for f in audit.findings]


def test_one_image_alone_can_be_audited(learned, concepts) -> None:
    audit = audit_split(learned, concepts.test.select([0]), threshold=1e-9)
    assert all(finding.margin is None for finding in audit.findings)
    assert "no other image" in " ".join(audit.summary.notes)


def test_a_matcher_without_parts_is_asked_word_by_word(concepts) -> None:
    model = cf.create("rvse-mlp", concepts, embed_size=16, text={"word_dim": 8})
    audit = audit_split(model, concepts.test.select(range(5)))
    assert audit.summary.word_method == "combined"
    assert len(audit.word_doubts[0]) == len(caption_words(audit.split.texts[0]))


def test_captions_are_compared_by_falls_and_words_by_combined_effects(
    learned, concepts, monkeypatch
) -> None:
    split = concepts.test.select(range(12))
    before = audit_split(learned, split)
    effects = dict(before.word_effects.words)
    kept = WordEffects(
        {n: [replace(word, effect=0.0) for word in own] for n, own in effects.items()}, "combined"
    )
    monkeypatch.setattr("counterfoil.audit.audit.measure_effects", lambda *_: kept)
    flat = audit_split(learned, split)
    np.testing.assert_array_equal(flat.suspicion, before.suspicion)
    assert any((flat.word_doubts[n] != before.word_doubts[n]).any() for n in effects)


def test_a_threshold_that_lists_everything_is_refused(learned, concepts) -> None:
    with pytest.raises(ConfigError, match="threshold"):
        audit_split(learned, concepts.test, threshold=0.0)


def test_corruption_tells_the_truth_about_itself(scenes) -> None:
    bad = corrupt(scenes, 0.2, 0.3, seed=4)
    texts = len(scenes.texts)
    assert bad.swapped.sum() == round(0.2 * texts)
    assert len(bad.wrong) == round(0.3 * texts)
    assert bad.labels.sum() == bad.swapped.sum() + len(bad.wrong)
    assert [len(c) for c in bad.split.captions] == [len(c) for c in scenes.captions]
    for number, (before, after) in enumerate(zip(scenes.texts, bad.split.texts, strict=True)):
        if not bad.labels[number]:
            assert before == after
        if number in bad.wrong:
            old, new = (
                [w.text.lower() for w in caption_words(text) if not w.is_punctuation]
                for text in (before, after)
            )
            kinds = bad.wrong[number]
            assert [a != b for a, b in zip(old, new, strict=True)] == [bool(k) for k in kinds]
    assert corrupt(scenes, 0.2, 0.3, seed=4).split.texts == bad.split.texts
    assert corrupt(scenes, 0.2, 0.3, seed=5).split.texts != bad.split.texts
    with pytest.raises(ConfigError, match="at most 1"):
        corrupt(scenes, 0.7, 0.7)


def test_unknown_words_change_no_finding_and_captions_of_such_words_alone_are_skipped(
    learned, concepts
) -> None:
    split = concepts.test
    plain = audit_split(learned, split, threshold=0.01)
    captions = [[f"zorp {text}" for text in texts] for texts in split.captions]
    captions[0] = [*captions[0], "zorp blah"]
    odd = audit_split(learned, replace(split, captions=captions), threshold=0.01)
    assert (odd.summary.unknown_words, odd.summary.unknown_captions) == (2, 1)
    assert odd.summary.captions == plain.summary.captions
    assert any("left out of 65 captions: zorp, blah" in note for note in odd.summary.notes)
    assert any("1 caption was skipped" in note for note in odd.summary.notes)
    assert np.isnan(odd.suspicion[2])
    kept = np.delete(odd.suspicion, 2)
    assert kept == pytest.approx(plain.suspicion, abs=1e-4)
    found = next(finding for finding in odd.findings if finding.kind == "mismatch")
    assert [(word.word, word.span) for word in found.unknown_words] == [("zorp", (0, 4))]
    assert "zorp" not in [word.word for word in found.wrong_words]


def test_an_emoji_is_named_as_an_unknown_word_and_a_caption_of_emoji_skipped(
    learned, concepts
) -> None:
    emoji = "\U0001f469\u200d\U0001f680"
    captions = [[f"{emoji} {text}" for text in texts] for texts in concepts.test.captions]
    captions[0] = [*captions[0], emoji]
    odd = audit_split(learned, replace(concepts.test, captions=captions), threshold=0.01)
    assert (odd.summary.unknown_words, odd.summary.unknown_captions) == (1, 1)
    assert any(note.endswith(f"captions: {emoji}") for note in odd.summary.notes)
    finding = next(finding for finding in odd.findings if finding.kind == "mismatch")
    assert [(word.word, word.span) for word in finding.unknown_words] == [(emoji, (0, 3))]


@pytest.mark.parametrize("every", [False, True])
def test_words_of_very_long_captions_are_not_examined_and_said_to_be(
    learned, concepts, every
) -> None:
    split, long = concepts.test, " ".join(["a dog"] * MOST_WORDS)
    captions = [list(texts) for texts in split.captions]
    captions[3].insert(0, long)
    if every:
        captions = [[long] for _ in captions]
    result = audit_split(learned, replace(split, captions=captions))
    count = len(captions) if every else 1
    assert result.summary.words_examined == len(result.split.texts) - count
    these = f"{count} captions that have" if count > 1 else "1 caption that has"
    note = f"words were not examined in {these} more than {MOST_WORDS}"
    assert [line for line in result.summary.notes if "examined" in line] == [note]
    number = list(result.split.texts).index(long)
    assert number not in result.word_effects.words
    assert np.isfinite(result.suspicion[number])
