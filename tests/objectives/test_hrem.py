"""HREM's graph of instances: parity with the public code, properties, and a short training."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from counterfoil.core.config import build_config
from counterfoil.core.errors import ConfigError
from counterfoil.encoders import Encoded
from counterfoil.models import create_model
from counterfoil.objectives import Context
from counterfoil.objectives import hrem as instance_graph
from counterfoil.objectives.hrem import HREM, InstanceGraph, Side
from counterfoil.objectives.triplet import HardestNegative
from counterfoil.training.trainer import Trainer
from tests.conftest import assert_close, assert_gradient_close, load_fixture, thinned
from tests.encoders.test_parity import mask_of

RENAMED = {
    "gnn.layers.0": "layer",
    "adj_model.adj_learning.mlp_i2t.0": "image_to_text.0",
    "adj_model.adj_learning.mlp_i2t.3": "image_to_text.2",
    "adj_model.adj_learning.mlp_t2i.0": "text_to_image.0",
    "adj_model.adj_learning.mlp_t2i.3": "text_to_image.2",
}
BLOCKS = {"i2i": (0, 0), "i2t": (0, 1), "t2i": (1, 0), "t2t": (1, 1)}


class Published:
    """The inputs of the reference's graph loss, with gradients."""

    def __init__(self, name: str, form: str, dtype: torch.dtype) -> None:
        self.fixture = fixture = load_fixture(name)
        hyper = fixture.hyper
        objective = HREM(
            loss=hyper["gnn_loss"],
            margin=hyper["margin"],
            warmup=5,
            heads=hyper["nhead"],
            threshold=hyper["threshold"],
            topk=hyper["topk"],
            mask_weight=hyper["mask_weight"],
            reg_weight=hyper["reg_loss_weight"],
            form=form,
        )
        objective.prepare(SimpleNamespace(embed_size=hyper["embed_size"]))
        state = {}
        for key, value in fixture.weights().items():
            old = next(old for old in RENAMED if key.startswith(old))
            state[key.replace(old, RENAMED[old], 1)] = value
        objective.graph.load_state_dict(state)
        self.objective = objective.to(dtype).eval()
        self.leaves = [fixture[f"in.{x}_emb"].to(dtype).requires_grad_() for x in ("img", "cap")]
        regions, words = (fixture[f"in.{x}"].to(dtype) for x in ("regions", "words"))
        self.images = Encoded(
            regions, mask_of(fixture["in.img_lens"], regions.shape[1]), self.leaves[0]
        )
        self.texts = Encoded(words, mask_of(fixture["in.cap_lens"], words.shape[1]), self.leaves[1])
        self.positives = fixture["in.img_ids"][:, None] == fixture["in.img_ids"][None]

    @property
    def context(self) -> Context:
        return Context(step=5, services=SimpleNamespace(images=self.images, texts=self.texts))

    def graph_loss(self) -> tuple[Tensor, Tensor]:
        scores = self.leaves[0] @ self.leaves[1].T
        report = self.objective.compute(scores, self.positives, self.context)
        return report.loss, report.diagnostics["hrem/regulariser"]

    def base_loss(self) -> Tensor:
        scores = self.leaves[0] @ self.leaves[1].T
        hardest = HardestNegative(margin=self.fixture.hyper["margin"])
        return hardest.compute(scores, self.positives, Context()).loss

    def relations(self):
        sides = [Side(side.pooled, side.fragments, side.mask) for side in (self.images, self.texts)]
        return self.objective.graph.relations(*sides)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("hrem-graphloss", "paper"),
        ("hrem-graphloss", "reference"),
        ("hrem-graphloss-shortcaps", "reference"),
    ],
)
def test_the_graph_loss_agrees_with_gradients(name, form, dtype) -> None:
    case = Published(name, form, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-9
    relations, stored = case.relations(), case.fixture
    for block, (row, column) in BLOCKS.items():
        place = (slice(8 * row, 8 * row + 8), slice(8 * column, 8 * column + 8))
        assert_close(relations.relevance[place], stored[f"out.relevance.{block}"], tolerance)
        assert torch.equal(relations.connected[place].long(), stored[f"out.connect.{block}"])
    loss, regularizer = case.graph_loss()
    assert_close(regularizer, stored["out.reg_loss"], tolerance)
    assert_close(case.base_loss(), stored["out.base_loss"], tolerance)
    whole = case.base_loss() + loss
    assert_close(whole, stored["out.loss"], tolerance)
    whole.backward()
    for leaf, key in zip(case.leaves, ("img", "cap"), strict=True):
        assert_gradient_close(leaf.grad, stored[f"grad.{key}_emb"])


def test_only_the_reference_reads_the_padding_of_short_captions() -> None:
    for form in ("paper", "reference"):
        case = Published("hrem-graphloss-shortcaps", form, torch.float64)
        before = case.graph_loss()[0].detach()
        junk = torch.randn(case.texts.fragments.shape).double() * ~case.texts.mask[..., None]
        case.texts = replace(case.texts, fragments=case.texts.fragments + junk)
        after = case.graph_loss()[0].detach()
        assert torch.allclose(before, after, atol=1e-9) == (form == "paper")


def random_side(seed: int, lengths: list[int], longest: int, dim: int = 8) -> Side:
    generator = torch.Generator().manual_seed(seed)
    mask = mask_of(torch.tensor(lengths), longest)
    x = torch.randn(len(lengths), longest, dim, generator=generator).double()
    whole = F.normalize(torch.randn(len(lengths), dim, generator=generator).double(), dim=-1)
    return Side(whole, x, mask)


def pair_by_loops(regions: Tensor, words: Tensor, k: int) -> tuple[list[float], float]:
    """What words find in an image: best matches and their mean, for one pair without padding."""
    regions, words = F.normalize(regions, dim=-1), F.normalize(words, dim=-1)
    table = [[float(F.leaky_relu(w @ r, 0.1)) for r in regions] for w in words]
    norms = [sum(row[c] ** 2 for row in table) ** 0.5 for c in range(len(regions))]
    best = [max(x / n for x, n in zip(row, norms, strict=True)) for row in table]
    top = sorted(best, reverse=True)[:k]
    return top + [0.0] * (k - len(top)), sum(best) / len(best)


@settings(max_examples=10)
@given(
    seed=st.integers(0, 999),
    sizes=st.tuples(*[st.lists(st.integers(1, 5), min_size=2, max_size=4) for _ in range(2)]),
)
def test_matches_are_what_loops_say_however_texts_are_cut(seed, sizes) -> None:
    images, texts = random_side(seed, sizes[0], 6), random_side(seed + 1, sizes[1], 5)
    graph = InstanceGraph(8, topk=3)
    with mock.patch.object(instance_graph, "MAX_CELLS", 1 + seed):
        of_words, of_regions = graph.matches(images, texts)
    for i in range(len(sizes[0])):
        for t in range(len(sizes[1])):
            x, y = images.fragments[i, images.mask[i]], texts.fragments[t, texts.mask[t]]
            top, mean = pair_by_loops(x, y, 3)
            assert of_words.top[t, i].tolist() == pytest.approx(top, abs=1e-9)
            assert float(of_words.mean[t, i]) == pytest.approx(mean, abs=1e-9)
            top, mean = pair_by_loops(y, x, 3)
            assert of_regions.top[i, t].tolist() == pytest.approx(top, abs=1e-9)
            assert float(of_regions.mean[i, t]) == pytest.approx(mean, abs=1e-9)


def test_permuting_a_batch_permutes_what_its_instances_see() -> None:
    torch.manual_seed(0)
    graph = InstanceGraph(8, topk=4).double().eval()
    images, texts = random_side(0, [3, 5, 1, 4], 6), random_side(1, [2, 5, 5, 1, 3, 4], 5)
    seen = graph(images, texts)
    rows, columns = torch.randperm(4), torch.randperm(6)
    moved = [
        Side(side.whole[at], side.fragments[at], side.mask[at])
        for side, at in ((images, rows), (texts, columns))
    ]
    again = graph(*moved)
    assert torch.allclose(again.images, seen.images[rows], atol=1e-9)
    assert torch.allclose(again.texts, seen.texts[columns], atol=1e-9)
    assert torch.allclose(again.regularizer, seen.regularizer, atol=1e-9)


def test_every_parameter_of_the_graph_learns_and_fragments_get_no_gradient() -> None:
    torch.manual_seed(0)
    objective = HREM(loss="vse", warmup=0, topk=3)
    objective.prepare(SimpleNamespace(embed_size=8))
    sides = [random_side(seed, [3, 1, 4, 2, 3, 2], 4) for seed in (0, 1)]
    encoded = [
        Encoded(
            side.fragments.float().requires_grad_(), side.mask, side.whole.float().requires_grad_()
        )
        for side in sides
    ]
    context = Context(services=SimpleNamespace(images=encoded[0], texts=encoded[1]))
    scores = encoded[0].pooled @ encoded[1].pooled.T
    objective.compute(scores, torch.eye(6).bool(), context).loss.backward()
    for side in encoded:
        assert side.fragments.grad is None
        assert side.pooled.grad.isfinite().all()
        assert side.pooled.grad.any()
    for parameter in objective.parameters():
        assert parameter.grad.isfinite().all()


@pytest.mark.parametrize("loss", ["trip", "vse"])
@pytest.mark.parametrize(
    ("images", "texts"), [([1], [1]), ([2, 0], [1, 3]), ([3, 2], [1, 4, 2, 1])]
)
def test_batches_of_one_empty_items_and_grouped_batches_are_finite(loss, images, texts) -> None:
    torch.manual_seed(0)
    objective = HREM(loss=loss, warmup=0)
    objective.prepare(SimpleNamespace(embed_size=8))
    sides = [random_side(0, images, 4), random_side(1, texts, 4)]
    encoded = [
        Encoded(side.fragments.bfloat16(), side.mask, side.whole.bfloat16().requires_grad_())
        for side in sides
    ]
    context = Context(services=SimpleNamespace(images=encoded[0], texts=encoded[1]))
    positives = torch.arange(len(images))[:, None] == torch.arange(len(texts))[None] % len(images)
    scores = (encoded[0].pooled @ encoded[1].pooled.T).float()
    report = objective.compute(scores, positives, context)
    assert report.loss.isfinite()
    report.loss.backward()
    assert all(side.pooled.grad.isfinite().all() for side in encoded)


def test_nothing_is_added_during_warm_up() -> None:
    case = Published("hrem-graphloss", "paper", torch.float32)
    scores = (case.leaves[0] @ case.leaves[1].T).detach().requires_grad_()
    report = case.objective.compute(scores, case.positives, replace(case.context, step=4))
    assert float(report.loss) == 0.0
    report.loss.backward()
    assert not scores.grad.any()
    assert float(case.graph_loss()[0]) > 0


def test_a_model_without_one_vector_an_item_is_refused() -> None:
    objective = HREM(warmup=0)
    objective.prepare(SimpleNamespace(embed_size=8))
    local = Encoded(torch.randn(2, 3, 8), torch.ones(2, 3, dtype=torch.bool))
    context = Context(services=SimpleNamespace(images=local, texts=local))
    with pytest.raises(ConfigError, match="use a model that pools"):
        objective.compute(torch.zeros(2, 2), torch.eye(2).bool(), context)


@pytest.mark.parametrize("loss", thinned(["trip", "vse"], "trip"))
@pytest.mark.slow
def test_hrem_learns_with_its_graph_after_warm_up(loss, concepts, tmp_path) -> None:
    base = "distance-weighted" if loss == "trip" else "hardest"
    settings = build_config(
        {
            "model": {"name": "hrem", "embed_size": 32, "text": {"word_dim": 16}},
            "data": {"min_count": 1},
            "objective": {base: {}, "hrem-graph": {"loss": loss, "warmup": 6}},
            "train": {"epochs": 4, "batch_size": 32, "log_every": 1, "optimizer": {"lr": 3e-3}},
        }
    )
    torch.manual_seed(0)
    model = create_model(settings.model, concepts.train, settings.data)
    trainer = Trainer(model, concepts, settings, tmp_path)
    graph = trainer.objective.terms["hrem-graph"].graph
    start = {name: value.clone() for name, value in graph.state_dict().items()}
    assert trainer.run().best_rsum > 150  # chance is about 100
    still = [name for name, value in graph.state_dict().items() if torch.equal(value, start[name])]
    assert still == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_captions_that_are_equal_up_to_rounding_are_connected_alike(dtype) -> None:
    graph, above = InstanceGraph(8, heads=1), 1 + torch.finfo(dtype).eps
    similarity = torch.tensor([[0.9, 0.5, 0.5, 0.1], [0.9, 0.5, 0.49, 0.1]], dtype=dtype)
    similarity[0, 1] *= above
    connected = graph._nearest(similarity)
    assert connected.tolist() == [[True, True, True, False], [True, True, False, False]]
