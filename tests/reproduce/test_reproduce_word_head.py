"""The masked-word head that a language model gets from captions."""

from __future__ import annotations

import gzip
import importlib.util
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import BertForPreTraining, BertModel

from counterfoil.encoders.bert import loading_notes
from counterfoil.encoders.transformer import Bert
from tests.models.test_model_bert_parts import WORDS, make, save

SCRIPT = Path(__file__).parents[2] / "reproduction" / "flickr8k" / "word_head.py"
ANIMALS = {"dog": "ball", "cat": "kite", "horse": "tree"}
"""Animals, and the only thing that each is near: what is masked follows from the rest."""


def write_captions(folder: Path, count: int) -> Path:
    draws = random.Random(0)
    animals = draws.choices(list(ANIMALS), k=count)
    lines = [f"the {animal} near a {ANIMALS[animal]}\n" for animal in animals]
    path = folder / "captions.txt.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


@pytest.fixture
def call() -> Callable[..., None]:
    spec = importlib.util.spec_from_file_location("word_head", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda *words: module.main([*map(str, words), "--device", "cpu"])


def test_it_learns_to_fill_masks_and_uniter_starts_with_its_head(call, concepts, tmp_path) -> None:
    source, _ = save(tmp_path / "bert", BertModel)
    out = tmp_path / "bert-captions"
    options = ["--held-out", 60, "--batch", 16, "--lr", 0.01, "--factor", 0.5, "--epochs", 4]
    call(source, write_captions(tmp_path, 600), out, *options)
    report = json.loads((out / "words.json").read_text())
    before, guess, last = report["before"], report["most frequent word"], report["epochs"][-1]
    assert report["captions"] == 540
    assert last["words"] >= 60
    assert last["accuracy"] > 2 * guess["accuracy"] > 0
    assert last["perplexity"] < guess["perplexity"] < before["perplexity"]

    bert = BertForPreTraining.from_pretrained(out)
    assert Bert.load(str(out), 16).word_head is not None
    model = make(concepts, out)
    assert loading_notes(model) == []  # pooler and head come from the folder
    states = torch.randn(5, 16)
    said = model.matcher.heads["mlm"](states, model.text_encoder.word_table.weight)
    assert torch.allclose(said, bert.cls.predictions(states)[:, :WORDS], atol=1e-5)
    pooler = BertModel.from_pretrained(source).pooler.dense.weight
    assert torch.equal(model.matcher.pooler.weight, pooler)  # no word reads it: as it was


def test_nothing_is_replaced_and_too_few_captions_are_named(call, tmp_path, capsys) -> None:
    source, _ = save(tmp_path / "bert", BertModel)
    captions = write_captions(tmp_path, 30)
    (tmp_path / "there").mkdir()
    for words, message in (
        ([source, captions, tmp_path / "there"], "exists already"),
        ([tmp_path / "none", captions, tmp_path / "out"], "no folder of a language model"),
        ([source, captions, tmp_path / "out"], "30 captions are too few to hold 2000 out"),
        ([source, tmp_path / "no.txt", tmp_path / "out"], "no.txt: not readable as lines of text"),
        ([source, source / "model.safetensors", tmp_path / "out"], "not readable as lines of text"),
    ):
        with pytest.raises(SystemExit, match=message):
            call(*words)
    for option in ("--epochs", "--batch", "--held-out", "--most"):
        with pytest.raises(SystemExit):
            call(source, captions, tmp_path / "out", option, 0)
        error = f"argument {option}: expected a whole number of at least 1, got 0"
        assert error in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
