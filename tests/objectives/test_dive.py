"""DivE's losses: parity with the public code, plain loops, and a short training."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import counterfoil.objectives.dive  # noqa: F401 - registers its objectives
from counterfoil.core.config import build_config, load_config
from counterfoil.core.errors import ConfigError
from counterfoil.data.batches.collate import Collate
from counterfoil.data.batches.dataset import Augmentation, CaptionItems
from counterfoil.data.batches.sampling import BatchPlan, RankBatches
from counterfoil.encoders import Encoded
from counterfoil.matchers import matchers
from counterfoil.models import create_model
from counterfoil.objectives import Context, create_objective, objectives
from counterfoil.objectives.dive import distances
from counterfoil.training.step import TrainingStep
from counterfoil.training.trainer import Trainer
from tests.conftest import assert_gradient_close, load_fixture

HYPER = load_fixture("dive-loss").hyper
OBJECTIVE = {
    "hardest": {"weight": 2.0, "reduction": "mean", "margin": HYPER["margin"]},
    "mmd": {"weight": HYPER["mmd_weight"], "gamma": HYPER["mmd_gamma"]},
    "uniformity": {"weight": HYPER["unif_weight"], "t": float(HYPER["unif_t"])},
}


def of_sets(sets: torch.Tensor, residuals: torch.Tensor | None = None) -> Encoded:
    mask = torch.ones(sets.shape[:2], dtype=torch.bool)
    return Encoded(sets, mask, residuals=residuals)


def context_of(images: Encoded, texts: Encoded) -> Context:
    batch = SimpleNamespace(extras={})
    return Context(services=SimpleNamespace(images=images, texts=texts, batch=batch))


class Published:
    """The inputs of the reference's loss, with gradients, as a batch of four images."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.fixture = load_fixture("dive-loss")
        names = ("img_sets", "cap_sets", "img_residuals", "cap_residuals")
        given = [self.fixture[f"in.{name}"].to(dtype).requires_grad_() for name in names]
        self.leaves = dict(zip(names, given, strict=True))
        self.context = context_of(of_sets(given[0], given[2]), of_sets(given[1], given[3]))
        live = self.context.services
        matcher = matchers["smooth-chamfer"](64, temperature=HYPER["temperature"])
        self.scores = matcher(live.images, live.texts)
        self.positives = torch.arange(4)[:, None] == torch.arange(20)[None] // 5

    def loss(self, spec) -> torch.Tensor:
        return create_objective(spec).compute(self.scores, self.positives, self.context).loss

    def expect(self, value: torch.Tensor, name: str, tolerance: float) -> None:
        assert float(value.detach()) == pytest.approx(
            float(self.fixture[f"out.{name}"]), abs=tolerance
        )


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-7), (torch.float32, 1e-5)])
def test_the_losses_of_dive_agree_with_the_reference(dtype, close) -> None:
    case = Published(dtype)
    fixture = case.fixture
    case.expect(case.loss(OBJECTIVE), "loss", close)
    triplet = case.loss({"hardest": OBJECTIVE["hardest"]})
    both = fixture["out.i2t_loss"] + fixture["out.t2i_loss"]
    assert float(triplet.detach()) == pytest.approx(float(both), abs=close)
    for term, output in {"mmd": "mmd_loss", "uniformity": "unif_loss"}.items():
        case.expect(case.loss(term), output, close)


def test_each_direction_of_the_hinge_is_the_references() -> None:
    case = Published(torch.float64)
    hardest = objectives["hardest"](reduction="mean")
    for anchors, name in zip(
        hardest.anchors(case.scores, case.positives, case.context), ("i2t", "t2i"), strict=True
    ):
        assert anchors.positive.shape == (20,)
        case.expect(hardest._one_direction(anchors, case.context), f"{name}_loss", 1e-7)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-5), (torch.float32, 1e-2)])
