"""Cross-encoders as models: where they start from, what they read, what they learn."""

from __future__ import annotations

import pytest
import torch
from transformers import BertConfig, BertModel, RobertaConfig, RobertaModel

from counterfoil.core.config import build_config
from counterfoil.core.errors import CheckpointError, ConfigError, DataError
from counterfoil.data.batches.collate import ImageBatch, TextBatch, pad_fragments
from counterfoil.data.fragments import Fragments
from counterfoil.encoders import image_encoders, text_encoders
from counterfoil.encoders.uniter import box_numbers
from counterfoil.models import create_model, from_pretrained, save_pretrained
from counterfoil.objectives import create_objective
from counterfoil.training.step import TrainingStep
from tests.data.text.test_text import save_tiny_tokenizer
from tests.models.test_models import batch_of

SIZES = {
    "vocab_size": 22,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 10,
}


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    save_tiny_tokenizer(folder)
    torch.manual_seed(0)
    BertModel(BertConfig(**SIZES, initializer_range=0.3)).save_pretrained(folder)
    return folder


def make(pairs, embed_size: int = 16, **parts):
    config = build_config(
        {
            "model": {"name": "uniter-small", "embed_size": embed_size, **parts},
            "data": {"min_count": 1},
        }
    )
    torch.manual_seed(0)
    return create_model(config.model, pairs.train, config.data).eval()


def from_bert(pairs, bert, layers: int = 3, **changes):
    return make(
        pairs,
        text={"name": "uniter-bert", "pretrained": str(bert)},
        matcher={"pretrained": str(bert), "layers": layers, "heads": 2, "ffn": 24, **changes},
    )


def test_a_text_without_an_image_is_what_bert_makes_of_it(concepts, bert) -> None:
    """With no region beside it, a caption goes through the very layers of that BERT."""
    model = from_bert(concepts, bert)
    ids = torch.tensor([[2, 5, 6, 3], [2, 8, 3, 0]])
    mask = torch.tensor([[True] * 4, [True, True, True, False]])
    nothing = ImageBatch(
        torch.zeros(2, 1, 16), torch.zeros(2, 1, dtype=torch.bool), torch.zeros(2, 1, 4)
    )
    expected = BertModel.from_pretrained(bert).eval()(ids, attention_mask=mask.long())
    states = model.matcher.states(
        model.encode_images(nothing), model.encode_texts(TextBatch(ids, mask))
    )
    result, wanted = states.words[mask], expected.last_hidden_state[mask]
    assert torch.allclose(result, wanted, atol=1e-5)
    assert torch.allclose(states.pooled, expected.pooler_output, atol=1e-5)


def test_fewer_layers_are_its_first_ones(concepts, bert) -> None:
    whole, cut = from_bert(concepts, bert), from_bert(concepts, bert, layers=1)
    theirs = whole.matcher.transformer.layers[0].state_dict()
    for key, value in cut.matcher.transformer.layers[0].state_dict().items():
        assert torch.equal(value, theirs[key])
    assert len(cut.matcher.transformer.layers) == 1


def test_a_model_from_bert_is_saved_without_it(concepts, bert, tmp_path) -> None:
    model = from_bert(concepts, bert)
    save_pretrained(model, tmp_path / "m")
    again = from_pretrained(tmp_path / "m")
    assert again.spec.matcher["pretrained"] == ""
    assert not again.spec.text["weights"]
    images = [concepts.test.fragments.read(i) for i in range(3)]
    captions = [*concepts.test.texts[:3], "a dog " * 20]
    assert torch.equal(again.score(images, captions), model.score(images, captions))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 4}, "has 3 layers of 2 heads .* set model.matcher.layers=3"),
        ({"heads": 4}, "of 2 heads .* model.matcher 3 of 4"),
        ({"ffn": 32}, "inner width of 24, model.matcher 3 of 2 and 32"),
    ],
)
def test_a_bert_of_other_sizes_is_refused_and_says_which_to_set(
    changes, message, concepts, bert
) -> None:
    with pytest.raises(ConfigError, match=message):
        from_bert(concepts, bert, **changes)


