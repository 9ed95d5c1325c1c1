"""Our objectives in the trainer of sentence-transformers, over a tiny CLIP of random weights."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn

from counterfoil.adapters.sentence_transformers import ImageTextLoss
from counterfoil.core.errors import DataError
from counterfoil.objectives import Context, create_objective

WORDS = [
    "<|startoftext|>",
    "<|endoftext|>",
    *"abcdefgh",
    *(f"{letter}</w>" for letter in "abcdefgh"),
]


class Linear(nn.Module):
    """A model as sentence-transformers calls it: inputs by name to a sentence_embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.words = nn.Linear(12, 5).double(), nn.Embedding(20, 5).double()

    def forward(self, features):
        if "pixel_values" in features:
            return {"sentence_embedding": self.image(features["pixel_values"].flatten(1))}
        states = self.words(features["input_ids"]) * features["attention_mask"][..., None]
        return {"sentence_embedding": states.sum(1)}


def columns(rows: slice = slice(None), width: int = 4):
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(6, 3, 2, 2, generator=generator, dtype=torch.float64)
    ids = torch.randint(1, 20, (6, 4), generator=generator)
    mask = torch.ones(6, 4, dtype=torch.long)
    mask[3, 2:] = ids[3, 2:] = 0
    ids[4], mask[4] = ids[1], mask[1]  # one caption twice
    pixels[5] = pixels[2]  # one image twice
    ids, mask = (nn.functional.pad(x, (0, width - 4)) for x in (ids, mask))
    return [
        {"pixel_values": pixels[rows]},
        {"input_ids": ids[rows], "attention_mask": mask[rows]},
    ]


def our_loop(objective) -> tuple[torch.Tensor, ...]:
    model = Linear()
    images, texts = (
        nn.functional.normalize(model(column)["sentence_embedding"], dim=-1) for column in columns()
    )
    ids = torch.tensor([0, 1, 2, 3, 4, 2])
    positives = ids[:, None] == ids
    protected = torch.zeros_like(positives)
    protected[1, 4] = protected[4, 1] = True
    loss = create_objective(objective).compute(
        images @ texts.T, positives, Context(protected=protected)
    )
    return loss.loss.detach(), *torch.autograd.grad(loss.loss, [*model.parameters()])


def assert_same(found, expected) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)


@pytest.mark.parametrize("objective", ["hardest", {"infonce": {"learned": False}}])
@pytest.mark.parametrize("swapped", [False, True])
def test_loss_and_gradients_are_those_of_our_own_loop(objective, swapped) -> None:
    """Duplicates are found by themselves; captions may be the first column."""
    model = Linear()
    given = columns()[::-1] if swapped else columns()
    loss = ImageTextLoss(model, objective)(given, None)
    assert_same(
        (loss.detach(), *torch.autograd.grad(loss, [*model.parameters()])), our_loop(objective)
    )


@pytest.mark.parametrize("mixed", [True, False])
def test_cosines_are_not_rounded_to_half_precision(mixed) -> None:
    class Embedding(nn.Module):
        def forward(self, features):
            name = "pixel_values" if "pixel_values" in features else "input_ids"
            return {"sentence_embedding": vectors[name]}

    generator = torch.Generator().manual_seed(0)
    both = torch.randn(2, 6, 64, generator=generator) + 3
    vectors = {"pixel_values": both[0], "input_ids": both[1]}
    if not mixed:
        vectors = {name: x.bfloat16() for name, x in vectors.items()}
    images, texts = (nn.functional.normalize(x.float(), dim=-1) for x in vectors.values())
    expected = create_objective("hardest")(images @ texts.T)
    given = [{"pixel_values": torch.arange(6)[:, None]}, {"input_ids": torch.arange(6)[:, None]}]
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        loss = ImageTextLoss(Embedding(), "hardest")(given)
    assert torch.allclose(loss, expected, atol=1e-6)


def test_labels_are_image_ids() -> None:
    loss = ImageTextLoss(Linear(), {"triplet": {"margin": 3.0}})
    assert loss(columns(), None) > 0
    assert loss(columns(), torch.zeros(6)) == 0


