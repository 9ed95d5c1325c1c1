"""Meta-SPN: its gradient against exact second order, what it learns, and that it resumes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counterfoil.core.config import build_config
from counterfoil.core.errors import ConfigError
from counterfoil.data.pairs import Pairs
from counterfoil.models import create_model
from counterfoil.objectives import Context, objectives
from counterfoil.objectives import meta_spn as meta
from counterfoil.objectives.meta_spn import MetaSPN, hardest_triplets
from counterfoil.training.lookahead import HeldOutBatches, LookaheadFactory, StepTrial
from counterfoil.training.services import set_aside
from counterfoil.training.step import score_batch
from counterfoil.training.trainer import Trainer
from tests.conftest import thinned
from tests.objectives.cases import Case, cases, make_case

REDUCTIONS = ["sum", "mean"]


def opinionated(seed: int = 0, **options) -> MetaSPN:
    """An objective whose network does not weigh everything alike."""
    torch.manual_seed(seed)
    objective = MetaSPN(**{"hidden": 12, **options}).double()
    torch.nn.init.normal_(objective.network.weigh.weight)
    return objective


@given(case=cases(), reduction=st.sampled_from(REDUCTIONS))
def test_an_untrained_network_leaves_the_hardest_loss_as_it_is(case, reduction) -> None:
    loss, gradient = case.loss_and_gradient(MetaSPN(reduction=reduction))
    expected, its_gradient = case.loss_and_gradient(objectives["hardest"](reduction=reduction))
    assert torch.allclose(loss, expected, rtol=1e-6)
    assert torch.allclose(gradient, its_gradient, rtol=1e-6)


def naive_loss(case: Case, objective: MetaSPN) -> float:
    rows = []
    for positive, negatives in case.anchors():
        hardest = max(negatives, default=None)
        cost = 0.0 if hardest is None else max(0.0, objective.margin + hardest - positive)
        weight = 0.0
        if cost:
            read = torch.tensor([positive, hardest, cost], dtype=torch.float64)
            weight = float(objective.network(read))
        rows.append((cost, weight))
    total = sum(cost * weight for cost, weight in rows)
    if objective.normalize and total:
        counted = [weight for cost, weight in rows if cost]
        total /= sum(counted) / len(counted)
    return total / (len(rows) if objective.reduction == "mean" else 1)


@given(case=cases(), reduction=st.sampled_from(REDUCTIONS), normalize=st.booleans())
def test_the_loss_equals_a_naive_loop(case, reduction, normalize) -> None:
    objective = opinionated(reduction=reduction, normalize=normalize)
    assert float(case.loss(objective)) == pytest.approx(naive_loss(case, objective), rel=1e-9)


def test_weights_are_constants_for_the_model_and_the_network_for_the_optimizer() -> None:
    case, objective = make_case(list(range(6)), scale=0.3), opinionated()
    scores = case.scores.clone().requires_grad_()
    objective.compute(scores, case.positives, Context()).loss.backward()
    triplets = hardest_triplets(scores, case.positives)
    weights = objective.weights(triplets, scores)
    by_hand = (weights * triplets.costs(scores, 0.2)).sum()
    assert torch.allclose(torch.autograd.grad(by_hand, scores)[0], scores.grad)
    assert not any(p.requires_grad or p.grad is not None for p in objective.parameters())


def small_trial(pairs, share: float = 0.3, rate: float = 0.05) -> StepTrial:
    """A real model of one linear layer a side (and a GRU), in double precision."""
    settings = build_config(
        {
            "model": {"name": "vse-fc", "embed_size": 8, "text": {"word_dim": 6}},
            "data": {"min_count": 1},
            "train": {"batch_size": 12},
        }
    )
    torch.manual_seed(3)
    model = create_model(settings.model, pairs.train, settings.data).double()
    train, held_out = set_aside(pairs.train, share, 0)
    batch = double(HeldOutBatches(train, model.text, settings)[0])
    trial = LookaheadFactory(model, held_out, settings, torch.device("cpu")).of(batch, 2, rate)
    aside = double(trial.held_out_batch())
    trial.held_out_batch = lambda: aside
    return trial


def double(batch):
    return replace(batch, images=replace(batch.images, fragments=batch.images.fragments.double()))


def exact_gradient(objective: MetaSPN, trial: StepTrial) -> tuple[torch.Tensor, ...]:
    """Autograd through the look-ahead step itself."""
    model, parameters = trial.model, list(objective.network.parameters())
    names = [name for name, _ in model.named_parameters()]
    objective.network.requires_grad_(True)

    def costs(weights, batch, weighed):
        scores = torch.func.functional_call(model, weights, (batch.images, batch.texts))
        triplets = hardest_triplets(scores, batch.image_ids[:, None] == batch.owners[None, :])
        results = triplets.costs(scores, objective.margin)
        results = results * objective.weights(triplets, scores) if weighed else results
        return results.sum() if objective.reduction == "sum" else results.mean()

    loss = costs(dict(model.named_parameters()), trial.batch, weighed=True)
    steps = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    ahead = {
        name: weight - trial.rate * step
        for name, weight, step in zip(names, model.parameters(), steps, strict=True)
    }
    outcome = costs(ahead, trial.held_out_batch(), weighed=False)
    results = torch.autograd.grad(outcome, parameters)
    objective.network.requires_grad_(False)
    return results


@pytest.mark.parametrize(
    ("reduction", "normalize"),
    thinned(product(REDUCTIONS, [True, False]), ("sum", True), ("mean", False)),
)
def test_the_meta_gradient_approaches_the_exact_one(
    concepts, reduction, normalize, monkeypatch
) -> None:
    """The error of a central difference falls with the square of the distance."""
    objective = opinionated(reduction=reduction, normalize=normalize)
    trial = small_trial(concepts)
    exact = exact_gradient(objective, trial)
    largest = max(float(part.abs().max()) for part in exact)
    for nudge, error in {
        meta.FINITE_DIFFERENCE_NORM: 0.05,
        meta.FINITE_DIFFERENCE_NORM / 10: 5e-4,
        meta.FINITE_DIFFERENCE_NORM / 100: 5e-6,
    }.items():
        monkeypatch.setattr(meta, "FINITE_DIFFERENCE_NORM", nudge)
        measured = objective.meta_gradient(trial)
        for mine, theirs in zip(measured, exact, strict=True):
            assert float((mine - theirs).abs().max()) < error * largest


def test_a_step_of_the_network_lowers_the_meta_loss_after_the_next_update(concepts) -> None:
    objective = opinionated(meta_lr=0.02)
    trial = small_trial(concepts)

    def outcome() -> float:
        scores, positives = trial.scores()
        triplets = hardest_triplets(scores, positives)
        costs = triplets.costs(scores, 0.2) * objective.weights(triplets, scores)
        with trial.moved(trial.gradient(costs.sum()), -trial.rate), torch.no_grad():
            scores, positives = trial.scores(trial.held_out_batch())
            return float(hardest_triplets(scores, positives).costs(scores, 0.2).sum())

    before = outcome()
    for _ in range(5):
        objective.before_step(trial)
    assert outcome() < before


def test_the_network_adapts_every_nth_step_only(concepts) -> None:
    objective, trial = opinionated(every=3), small_trial(concepts)
    before = objective.network.weigh.weight.clone()
    objective.before_step(trial)  # after two updates
    assert torch.equal(objective.network.weigh.weight, before)
    trial.step = 3
    objective.before_step(trial)
    assert not torch.equal(objective.network.weigh.weight, before)


def test_a_meta_batch_without_a_negative_teaches_nothing(concepts) -> None:
    objective, trial = opinionated(), small_trial(concepts)
    alone = replace(trial.held_out_batch(), owners=torch.zeros(12), image_ids=torch.zeros(12))
    trial.held_out_batch = lambda: alone
    assert objective.meta_gradient(trial) is None
    before = objective.network.weigh.weight.clone()
    objective.before_step(trial)
    assert torch.equal(objective.network.weigh.weight, before)


@pytest.mark.parametrize("option", [{"meta_share": 0.0}, {"every": 0}, {"hidden": 0}])
def test_options_that_cannot_be_are_refused(option) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        MetaSPN(**option)


def run_config(name: str, warm_up: int, epochs: int, **options):
    return build_config(
        {
            "model": {"name": name, "embed_size": 16, "text": {"word_dim": 16, "dropout": 0.1}},
            "data": {"min_count": 1},
            "objective": {
                "triplet": {"epochs": [0, warm_up]},
                "meta-spn": {"epochs": [warm_up, None], **options},
            },
            "train": {
                "epochs": epochs, "batch_size": 32, "log_every": 1, "optimizer": {"lr": 5e-3},
            },
        }
    )  # fmt: skip


def make_trainer(pairs, folder: Path, config, **kwargs) -> Trainer:
    torch.manual_seed(config.seed)
    model = create_model(config.model, pairs.train, config.data)
    return Trainer(model, pairs, config, folder, **kwargs)


def with_wrong_captions(pairs: Pairs, share: float) -> tuple[Pairs, set[str]]:
    """A third of the images that are trained on exchange their captions; none set aside does."""
    train = pairs.train
    _, aside = set_aside(train, share, 0)
    clean = set(aside.ids)
    wrong = [i for i, name in enumerate(train.ids) if name not in clean][::3]
    captions = list(train.captions)
    for image, other in zip(wrong, wrong[1:] + wrong[:1], strict=True):
        captions[image] = train.captions[other]
    changed = Pairs("noisy", {**pairs.splits, "train": replace(train, captions=captions)})
    return changed, {train.ids[i] for i in wrong}


@pytest.mark.slow
def test_pairs_that_the_meta_set_contradicts_get_smaller_weights(concepts, tmp_path) -> None:
    pairs, wrong = with_wrong_captions(concepts, 0.25)
    config = run_config("vse-fc", 5, 11, meta_share=0.25, meta_lr=0.01)
    trainer = make_trainer(pairs, tmp_path, config)
    trainer.run()
    objective, split = trainer.objective.terms["meta-spn"], trainer.batches.items.split
    results: dict[bool, list[float]] = {True: [], False: []}
    for batch in trainer.batches.loader(trainer.position.epoch, 0):
        with torch.no_grad():
            scores = score_batch(trainer.model, batch).scores
            triplets = hardest_triplets(scores, batch.image_ids[:, None] == batch.owners[None, :])
            weights, costs = objective.weights(triplets, scores), triplets.costs(scores, 0.2)
        for image, weight, cost in zip(triplets.image, weights, costs, strict=True):
            if cost > 0:
                name = split.ids[int(batch.image_ids[image])]
                results[name in wrong].append(float(weight))
    noisy, clean = (sum(results[kind]) / len(results[kind]) for kind in (True, False))
    assert noisy < 0.8 * clean


@pytest.mark.parametrize("name", thinned(["vse-fc", "scan-t2i"], "vse-fc"))
def test_a_run_learns_and_resumes_to_the_same_bytes(concepts, tmp_path, name) -> None:
    config = run_config(name, 1, 3, meta_share=0.2, every=2)
    whole = make_trainer(concepts, tmp_path / "whole", config)
    start = whole.objective.terms["meta-spn"].network.read.weight.clone()
    result = whole.run()
    network = whole.objective.terms["meta-spn"].network
    assert result.best_rsum > 0
    assert not torch.equal(network.read.weight, start)
    command = iter(range(1000))
    cut = make_trainer(concepts, tmp_path / "cut", config, should_stop=lambda: next(command) >= 7)
    assert cut.run().interrupted
    again = make_trainer(concepts, tmp_path / "cut", config)
    again.run(resume=True)
    for file in ("metrics.jsonl", "last/model.safetensors"):
        mine, theirs = (tmp_path / run / file for run in ("cut", "whole"))
        assert mine.read_bytes() == theirs.read_bytes()
    resumed = again.objective.terms["meta-spn"]
    for mine, theirs in zip(resumed.network.parameters(), network.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    trained = {id(p) for group in again.updates.optimizer.param_groups for p in group["params"]}
    assert not trained & {id(p) for p in resumed.parameters()}


def test_pairs_need_not_be_on_the_diagonal() -> None:
    scores = torch.tensor([[0.1, 0.9, 0.2], [0.3, 0.2, 0.8], [0.7, 0.1, 0.0]], dtype=torch.float64)
    moved = torch.tensor([[0, 1, 0], [0, 0, 1], [1, 0, 0]]).bool()
    assert MetaSPN()(scores, moved) == MetaSPN()(scores[:, [1, 2, 0]]) == 0.0
    fewer = moved.clone()
    fewer[2] = False  # an image without a caption
    assert MetaSPN()(scores, fewer) == pytest.approx(float(objectives["hardest"]()(scores, fewer)))