def test_a_bert_of_another_width_or_kind_is_refused(concepts, bert, tmp_path) -> None:
    text = {"name": "uniter-bert", "pretrained": str(bert)}
    with pytest.raises(ConfigError, match=r"hidden size of 16.*set model\.embed_size=16"):
        make(concepts, embed_size=12, text=text)
    with pytest.raises(ConfigError, match=r"hidden size of 16.*set model\.embed_size=16"):
        make(concepts, embed_size=12, matcher={"pretrained": str(bert)})
    RobertaModel(RobertaConfig(**SIZES)).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="got a model of type 'roberta'"):
        make(concepts, matcher={"pretrained": str(tmp_path)})


def test_a_box_is_seven_numbers() -> None:
    result = box_numbers(torch.tensor([0.1, 0.2, 0.5, 0.8]))
    assert result.tolist() == pytest.approx([0.1, 0.2, 0.5, 0.8, 0.4, 0.6, 0.24])


def test_where_a_region_is_matters_unless_boxes_are_none(concepts) -> None:
    image = concepts.test.fragments.read(0)
    moved = Fragments(image.features, 0.5 * image.boxes)
    caption = concepts.test.texts[0]
    here, there = make(concepts).score([image, moved], [caption])
    assert here != there
    blind = make(concepts, image={"boxes": "none"})
    here, there, unknown = (
        blind.score([x], [caption]) for x in (image, moved, Fragments(image.features))
    )
    assert here == there == unknown
    with pytest.raises(DataError, match=r"model\.image\.boxes=none"):
        make(concepts).encode_images(pad_fragments([Fragments(image.features)]))


def test_embeddings_are_the_sums_uniter_adds_up(concepts) -> None:
    """Each part by hand, and nothing at padding."""
    torch.manual_seed(0)
    regions = image_encoders["uniter"](5, 8).eval()
    batch = ImageBatch(
        torch.randn(2, 3, 5), torch.tensor([[True] * 3, [True, False, False]]), torch.rand(2, 3, 4)
    )
    result = regions(batch)
    features = regions.feature_norm(regions.feature(batch.fragments[0, 1]))
    place = regions.place_norm(regions.place(box_numbers(batch.boxes[0, 1])))
    expected = regions.norm(features + place + regions.kind)
    assert torch.allclose(result.fragments[0, 1], expected, atol=1e-6)
    assert not result.fragments[1, 1:].any()
    words = text_encoders["uniter"](make(concepts).text, 8, positions=3).eval()
    texts = TextBatch(torch.tensor([[1, 5, 6, 7, 7]]), torch.tensor([[True] * 4 + [False]]))
    encoded = words(texts).fragments[0]
    expected = words.norm(words.embed.weight[6] + words.positions.weight[2] + words.kind)
    assert torch.allclose(encoded[2], expected, atol=1e-6)
    expected = words.norm(words.embed.weight[7] + words.positions.weight[2] + words.kind)
    assert torch.allclose(encoded[3], expected, atol=1e-6)
    assert not encoded[4].any()


def test_heads_are_saved_with_a_model(concepts, tmp_path) -> None:
    model = make(concepts, matcher={"extras": ["mlm", "discrimination"]})
    save_pretrained(model, tmp_path / "m")
    again = from_pretrained(tmp_path / "m")
    assert list(again.matcher.heads) == ["rank", "mlm", "discrimination"]
    batch = batch_of(model, concepts, 3)
    for mine in (model, again):
        images, texts = mine.encode_images(batch.images), mine.encode_texts(batch.texts)
        words = mine.matcher.states(images, texts).words
        logits = mine.matcher.heads["mlm"](words, mine.text_encoder.word_table.weight)
        assert logits.shape == (*batch.texts.ids.shape, len(mine.text))


def test_a_small_one_learns_what_goes_with_what(concepts) -> None:
    model = make(concepts, embed_size=32, matcher={"layers": 2, "heads": 4, "dropout": 0.0})
    step = TrainingStep(model, create_objective({"triplet": {}}), None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    batch = batch_of(model, concepts, 6)
    losses = []
    for number in range(35):
        loss, _ = step(batch, 0, number, False)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(2 * 6 * 5 * 0.2, rel=0.05)  # it knows nothing yet
    assert losses[-1] < 0.8 * losses[0]
