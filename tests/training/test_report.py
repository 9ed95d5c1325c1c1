"""The run report: which plots appear, what they show, and warnings at the top of the page."""

from __future__ import annotations

import base64
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counterfoil.core.config import build_config
from counterfoil.evaluation.evaluate import example_searches, report_scores
from counterfoil.models import create_model
from counterfoil.scoring.encode import score_split
from counterfoil.training.logs import MetricsLog
from counterfoil.training.plots import density, plots_of, thin
from counterfoil.training.report import write_report
from tests.conftest import all_charts

SIDES = ("anchor", "positive", "negative")


def step(number: int, **values: float | None) -> dict:
    return {"kind": "step", "step": number, "loss": 1.0 / number, "lr": 1e-3, **values}


def epoch(number: int, counts: list[int] | None = None) -> dict:
    record = {"kind": "epoch", "epoch": number, "step": 10 * number}
    record["dev"] = {"i2t_r1": 5.0, "t2i_r1": 4.0, "rsum": 60.0 + number}
    if counts is not None:
        record["margin_histogram"] = {"low": -1.0, "high": 1.0, "counts": counts}
    return record


def full_step(number: int) -> dict:
    keys = [f"gap/{name}" for name in ("abs", "p05", "p25", "p50", "p75", "p95")]
    keys += [f"{kind}/{side}" for kind in ("tangent", "eq8") for side in SIDES]
    keys += ["gradient/projection", "loss/hardest", "loss/triplet", "positive", "hardest_negative"]
    values = {key: 0.01 * number * (i + 1) for i, key in enumerate(keys)}
    return step(number, **values, **{"selhn/averaged": 0.75, "grad_norm": 2.0})


NEW = {"loss-terms", "gap", "branches", "gradient-projection", "tangent", "eq8", "margins"}


def test_only_plots_whose_data_exist_appear() -> None:
    plain = plots_of([step(1, grad_norm=None), step(2, grad_norm=None), epoch(1)], "dev")
    assert set(plain) == {"loss", "rsum", "recall", "learning-rate"}
    full = plots_of([full_step(1), full_step(2), epoch(1, [1, 2])], "dev")
    assert set(full) == {*plain, *NEW, "scores", "gradient"}
    assert plots_of([], "dev") == {}


def test_the_gap_is_drawn_as_its_mean_and_quantiles() -> None:
    series = plots_of([full_step(1), full_step(2)], "dev")["gap"].series
    assert list(series) == ["mean", "5 %", "25 %", "75 %", "95 %"]
    assert series["mean"] == [(1, pytest.approx(0.01)), (2, pytest.approx(0.02))]
    assert series["95 %"][0] == (1, pytest.approx(0.06))


def test_the_branches_of_selhn_add_up_to_every_anchor() -> None:
    series = plots_of([step(3, **{"selhn/averaged": 0.75})], "dev")["branches"].series
    assert series == {"every negative": [(3, 75.0)], "hardest negative": [(3, 25.0)]}


def test_the_terms_of_a_composite_are_named_and_start_when_they_do() -> None:
    records = [step(1, **{"loss/a": 2.0}), step(2, **{"loss/a": 1.0, "loss/b/c": 3.0})]
    series = plots_of(records, "dev")["loss-terms"].series
    assert series == {"a": [(1, 2.0), (2, 1.0)], "b/c": [(2, 3.0)]}


@pytest.mark.parametrize(
    ("epochs", "shown"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (10, [1, 5, 10])]
)
def test_margins_are_shown_for_the_first_middle_and_last_epoch(epochs, shown) -> None:
    records = [epoch(number + 1, [number, 1, 2, 3]) for number in range(epochs)]
    series = plots_of(records, "dev")["margins"].series
    assert list(series) == [f"epoch {number}" for number in shown]


def test_an_epoch_that_counted_no_margin_is_passed_over() -> None:
    series = plots_of([epoch(1, [0, 0]), epoch(2), epoch(3, [1, 1])], "dev")["margins"].series
    assert series == {"epoch 3": [(-0.5, 0.5), (0.5, 0.5)]}


@given(
    counts=st.lists(st.integers(0, 10**9), min_size=1, max_size=60).filter(any),
    low=st.floats(-5, 0),
    width=st.floats(0.01, 5),
)
def test_a_density_has_an_area_of_one(counts, low, width) -> None:
    points = density(low, low + width, counts)
    assert sum(y for _, y in points) * width / len(counts) == pytest.approx(1.0)
    assert all(low <= x <= low + width for x, _ in points)