@pytest.mark.parametrize(
    ("spec", "stored"),
    [
        ({"hardest": OBJECTIVE["hardest"]}, "triplet"),
        ("mmd", "mmd_loss"),
        ("uniformity", "unif_loss"),
    ],
    ids=str,
)
def test_gradients_agree_with_the_reference(spec, stored, dtype, close) -> None:
    case = Published(dtype)
    case.loss(spec).backward()
    met = 0
    for name, leaf in case.leaves.items():
        if f"grad.{stored}.{name}" in case.fixture.tensors:
            assert_gradient_close(leaf.grad, case.fixture[f"grad.{stored}.{name}"], close)
            met += 1
    assert met == 2


@given(seed=st.integers(0, 999), n=st.integers(1, 5), m=st.integers(1, 5), double=st.booleans())
def test_mmd_is_what_loops_say_and_its_gradient_is_finite(seed, n, m, double) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(k, 2, 3, generator=generator).double() for k in (n, m))
    if double:  # the same vector on both sides
        y[0, 0] = x[0, 0]
    x.requires_grad_()
    loss = objectives["mmd"](gamma=0.7).compute(None, None, context_of(of_sets(x), of_sets(y))).loss
    kernel = {
        name: sum(math.exp(-0.7 * math.dist(a, b)) for a in one for b in two) / len(one) / len(two)
        for name, one, two in (
            ("xx", x.flatten(0, 1).tolist(), x.flatten(0, 1).tolist()),
            ("yy", y.flatten(0, 1).tolist(), y.flatten(0, 1).tolist()),
            ("xy", x.flatten(0, 1).tolist(), y.flatten(0, 1).tolist()),
        )
    }
    assert float(loss.detach()) == pytest.approx(
        kernel["xx"] + kernel["yy"] - 2 * kernel["xy"], abs=1e-6
    )
    loss.backward()
    assert x.grad.isfinite().all()


def test_mmd_is_zero_for_equal_distributions_and_falls_as_clouds_meet() -> None:
    x = torch.randn(6, 4, 8)
    mmd = objectives["mmd"]()
    assert float(mmd.compute(None, None, context_of(of_sets(x), of_sets(x))).loss) == pytest.approx(
        0.0, abs=1e-6
    )
    far, near = (
        float(mmd.compute(None, None, context_of(of_sets(x), of_sets(x + shift))).loss)
        for shift in (5.0, 1.0)
    )
    assert far > near > 0


def test_mmd_reads_pooled_vectors_where_a_model_pools_and_only_real_fragments() -> None:
    x, y = torch.randn(3, 2, 4), torch.randn(5, 2, 4)
    mmd = objectives["mmd"]()
    expected = mmd.compute(None, None, context_of(of_sets(x), of_sets(y))).loss
    padded = of_sets(x).pad_to(4)
    assert torch.allclose(mmd.compute(None, None, context_of(padded, of_sets(y))).loss, expected)
    pooled = [replace(of_sets(z), pooled=z[:, 0]) for z in (x, y)]
    alone = [of_sets(z[:, :1]) for z in (x, y)]
    one, other = (mmd.compute(None, None, context_of(*pair)).loss for pair in (pooled, alone))
    assert torch.allclose(one, other)


@given(seed=st.integers(0, 999), size=st.integers(1, 4))
def test_uniformity_is_what_loops_say(seed, size) -> None:
    generator = torch.Generator().manual_seed(seed)
    sides = [torch.randn(n, size, 3, generator=generator).double() for n in (3, 5)]
    expected = 0.0
    for residuals in sides:
        units = torch.nn.functional.normalize(residuals, dim=-1).tolist()
        terms = [
            math.exp(-2 * math.dist(item[a], item[b]) ** 2)
            for item in units
            for a in range(size)
            for b in range(a + 1, size)
        ]
        expected += sum(terms) / len(terms) if terms else 0.0
    context = context_of(*(of_sets(residuals, residuals) for residuals in sides))
    loss = objectives["uniformity"]().compute(None, None, context).loss
    assert float(loss) == pytest.approx(expected, abs=1e-6)


