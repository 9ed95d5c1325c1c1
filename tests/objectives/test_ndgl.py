"""NDGL: its terms by plain loops, and runs that a guide of trained runs guides."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import counterfoil.objectives.ndgl  # noqa: F401 - registers 'ndgl'
from counterfoil.core.config import build_config
from counterfoil.core.errors import ConfigError, DataError, TrainingError
from counterfoil.data.pairs import Pairs
from counterfoil.models import from_pretrained
from counterfoil.objectives import Context, create_objective
from counterfoil.objectives.ndgl import NDGL, guided_directions, rectification
from counterfoil.training.guides.build import build_guide
from tests.conftest import thinned
from tests.objectives.cases import Case, cases, make_case
from tests.objectives.live import some_of
from tests.training.test_trainer import metrics, trainer, weights


def targets_for(case: Case, seed: int, unknown: float = 0.0) -> Tensor:
    """Scores of a guide, some of whose images could not be read."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randn(case.scores.shape, generator=generator, dtype=torch.float64) * 0.3
    gone = torch.rand(len(targets), generator=generator) < unknown
    return targets.masked_fill(gone[:, None], torch.nan)


def naive_anchors(case: Case, targets: Tensor) -> list[list[tuple]]:
    """Of both directions: S and Ŝ of each anchor's positive, and of its negatives."""
    scores, guide = case.scores.tolist(), targets.tolist()
    rows, columns = case.scores.shape
    own = [
        (i, j)
        for i in range(rows)
        for j in range(columns)
        if (i == j if rows == columns else case.positives[i, j])
    ]
    directions = []
    for by_text in (False, True):
        anchors = []
        for i, j in own:
            others = [(k, j) for k in range(rows)] if by_text else [(i, k) for k in range(columns)]
            negatives = [
                (scores[a][b], guide[a][b])
                for a, b in others
                if not case.positives[a, b]
                and not case.protected[a, b]
                and not math.isnan(guide[a][b])
                and not math.isnan(guide[i][j])
            ]
            anchors.append((scores[i][j], guide[i][j], negatives))
        directions.append(anchors)
    return directions


def softmax(values: list[float]) -> list[float]:
    powers = [math.exp(v - max(values)) for v in values]
    return [p / sum(powers) for p in powers]


def kl(p: list[float], q: list[float], direction: str) -> float:
    if direction == "reverse":
        p, q = q, p
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def naive_mr(anchors, o: NDGL) -> float:
    total = 0.0
    for s, t, negatives in anchors:
        if not negatives:
            continue
        own = [(s - x) / o.temperature for x, _ in negatives]
        guide = [(t - y) / o.target_temperature for _, y in negatives]
        if o.normalize == "softmax":
            sign = -1 if o.emphasis == "hard" else 1
            p, q = softmax([sign * x for x in own]), softmax([sign * x for x in guide])
            total += kl(p, q, o.direction)
        else:
            # 1 / (1 + e^m) and not 1 − 1 / (1 + e^−m), of which little is left where m is large
            odds = [
                [[1 / (1 + math.exp(-n)) for n in (m, -m)] for m in side] for side in (own, guide)
            ]
            each = [kl(a, b, o.direction) for a, b in zip(*odds, strict=True)]
            total += sum(each) / len(each)
    return total / len(anchors)


def naive_sr(anchors, o: NDGL) -> float:
    total = 0.0
    for s, t, negatives in anchors:
        if negatives:
            p = softmax([x / o.temperature for x in (s, *(x for x, _ in negatives))])
            q = softmax([x / o.target_temperature for x in (t, *(y for _, y in negatives))])
            total += kl(p, q, o.direction)
    return total / len(anchors)


def naive_hnr(anchors, o: NDGL) -> tuple[float, int]:
    total, agree = 0.0, 0
    for _, _, negatives in anchors:
        if not negatives:
            continue
        mine = max(range(len(negatives)), key=lambda k: negatives[k][0])
        theirs = max(range(len(negatives)), key=lambda k: negatives[k][1])
        same = (
            negatives[mine][1] == negatives[theirs][1]
        )  # also another one the guide likes as much
        agree += same
        if same:
            continue
        total += max(0.0, o.gamma - negatives[theirs][0] + negatives[mine][0])
    return total if o.reduction == "sum" else total / len(anchors) / 2, agree


options = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.1, 0.5, 1.0]),
        "target_temperature": st.sampled_from([None, 0.3]),
        "normalize": st.sampled_from(["softmax", "sigmoid"]),
        "emphasis": st.sampled_from(["hard", "easy"]),
        "direction": st.sampled_from(["forward", "reverse"]),
        "reduction": st.sampled_from(["sum", "mean"]),
        "gamma": st.sampled_from([0.01, 0.2]),
        "sr": st.sampled_from([0.0, 3.0]),
    }
)


@given(
    case=cases(scale=0.3), given_=options, seed=st.integers(0, 99), gone=st.sampled_from([0, 0.3])
)
def test_the_loss_is_what_plain_loops_make(case, given_, seed, gone) -> None:
    objective = NDGL(guide="g", mr=7.0, hnr=0.5, **given_)
    targets = targets_for(case, seed, gone)
    report = objective.compare(case.scores, targets, case.positives, case.context)
    directions = naive_anchors(case, targets)
    mr = sum(naive_mr(anchors, objective) for anchors in directions)
    sr = sum(naive_sr(anchors, objective) for anchors in directions)
    corrections = [naive_hnr(anchors, objective) for anchors in directions]
    hnr, agree = (sum(part) for part in zip(*corrections, strict=True))
    command = sum(bool(negatives) for anchors in directions for *_, negatives in anchors)
    result = report.diagnostics
    assert float(result["ndgl/mr"]) == pytest.approx(mr, abs=1e-9)
    assert float(result["ndgl/hnr"]) == pytest.approx(hnr, abs=1e-9)
    assert float(result["ndgl/agreement"]) == pytest.approx(agree / max(1, command))
    expected = 7.0 * mr + 0.5 * hnr + objective.sr * sr
    assert report.loss.item() == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("normalize", ["softmax", "sigmoid"])
@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("square", [True, False])
def test_gradients_are_those_of_finite_differences(normalize, direction, square) -> None:
    case = make_case([0, 0, 1, 2, 3, 3], square=square, seed=4, protected=0.2, scale=0.3)
    targets = targets_for(case, 1)
    targets[-1] = torch.nan
    objective = NDGL(guide="g", sr=2.0, normalize=normalize, direction=direction)

    def loss(scores: Tensor) -> Tensor:
        return objective.compare(scores, targets, case.positives, case.context).loss

    assert torch.autograd.gradcheck(loss, case.scores.clone().requires_grad_())


@pytest.mark.parametrize("normalize", ["softmax", "sigmoid"])
def test_pairs_that_are_no_negatives_teach_nothing(normalize) -> None:
    case = make_case([0, 0, 1, 2, 3, 4], protected=0.4, seed=2, scale=0.3)
    targets = targets_for(case, 0)
    targets[3] = torch.nan
    objective = NDGL(guide="g", sr=1.0, normalize=normalize)
    scores = case.scores.clone().requires_grad_()
    objective.compare(scores, targets, case.positives, case.context).loss.backward()
    apart = case.positives & ~torch.eye(6).bool()
    assert (scores.grad[case.protected | apart] == 0).all()
    assert (scores.grad[3] == 0).all()
    assert scores.grad.abs().sum() > 0