@given(
    values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300),
    most=st.integers(2, 40),
)
def test_thinning_keeps_order_and_peaks(values, most) -> None:
    points = list(enumerate(values))
    kept = thin(points, most)
    assert len(kept) <= most or len(points) <= most
    assert set(kept) <= set(points)
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)
    assert min(y for _, y in kept) == min(values)
    assert max(y for _, y in kept) == max(values)


@pytest.fixture(scope="module")
def evaluated(concepts):
    config = build_config(
        {
            "model": {"name": "vse-fc", "embed_size": 8, "text": {"word_dim": 4}},
            "data": {"min_count": 1},
        }
    )
    torch.manual_seed(0)
    model = create_model(config.model, concepts.train, config.data)
    result = score_split(model, concepts["dev"], 32)
    report = report_scores([result], "dev", folds=1, bootstrap=0)
    return config, report, concepts["dev"], example_searches(result, seed=0)


def page_of(folder, records, evaluated) -> str:
    log = MetricsLog(folder / "metrics.jsonl")
    for record in records:
        log.write(record)
    log.close()
    return write_report(folder, *evaluated).read_text(encoding="utf-8")


def test_every_plot_is_on_the_page_and_in_a_file(evaluated, tmp_path) -> None:
    some = {"gap/abs": 0.1, "gap/p95": 0.2, "selhn/averaged": 0.5}
    records = [step(1, **some), epoch(1, [1, 2, 1])]
    with all_charts():
        page = page_of(tmp_path, records, evaluated)
    plots = plots_of(records, "dev")
    assert {"gap", "branches", "margins"} <= plots.keys()
    assert page.count("data:image/svg+xml;base64,") == len(plots)
    for name, plot in plots.items():
        assert (tmp_path / f"{name}.png").stat().st_size > 1000
        assert f'<img alt="{plot.title}"' in page


def test_warnings_stand_above_the_results(evaluated, tmp_path) -> None:
    text = "collapsed: the loss is <that> of a model & no more"
    records = [
        step(1),
        {"kind": "warning", "step": 1200, "text": text},
        {"kind": "warning", "step": 1300, "text": "recovered at step 1250"},
    ]
    page = page_of(tmp_path, records, evaluated)
    box = page[page.index('<aside class="warning"') : page.index("</aside>")]
    assert "Step 1,200." in box
    assert "the loss is &lt;that&gt; of a model &amp; no more" in box
    assert box.index("collapsed") < box.index("recovered at step 1250")
    assert page.index("</aside>") < page.index("<table>")


def test_a_run_that_went_well_has_no_box(evaluated, tmp_path) -> None:
    assert "<aside" not in page_of(tmp_path, [step(1), epoch(1)], evaluated)


def test_a_run_warned_all_the_time_does_not_fill_the_page(evaluated, tmp_path) -> None:
    records = [{"kind": "warning", "step": n, "text": "once more"} for n in range(100)]
    page = page_of(tmp_path, records, evaluated)
    assert page.count("once more") == 8
    assert "92 more in metrics.jsonl" in page


def test_a_long_run_does_not_make_a_heavy_page(evaluated, tmp_path) -> None:
    with all_charts():
        page = page_of(tmp_path, [step(n) for n in range(1, 5000)], evaluated)
    charts = re.findall(r"data:image/svg\+xml;base64,([^\"]*)", page)
    assert charts
    for chart in map(base64.b64decode, charts):
        assert max(path.count(b"L ") for path in re.findall(rb' d="([^"]*)"', chart)) <= 400


def test_text_of_strangers_in_a_report_is_never_markup_and_nothing_can_be_fetched(
    evaluated, tmp_path
) -> None:
    config, report, split, gallery = evaluated
    hostile = '"><script>alert(1)</script><img src=x onerror=alert(1)>\x07'
    strange = replace(
        split,
        ids=[f"{hostile}{number}" for number in range(len(split))],
        captions=[[hostile + text for text in texts] for texts in split.captions],
    )
    settings = config.model_copy(
        update={"data": config.data.model_copy(update={"source": hostile})}
    )
    records = [{"kind": "warning", "step": 1, "text": hostile}]
    page = page_of(tmp_path, records, (settings, report, strange, gallery, [hostile]))
    assert "<script" not in page
    assert "<img src=x" not in page
    assert "\x07" not in page
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert "default-src &#x27;none&#x27;" in policy[1]
    assert "script-src" not in policy[1]  # so that none runs
    assert page.index("Content-Security-Policy") < page.index("<title>")