def test_uniformity_says_that_a_model_predicts_no_sets() -> None:
    x = of_sets(torch.randn(2, 4, 8))
    with pytest.raises(ConfigError, match="predicts no sets"):
        objectives["uniformity"]().compute(None, None, context_of(x, x))


def test_copies_are_judged_each_by_itself() -> None:
    sides = [
        [of_sets(torch.randn(n, 4, 8), torch.randn(n, 4, 8)) for _ in range(2)] for n in (3, 4)
    ]
    joined = [
        replace(
            one,
            fragments=torch.cat([one.fragments, two.fragments], -1),
            residuals=torch.cat([one.residuals, two.residuals], -1),
        )
        for one, two in sides
    ]
    both = replace(context_of(*joined), members=(torch.zeros(3, 4),) * 2)
    for name in ("mmd", "uniformity"):
        objective = objectives[name]()
        each = [
            objective.compute(None, None, context_of(sides[0][k], sides[1][k])).loss
            for k in range(2)
        ]
        assert torch.allclose(objective.compute(None, None, both).loss, torch.stack(each).mean())


def test_distances_are_exact_at_zero_and_elsewhere() -> None:
    x = torch.nn.functional.normalize(torch.randn(40, 16), dim=-1)
    x[7] = x[3]
    x.requires_grad_()
    results = distances(x)
    assert torch.allclose(
        results, torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist"), atol=1e-5
    )
    assert results[3, 7].item() == 0.0
    results.sum().backward()
    assert x.grad.isfinite().all()
    assert x.grad.abs().max() < 100


SMALL = {"head_dim": 8, "depth": 2}
SETTINGS = {
    "model": {
        "name": "dive",
        "embed_size": 32,
        "image": SMALL,
        "text": {"word_dim": 16, **SMALL},
    },
    "data": {"min_count": 1, "captions": "grouped"},
    "objective": OBJECTIVE,
    "train": {"epochs": 6, "batch_size": 16, "log_every": 1, "optimizer": {"lr": 2e-3}},
}


@pytest.mark.parametrize("ensemble_size", [1, 2])
def test_a_grouped_batch_trains_every_parameter_of_dive(ensemble_size, concepts) -> None:
    config = build_config(
        {**SETTINGS, "model": {**SETTINGS["model"], "ensemble_size": ensemble_size}}
    )
    torch.manual_seed(0)
    model = create_model(config.model, concepts.train, config.data)
    items = CaptionItems(concepts.train, model.text, Augmentation(), 0)
    plan = BatchPlan(concepts.train, 6, captions="grouped")
    batch = Collate(model.text.pad)([items[index] for index in next(iter(RankBatches(plan, 0)))])
    step = TrainingStep(model, create_objective(config.objective), None)
    loss, diagnostics = step(batch, 0, 0)
    assert {"loss/hardest", "loss/mmd", "loss/uniformity"} <= diagnostics.keys()
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.slow
def test_dive_learns_from_images_with_all_their_captions(concepts, tmp_path) -> None:
    settings = build_config(SETTINGS)
    torch.manual_seed(settings.seed)
    model = create_model(settings.model, concepts.train, settings.data)
    result = Trainer(model, concepts, settings, tmp_path).run()
    assert result.best_rsum > 150  # chance is about 100


@pytest.mark.parametrize("name", ["f30k/dive", "coco/dive", "f30k/dive-bert", "scenes/dive"])
def test_recipes_weigh_the_hinge_as_the_reference_does(name) -> None:
    config = load_config(name)
    assert config.data.captions == "grouped"
    objective = create_objective(config.objective)
    assert objective.weights == {"hardest": 2.0, "mmd": 0.01, "uniformity": 0.01}
    assert objective.terms["hardest"].reduction == "mean"
    assert objective.needs == "both"