def test_labels_that_are_scores_are_refused() -> None:
    """Rounded to integers they would all be one image, and nothing a negative."""
    with pytest.raises(DataError, match=r"column 'label': expected image ids, .* got fractions"):
        ImageTextLoss(Linear())(columns(), torch.linspace(0.1, 0.9, 6))


def share(objective) -> tuple[torch.Tensor, ...]:
    model, rank = Linear(), dist.get_rank()
    # a longer padding in one of the processes: equal captions are equal all the same
    loss = ImageTextLoss(model, objective)(columns(slice(3 * rank, 3 * rank + 3), 4 + rank), None)
    gradients = torch.autograd.grad(loss, [*model.parameters()])
    for gradient in gradients:  # as DistributedDataParallel does
        dist.all_reduce(gradient)
        gradient /= 2
    return loss.detach(), *gradients


@pytest.mark.parametrize("objective", ["hardest", {"infonce": {"learned": False}}])
def test_two_processes_are_one(objective, in_two_processes) -> None:
    for result in in_two_processes(share, objective):
        assert_same(result, our_loop(objective))


def test_more_columns_or_unknown_inputs_are_refused() -> None:
    loss = ImageTextLoss(Linear())
    with pytest.raises(DataError, match="expected two columns"):
        loss([*columns(), columns()[1]], None)
    with pytest.raises(DataError, match="got: audio"):
        loss([columns()[0], {"audio": torch.zeros(6)}], None)


def save_tiny_clip(folder) -> None:
    from transformers import (
        CLIPConfig,
        CLIPImageProcessorPil,
        CLIPModel,
        CLIPProcessor,
        CLIPTokenizer,
    )

    (folder / "vocab.json").write_text(json.dumps({word: n for n, word in enumerate(WORDS)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    size = {"height": 16, "width": 16}
    pictures = CLIPImageProcessorPil(size=size, crop_size=size)
    CLIPProcessor(pictures, tokenizer).save_pretrained(folder)
    shared = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    shared |= {"num_attention_heads": 2, "projection_dim": 8}
    text = {**shared, "vocab_size": len(WORDS), "max_position_embeddings": 12}
    text |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    vision = {**shared, "image_size": 16, "patch_size": 8}
    torch.manual_seed(0)
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    CLIPModel(config).save_pretrained(folder)


def toy_pairs(count: int = 8) -> dict[str, list]:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 255, (count, 2, 2, 3), dtype=np.uint8)
    images = [Image.fromarray(x).resize((16, 16), Image.Resampling.NEAREST) for x in pixels]
    captions = ["a b", "c d", "e f", "g h", "a c", "b d", "e g", "a b"]  # the first is the last
    return {"image": images, "caption": captions}


@pytest.mark.slow
def test_their_trainer_learns_with_our_objective(tmp_path) -> None:
    pytest.importorskip("accelerate", reason="the trainer of sentence-transformers needs it")
    datasets = pytest.importorskip(
        "datasets", reason="the trainer of sentence-transformers needs it"
    )
    st = pytest.importorskip("sentence_transformers")
    (tmp_path / "clip").mkdir()
    save_tiny_clip(tmp_path / "clip")
    model = st.SentenceTransformer(str(tmp_path / "clip"), device="cpu")
    loss = ImageTextLoss(model, "triplet", steps_per_epoch=1)
    arguments = st.SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path / "out"),
        num_train_epochs=30,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )
    data = datasets.Dataset.from_dict(toy_pairs())
    trainer = st.SentenceTransformerTrainer(
        model=model, args=arguments, train_dataset=data, loss=loss
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert loss.step == 30
    # had the equal captions been negatives, a whole margin would be left for each
    counted = ImageTextLoss(model, {"triplet": {}, "protect": {"identical": False}})
    with torch.no_grad():
        given = trainer.data_collator([data[i] for i in range(8)])
        features = trainer.collect_features(given)[0]
        assert counted(features, None) > loss(features, None) + 0.2
