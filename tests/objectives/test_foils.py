"""Foils against their own pairs: the cost of plain loops, and runs that learn to tell them."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counterfoil.core.config import build_config
from counterfoil.core.errors import ConfigError, TrainingError
from counterfoil.data.pairs import Pairs, Split
from counterfoil.objectives import Context, create_objective
from counterfoil.objectives.foils import VSEC, FoilObjective, foil_costs
from tests.conftest import make_split, thinned
from tests.objectives.live import one_step, prepare, score, small_model, some_of
from tests.training.test_trainer import metrics, trainer, weights


@given(
    positive=st.lists(st.floats(-1, 1), min_size=1, max_size=5),
    foils=st.lists(st.tuples(st.floats(-1, 1), st.integers(0, 4)), max_size=9),
    hardest=st.booleans(),
)
def test_the_cost_of_a_pair_is_what_a_plain_loop_finds(positive, foils, hardest) -> None:
    owned = [(value, owner % len(positive)) for value, owner in foils]
    expected = []
    for pair, p in enumerate(positive):
        costs = [max(0.0, 0.3 + value - p) for value, owner in owned if owner == pair]
        worst = max(costs, default=0.0)
        expected.append(worst if hardest else sum(costs) / max(1, len(costs)))
    result = foil_costs(
        torch.tensor(positive, dtype=torch.float64),
        torch.tensor([value for value, _ in owned], dtype=torch.float64),
        torch.tensor([owner for _, owner in owned], dtype=torch.long),
        margin=0.3,
        hardest=hardest,
    )
    assert result.tolist() == pytest.approx(expected)


def test_only_the_hardest_foil_has_a_gradient() -> None:
    foils = torch.tensor([0.1, 0.4, 0.3], requires_grad=True)
    costs = foil_costs(torch.zeros(2), foils, torch.tensor([0, 0, 1]), 0.2, hardest=True)
    costs.sum().backward()
    assert foils.grad.tolist() == [0.0, 1.0, 1.0]


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> Split:
    return make_split(tmp_path_factory.mktemp("foils"), "train", 24, seed=0)


def listed(tmp_path, split: Split) -> str:
    """Two foils for every third caption, one for the next, none for the one after."""
    path = tmp_path / "foils.jsonl"
    lines = [
        {"image": split.ids[split.image_of[c]], "caption": text, "foil": f"{word} {text}"}
        for c, text in enumerate(split.texts)
        for word in (("dog", "a kite"), ("dog",), ())[c % 3]
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


@pytest.mark.parametrize("captions", ["all", "grouped"])
@pytest.mark.parametrize("name", thinned(["vse-fc", "scan-t2i"], "scan-t2i"))
@pytest.mark.parametrize("hardest", [True, False])
@pytest.mark.parametrize("reduction", thinned(["sum", "mean"], "mean"))
def test_the_loss_of_a_batch_is_that_of_scores_taken_one_by_one(
    split, tmp_path, name, captions, hardest, reduction
) -> None:
    model = small_model(split, name)
    source = listed(tmp_path, split)
    objective = FoilObjective(source=source, count=2, hardest=hardest, reduction=reduction)
    size = 9 if captions == "all" else 5
    loss, diagnostics, batch, brought = one_step(objective, split, model, captions, size)
    assert {len(extra.texts) for extra in brought.values()} == {0, 1, 2}
    costs, gaps = [], []
    for caption in batch.caption_ids.tolist():
        image, text = int(split.image_of[caption]), split.texts[caption]
        p = score(model, split, image, text)
        foils = [score(model, split, image, foil) for foil in brought[caption].texts]
        each = [max(0.0, 0.2 + value - p) for value in foils] or [0.0]
        costs.append(max(each) if hardest else sum(each) / len(each))
        gaps += [p - value for value in foils]
    expected = sum(costs) if reduction == "sum" else sum(costs) / len(costs)
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    assert float(diagnostics["foils/gap"]) == pytest.approx(sum(gaps) / len(gaps), abs=1e-5)
    below = sum(gap > 0 for gap in gaps) / len(gaps)
    assert float(diagnostics["foils/accuracy"]) == pytest.approx(below)


def test_a_batch_without_foils_costs_nothing_and_can_still_be_learned_from(split, tmp_path) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"image": split.ids[0], "caption": 0, "foil": "nothing"}))
    model = small_model(split, "vse-fc")
    rest = [image for image in range(24) if image != 0]
    objective = FoilObjective(source=str(path))
    prepare(objective, split, model)
    objective.prepare = lambda training: None  # the foils of the whole split, a batch of the rest
    loss, diagnostics, batch, _ = one_step(objective, split.select([*rest, 0]), model, size=4)
    assert not len(batch.extras["it"].text_owners)
    assert loss.item() == 0
    assert "foils/gap" not in diagnostics
    loss.backward()
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def test_vse_c_is_the_hardest_of_several_foils_by_rule(split) -> None:
    term = VSEC(kinds=["noun"], count=3)
    model = small_model(split, "vse-fc")
    loss, _, batch, brought = one_step(term, split, model)
    total = 0.0
    for caption in batch.caption_ids.tolist():
        image, text = int(split.image_of[caption]), split.texts[caption]
        assert len(brought[caption].texts) == 3
        for foil in brought[caption].texts:
            changed = [a for a, b in zip(text.split(), foil.split(), strict=True) if a != b]
            assert not {"near", "and"} & set(changed)
        p = score(model, split, image, text)
        total += max(
            max(0.0, 0.2 + score(model, split, image, foil) - p) for foil in brought[caption].texts
        )
    assert loss.item() == pytest.approx(total, rel=1e-4)


def test_the_uninformed_loss_is_the_margin_for_each_pair() -> None:
    same, owners = torch.full((5,), 0.4), torch.arange(5)
    costs = foil_costs(same, same, owners, 0.2, hardest=True)
    assert FoilObjective().loss_at_equal_scores(5, 4) == pytest.approx(float(costs.sum()))
    assert FoilObjective(reduction="mean").loss_at_equal_scores(5, 4) == pytest.approx(
        float(costs.mean())
    )


def test_what_cannot_work_is_refused(split) -> None:
    model = small_model(split, "vse-fc")
    with pytest.raises(ConfigError, match="unknown kind 'nouns'"):
        prepare(create_objective({"vse-c": {"kinds": ["nouns"]}}), split, model)
    with pytest.raises(ConfigError, match="neither 'rules' nor a file"):
        prepare(FoilObjective(source="ruls"), split, model)
    with pytest.raises(TrainingError, match="works on the batches of a training run only"):
        FoilObjective().compute(torch.zeros(2, 2), torch.eye(2).bool(), Context())


@pytest.fixture(scope="module")
def few(concepts) -> Pairs:
    return some_of(concepts)


def run_config(name: str, objective: dict, epochs: int = 2, **data):
    return build_config(
        {
            "model": {"name": name, "embed_size": 16, "text": {"word_dim": 8}},
            "data": {"min_count": 1, "drop_regions": 0.2, **data},
            "objective": objective,
            "train": {
                "epochs": epochs,
                "batch_size": 32,
                "log_every": 1,
                "optimizer": {"lr": 3e-3},
            },
        }
    )


@pytest.mark.parametrize(
    ("name", "objective"),
    [
        ("vse-fc", {"hardest": 1, "foils": 0.5}),
        pytest.param("scan-t2i", {"hardest": 1, "foils": 0.5}, marks=pytest.mark.slow),
        pytest.param(
            "vse-fc", {"hardest": 1, "vse-c": {"count": 2, "weight": 1}}, marks=pytest.mark.slow
        ),
    ],
)
@pytest.mark.slow
def test_a_run_with_foils_resumes_to_the_same_bytes(few, tmp_path, name, objective) -> None:
    settings = run_config(name, objective)
    trainer(few, tmp_path / "whole", settings).run()
    command = iter(range(1000))
    cut = trainer(few, tmp_path / "cut", settings, should_stop=lambda: next(command) >= 1)
    assert cut.run().interrupted
    trainer(few, tmp_path / "cut", settings).run(resume=True)
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")


@pytest.mark.slow
def test_workers_make_the_same_foils(few, tmp_path) -> None:
    for workers in (0, 2):
        settings = run_config("vse-fc", {"hardest": 1, "foils": 1}, workers=workers)
        trainer(few, tmp_path / str(workers), settings).run()
    assert metrics(tmp_path / "0") == metrics(tmp_path / "2")


@pytest.mark.slow
def test_a_run_learns_to_tell_foils_from_captions(concepts, tmp_path) -> None:
    settings = run_config("vse-fc", {"hardest": 1, "foils": {"weight": 1, "count": 2}}, epochs=5)
    trainer(concepts, tmp_path, settings).run()
    records = [json.loads(line) for line in metrics(tmp_path).splitlines()]
    accuracy = [r["foils/accuracy"] for r in records if r["kind"] == "step"]
    assert sum(accuracy[-4:]) / 4 > max(0.75, sum(accuracy[:2]) / 2 + 0.15)
