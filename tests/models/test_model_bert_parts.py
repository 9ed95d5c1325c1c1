"""What a cross-encoder takes from a BERT: its masked-word head too, and how fast it learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, BertForPreTraining, BertModel

from counterfoil.core.config import OptimizerConfig, build_config
from counterfoil.core.errors import CheckpointError, ConfigError
from counterfoil.encoders.bert import loading_notes
from counterfoil.models import Model, create_model, from_pretrained, save_pretrained
from counterfoil.models.warm_start import start_from
from counterfoil.training.optim import create_optimizer
from counterfoil.training.run_folder import resolve_paths
from tests.data.text.test_text import save_tiny_tokenizer

SIZES = {
    "vocab_size": 24,  # two more than the tokenizer has: a padded table
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 10,
}
WORDS = 22
HEADS = ["mlm", "discrimination", "correction"]


def save(folder: Path, kind: type, seed: int = 0, **options) -> tuple[Path, object]:
    """A small BERT in a folder, every weight of it drawn at random, norms and biases as well."""
    folder.mkdir(parents=True, exist_ok=True)
    save_tiny_tokenizer(folder)
    torch.manual_seed(seed)
    bert = kind(BertConfig(**SIZES, **options))
    with torch.no_grad():
        for parameter in bert.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    bert.save_pretrained(folder)
    return folder, bert


def make(pairs, folder: Path | str, text: Path | str = "", **matcher) -> Model:
    words = {"name": "uniter-bert", "pretrained": str(text or folder)}
    shape = {"layers": 2, "heads": 2, "ffn": 24, "extras": HEADS}
    config = build_config(
        {
            "model": {
                "name": "uniter-small",
                "embed_size": 16,
                "text": words if text is not None else {"name": "uniter", "positions": 10},
                "matcher": {**shape, "pretrained": str(folder), **matcher},
            },
            "data": {"min_count": 1},
        }
    )
    torch.manual_seed(0)
    return create_model(config.model, pairs.train, config.data).eval()


def rates(model: Model, **options) -> dict[str, float]:
    groups = create_optimizer(model, OptimizerConfig(lr=1.0, **options)).param_groups
    rate = {id(p): group["lr"] for group in groups for p in group["params"]}
    return {name: rate[id(p)] for name, p in model.named_parameters()}


def old_names(folder: Path, bert) -> None:
    """The file as early releases wrote it: gamma and beta, and the output layer once more."""
    state = {
        key.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): value.detach().clone()
        for key, value in bert.state_dict().items()
    }
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")


# --- the masked-word head -------------------------------------------------------------------


@pytest.mark.parametrize("form", ["masked-lm", "pretraining", "gamma and beta"])
def test_berts_masked_word_head_is_not_dropped_on_loading(form, concepts, tmp_path) -> None:
    kind = BertForMaskedLM if form == "masked-lm" else BertForPreTraining
    folder, bert = save(tmp_path / "bert", kind)
    if form == "gamma and beta":
        old_names(folder, bert)
    model = make(concepts, folder)
    states = torch.randn(5, 16)
    expected = bert.cls.predictions(states)[:, :WORDS]
    table = model.text_encoder.word_table.weight
    for head in ("mlm", "correction"):  # TAGS starts the correction as the masked-word head
        assert torch.allclose(model.matcher.heads[head](states, table), expected, atol=1e-5)
    no_pooler = f"'{folder}' has no pooler: it starts from random numbers"
    assert loading_notes(model) == ([no_pooler] if kind is BertForMaskedLM else [])


def test_a_word_head_that_cannot_be_used_is_named(concepts, tmp_path) -> None:
    plain, _ = save(tmp_path / "plain", BertModel)
    (note,) = loading_notes(make(concepts, plain))
    assert "cls.predictions.transform.dense.weight" in note
    assert "mlm and correction start from random numbers" in note
    untied, _ = save(tmp_path / "untied", BertForMaskedLM, tie_word_embeddings=False)
    other, _ = save(tmp_path / "other", BertForPreTraining, seed=1)
    words = make(concepts, other, text=None)
    for model in (make(concepts, untied), make(concepts, other, text=plain), words):
        note = loading_notes(model)[-1]
        assert "not used" in note
        assert "cls.predictions.*" in note
        assert not any(".heads." in name for name in model.pretrained)
    assert loading_notes(make(concepts, plain, extras=["itm"])) == []


def test_a_word_head_of_another_shape_is_named_and_not_used(concepts, tmp_path) -> None:
    folder, _ = save(tmp_path / "bert", BertForPreTraining)
    state = load_file(folder / "model.safetensors")
    state["cls.predictions.transform.dense.weight"] = torch.zeros(8, 16)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    model = make(concepts, folder)
    (note,) = loading_notes(model)
    assert "of another shape: cls.predictions.transform.dense.weight)" in note
    assert not any(".heads." in name for name in model.pretrained)
    assert model.matcher.heads["mlm"].dense.weight.abs().sum() > 0


def test_a_bert_that_lacks_layers_is_refused_and_not_filled_up_at_random(
    concepts, tmp_path
) -> None:
    folder, _ = save(tmp_path / "bert", BertModel)
    deeper = BertConfig(**{**SIZES, "num_hidden_layers": 3})
    deeper.save_pretrained(folder)
    with pytest.raises(CheckpointError, match=r"bert\.encoder\.layer\.2\."):
        make(concepts, folder)


def test_the_same_seed_makes_the_same_new_weights_with_and_without_a_head(
    concepts, tmp_path
) -> None:
    with_head, _ = save(tmp_path / "whole", BertForPreTraining)
    plain, _ = save(tmp_path / "plain", BertModel)
    one, two = make(concepts, with_head), make(concepts, plain)
    assert torch.equal(one.matcher.heads["rank"].weight, two.matcher.heads["rank"].weight)
    assert torch.equal(one.image_encoder.feature.weight, two.image_encoder.feature.weight)


# --- rates ----------------------------------------------------------------------------------


def test_the_factor_finds_the_pretrained_parameters_of_uniter_bert_and_no_others(
    concepts, tmp_path
) -> None:
    folder, _ = save(tmp_path / "bert", BertForPreTraining)
    result = rates(make(concepts, folder), pretrained_lr_factor=0.1)
    slow = ("text_encoder.", "matcher.transformer.", "matcher.pooler.", "matcher.heads.mlm.")
    slow += ("matcher.heads.correction.",)
    for name, rate in result.items():
        assert rate == pytest.approx(0.1 if name.startswith(slow) else 1.0), name
    assert {rate for name, rate in result.items() if name.startswith("image_encoder.")} == {1.0}


@pytest.mark.parametrize("kind", [BertModel, BertForMaskedLM])
def test_what_a_checkpoint_lacks_learns_at_the_full_rate(kind, concepts, tmp_path) -> None:
    folder, _ = save(tmp_path / "bert", kind)
    result = rates(make(concepts, folder), pretrained_lr_factor=0.25)
    lacking = "matcher.heads.mlm." if kind is BertModel else "matcher.pooler."
    for name, rate in result.items():
        if name.startswith(lacking):
            assert rate == 1.0, name
    assert result["matcher.transformer.layers.1.qkv.weight"] == 0.25
    assert result["text_encoder.kind"] == 0.25


def test_either_half_alone_may_be_pretrained(concepts, tmp_path) -> None:
    folder, _ = save(tmp_path / "bert", BertModel)
    result = rates(make(concepts, "", text=folder), pretrained_lr_factor=0.1)
    assert {name.split(".")[0] for name, rate in result.items() if rate < 1} == {"text_encoder"}
    result = rates(make(concepts, folder, text=None), pretrained_lr_factor=0.1)
    assert {name.split(".")[0] for name, rate in result.items() if rate < 1} == {"matcher"}


def test_a_bert_text_encoder_without_its_weights_learns_at_the_full_rate(
    concepts, tmp_path
) -> None:
    folder, _ = save(tmp_path / "bert", BertForMaskedLM)

    def encoder(weights: bool) -> Model:
        text = {"pretrained": str(folder), "weights": weights}
        config = build_config({"model": {"name": "vse-infty-bert", "embed_size": 8, "text": text}})
        return create_model(config.model, concepts.train, config.data)

    assert set(rates(encoder(False)).values()) == {1.0}
    result = rates(encoder(True))
    assert result["text_encoder.bert.model.encoder.layer.0.output.dense.weight"] == 0.1
    assert result["text_encoder.bert.model.pooler.dense.weight"] == 1.0  # made up: not in the file
    assert result["text_encoder.fc.weight"] == 1.0


def test_a_factor_that_finds_nothing_is_refused_and_not_passed_over(concepts, tmp_path) -> None:
    model = make(concepts, "", text=None)
    for factor in (0.1, 0.5, 0.0, 2.0):
        with pytest.raises(ConfigError, match=r"pretrained_lr_factor=.*nothing to slow down"):
            rates(model, pretrained_lr_factor=factor)
    assert set(rates(model).values()) == {1.0}  # the default asks for nothing
    assert set(rates(model, pretrained_lr_factor=1.0).values()) == {1.0}


def test_a_config_that_was_written_and_read_sets_no_factor_that_nobody_set() -> None:
    import yaml

    plain = build_config({})
    again = build_config(yaml.safe_load(plain.to_yaml()))
    assert again == plain
    assert again.train.optimizer.pretrained_lr_factor is None
    tree = {"train": {"optimizer": {"pretrained_lr_factor": 0.1}}}
    again = build_config(yaml.safe_load(build_config(tree).to_yaml()))
    assert again.train.optimizer.pretrained_lr_factor == 0.1


def test_a_config_of_all_its_fields_trains_a_model_without_pretrained_parts(concepts) -> None:
    whole = build_config(build_config({}).model_dump())
    create_optimizer(make(concepts, "", text=None), whole.train.optimizer)


def test_a_saved_model_remembers_what_was_pretrained_so_that_a_run_goes_on_at_its_rates(
    concepts, tmp_path
) -> None:
    folder, _ = save(tmp_path / "bert", BertForPreTraining)
    model = make(concepts, folder)
    save_pretrained(model, tmp_path / "m")
    again = from_pretrained(tmp_path / "m")
    assert again.pretrained == model.pretrained
    assert rates(again) == rates(model)


def test_a_start_keeps_what_was_pretrained_and_berts_head_where_the_start_has_none(
    concepts, tmp_path
) -> None:
    folder, bert = save(tmp_path / "bert", BertForPreTraining)
    first = make(concepts, folder, extras=["itm"])
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.add_(0.1)
    save_pretrained(first, tmp_path / "first")
    model = make(concepts, folder)
    start_from(model, tmp_path / "first")
    assert model.pretrained == make(concepts, folder).pretrained
    dense = bert.cls.predictions.transform.dense.weight
    assert torch.equal(model.matcher.heads["mlm"].dense.weight, dense)
    assert torch.equal(model.matcher.pooler.weight, first.matcher.pooler.weight)


def test_the_folder_of_the_matchers_bert_holds_wherever_a_run_is_resumed(
    tmp_path, monkeypatch
) -> None:
    (tmp_path / "minilm").mkdir()
    monkeypatch.chdir(tmp_path)
    tree = {"model": {"name": "uniter-small", "matcher": {"pretrained": "minilm"}}}
    config = resolve_paths(build_config(tree))
    assert config.model.matcher["pretrained"] == str(tmp_path / "minilm")
