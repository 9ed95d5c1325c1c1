"""Foils written by a model: sentences that read back as its tokens, false, reproducible."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counterfoil.core.config import build_config
from counterfoil.core.errors import ConfigError, DataError
from counterfoil.core.progress import Silent
from counterfoil.data.fragments import Fragments
from counterfoil.data.pairs import Split
from counterfoil.data.text.tokenizers import HuggingFaceText, WordText
from counterfoil.data.text.vocabulary import Vocabulary
from counterfoil.data.text.words import words
from counterfoil.foils.files import read_foils
from counterfoil.models import create_model
from counterfoil.models.foil_files import FoilAuthor, write_model_foils
from counterfoil.models.foil_generator import spell_foil
from counterfoil.objectives.services import GeneratorOptions
from counterfoil.training.extra_negatives import foil_negatives
from tests.conftest import CONCEPTS, make_split
from tests.data.text.test_text import save_tiny_tokenizer
from tests.foils.test_files import Impatient, Killed

OPTIONS = GeneratorOptions(
    masks=3, samples=4, kept=3, temperature=1.5, unit="graph", extractor="rules"
)


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> Split:
    return make_split(tmp_path_factory.mktemp("foil-files"), "train", 10, seed=0)


@pytest.fixture(scope="module")
def model(split):
    matcher = {"layers": 1, "heads": 2, "extras": ["mlm"]}
    section = {"name": "uniter-small", "embed_size": 16, "matcher": matcher}
    config = build_config({"model": section, "data": {"min_count": 1}})
    torch.manual_seed(0)
    return create_model(config.model, split, config.data)


def write(model, split, path, options=OPTIONS, **more):
    return write_model_foils(model, split, path, options, weights="w", batch_size=4, **more)


# --- spelling -------------------------------------------------------------------------------


WORDS = WordText(Vocabulary.build(["a red dog runs on the beach , a cat"], 1))


@given(st.data())
def test_a_spelt_foil_reads_back_as_its_tokens_and_keeps_all_else(data) -> None:
    vocabulary = WORDS.vocabulary
    caption = data.draw(st.sampled_from(["A red DOG runs, zounds!", "The cat on a beach"]))
    true = WORDS.encode(caption)
    places = data.draw(st.sets(st.integers(1, len(true) - 2), min_size=1))
    ordinary = [vocabulary.index[word] for word in ("a", "red", "dog", "beach", "cat", "on")]
    foil = [data.draw(st.sampled_from(ordinary)) if p in places else t for p, t in enumerate(true)]
    spelt = spell_foil(WORDS, caption, true, foil)
    changed = tuple(place - 1 for place in range(len(true)) if true[place] != foil[place])
    if not changed:
        assert spelt is None
        return
    assert spelt is not None
    assert spelt.positions == changed
    assert WORDS.encode(spelt.text) == foil
    old, new = words(caption), words(spelt.text)
    assert all(old[p] == new[p] for p in range(len(old)) if p not in changed)


def test_capitals_and_unknown_words_stay_as_they_were_written() -> None:
    caption = "Dog runs on ZOUNDS"
    true = WORDS.encode(caption)
    foil = [*true[:1], WORDS.vocabulary.index["cat"], *true[2:]]
    assert spell_foil(WORDS, caption, true, foil).text == "Cat runs on ZOUNDS"


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tiny_tokenizer(folder)
    return HuggingFaceText.from_pretrained(str(folder))


def test_pieces_become_words_or_the_foil_is_none(pieces) -> None:
    vocabulary = pieces.tokenizer.get_vocab()
    inner = [token for token in vocabulary if token.startswith("##")]
    plain = [t for t in vocabulary if t.isalpha() and pieces.encode(t)[1:-1] == [vocabulary[t]]]
    caption = f"{plain[0]} {plain[1]} {plain[2]}"
    true = pieces.encode(caption)
    foil = [*true[:2], vocabulary[plain[3]], *true[3:]]
    spelt = spell_foil(pieces, caption, true, foil)
    assert (spelt.text, spelt.positions) == (f"{plain[0]} {plain[3]} {plain[2]}", (1,))
    alone = [*true[:2], vocabulary[inner[0]], *true[3:]]
    result = spell_foil(pieces, caption, true, alone)
    assert result is None or pieces.encode(result.text) == alone


# --- writing --------------------------------------------------------------------------------


def test_foils_are_false_by_the_filter_scored_by_the_model_and_best_first(
    model, split, tmp_path
) -> None:
    counts = write(model, split, tmp_path / "f.jsonl")
    result = list(read_foils(tmp_path / "f.jsonl"))
    assert counts.foils == len(result) > 10
    assert counts.captions == len(set(zip(split.image_of.tolist(), split.texts, strict=True)))
    for image, texts in zip(split.ids, split.captions, strict=True):
        own = {word for text in texts for word in words(text)}
        row = list(split.ids).index(image)
        for text in dict.fromkeys(texts):
            mine = [foil for foil in result if (foil.image, foil.caption) == (image, text)]
            assert len({foil.foil for foil in mine}) == len(mine) <= OPTIONS.kept
            assert [foil.score for foil in mine] == sorted((f.score for f in mine), reverse=True)
            for foil in mine:
                old, new = words(text), words(foil.foil)
                differ = tuple(p for p in range(len(old)) if old[p] != new[p])
                assert differ == foil.positions
                assert {new[place] for place in differ} - own
                score = float(model.score([split.fragments.read(row)], [foil.foil]))
                assert foil.score == pytest.approx(score, abs=1e-5)


@pytest.mark.parametrize("after", [0, 2])
def test_killed_and_started_again_it_writes_the_same_bytes(model, split, tmp_path, after) -> None:
    write(model, split, tmp_path / "whole", seed=3)
    with pytest.raises(Killed):
        write(model, split, tmp_path / "cut", seed=3, progress=Impatient(after))
    partial = tmp_path / "cut.partial"
    partial.write_bytes(partial.read_bytes()[:-7])  # in the middle of a batch, and of a line
    torch.manual_seed(99)
    write(model, split, tmp_path / "cut", seed=3)
    assert (tmp_path / "cut").read_bytes() == (tmp_path / "whole").read_bytes()


def test_writing_leaves_the_random_numbers_of_the_program_alone(model, split, tmp_path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    write(model, split, tmp_path / "f")
    assert torch.rand(3).equal(expected)


def test_another_seed_or_model_writes_other_foils_and_mixes_with_none(
    model, split, tmp_path
) -> None:
    write(model, split, tmp_path / "one", seed=1)
    write(model, split, tmp_path / "two", seed=2)
    assert (tmp_path / "one").read_bytes() != (tmp_path / "two").read_bytes()
    with pytest.raises(Killed):
        write(model, split, tmp_path / "three", progress=Impatient(1))
    with pytest.raises(DataError, match="other settings"):
        write_model_foils(model, split, tmp_path / "three", OPTIONS, weights="other", batch_size=4)


def test_any_training_can_read_them(model, split, tmp_path) -> None:
    write(model, split, tmp_path / "f.jsonl")
    companions = foil_negatives(str(tmp_path / "f.jsonl"), 2, split, Silent())
    assert len(companions.of(0, np.random.default_rng(0)).texts) == 2


def test_single_words_are_masked_where_asked_for(model, split, tmp_path) -> None:
    write(model, split, tmp_path / "f", replace(OPTIONS, unit="word"))
    kinds = {foil.kind for foil in read_foils(tmp_path / "f")}
    assert "word" in kinds  # articles and conjunctions, which no scene graph has


def test_an_image_that_cannot_be_read_is_counted_and_the_others_are_written(
    model, split, tmp_path
) -> None:
    bad = split.ids[2]
    table = split.fragments
    broken = replace(split, fragments=_Broken(table, 2))
    counts = write(model, broken, tmp_path / "f")
    assert counts.unreadable == (f"image {bad}: damaged",)
    assert bad not in {foil.image for foil in read_foils(tmp_path / "f")}
    others = [image for image in split.ids if image != bad]
    assert counts.captions == sum(len(set(split.captions[split.ids.index(i)])) for i in others)


class _Broken:
    """Fragments of which one image cannot be read."""

    def __init__(self, table, row: int) -> None:
        self.table, self.row = table, row

    def __len__(self) -> int:
        return len(self.table)

    def read(self, row: int) -> Fragments:
        if row == self.row:
            raise DataError("damaged")
        return self.table.read(row)


def test_what_cannot_write_is_refused(model, split) -> None:
    for temperature in (0.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="temperature"):
            FoilAuthor(model, replace(OPTIONS, temperature=temperature))
    with pytest.raises(ConfigError, match="at least 1"):
        FoilAuthor(model, replace(OPTIONS, samples=0))
    config = build_config({"model": {"name": "uniter-small", "embed_size": 16}})
    with pytest.raises(ConfigError, match=r"model\.matcher\.extras=\[mlm\]"):
        FoilAuthor(create_model(config.model, split, config.data), OPTIONS)


def test_the_concepts_are_what_is_exchanged(model, split, tmp_path) -> None:
    """With scene graphs, most foils change a thing or a relation, not an article."""
    write(model, split, tmp_path / "f")
    result = list(read_foils(tmp_path / "f"))
    changed = [words(foil.caption)[p] for foil in result for p in foil.positions]
    assert set(changed) <= {*CONCEPTS, "near", "and", "a", "the"}
    assert sum(word in CONCEPTS or word == "near" for word in changed) / len(changed) > 0.8