SITUATIONS = {
    "one image only": make_case([0, 0, 0]),
    "a single pair": make_case([0]),
    "everything protected": make_case(list(range(5)), protected=1.1),
    "huge scores": make_case(list(range(5)), scale=1e4),
    "all scores equal": make_case(list(range(5)), scale=0.0),
}


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("normalize", ["softmax", "sigmoid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradients_are_finite(situation, normalize, dtype) -> None:
    case = SITUATIONS[situation]
    for unknown in (0.0, 1.1):
        targets = targets_for(case, 0, unknown).float()
        scores = case.scores.to(dtype, copy=True).requires_grad_()
        objective = NDGL(guide="g", sr=1.0, normalize=normalize)
        report = objective.compare(scores, targets, case.positives, case.context)
        report.loss.backward()
        assert report.loss.isfinite()
        assert scores.grad.isfinite().all()
        if unknown or situation in ("one image only", "a single pair", "everything protected"):
            assert report.loss.item() == 0


def test_a_model_that_scores_as_its_guide_does_costs_nothing() -> None:
    case = make_case(list(range(6)), scale=0.3)
    report = NDGL(guide="g", sr=1.0).compare(case.scores, case.scores, case.positives, case.context)
    assert report.loss.item() == pytest.approx(0, abs=1e-12)
    assert float(report.diagnostics["ndgl/agreement"]) == 1


def test_a_softmax_forgets_the_positive_and_a_sigmoid_does_not() -> None:
    case = make_case(list(range(6)), scale=0.3)
    lifted = case.scores + 0.5 * torch.eye(6)
    for normalize, kept in {"softmax": False, "sigmoid": True}.items():
        objective = NDGL(guide="g", hnr=0.0, normalize=normalize)
        before, after = (
            objective.compare(x, targets_for(case, 3), case.positives, case.context).loss.item()
            for x in (case.scores, lifted)
        )
        assert (before != pytest.approx(after)) == kept


def test_at_temperature_one_the_sign_of_a_margin_hardly_matters_and_a_tenth_weighs_a_hundred() -> (
    None
):
    """What the notes in the docstring say of the choices the paper leaves open."""
    case = make_case(list(range(40)), scale=0.03)
    targets = case.scores + 0.1 * targets_for(case, 5)

    def mr(**given_) -> float:
        objective = NDGL(guide="g", mr=1.0, hnr=0.0, **given_)
        return objective.compare(case.scores, targets, case.positives, case.context).loss.item()

    hard, easy = (mr(temperature=1.0, emphasis=emphasis) for emphasis in ("hard", "easy"))
    assert hard == pytest.approx(easy, rel=0.05)
    assert mr(temperature=0.1) == pytest.approx(100 * hard, rel=0.2)


def test_what_cannot_work_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"counterfoil guide build.*objective\.ndgl\.guide="):
        create_objective({"hardest": {}, "ndgl": {}})
    for key in ("temperature", "target_temperature"):
        with pytest.raises(ConfigError, match=rf"objective\.ndgl\.{key}: more than 0"):
            create_objective({"ndgl": {"guide": "g", key: 0.0}})
    objective = NDGL(guide="g")
    with pytest.raises(TrainingError, match="batches of a training run only"):
        objective.compute(torch.zeros(2, 2), torch.eye(2).bool(), Context())


@pytest.fixture(scope="module")
def few(concepts) -> Pairs:
    return some_of(concepts)


def run_config(name: str, guide: str = "", seed: int = 0, **ndgl):
    guided = {"ndgl": {"guide": guide, **ndgl}} if guide else {}
    return build_config(
        {
            "seed": seed,
            "model": {"name": name, "embed_size": 16, "text": {"word_dim": 8}},
            "data": {"min_count": 1, "drop_regions": 0.2, "word_noise": 0.1},
            "objective": {"hardest": {}, **guided},
            "train": {"epochs": 2, "batch_size": 32, "log_every": 1, "optimizer": {"lr": 3e-3}},
        }
    )


@pytest.fixture(scope="module")
def first_runs(few, tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("first-runs")
    for seed in (0, 1):
        settings = run_config("vse-fc", seed=seed)
        settings = settings.model_copy(
            update={"train": settings.train.model_copy(update={"epochs": 6})}
        )
        trainer(few, folder / str(seed), settings).run()
    return [folder / "0", folder / "1"]


@pytest.fixture(scope="module", params=thinned(["matrix", "embeddings"], "matrix"))
def guide(request, few, first_runs, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("guides") / request.param
    build_guide(folder, first_runs, few.train, form=request.param)
    return str(folder)


def steps(folder: Path) -> list[dict]:
    records = [json.loads(line) for line in metrics(folder).splitlines()]
    return [record for record in records if record["kind"] == "step"]


@pytest.mark.parametrize("name", thinned(["vse-fc", "scan-t2i"], "scan-t2i"))
@pytest.mark.slow
def test_a_guided_run_resumes_to_the_same_bytes(few, guide, tmp_path, name) -> None:
    settings = run_config(name, guide)
    whole = trainer(few, tmp_path / "whole", settings).run()
    assert whole.steps == 6
    command = iter(range(1000))
    cut = trainer(few, tmp_path / "cut", settings, should_stop=lambda: next(command) >= 1)
    assert cut.run().interrupted
    trainer(few, tmp_path / "cut", settings).run(resume=True)
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")


@pytest.mark.slow
def test_a_guided_run_comes_to_score_as_its_guide_does(few, guide, tmp_path) -> None:
    settings = run_config("vse-fc", guide, seed=5)
    settings = settings.model_copy(
        update={"train": settings.train.model_copy(update={"epochs": 12})}
    )
    trainer(few, tmp_path, settings).run()
    logged = steps(tmp_path)
    early, late = logged[:3], logged[-3:]

    def mean(records, key):
        return sum(record[key] for record in records) / len(records)

    assert mean(late, "ndgl/mr") < 0.5 * mean(early, "ndgl/mr")
    assert mean(late, "ndgl/agreement") > mean(early, "ndgl/agreement")
    assert mean(late, "loss/hardest") < mean(early, "loss/hardest")


def test_both_forms_teach_the_same(few, first_runs, tmp_path) -> None:
    losses = []
    for form in ("matrix", "embeddings"):
        build_guide(tmp_path / form, first_runs, few.train, form=form)
        run = tmp_path / f"run-{form}"
        trainer(few, run, run_config("vse-fc", str(tmp_path / form))).run()
        losses.append([record["loss"] for record in steps(run)])
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_a_guide_leaves_nothing_in_the_optimizer_or_the_checkpoint(few, guide, tmp_path) -> None:
    guided = trainer(few, tmp_path / "a", run_config("scan-t2i", guide))
    plain = trainer(few, tmp_path / "b", run_config("scan-t2i"))
    count = [sum(1 for _ in one.step_module.parameters()) for one in (guided, plain)]
    assert count[0] == count[1]
    assert guided.objective.state_dict() == {}


@pytest.mark.slow
def test_a_guided_run_teaches_the_next(few, guide, tmp_path) -> None:
    """Born again: each generation is guided by the one before."""
    folder = guide
    for generation in range(2):
        run = tmp_path / f"run-{generation}"
        trainer(few, run, run_config("vse-fc", folder, seed=generation)).run()
        folder = str(tmp_path / f"guide-{generation}")
        manifest = build_guide(Path(folder), [run], few.train)
        assert [teacher.run for teacher in manifest.teachers] == [run.name]
        assert from_pretrained(run / "best").spec.name == "vse-fc"


def test_a_run_on_other_data_is_refused_before_it_starts(few, guide, tmp_path) -> None:
    settings = run_config("vse-fc", guide)
    captions = [list(reversed(texts)) for texts in few.train.captions]
    shuffled = replace(few.train, captions=captions)
    other = replace(few, splits={**few.splits, "train": shuffled})
    with pytest.raises(DataError, match=r"caption \d+ is '.*' in the guide and '.*' in these"):
        trainer(other, tmp_path, settings)


def test_a_guide_goes_along_with_other_objectives_and_protected_pairs(few, guide, tmp_path) -> None:
    settings = run_config("vse-fc", guide).model_copy(
        update={
            "objective": {
                "infonce": {"weight": 0.5},
                "ndgl": {"guide": guide, "normalize": "sigmoid", "epochs": [1, None]},
                "protect": {"captions": 0.9},
            }
        }
    )
    trainer(few, tmp_path, settings).run()
    assert ["ndgl/mr" in record for record in steps(tmp_path)] == [False] * 3 + [True] * 3


def test_the_guide_has_no_favorite_among_negatives_it_scores_alike() -> None:
    own = torch.tensor([[0.9, 0.5, 0.4, 0.1]])
    guide = torch.tensor([[0.9, 0.3, 0.7, 0.7]])
    positives = torch.tensor([[True, False, False, False]])
    anchors = guided_directions(own, guide, positives)[0]
    cost, agree = rectification(anchors, gamma=0.01)
    assert cost.tolist() == pytest.approx([0.01 - 0.4 + 0.5])
    assert not agree.any()
    alike = guided_directions(own, torch.tensor([[0.9, 0.7, 0.7, 0.1]]), positives)[0]
    cost, agree = rectification(alike, gamma=0.01)
    assert agree.all()
    assert cost.tolist() == [0.0]
