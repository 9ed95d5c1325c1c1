"""Models judged on foils: where these come from, and what is measured."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counterfoil.core.config import build_config
from counterfoil.core.errors import ConfigError, DataError
from counterfoil.core.progress import Silent
from counterfoil.data.batches.collate import pad_fragments, pad_texts
from counterfoil.data.scenes import load_scenes
from counterfoil.data.text.words import words
from counterfoil.evaluation.foils.fluency import RunFluency, TransformersFluency
from counterfoil.evaluation.foils.metrics import (
    OTHER,
    SEVERAL,
    judge_foils,
    judge_words,
    kinds_on,
    true_foil_kinds,
    verdicts_on,
)
from counterfoil.evaluation.foils.report import FoilReport
from counterfoil.evaluation.foils.scores import FoilScores, encode_sentences, score_foils
from counterfoil.evaluation.foils.sets import (
    FoilChoice,
    FoilPair,
    FoilSet,
    foils_by,
    foils_of_model,
    rule_set,
    stored_set,
)
from counterfoil.evaluation.foils.truth import has_truth
from counterfoil.evaluation.words.evaluate import roc_auc
from counterfoil.features import with_fragments
from counterfoil.foils.files import FoilWriter, StoredFoil
from counterfoil.foils.generation import MaskTokens
from counterfoil.models import create_model
from counterfoil.models.foil_generator import word_table
from tests.conftest import make_split, thinned

HEADS = ["mlm", "discrimination", "correction"]


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    cache = tmp_path_factory.mktemp("scenes")
    return with_fragments(load_scenes(cache, (20, 4, 8), workers=1), cache, workers=1)


class Lines(Silent):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def make(pairs, name: str = "uniter-small", **matcher):
    """A model whose weights are far from each other, so that its scores are, too."""
    torch.manual_seed(0)
    if name == "uniter-small":
        matcher = {"layers": 1, "heads": 2, "extras": HEADS} | matcher
    section = {"name": name, "embed_size": 16, "matcher": matcher}
    config = build_config({"model": section, "data": {"min_count": 1}})
    model = create_model(config.model, pairs.train, config.data)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture(scope="module")
def model(scenes):
    return make(scenes)


@pytest.fixture(scope="module")
def foils(scenes):
    return rule_set(scenes.test, per_caption=2)


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=20
    )
)
def test_accuracies_agree_with_counting(items) -> None:
    items = sorted(items)
    pairs = [FoilPair(caption, "") for caption, _, _ in items]
    true, foil = (np.array([float(item[k]) for item in items]) for k in (1, 2))
    result = FoilScores(pairs, true, foil, elsewhere=foil - 1)
    right = [t > f for t, f in zip(true, foil, strict=True)]
    assert result.accuracy == pytest.approx(sum(right) / len(right))
    captions = {pair.caption for pair in pairs}
    whole = [
        all(r for r, pair in zip(right, pairs, strict=True) if pair.caption == caption)
        for caption in captions
    ]
    assert result.caption_accuracy == pytest.approx(sum(whole) / len(whole))
    assert result.gap == pytest.approx(sum(true - foil) / len(items))
    shares = {-1.0: 0.0, 0.0: 0.5, 1.0: 1.0}
    assert result.other_image == pytest.approx(sum(shares[f - 1] for f in foil) / len(items))
    gains = [t - f - (f - 1) for t, f in zip(true, foil, strict=True)]
    clearer = [1.0 if gain > 0 else 0.5 if gain == 0 else 0.0 for gain in gains]
    assert result.own_image == pytest.approx(sum(clearer) / len(items))


def test_another_image_reveals_a_model_that_only_reads(scenes, foils) -> None:
    pairs = foils.pairs[:60]
    some = replace(foils, pairs=pairs)
    model = make(scenes)
    encode = model.encode_images
    # every image looks like the first of its block
    model.encode_images = lambda images: encode(images)[torch.zeros(len(images.mask)).long()]
    scores = score_foils(model, scenes.test, some)
    known = ~np.isnan(scores.elsewhere)
    differences = (scores.true - scores.foil)[known]
    assert scores.elsewhere[known] == pytest.approx(differences, abs=1e-5)
    assert scores.other_image == pytest.approx(np.mean((np.sign(differences) + 1) / 2))
    assert len(scores.elsewhere) == len(pairs)
    images = [int(scenes.test.image_of[pair.caption]) for pair in pairs]
    assert len(set(images)) > 1
    alone = [pair for pair, image in zip(pairs, images, strict=True) if image == images[0]]
    one = score_foils(make(scenes), scenes.test, replace(foils, pairs=alone))
    assert one.other_image is None
    assert one.own_image is None
    assert np.isnan(one.elsewhere).all()


def test_scores_with_another_image_agree_with_a_loop(scenes, foils, model) -> None:
    split, some = scenes.test, replace(foils, pairs=foils.pairs[:7])
    scores = score_foils(model, split, some)
    with torch.inference_mode():
        for k, pair in enumerate(some.pairs):
            other = some.pairs[(k - len(some.pairs) // 2) % len(some.pairs)].caption
            image = int(split.image_of[other])
            if image == int(split.image_of[pair.caption]):
                assert np.isnan(scores.elsewhere[k])
                continue
            encoded = model.encode_images(pad_fragments([split.require_fragments().read(image)]))
            texts = model.encode_texts(
                encode_sentences(model, [split.texts[pair.caption], pair.foil])
            )
            true, false = model.matcher.score_all(encoded, texts)[0].tolist()
            assert scores.elsewhere[k] == pytest.approx(true - false, abs=1e-5)


def test_rules_make_the_same_foils_for_the_same_seed(scenes, foils) -> None:
    split = scenes.test
    assert rule_set(split, per_caption=2) == foils
    assert rule_set(split, per_caption=2, seed=1) != foils
    assert foils.captions == len(split.texts)
    for pair in foils.pairs:
        own = {
            word for text in split.captions[split.image_of[pair.caption]] for word in words(text)
        }
        new = set(words(pair.foil)) - set(words(split.texts[pair.caption]))
        assert new - {"a", "an"}
        assert not (new - {"a", "an"}) & own
    few = rule_set(split, most=5)
    assert few.captions == 5 >= len(few.pairs)
    assert few.left_out == 5 - len({pair.caption for pair in few.pairs})


def test_foils_of_a_file_find_their_captions(scenes, foils, tmp_path) -> None:
    split, path = scenes.test, tmp_path / "foils.jsonl"
    with FoilWriter(path) as writer:
        for index, text in enumerate(split.texts):
            image = split.ids[split.image_of[index]]
            own = [p.foil for p in foils.pairs if p.caption == index]
            writer.add(image, text, [StoredFoil(image, text, foil) for foil in own])
    assert stored_set(path, split).pairs == foils.pairs
    assert foils_by(str(path), split, FoilChoice(), make).pairs == foils.pairs
    with pytest.raises(DataError, match="another split"):
        stored_set(path, scenes.train)
    line = {"image": split.ids[1], "caption": 2, "foil": "a purple idea"}  # by its number, too
    (tmp_path / "numbered.jsonl").write_text(json.dumps(line))
    (pair,) = stored_set(tmp_path / "numbered.jsonl", split).pairs
    assert split.texts[pair.caption] == split.captions[1][2]
    strange = {**line, "caption": 99}
    true = {**line, "foil": split.captions[1][0].upper()}
    elsewhere = {**line, "image": "of another split"}
    lines = "\n".join(
        map(json.dumps, [line, strange, {**strange, "caption": "?"}, true, elsewhere])
    )
    (tmp_path / "mixed.jsonl").write_text(lines)
    said = Lines()
    choice = FoilChoice()
    assert foils_by(str(tmp_path / "mixed.jsonl"), split, choice, make, said).pairs == (pair,)
    assert said.lines == [
        "mixed.jsonl: ignored 2 foils of captions that their image does not have "
        f"(first: image '{split.ids[1]}', caption 99)",
        "mixed.jsonl: ignored 1 foil equal to a caption of the image "
        f"(first: image '{split.ids[1]}', {true['foil']!r})",
    ]
    (tmp_path / "true.jsonl").write_text(json.dumps(true))
    with pytest.raises(DataError, match="no foil can be used: 1 foil equal to a caption of the"):
        stored_set(tmp_path / "true.jsonl", split)
    (tmp_path / "none.jsonl").write_text("\n".join(map(json.dumps, [strange, strange, true])))
    with pytest.raises(DataError, match=r"used: 2 foils of captions .*, 1 foil equal to"):
        stored_set(tmp_path / "none.jsonl", split)
    with pytest.raises(ConfigError, match="no file or folder 'rule'; did you mean 'rules'"):
        foils_by("rule", split, FoilChoice(), make)


@pytest.mark.parametrize(
    "name", thinned(["uniter-small", "rvse-mlp", "scan-t2i"], "uniter-small", "rvse-mlp")
)
def test_scores_are_those_of_each_caption_with_its_image(scenes, foils, name) -> None:
    split, model = scenes.test, make(scenes, name)
    result = score_foils(model, split, foils)
    assert result.pairs == list(foils.pairs)
    for place in (0, len(foils.pairs) // 2, len(foils.pairs) - 1):
        pair = foils.pairs[place]
        image = pad_fragments([split.fragments.read(int(split.image_of[pair.caption]))])
        for text, score in (
            (split.texts[pair.caption], result.true[place]),
            (pair.foil, result.foil[place]),
        ):
            ids = pad_texts([model.text.encode(text)], model.text.pad)
            with torch.no_grad():
                own = model.matcher(model.encode_images(image), model.encode_texts(ids))
            assert score == pytest.approx(float(own), abs=1e-5)


@pytest.mark.parametrize("name", thinned(["rvse-mlp", "scan-t2i", "naaf"], "naaf"))
def test_what_a_model_reads_alike_is_a_tie(scenes, name) -> None:
    split, model = scenes.test, make(scenes, name)
    said = [f"{text} zzyzx" for text in split.texts]
    odd = replace(split, captions=[said[i : i + 5] for i in range(0, len(said), 5)])
    pairs = [FoilPair(index, f"{text} qwfp") for index, text in enumerate(split.texts)]
    result = score_foils(model, odd, FoilSet.of("odd", pairs, len(pairs)))
    assert np.array_equal(result.true, result.foil)
    assert result.accuracy == 0


def test_a_model_writes_foils_that_differ_from_its_captions(scenes, model) -> None:
    split, choice = scenes.test, FoilChoice(per_caption=2, captions=20, masks=3, samples=3)
    made = foils_of_model(model, "itself", split, choice)
    assert made == foils_of_model(model, "itself", split, choice)
    other = FoilChoice(per_caption=2, captions=20, masks=3, samples=3, seed=5)
    assert foils_of_model(model, "itself", split, other).pairs != made.pairs
    assert made.captions == 20
    assert len({(pair.caption, pair.foil) for pair in made.pairs}) == len(made.pairs)
    for pair in made.pairs:
        caption = split.texts[pair.caption]
        assert len(words(pair.foil)) == len(words(caption))
        own = {
            word for text in split.captions[split.image_of[pair.caption]] for word in words(text)
        }
        assert set(words(pair.foil)) - own
    with pytest.raises(ConfigError, match="mlm"):
        foils_of_model(make(scenes, extras=[]), "plain", split, choice)


def naive_words(model, split, foils):
    """Token by token: suspicion, whether it was replaced, whether it is set right."""
    suspicion, replaced, restored = [], [], []
    ordinary = MaskTokens.of(model.text).ordinary.tolist()
    heads = model.matcher.heads
    for pair in foils.pairs:
        true, ids = model.text.encode(split.texts[pair.caption]), model.text.encode(pair.foil)
        image = pad_fragments([split.fragments.read(int(split.image_of[pair.caption]))])
        texts = model.encode_texts(pad_texts([ids], model.text.pad))
        states = model.matcher.states(model.encode_images(image), texts).words[0]
        wrong = heads["discrimination"](states).softmax(-1)[:, 0]
        logits = heads["correction"](states, word_table(model))
        for place, (old, new) in enumerate(zip(true, ids, strict=True)):
            if old not in ordinary and new not in ordinary:
                continue
            suspicion.append(float(wrong[place]))
            replaced.append(old != new)
            if old != new:
                restored.append(max(ordinary, key=logits[place].__getitem__) == old)
    return suspicion, replaced, restored


def test_words_are_judged_as_token_by_token(scenes, model, foils) -> None:
    result = judge_words(model, scenes.test, foils)
    with torch.no_grad():
        suspicion, replaced, restored = naive_words(model, scenes.test, foils)
    assert result.suspicion == pytest.approx(suspicion, abs=1e-5)
    assert result.replaced.tolist() == replaced
    assert result.restored.tolist() == restored
    assert result.auc == pytest.approx(roc_auc(suspicion, replaced), abs=1e-6)
    told = [(s >= 0.5) == r for s, r in zip(suspicion, replaced, strict=True)]
    assert result.accuracy == pytest.approx(np.mean(told))
    suspected = [s >= 0.5 for s, r in zip(suspicion, replaced, strict=True) if r]
    assert result.recall == pytest.approx(np.mean(suspected))
    assert result.correction == pytest.approx(np.mean(restored))


def test_corrected_foils_have_a_new_word_wherever_one_is_suspected(scenes, foils) -> None:
    model = make(scenes)
    sure = model.matcher.heads["discrimination"]
    with torch.no_grad():
        sure.weight.zero_()
        sure.bias.copy_(torch.tensor([-9.0, 9.0]))
        kept = judge_words(model, scenes.test, foils)
        sure.bias.neg_()
        changed = judge_words(model, scenes.test, foils)
    assert kept.corrected == [pair.foil for pair in kept.pairs]
    assert kept.recall == 0
    assert changed.recall == 1
    for pair, text in zip(changed.pairs, changed.corrected, strict=True):
        assert len(words(text)) == len(words(pair.foil))
    assert sum(a != b.foil for a, b in zip(changed.corrected, changed.pairs, strict=True)) > 10


def test_perplexity_is_that_of_each_token_masked_by_itself(scenes, model) -> None:
    split = scenes.test
    pairs = [FoilPair(index, split.texts[index]) for index in (0, 7)]
    tokens = RunFluency(model).tokens
    losses = []
    with torch.no_grad():
        for pair in pairs:
            ids = model.text.encode(pair.foil)
            image = pad_fragments([split.fragments.read(int(split.image_of[pair.caption]))])
            for place, command in enumerate(ids):
                if command not in tokens.ordinary:
                    continue
                masked = [tokens.mask if k == place else token for k, token in enumerate(ids)]
                texts = model.encode_texts(pad_texts([masked], model.text.pad))
                states = model.matcher.states(model.encode_images(image), texts).words[0, place]
                logits = model.matcher.heads["mlm"](states, word_table(model))
                ordinary = torch.from_numpy(tokens.ordinary)
                chances = logits[ordinary].log_softmax(-1)
                losses.append(-float(chances[tokens.ordinary.tolist().index(command)]))
    expected = math.exp(sum(losses) / len(losses))
    assert RunFluency(model).perplexity(split, pairs) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_a_language_model_from_a_folder_reads_sentences(tmp_path, scenes, kind) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "dog", "cat", "runs"])
    )
    transformers.BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(
        vocab_size=9, intermediate_size=8, is_decoder=kind == "causal", **sizes
    )
    made = transformers.BertLMHeadModel if kind == "causal" else transformers.BertForMaskedLM
    made(config).save_pretrained(tmp_path)
    fluency = TransformersFluency(str(tmp_path))
    assert fluency.masked == (kind == "masked")
    tokenizer = fluency.tokenizer
    ids = tokenizer("a dog runs")["input_ids"]
    losses = []
    for place in range(1, len(ids)) if kind == "causal" else range(1, len(ids) - 1):
        given = ids[:place] if kind == "causal" else list(ids)
        if kind == "masked":
            given[place] = tokenizer.mask_token_id
        with torch.no_grad():
            logits = fluency.model(torch.tensor([given])).logits[0]
        row = logits[-1] if kind == "causal" else logits[place]
        losses.append(-float(row.log_softmax(-1)[ids[place]]))
    result = fluency.perplexity(scenes.test, [FoilPair(0, "a dog runs")])
    assert result == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)


def test_a_folder_without_a_language_model_is_refused(tmp_path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match="not a causal or masked language model"):
        TransformersFluency(str(tmp_path))


def test_a_report_says_what_was_measured_and_comes_back_from_json(scenes, model, foils) -> None:
    report = judge_foils(model, scenes.test, foils, fluency=RunFluency(model))
    assert report.pairs == len(foils.pairs)
    assert report.accuracy + report.harder <= 100 + 1e-9
    assert report.checked + report.unsure == len(foils.pairs)
    assert report.word_pairs == len(foils.pairs)
    assert FoilReport.from_json(report.to_json()) == report
    page = report.to_markdown()
    for said in (
        "true caption > foil",
        "> false foil",
        "true negatives",
        "AUC",
        "correction",
        "perplexity",
    ):
        assert said in page
    plain = judge_foils(make(scenes, "rvse-mlp"), scenes.test, foils)
    assert plain.wod_auc is None
    assert plain.perplexity_true is None
    assert "discrimination" not in plain.to_markdown()


def test_rules_that_look_away_make_false_negatives(scenes) -> None:
    """A caption is no negative of its own image, one that names another thing is."""
    split = scenes.test
    copies = [FoilPair(index, text) for index, text in enumerate(split.texts)]
    assert set(verdicts_on(split, copies)) == {"true"}


def test_without_truth_nothing_is_said_of_negatives(tmp_path) -> None:
    split = make_split(tmp_path, "test", 4, 0)
    assert not has_truth(split)
    assert verdicts_on(split, [FoilPair(0, "a cat")]) == []


def test_the_accuracy_on_false_foils_leaves_out_those_that_are_true_or_unsure(
    scenes, model, foils
) -> None:
    split = scenes.test
    copies = [FoilPair(index, text) for index, text in enumerate(split.texts[:7])]
    longer = [FoilPair(index, f"{text} indeed") for index, text in enumerate(split.texts[:5])]
    some = foils.pairs[:25]
    mixed = FoilSet.of("mixed", [*some, *copies, *longer], len(split.texts))
    report = judge_foils(model, split, mixed)
    right = []
    for pair in some:
        if verdicts_on(split, [pair]) == ["false"]:
            right.append(judge_foils(model, split, FoilSet.of("one", [pair], 1)).accuracy == 100)
    assert 0 < len(right) < len(mixed.pairs)
    assert report.false_accuracy == pytest.approx(100 * np.mean(right))
    true = judge_foils(make(scenes, "rvse-mlp"), split, FoilSet.of("true", copies, 7))
    assert true.false_accuracy is None


def test_kinds_add_up_to_all_foils(scenes, model) -> None:
    split = scenes.test
    foils = foils_of_model(model, "own", split, FoilChoice(per_caption=3))
    report = judge_foils(model, split, foils, by_kind=True)
    shares = report.by_kind
    verdicts = verdicts_on(split, foils.pairs)
    assert len({one.kind for one in shares}) == len(shares) > 3
    assert sum(one.foils for one in shares) == report.pairs
    assert sum(one.false for one in shares) == verdicts.count("false")
    assert (
        sum(one.true for one in shares) == verdicts.count("true") == sum(report.true_kinds.values())
    )
    told = sum(one.accuracy * one.foils for one in shares) / report.pairs
    assert told == pytest.approx(report.accuracy)
    false = sum((one.false_accuracy or 0) * one.false for one in shares) / verdicts.count("false")
    assert false == pytest.approx(report.false_accuracy)
    assert FoilReport.from_json(report.to_json()) == report
    assert report.kind_rows()[-1][2] == f"{report.true_negatives:.1f}"
    assert judge_foils(model, split, foils).kind_rows() == []


def test_the_kind_of_a_foil_is_what_it_exchanges(scenes) -> None:
    split = scenes.train
    place = next(n for n, text in enumerate(split.texts) if " two " in text and " left " in text)
    text = split.texts[place]
    said = [text.replace(" two ", " three "), text.replace(" left ", " right "), text]
    said += [said[0].replace(" left ", " right "), f"{text} indeed"]
    kinds = kinds_on(split, [FoilPair(place, foil) for foil in said])
    assert kinds == ["number", "relation", OTHER, SEVERAL, SEVERAL]
    graphs = replace(split, extras=None)  # no truth: what the words are, not what they say
    kinds = kinds_on(graphs, [FoilPair(place, foil) for foil in said])
    assert kinds == ["attribute", "relation", OTHER, SEVERAL, SEVERAL]
    assert true_foil_kinds(graphs, [FoilPair(place, text)]) == {}


@pytest.mark.slow
def test_the_command_judges_a_run_on_foils_of_several_sources(
    tmp_path, scenes, model, monkeypatch
) -> None:
    from counterfoil.models import save_pretrained
    from tests.cli.test_cli import invoke

    cache = tmp_path / "cache"
    data = {"source": "scenes", "options": {"images": [20, 4, 8]}, "min_count": 1}
    config = build_config({"data": data, "model": {"name": "uniter-small", "embed_size": 16}})
    model.fragments_from = "segments"
    save_pretrained(model, tmp_path / "run" / "best")
    (tmp_path / "run" / "config.yaml").write_text(config.to_yaml())
    (tmp_path / "rules").mkdir()  # which is a name even where a folder is called so
    monkeypatch.chdir(tmp_path)
    command = ["evaluate-foils", tmp_path / "run", "--foils", "rules", "--foils", "own"]
    command += ["--max-captions", 10, "--masks", 2, "--samples", 2, "--cache", cache]
    told = json.loads(invoke(*command, "--json"))
    assert [one["captions"] for one in told] == [10, 10]
    assert [one["foils"] for one in told] == ["rules", "run"]
    shown = invoke(*command)
    assert "true caption > foil" in shown
    assert f"{told[0]['accuracy']:.1f}" in shown
    shown = invoke(*command, "--by-kind")
    assert "exchanged" in shown
    assert "true of the same things" in " ".join(shown.split())
    by_words = json.loads(invoke(*command, "--masking", "words", "--json"))
    assert by_words[0] == told[0]  # rules do not mask
    with pytest.raises(ConfigError, match="--masks, --samples: no effect, because no model"):
        invoke(*command[:4], *command[6:])
