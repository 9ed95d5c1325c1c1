"""Named models: composition, training step, saving; every one in the registry."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from counterfoil.core.config import build_config
from counterfoil.core.errors import ArgumentError, CheckpointError, ConfigError, DataError
from counterfoil.core.storage.checksums import write_sums
from counterfoil.data.batches.collate import Collate, ImageBatch, pad_fragments
from counterfoil.data.batches.dataset import Augmentation, CaptionItems
from counterfoil.data.fragments import Fragments
from counterfoil.evaluation.foils.scores import encode_sentences
from counterfoil.models import create_model, from_pretrained, models, save_pretrained
from counterfoil.models.catalogue import reads_pixels
from counterfoil.objectives import create_objective, objectives
from counterfoil.training.step import TrainingStep
from tests.conftest import thinned
from tests.data.text.test_text import save_tiny_tokenizer

REGIONS = np.random.default_rng(0).normal(size=(5, 16)).astype(np.float32)


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory):
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("bert")
    save_tiny_tokenizer(folder)
    torch.manual_seed(0)
    BertModel(
        BertConfig(
            vocab_size=22,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=16,
        )
    ).save_pretrained(folder)
    return folder


def config_of(name: str, bert, **model):
    text = {"pretrained": str(bert)} if "bert" in models[name]().text["name"] else {}
    return build_config(
        {"model": {"name": name, "embed_size": 12, "text": text, **model}, "data": {"min_count": 1}}
    )


def make(name: str, pairs, bert, **model):
    torch.manual_seed(0)
    config = config_of(name, bert, **model)
    return create_model(config.model, pairs.train, config.data)


def batch_of(model, pairs, count: int = 8):
    items = CaptionItems(pairs.train, model.text, Augmentation(), 0)
    return Collate(model.text.pad)([items[0, 3 * i, 0] for i in range(count)])


SCORES_ALONE = [name for name in objectives if not objectives[name].requires]


# Those that read pixels are put to the same tests in test_dual.py.
FEATURE_MODELS = [name for name in models if not reads_pixels(models[name]())]
ONE_OF_EACH = ("vse-infty", "scan-t2i", "naaf", "sgr", "gsmn", "hrem", "uniter-small")
"""A model of every kind: global, local, with a boundary, with graphs, one that reads both."""


@pytest.mark.parametrize("objective", thinned(SCORES_ALONE, "hardest"))
@pytest.mark.parametrize("name", FEATURE_MODELS)
def test_every_model_learns_from_every_objective(name, objective, concepts, tiny_bert) -> None:
    model = make(name, concepts, tiny_bert)
    step = TrainingStep(model, create_objective(objective), None)
    loss, _ = step(batch_of(model, concepts), 0, 0)
    loss.backward()
    assert loss.isfinite()
    idle = [n for n, p in model.named_parameters() if p.grad is None]
    assert [n for n in idle if "pooler" not in n] == []


def doubled(fragments: Sequence[Fragments]) -> ImageBatch:
    """The images as a batch in double precision."""
    batch = pad_fragments(fragments)
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    real = {k: v for k, v in values.items() if isinstance(v, Tensor) and v.is_floating_point()}
    return replace(batch, **{name: value.double() for name, value in real.items()})


@pytest.mark.parametrize("name", thinned(FEATURE_MODELS, *ONE_OF_EACH))
def test_permuting_a_batch_permutes_the_scores(name, concepts, tiny_bert) -> None:
    # In double precision: GSMN enlarges what rounding leaves by a thousand.
    model = make(name, concepts, tiny_bert).eval().double()
    images = [concepts.train.fragments.read(i) for i in range(6)]
    captions = concepts.train.texts[:5]

    def score(rows: Sequence[int], columns: Sequence[int]) -> Tensor:
        sentences = encode_sentences(model, [captions[j] for j in columns])
        with torch.inference_mode():
            encoded = model.encode_images(doubled([images[i] for i in rows]))
            return model.matcher(encoded, model.encode_texts(sentences))

    scores = score(range(6), range(5))
    assert scores.dtype == torch.float64
    order, cut = torch.randperm(6), torch.randperm(5)
    shuffled = score(order.tolist(), cut.tolist())
    assert torch.allclose(shuffled, scores[order][:, cut], atol=1e-9)
    assert torch.allclose(score([0], [0])[0, 0], scores[0, 0], atol=1e-9)


@pytest.mark.parametrize("name", thinned(FEATURE_MODELS, *ONE_OF_EACH, "chan-bert"))
def test_a_saved_model_needs_nothing_but_its_folder(name, concepts, tiny_bert, tmp_path) -> None:
    model = make(name, concepts, tiny_bert)
    model.fragments_from = "segments"
    save_pretrained(model, tmp_path / "model")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "model").rename(tmp_path / "elsewhere" / "model")
    again = from_pretrained(tmp_path / "elsewhere" / "model")
    images = [concepts.test.fragments.read(i) for i in range(4)]
    captions = concepts.test.texts[:4]
    assert torch.equal(again.score(images, captions), model.score(images, captions))
    assert again.fragments_from == "segments"


def test_parts_can_be_exchanged_by_name(concepts, tiny_bert) -> None:
    model = make("rvse-mlp", concepts, tiny_bert, image={"name": "fc"}, text={"name": "gru"})
    assert model.spec.image == {"name": "fc", "pooling": "gpo"}
    kmax = make("vse-fc", concepts, tiny_bert, image={"pooling": {"name": "kmax", "k": 2}})
    assert kmax.image_encoder.joint.pool.k == 2


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"name": "rvse-mpl"}, "unknown model 'rvse-mpl'; did you mean 'rvse-mlp'"),
        ({"name": "vse-fc", "image": {"poling": "max"}}, "model.image.poling.*'pooling'"),
        ({"name": "vse-fc", "image": {"pooling": "gop"}}, "unknown pooling 'gop'"),
        ({"name": "vse-mlp", "image": {"residual": "some"}}, "model.image.residual"),
        ({"name": "vse-fc", "text": {"dropout": "lots"}}, "model.text.dropout"),
        ({"name": "vse-fc", "matcher": {"name": "cosin"}}, "did you mean 'cosine'"),
    ],
)
def test_a_wrong_part_or_option_is_refused_by_name(concepts, model, message) -> None:
    with pytest.raises(ConfigError, match=message):
        create_model(build_config({"model": model}).model, concepts.train)


def test_a_matcher_of_vectors_says_what_to_do_without_pooling(concepts, tiny_bert) -> None:
    model = make("vse-fc", concepts, tiny_bert, image={"pooling": "none"})
    with pytest.raises(ConfigError, match=r"set model\.image\.pooling"):
        model.score([concepts.train.fragments.read(0)], ["a dog"])


def test_fragments_of_another_width_are_refused(concepts, tiny_bert) -> None:
    from counterfoil.data.fragments import Fragments

    model = make("vse-fc", concepts, tiny_bert)
    with pytest.raises(DataError, match="reads fragments of 16 numbers, these have 7"):
        model.score([Fragments(torch.zeros(2, 7).numpy())], ["a dog"])
    model.fragments_from = "segments"
    with pytest.raises(DataError, match="extract them with 'segments'"):
        model.score([Fragments(torch.zeros(2, 7).numpy())], ["a dog"])


def damage(folder, how: str) -> None:
    config = folder / "config.json"
    layout = json.loads(config.read_text())
    if how == "no config":
        config.unlink()
    elif how == "cut config":
        config.write_text("{")
    elif how == "cut weights":
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:100])
    elif how == "no weights":
        (folder / "model.safetensors").unlink()
    elif how == "a pickle":
        torch.save({"a": 1}, folder / "model.safetensors")
    elif how == "other sizes":
        config.write_text(json.dumps({**layout, "input_dim": 99}))
        write_sums(folder)
    elif how == "a later format":
        config.write_text(json.dumps({**layout, "format": 99}))
        write_sums(folder)
    elif how == "no vocabulary":
        (folder / "vocabulary.json").unlink()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no config", "not a saved model"),
        ("cut config", "damaged"),
        ("cut weights", "not a readable safetensors"),
        ("no weights", "incomplete model folder"),
        ("a pickle", "not a readable safetensors"),
        ("other sizes", "do not fit"),
        ("a later format", "format 99"),
        ("no vocabulary", r"vocabulary\.json: no such file"),
    ],
)
def test_a_damaged_folder_is_named(concepts, tiny_bert, tmp_path, how, message) -> None:
    save_pretrained(make("vse-fc", concepts, tiny_bert), tmp_path / "m")
    damage(tmp_path / "m", how)
    with pytest.raises((CheckpointError, DataError), match=message):
        from_pretrained(tmp_path / "m")


def test_saving_over_a_model_replaces_it_whole(concepts, tiny_bert, tmp_path) -> None:
    save_pretrained(make("vse-infty-bert", concepts, tiny_bert), tmp_path / "m")
    save_pretrained(make("vse-fc", concepts, tiny_bert), tmp_path / "m")
    assert not (tmp_path / "m" / "tokenizer").exists()
    assert from_pretrained(tmp_path / "m").spec.name == "vse-fc"
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_bert_text_encoder_trains_at_a_tenth_of_the_rate(concepts, tiny_bert) -> None:
    from counterfoil.core.config import OptimizerConfig
    from counterfoil.training.optim import create_optimizer

    groups = create_optimizer(
        make("vse-infty-bert", concepts, tiny_bert), OptimizerConfig()
    ).param_groups
    assert [group["lr"] for group in groups] == pytest.approx([5e-4, 5e-5])


def test_glove_initializes_and_may_be_frozen(concepts, tiny_bert, tmp_path) -> None:
    (tmp_path / "g.txt").write_text("dog 1 2 3\ncat 4 5 6\n")
    text = {"glove": str(tmp_path / "g.txt"), "frozen": True}
    model = make("vse-fc", concepts, tiny_bert, text=text)
    table = model.text_encoder.embed.weight
    assert table[model.text.vocabulary.index["dog"]].tolist() == [1, 2, 3]
    assert not table.requires_grad
    save_pretrained(model, tmp_path / "m")
    (tmp_path / "g.txt").unlink()
    again = from_pretrained(tmp_path / "m")
    assert torch.equal(again.text_encoder.embed.weight, table)


@pytest.mark.parametrize(("init", "spread"), [("uniform", 0.1 / 3**0.5), ("normal", 1.0)])
@pytest.mark.parametrize("name", ["vse-fc", "vse++", "dive"])
def test_random_word_vectors_are_small_or_of_a_standard_distribution(
    name, init, spread, concepts, tiny_bert
) -> None:
    model = make(name, concepts, tiny_bert, text={"word_init": init, "word_dim": 300})
    assert float(model.text_encoder.embed.weight.detach().std()) == pytest.approx(spread, rel=0.1)


@pytest.fixture
def scorer(concepts, tiny_bert):
    return make("vse++", concepts, tiny_bert).eval()


@pytest.mark.parametrize(
    ("images", "texts", "message"),
    [
        (REGIONS, None, "texts: expected one or a list of them, got NoneType"),
        (REGIONS, 5, "texts: expected one or a list of them, got int"),
        (REGIONS, [None], "texts: expected strings, got NoneType among them"),
        (REGIONS, [], "texts: expected at least one, got none"),
        (None, "a dog", "images: expected one or a list of them, got NoneType"),
        ([None], "a dog", "image: expected a path, .* got NoneType"),
        (np.zeros((0, 2, 16), np.float32), "a dog", "images: expected at least one, got none"),
        (np.float32(3), "a dog", "images: expected one or a list of them, got float32"),
        (np.zeros((0, 4, 3), np.uint8), "a dog", r"image: expected pixels, got shape \[0, 4, 3\]"),
    ],
)
def test_arguments_of_a_score_are_checked(scorer, images, texts, message) -> None:
    with pytest.raises(ArgumentError, match=message):
        scorer.score(images, texts)


@pytest.mark.parametrize("text", ["", "  \n", ["a dog", ""]])
def test_a_text_without_words_is_refused(scorer, text) -> None:
    with pytest.raises(DataError, match="has no words"):
        scorer.score(REGIONS, text)


@pytest.mark.parametrize("features", [np.full((2, 16), np.nan, np.float32), REGIONS[:0]])
def test_fragments_are_finite_and_not_empty(scorer, features) -> None:
    for image in (features, Fragments(features), [Fragments(features)]):
        with pytest.raises(DataError, match="at least one fragment, all numbers finite"):
            scorer.score(image, "a dog")


def test_one_text_is_explained_at_a_time(scorer) -> None:
    with pytest.raises(ArgumentError, match="text: expected one string, got list"):
        scorer.explain(REGIONS, ["a dog"])


def test_tensors_of_bfloat16_are_converted(scorer) -> None:
    rounded = torch.tensor(REGIONS).bfloat16()
    result = scorer.score(rounded, "a dog", progress=True)
    assert torch.equal(result, scorer.score(rounded.float().numpy(), "a dog", progress=False))
