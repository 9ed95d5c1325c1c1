"""Margins, similarities and maps of negatives (NDGL, figures 1b, 1c and 3b)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from counterfoil.core.errors import ConfigError, DataError
from counterfoil.core.progress import Silent
from counterfoil.evaluation.evaluate import flat_metrics
from counterfoil.evaluation.report import RetrievalReport
from counterfoil.reproduce import negatives
from counterfoil.reproduce.catalogue import labels, load_artifact, names
from counterfoil.reproduce.distributions import embed
from counterfoil.reproduce.measure import RunEvaluator
from counterfoil.reproduce.negatives import HARDEST, OTHER, POSITIVE, QUERY, margin_report
from counterfoil.reproduce.plots import charts_of, write_charts
from counterfoil.reproduce.present import to_markdown, write_reproduction
from counterfoil.reproduce.results import PointMap, Reproduction, table_rows
from counterfoil.reproduce.spec import Negatives, build_artifact
from counterfoil.reproduce.store import ResultCache, write_stored
from counterfoil.scoring.encode import SplitScores, score_split
from counterfoil.training.run_folder import load_model
from tests.reproduce.conftest import planned, tiny
from tests.reproduce.test_reproduce import finish, shown
from tests.reproduce.test_store import result, table


def figure(show: str, columns: list[tuple[str, str]], **change):
    measures = [{"title": title, "number": number, "decimals": 3} for title, number in columns]
    return tiny(kind="negatives", show=show, measures=measures, nearest=5, **change)


MARGINS = [("mean", "i2t_margin"), ("won", "i2t_won"), ("t→i won", "t2i_won")]


def test_margins_are_those_of_a_loop_over_all_queries() -> None:
    scores = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 7))).float()
    image_of = np.array([0, 0, 1, 1, 1, 2, 2])
    report = margin_report(SplitScores(scores, image_of, [0, 1, 2], list(range(7)), []))
    for image in range(3):
        own = [float(scores[image, t]) for t in range(7) if image_of[t] == image]
        other = [float(scores[image, t]) for t in range(7) if image_of[t] != image]
        assert report.margins["i2t"][image] == pytest.approx(max(own) - max(other), abs=1e-6)
    for text in range(7):
        other = [float(scores[i, text]) for i in range(3) if i != image_of[text]]
        margin = float(scores[image_of[text], text]) - max(other)
        assert report.margins["t2i"][text] == pytest.approx(margin, abs=1e-6)
    assert report.numbers["t2i_margin"] == pytest.approx(np.mean(report.margins["t2i"]))


def test_a_split_of_one_image_has_no_margins_and_says_so() -> None:
    one = SplitScores(torch.ones(1, 2), np.array([0, 0]), [0], [0, 1], [])
    with pytest.raises(DataError, match="at least two images"):
        margin_report(one)


@pytest.mark.slow
def test_margins_of_two_models_are_drawn_for_both_directions(out, cache, tmp_path) -> None:
    plan = planned(figure("margins", MARGINS, panels={"i2t": "There"}), out, seeds=2)
    results = finish(plan, cache)
    there, back = results.plots
    assert (there.title, back.title) == ("There", "Margins, text to image")
    assert [line.name for line in there.curves] == ["all", "hard"]
    for line, queries in ((there.curves[0], 12), (back.curves[0], 24)):
        assert sum(y for _, y, _ in line.points) == pytest.approx(queries)
    places = [[x for x, _, _ in line.points] for line in there.curves]
    assert places[0] == places[1]  # all rows share their bins
    run = plan.runs["all"][0]
    recalls = flat_metrics(RetrievalReport.from_json((run.folder / "results.json").read_text()))
    assert results.rows[0].each[0].numbers["won"] == pytest.approx(recalls["i2t_r1"])
    assert results.rows[0].each[0].numbers["t→i won"] == pytest.approx(recalls["t2i_r1"])
    page = write_reproduction(results, tmp_path)
    assert {"margin-i2t.svg", "margin-t2i.svg"} <= {path.name for path in tmp_path.iterdir()}
    assert "| RSUM | mean | won |" in page.replace(": ", "")
    assert "(21.0)" in page
    assert Reproduction.from_json((tmp_path / "tiny.json").read_text()) == results


@pytest.mark.slow
def test_what_was_measured_of_negatives_is_kept(out, cache, monkeypatch) -> None:
    plan = planned(figure("margins", MARGINS), out)
    first = finish(plan, cache)
    monkeypatch.setattr(negatives, "load_model", None)  # no model is read again
    assert shown(plan, cache) == first


def test_similarities_are_between_the_hardest_and_the_other_near_negatives(out, cache) -> None:
    columns = [("images", "image_similarity"), ("below", "text_below_half")]
    plan = planned(figure("similarity", columns), out)
    results = finish(plan, cache)
    run = plan.runs["all"][0]
    split = RunEvaluator(out / "evaluations", cache, Silent()).split_of(run)
    model = load_model(run.folder, "cpu").eval()
    scores = score_split(model, split).scores
    vectors = negatives._Vectors.of(model, split, 64, Silent())
    cosines = []
    for text, image in enumerate(split.image_of):
        others = [i for i in range(len(split)) if i != int(image)]
        others.sort(key=lambda i, text=text: -float(scores[i, text]))
        hardest, *near = others[:5]
        cosines += [float(vectors.images[hardest] @ vectors.images[i]) for i in near]
    number = results.rows[0].each[0].numbers["images"]
    assert number == pytest.approx(np.mean(cosines), abs=1e-4)
    (plot,) = results.plots
    assert [line.name for line in plot.curves] == [
        "all, images", "all, captions", "hard, images", "hard, captions",
    ]  # fmt: skip
    shares = [y for _, y, _ in plot.curves[0].points]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)


def test_the_map_has_the_image_of_median_margin_and_its_negatives(out, cache, tmp_path) -> None:
    columns = [("best", "positive_score"), ("hardest", "hardest_score")]
    plan = planned(figure("map", columns, rows=[{"label": ["all"], "run": "all"}]), out)
    results = finish(plan, cache)
    (one,) = results.maps
    sizes = {name: len(points) for name, points in one.groups.items()}
    assert sizes == {QUERY: 1, POSITIVE: 2, HARDEST: 1, OTHER: 4}
    run = plan.runs["all"][0]
    split = RunEvaluator(out / "evaluations", cache, Silent()).split_of(run)
    margins = margin_report(score_split(load_model(run.folder, "cpu").eval(), split)).margins["i2t"]
    numbers = results.rows[0].each[0].numbers
    assert numbers["best"] - numbers["hardest"] == pytest.approx(
        sorted(margins)[(len(margins) - 1) // 2], abs=1e-5
    )
    page = write_reproduction(results, tmp_path)
    assert "all, the first of its seeds: image scene-test-" in page
    (axes,) = charts_of(results)[0].draw().axes
    assert sum(len(group.get_offsets()) for group in axes.collections) == 8
    assert (tmp_path / "map.png").is_file()


@pytest.mark.slow
def test_a_map_of_a_model_without_whole_vectors_says_which_models_have_them(out, cache) -> None:
    runs = {"all": {"common": {"model": "scan-t2i", "objective": "triplet"}}}
    plan = planned(figure("map", [], runs=runs, rows=[{"label": ["all"], "run": "all"}]), out)
    results = finish(plan, cache)
    assert "choose one that compares such vectors" in to_markdown(results)
    assert results.rows[0].numbers["rsum"].mean > 0
    assert not results.complete


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"show": "everything"}, "show"),
        ({"measures": [{"title": "x", "number": "i2t_margn"}]}, "did you mean 'i2t_margin'"),
        ({"rows": [{"label": ["a"], "ensemble": ["all", "hard"]}]}, "need one run each"),
        (
            {"rows": [{"label": ["a"], "run": "all", "published_measures": {"f30k": [1.0]}}]},
            "1 published measures for 3 columns",
        ),
    ],
)
def test_a_mistake_in_a_figure_of_negatives_is_named(change, message) -> None:
    with pytest.raises(ConfigError, match=message):
        build_artifact(figure("margins", MARGINS) | change, "mine.yaml")


def test_the_figures_1b_1c_and_3b_of_ndgl_share_their_runs_with_its_tables(tmp_path) -> None:
    shows = {"ndgl.figure1b": "map", "ndgl.figure1c": "similarity", "ndgl.figure3b": "margins"}
    assert shows.keys() <= set(names())
    for name, show in shows.items():
        artifact = load_artifact(name)
        assert isinstance(artifact, Negatives)
        assert artifact.show == show
        assert set(artifact.used) <= set(load_artifact("ndgl.table1").used)
    published = load_artifact("ndgl.figure1c").rows[0].published_measures["f30k"]
    assert published[:2] == [86.0, 66.0]


def test_tsne_keeps_two_clusters_apart_and_is_the_same_each_time() -> None:
    rng = np.random.default_rng(3)
    centers = np.repeat(np.eye(2, 16) * 8, 30, axis=0)
    vectors = centers + rng.normal(size=(60, 16))
    places = embed(vectors)
    assert places.shape == (60, 2)
    assert np.isfinite(places).all()
    first, second = places[:30].mean(0), places[30:].mean(0)
    apart = np.linalg.norm(first - second)
    spread = max(np.linalg.norm(places[:30] - first, axis=1).max(), 1e-9)
    assert apart > spread
    assert (embed(vectors) == places).all()


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5])
def test_tsne_of_very_few_vectors_is_finite(count) -> None:
    places = embed(np.ones((count, 4)) if count < 4 else np.eye(count, 4))
    assert places.shape == (count, 2)
    assert np.isfinite(places).all()


@pytest.mark.parametrize("groups", [{"a": []}, {"a": [(0.0, 9.0)], "b": []}])
def test_a_map_without_a_diagonal_is_written_as_svg_and_png(tmp_path, groups) -> None:
    one = PointMap(name="scores", title="T", groups=groups, diagonal=True)
    results = Reproduction(
        name="tiny", kind="negatives", title="T", paper="p", data="scenes", scale="full", seeds=1,
        overrides=[], columns=["Loss"], rows=[], maps=[one],
    )  # fmt: skip
    assert [path.stem for path in write_charts(results, tmp_path)] == ["scores"]
    assert (tmp_path / "scores.png").read_bytes().startswith(b"\x89PNG")


def test_a_row_known_from_a_table_is_trained_for_a_figure_that_was_never_drawn(tmp_path) -> None:
    plan = planned(figure("margins", MARGINS), tmp_path)
    rows = [each.result for each in table_rows(plan)]
    known = [one.with_each([result(0, 7.0, one.recipe)]) for one in rows]
    write_stored(tmp_path / "store", table(*known), "other@scenes.json")
    kept = ResultCache(tmp_path / "store", plan, labels(plan.artifact))
    kept.skip_known()
    assert len(plan.missing()) == len(rows)


def test_the_plots_of_negatives_are_all_that_is_drawn(out, cache) -> None:
    results = finish(planned(figure("margins", MARGINS), out), cache)
    assert [chart.name for chart in charts_of(results)] == ["margin-i2t", "margin-t2i"]


def test_a_later_call_without_runs_leaves_the_stored_plots(out, cache, tmp_path) -> None:
    plan = planned(figure("margins", MARGINS), out)
    order = labels(plan.artifact)
    results = ResultCache(tmp_path / "store", plan, order).add(finish(plan, cache))
    later = planned(figure("margins", MARGINS), tmp_path / "fresh")  # nothing is trained here
    kept = ResultCache(tmp_path / "store", later, order)
    kept.skip_known()
    assert later.missing() == []
    assert kept.add(shown(later, cache)).plots == results.plots
