"""Values that sweeps on dev choose, and the rows that count as tuned."""

from __future__ import annotations

import pytest

from counterfoil.core.errors import ConfigError
from counterfoil.reproduce.grid import at_an_edge
from counterfoil.reproduce.plan import Settings, make_plan
from counterfoil.reproduce.present import body, claim_rows
from counterfoil.reproduce.results import Reproduction, table_rows
from counterfoil.reproduce.spec import Claim, build_artifact
from counterfoil.reproduce.store import best_values, runs_at_edges
from tests.reproduce.conftest import TINY, tiny
from tests.reproduce.test_store import result, row, table


def sweep_of(key: str, scores: dict[float, float]) -> Reproduction:
    rows = [
        row("a", result(0, score)).model_copy(update={"value": value, "varied_run": "all"})
        for value, score in scores.items()
    ]
    change = {"kind": "sweep", "key": key, "judged_on": "dev"}
    return table(*rows).model_copy(update=change)


def test_values_of_several_sweeps_add_up_key_by_key() -> None:
    rates = sweep_of("train.optimizer.lr", {0.1: 5.0, 0.2: 7.0, 0.4: 7.0})
    warm = sweep_of("objective.hardest.warmup_epochs", {0.0: 1.0, 3.0: 2.0})
    expected = ("train.optimizer.lr=0.2", "objective.hardest.warmup_epochs=3")
    assert best_values(rates, warm) == {"all": expected}
    later = sweep_of("train.optimizer.lr", {0.8: 1.0})
    assert best_values(rates, later) == {"all": ("train.optimizer.lr=0.8",)}


def test_values_are_not_chosen_on_test() -> None:
    sweep = table().model_copy(update={"kind": "sweep", "key": "train.optimizer.lr"})
    with pytest.raises(ConfigError, match="chosen on dev"):
        best_values(sweep)
    with pytest.raises(ConfigError, match="not a sweep"):
        best_values(table())


def test_a_row_is_tuned_if_a_sweep_chose_a_value_for_all_its_runs(tmp_path) -> None:
    rows = [*TINY["rows"], {"label": ["both"], "ensemble": ["all", "hard"]}]
    artifact = build_artifact(tiny(rows=rows), "tiny.yaml")
    for tuned, expected in (({}, []), ({"hard": ("train.optimizer.lr=0.1",)}, ["hard"])):
        plan = make_plan(artifact, Settings(seeds=1, tuned=tuned), tmp_path)
        assert [one.result.name for one in table_rows(plan) if one.result.tuned] == expected
    both = dict.fromkeys(("all", "hard"), ("train.optimizer.lr=0.1",))
    plan = make_plan(artifact, Settings(seeds=1, tuned=both), tmp_path)
    assert all(one.result.tuned for one in table_rows(plan))
    settings = Settings(seeds=1, tuned=both, at_edges=frozenset(["hard"]))
    plan = make_plan(artifact, settings, tmp_path)
    assert [one.result.name for one in table_rows(plan) if one.result.tuned] == ["all"]


def test_a_row_is_not_tuned_by_a_value_that_was_chosen_for_a_run_it_extends(tmp_path) -> None:
    runs = {**TINY["runs"], "alike": {"like": "hard"}}
    rows = [*TINY["rows"], {"label": ["alike"], "run": "alike"}]
    artifact = build_artifact(tiny(runs=runs, rows=rows), "tiny.yaml")
    tuned = {"hard": ("train.optimizer.lr=0.1",)}
    plan = make_plan(artifact, Settings(seeds=1, tuned=tuned), tmp_path)
    assert plan.runs["alike"][0].config.train.optimizer.lr == 0.1
    results = [one.result for one in table_rows(plan)]
    assert [one.name for one in results if one.tuned] == ["hard"]
    assert [one.name for one in results if one.swept] == ["hard", "alike"]


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ({0.1: 5.0, 0.2: 7.0, 0.4: 6.0}, False),
        ({0.1: 5.0, 0.2: 6.0, 0.4: 7.0}, True),
        ({0.1: 5.0, 0.2: 4.0}, True),
        ({0.1: 5.0}, True),
        ({0.0: 5.0, 1.0: 4.0}, False),  # nothing is below no epochs at all
        ({1.0: 5.0, 3.0: 4.0}, True),
    ],
)
def test_runs_whose_best_value_is_at_an_edge(scores, expected) -> None:
    result = sweep_of("train.optimizer.lr", scores)
    assert runs_at_edges(result) == (frozenset(["all"]) if expected else frozenset())
    assert bool(at_an_edge(result)) == expected


