"""Runs of other seeds, guides made of them, and terms beside an objective: what they resolve to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterfoil.core.errors import ConfigError
from counterfoil.reproduce.columns import references, replace_references, run_reference
from counterfoil.reproduce.plan import PlannedGuide
from counterfoil.reproduce.spec import build_artifact
from tests.reproduce.conftest import TINY, planned, tiny

NAMES = st.text("abc-+", min_size=1)


def guided(guide: str = "{guide:hard@+1,hard@+2}", **runs: object) -> dict[str, object]:
    """The tiny table with a run that learns beside a guide."""
    student = {"like": "hard", "beside": {"ndgl": {"guide": guide}}}
    rows = [{"label": ["guided"], "run": "guided"}]
    return tiny(runs=TINY["runs"] | {"guided": student} | runs, rows=rows)


@given(NAMES, st.integers(0, 99), st.integers(0, 99))
def test_a_seed_is_absolute_or_counted_from_the_one_in_hand(name, said, hand) -> None:
    assert run_reference(name).at(hand) == hand
    assert run_reference(f"{name}@{said}").at(hand) == said
    assert run_reference(f" {name}@+{said} ").at(hand) == hand + said
    assert run_reference(f"{name}@+{said}").name == name


@pytest.mark.parametrize("text", ["a@", "a@x", "a@-1", "a@1.5", "@1", "a@+", "a@1@2"])
def test_what_is_no_seed_is_refused(text) -> None:
    with pytest.raises(ValueError, match="a run of another seed is written"):
        run_reference(text)


def test_references_are_found_and_replaced_anywhere_in_a_tree() -> None:
    tree = {"a": ["x {run:one}", {"b": "{guide:one,two@+1}"}], "c": "{run:one}", "d": 3, "e": "{f}"}
    assert references(tree) == ["run:one", "guide:one,two@+1"]
    assert replace_references(tree, str.upper) == {
        "a": ["x RUN:ONE", {"b": "GUIDE:ONE,TWO@+1"}], "c": "RUN:ONE", "d": 3, "e": "{f}",
    }  # fmt: skip


def test_a_guide_is_made_of_runs_and_comes_after_them(tmp_path) -> None:
    plan = planned(guided(), tmp_path, seeds=2)
    for seed, run in enumerate(plan.runs["guided"]):
        (guide,) = run.needs
        assert isinstance(guide, PlannedGuide)
        assert [(one.name, one.config.seed) for one in guide.teachers] == [
            ("hard", seed + 1), ("hard", seed + 2),
        ]  # fmt: skip
        assert guide.folder == tmp_path / "guides" / guide.digest
        assert run.config.objective["ndgl"]["guide"] == str(guide.folder)
        assert guide.state == "new"
    assert [job.title for job in plan.jobs()] == [
        "hard, seed 1",
        "hard, seed 2",
        "guide of hard, seed 1 and hard, seed 2",
        "guided, seed 0",
        "hard, seed 3",
        "guide of hard, seed 2 and hard, seed 3",
        "guided, seed 1",
    ]
    assert [run.title for run in plan.in_order()] == [
        "hard, seed 1", "hard, seed 2", "guided, seed 0", "hard, seed 3", "guided, seed 1",
    ]  # fmt: skip


def test_absolute_seeds_make_one_guide_for_all(tmp_path) -> None:
    plan = planned(guided("{guide:hard@7,all@8}"), tmp_path, seeds=3)
    guides = [job for job in plan.jobs() if isinstance(job, PlannedGuide)]
    assert [[run.title for run in guide.teachers] for guide in guides] == [
        ["hard, seed 7", "all, seed 8"]
    ]


def test_a_guided_run_is_known_by_its_teachers_wherever_they_lie(tmp_path) -> None:
    def digest(tree: dict[str, object], out: str = "a") -> str:
        return planned(tree, tmp_path / out).runs["guided"][0].digest

    same = digest(guided())
    assert digest(guided(), "b") == same
    assert digest(guided(" {guide:hard@1, hard@2}".strip())) == same
    for other in ("{guide:hard@+1}", "{guide:hard@+1,hard@+3}", "{guide:hard@+1,all@+2}"):
        assert digest(guided(other)) != same
    longer = {"common": {"objective": {"hardest": {"margin": 0.2}}, "train": {"epochs": 3}}}
    short = {"like": "longer", "common": {"train": {"epochs": 2}}} | {
        "beside": {"ndgl": {"guide": "{guide:longer@+1,longer@+2}"}}
    }
    assert digest(guided(longer=longer, guided=short)) != same


@pytest.mark.parametrize(
    ("guide", "message"),
    [
        ("{guide:hrad@+1}", "run 'guided': refers to the unknown run 'hrad'; did you mean 'hard'"),
        ("{guide:hard,}", "refers to the unknown run ''"),
        (
            "{guide:hard@next}",
            r"run 'guided': 'hard@next': a run of another seed is written hard@0",
        ),
        ("{guide:guided@+1}", "run 'guided' needs itself"),
    ],
)
def test_a_guide_that_cannot_be_is_refused(guide, message, tmp_path) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(guided(guide), tmp_path)


def test_rows_take_runs_of_other_seeds(tmp_path) -> None:
    rows = [
        {"label": ["one"], "run": "all"},
        {"label": ["later"], "ensemble": ["all@+1", "all@+2"]},
        {"label": ["fixed"], "ensemble": ["all@0", "hard"]},
    ]
    plan = planned(tiny(rows=rows), tmp_path, seeds=2)
    assert plan.runs["all@+1"][0] == plan.runs["all"][1]
    assert [run.config.seed for run in plan.runs["all@+2"]] == [2, 3]
    assert [run.config.seed for run in plan.runs["all@0"]] == [0, 0]
    assert len(plan.in_order()) == 4 + 2
    with pytest.raises(ConfigError, match=r"mine.yaml: unknown run 'al'; did you mean 'all'"):
        build_artifact(tiny(rows=[{"label": ["a"], "run": "al@+1"}]), "mine.yaml")
    with pytest.raises(ConfigError, match=r"mine.yaml: 'all@x': a run of another seed"):
        build_artifact(tiny(rows=[{"label": ["a"], "run": "all@x"}]), "mine.yaml")


def test_terms_beside_an_objective_stay_whatever_it_is(tmp_path) -> None:
    more = {"like": "guided", "beside": {"ndgl": {"hnr": 0.0}}}
    tree = guided(more=more, hard=TINY["runs"]["hard"] | {"smoke": {"objective": "selhn"}})
    tree["rows"].append({"label": ["more"], "run": "more"})
    full, smoke = (planned(tree, tmp_path, scale=scale).runs for scale in ("full", "smoke"))
    guide = full["guided"][0].config.objective["ndgl"]["guide"]
    assert full["guided"][0].config.objective == {
        "hardest": {"margin": 0.2}, "ndgl": {"guide": guide},
    }  # fmt: skip
    assert full["more"][0].config.objective["ndgl"] == {"guide": guide, "hnr": 0.0}
    assert list(smoke["guided"][0].config.objective) == ["selhn", "ndgl"]


def swept(**change: object) -> dict[str, object]:
    lines = [
        {"label": "A", "run": "all", "published": {"f30k": [1.0, None]}},
        {"label": "B", "run": "hard"},
    ]
    sweep = {"kind": "sweep", "key": "train.batch_size", "values": [12, 24], "x_label": "batch"}
    return tiny(lines=lines, rows=None, columns=None, **(sweep | change))


def test_a_sweep_of_lines_varies_each_of_them_at_any_scale(tmp_path) -> None:
    base = TINY["base"] | {"scenes_smoke": {"train": {"batch_size": 8}}}
    for scale in ("full", "smoke"):
        runs = planned(swept(base=base), tmp_path, scale=scale).runs
        assert [(name, of[0].config.train.batch_size) for name, of in runs.items()] == [
            ("all, batch_size=12", 12),
            ("all, batch_size=24", 24),
            ("hard, batch_size=12", 12),
            ("hard, batch_size=24", 24),
        ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run": "all"}, "either a run or lines"),
        ({"lines": []}, "either a run or lines"),
        ({"values": [1, 2, 3]}, "line 'A', f30k: expected 3 numbers"),
        ({"data_sets": {}}, "line 'A', f30k: expected 2 numbers"),
    ],
)
def test_a_mistake_in_a_sweep_is_named(change, message) -> None:
    with pytest.raises(ConfigError, match=message):
        build_artifact(swept() | change, "x")
