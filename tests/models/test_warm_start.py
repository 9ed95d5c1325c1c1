"""Starting from another model's weights: what is taken over, how heads begin, what is refused."""

from __future__ import annotations

import pytest
import torch

import counterfoil as cf
from counterfoil.core.config import build_config
from counterfoil.core.errors import CheckpointError, ConfigError
from counterfoil.data.text.vocabulary import Vocabulary
from counterfoil.models import create_model, save_pretrained
from counterfoil.models.warm_start import same_ids, start_from
from tests.models import test_catalogue as test_cross
from tests.models.test_catalogue import from_bert

bert = test_cross.bert  # a fixture


def cross(pairs, extras=(), seed: int = 0, data: dict | None = None, **matcher):
    matcher = {"layers": 1, "heads": 2, "extras": list(extras), **matcher}
    section = {"name": "uniter-small", "embed_size": 16, "matcher": matcher}
    config = build_config({"model": section, "data": {"min_count": 1, **(data or {})}})
    torch.manual_seed(seed)
    return create_model(config.model, pairs.train, config.data)


@pytest.fixture(scope="module")
def first(concepts, tmp_path_factory):
    """A first stage: a folder, and the model in it."""
    folder = tmp_path_factory.mktemp("start") / "first"
    model = cross(concepts, ["mlm"], seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    save_pretrained(model, folder)
    return folder, model


def test_all_weights_are_those_of_the_first_stage_and_new_heads_begin_from_its_own(
    concepts, first
) -> None:
    folder, trained = first
    model = cross(concepts, ["itm", "mlm", "discrimination", "correction"])
    started = start_from(model, folder)
    assert started.new_heads == ("itm", "discrimination", "correction")
    assert "new heads: itm, discrimination, correction" in started.note()
    state = model.state_dict()
    assert all(state[key].equal(value) for key, value in trained.state_dict().items())
    heads = {name: head.state_dict() for name, head in model.matcher.heads.items()}
    assert heads["correction"].keys() == heads["mlm"].keys()
    assert all(value.equal(heads["correction"][key]) for key, value in heads["mlm"].items())
    assert heads["itm"]["weight"][1].equal(trained.matcher.heads["rank"].weight[0])
    assert heads["discrimination"]["weight"].equal(heads["itm"]["weight"])


def test_heads_stay_in_the_order_in_which_a_saved_model_has_them(concepts, first) -> None:
    model = cross(concepts, ["itm", "mlm", "discrimination"])
    before = [name for name, _ in model.named_parameters()]
    start_from(model, first[0])
    assert [name for name, _ in model.named_parameters()] == before


def test_heads_that_are_not_wanted_are_left_and_named(concepts, first) -> None:
    model = cross(concepts)
    started = start_from(model, first[0])
    assert started.left_heads == ("mlm",)
    assert "not taken over: mlm" in started.note()
    assert list(model.matcher.heads) == ["rank"]


def test_what_only_training_reads_may_differ(concepts, first) -> None:
    model = cross(concepts, ["mlm"], dropout=0.3, checkpointing=True)
    assert start_from(model, first[0]).new_heads == ()
    assert model.matcher.transformer.checkpointing


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 2}, r"has no matcher\.transformer\.layers\.1"),
        ({"heads": 4}, r"model\.matcher\.heads=2, this run 4"),
        ({"ffn": 20}, r"layers\.0\.widen\.weight is \[64, 16\].*here \[20, 16\]"),
        ({"output": "logit"}, r"model\.matcher\.output=sigmoid, this run logit"),
    ],
)
def test_another_make_or_size_is_refused_by_name(concepts, first, change, message) -> None:
    with pytest.raises(ConfigError, match=message):
        start_from(cross(concepts, ["mlm"], **change), first[0])


def test_other_parts_are_refused_by_name(concepts, first) -> None:
    model = cf.create("scan-t2i", concepts, embed_size=16, text={"word_dim": 8})
    model.text = first[1].text
    with pytest.raises(ConfigError, match=r"set model\.image\.name=uniter"):
        start_from(model, first[0])


def test_other_words_are_refused_with_the_file_that_has_the_right_ones(
    concepts, first, tmp_path
) -> None:
    folder, _ = first
    Vocabulary.build(["a dog"], 1).save(tmp_path / "words.json")
    other = cross(concepts, ["mlm"], data={"vocabulary": str(tmp_path / "words.json")})
    with pytest.raises(ConfigError, match=r"data\.vocabulary=.*vocabulary\.json"):
        start_from(other, folder)
    same = cross(concepts, ["mlm"], data={"vocabulary": str(folder / "vocabulary.json")})
    start_from(same, folder)
    assert not same_ids(other.text, same.text)


def test_other_features_are_refused(concepts, first, tmp_path) -> None:
    model = cross(concepts, ["mlm"])
    model.fragments_from = "segments"
    save_pretrained(model, tmp_path / "segments")
    model.fragments_from = "grid"
    with pytest.raises(ConfigError, match=r"data\.features\.extractor=segments"):
        start_from(model, tmp_path / "segments")
    model.input_dim = 17
    with pytest.raises(ConfigError, match="16 numbers, the data of this run has 17"):
        start_from(model, first[0])


def test_a_folder_without_a_model_is_refused(concepts, tmp_path) -> None:
    with pytest.raises(CheckpointError, match="neither a run nor a saved model"):
        start_from(cross(concepts), tmp_path)


def test_a_saved_cross_encoder_of_bert_starts_one_that_is_made_from_bert(
    concepts,
    bert,
    tmp_path,
) -> None:
    trained = from_bert(concepts, bert)
    with torch.no_grad():
        trained.matcher.pooler.weight.add_(1.0)
    save_pretrained(trained, tmp_path / "first")
    model = from_bert(concepts, bert, extras=["mlm"])
    assert start_from(model, tmp_path / "first").new_heads == ("mlm",)
    assert model.matcher.pooler.weight.equal(trained.matcher.pooler.weight)


def test_python_programs_start_from_a_run_too(concepts, tmp_path) -> None:
    small = {"embed_size": 8, "text": {"word_dim": 4}}
    one = cf.create("vse-fc", concepts, seed=1, **small)
    cf.save_pretrained(one, tmp_path / "one")
    two = cf.create("vse-fc", concepts, seed=2, init_from=str(tmp_path / "one"), **small)
    assert all(value.equal(two.state_dict()[key]) for key, value in one.state_dict().items())