def test_of_two_sweeps_of_a_key_the_later_says_what_is_at_an_edge() -> None:
    narrow = sweep_of("train.optimizer.lr", {0.1: 1.0, 0.2: 2.0})
    wide = sweep_of("train.optimizer.lr", {0.1: 1.0, 0.2: 2.0, 0.4: 1.0})
    decay = sweep_of("train.optimizer.weight_decay", {0.1: 1.0, 0.2: 2.0})
    assert runs_at_edges(narrow) == {"all"}
    assert not runs_at_edges(narrow, wide)
    assert runs_at_edges(wide, decay) == {"all"}


def test_a_row_that_inherits_one_of_its_values_is_not_tuned(tmp_path) -> None:
    runs = {**TINY["runs"], "alike": {"like": "hard"}}
    rows = [*TINY["rows"], {"label": ["alike"], "run": "alike"}]
    artifact = build_artifact(tiny(runs=runs, rows=rows), "tiny.yaml")
    rate, decay = "train.optimizer.lr=0.1", "train.optimizer.weight_decay=0.1"
    tuned = {"hard": (rate, decay), "alike": (rate,)}
    plan = make_plan(artifact, Settings(seeds=1, tuned=tuned), tmp_path)
    assert [one.result.name for one in table_rows(plan) if one.result.tuned] == ["hard"]


def test_a_table_with_claims_names_the_rows_that_are_not_tuned() -> None:
    claims = [Claim(text="a > b", better="a", worse="b")]
    rows = [row(name, result(0, 1.0), tuned=name == "a") for name in "ab"]
    mixed = table(*rows, row("quoted"), claims=claims)
    assert "- Not tuned, or tuned to an edge of what was tried: b.\n" in body(mixed) + "\n"
    for changed in (
        {"claims": []},
        {"rows": [one.model_copy(update={"tuned": True}) for one in rows]},
    ):
        assert "Not tuned" not in body(mixed.model_copy(update=changed))


def test_a_tuned_row_is_not_compared_with_one_that_has_no_value_of_a_sweep() -> None:
    def strength(seeds: int = 3, last: float = 6.0, **worse: bool) -> tuple[str, ...]:
        first = row("a", result(0, 5.0), result(1, 5.0), result(2, last), swept=True, tuned=True)
        second = row("b", *(result(seed, 1.0) for seed in range(seeds)), **worse)
        claims = [Claim(text="a > b", better="a", worse="b")]
        return claim_rows(table(first, second, claims=claims))[1]

    both = {"swept": True, "tuned": True}
    assert strength(**both) == ("a > b", "+4.3 ± 0.6", "+2.9 to +5.8", "", "held")
    # beyond the deviation, but with three seeds that may be chance
    assert strength(last=11.0, **both)[1:] == ("+6.0 ± 3.5", "-2.6 to +14.6", "", "held, weakly")
    assert strength(last=-1.0, **both)[4] == "within the spread"
    assert strength(swept=True)[1:] == ("+4.3 ± 0.6", "+2.9 to +5.8", "", "higher, but not tuned")
    assert strength()[1:] == ("", "", "", "not tested: only one row is tuned")
    assert strength(seeds=0)[1:] == ("", "", "", "not tested")
    assert strength(seeds=2, **both)[1:] == ("+4.0 ± 0.0", "", "", "not tested: 2 seeds")
