"""NAAF's figures 3 and 4: by their commands on very few scenes, and their parts by hand."""

from __future__ import annotations

import json
import math
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from counterfoil.cli import app
from counterfoil.core.errors import ConfigError
from counterfoil.data.pairs import Split
from counterfoil.data.scenes import make_scene
from counterfoil.data.scenes.scene import SIZE
from counterfoil.plots.charts import to_svg
from counterfoil.reproduce.distributions import (
    choose_epoch,
    describe_samples,
    sampled_epochs,
    shape_of,
    share_below,
)
from counterfoil.reproduce.plots import charts_of, write_charts
from counterfoil.reproduce.results import Reproduction, RowResult
from counterfoil.reproduce.spec import build_artifact
from counterfoil.reproduce.store import merged
from counterfoil.reproduce.word_maps import choose_pairs, region_names
from counterfoil.scoring.encode import SplitScores
from tests.reproduce.conftest import tiny

SMALL = [
    *("--scale", "smoke", "--seeds", "1", "data.options.images=[24,8,12]", "data.min_count=1"),
    *("train.epochs=2", "train.batch_size=24", "model.embed_size=16", "model.text.word_dim=8"),
    *("train.device=cpu", "--json"),
]


def some_rows(*rows: str) -> list[str]:
    return [part for row in rows for part in ("--rows", row)]


@pytest.fixture
def reproduce(tmp_path, cache):
    """The command with very few scenes."""

    def call(name: str, *options: str) -> tuple[dict, object]:
        places = ["--out", str(tmp_path), "--cache", str(cache)]
        done = CliRunner().invoke(app, ["reproduce", name, *SMALL, *options, *places])
        assert done.exit_code == 0, done.output
        [folder] = tmp_path.glob(f"{name}-*")
        return json.loads(done.stdout), folder

    return call


@pytest.mark.parametrize("alphas", [[2], pytest.param([1, 2, 3], marks=pytest.mark.slow)])
def test_figure_3_draws_histograms_normals_and_boundary_for_each_alpha(reproduce, alphas) -> None:
    options = ("model.matcher.min_samples=5", "model.matcher.adjust_epoch=1")
    rows = [f"α = {alpha}" for alpha in alphas]
    result, folder = reproduce("naaf.figure3", *options, *some_rows(*rows))
    drawn = result["distributions"]
    assert [one["row"] for one in drawn] == [row for row in rows for _ in range(2)]
    assert [one["alpha"] for one in drawn] == [x for alpha in alphas for x in (alpha, None)]
    for one in drawn:
        numbers = {key: value["mean"] for key, value in one["numbers"].items()}
        assert numbers["boundary"] == one["boundary"]
        expected = shape_of(one["low"], one["high"], one["matched"])
        assert numbers["matched_skewness"] == pytest.approx(expected["skewness"])
        assert numbers["error"] == pytest.approx(
            (numbers["matched_below"] + numbers["mismatched_above"]) / 2
        )
    page = (folder / "naaf.figure3.md").read_text()
    assert "excess kurtosis" in page
    assert f"{drawn[0]['numbers']['matched_kurtosis']['mean']:.3f}" in page
    stored = Reproduction.from_json((folder / "naaf.figure3.json").read_text())
    panels = charts_of(stored)[0].draw().axes
    assert len(panels) == len(drawn)
    assert {len(axes.get_lines()) for axes in panels} == {3}  # two normals and the boundary
    ElementTree.parse(folder / "distributions.svg")  # noqa: S314 - ours


@pytest.mark.slow
def test_figure_4_maps_words_to_regions_beside_scans_attention(reproduce) -> None:
    result, folder = reproduce("naaf.figure4")
    pairs = result["pairs"]
    assert [pair["own"] for pair in pairs] == [True, False] * 3
    for pair in pairs:
        naaf, scan = pair["maps"]
        assert (naaf["quantity"], scan["quantity"]) == ("s − t", "attention")
        for one in (naaf, scan):
            assert np.array(one["values"]).shape == (len(pair["words"]), len(pair["regions"]))
        assert np.array(scan["values"]).sum(1) == pytest.approx(1.0, abs=1e-3)
        assert np.array(naaf["values"]).min() < 0
    names = " ".join(name for pair in pairs for name in pair["regions"])
    assert any(colour in names for colour in ("red", "green", "blue", "yellow", "white"))
    assert pairs[0]["caption"] == pairs[1]["caption"]
    assert pairs[0]["image"] != pairs[1]["image"]
    page = (folder / "naaf.figure4.md").read_text()
    assert f"“{pairs[0]['caption']}” with its own image, {pairs[0]['image']}" in page
    assert {path.name for path in folder.glob("pair-*")} == {
        f"pair-{n}.{suffix}" for n in (1, 2, 3) for suffix in ("svg", "png")
    }
    stored = Reproduction.from_json((folder / "naaf.figure4.json").read_text())
    panels = charts_of(stored)[0].draw().axes[::2]  # each is followed by its scale
    shapes = [axes.collections[0].get_array().shape for axes in panels]
    assert shapes == [(len(p["words"]), len(p["regions"])) for p in pairs[:2] for _ in range(2)]


def test_the_shape_of_a_histogram_is_that_of_its_samples() -> None:
    samples = np.repeat([0.5, 1.5, 2.5, 3.5], [1, 5, 2, 8])
    shape = shape_of(0.0, 4.0, [1, 5, 2, 8])
    centered = samples - samples.mean()
    assert shape["mean"] == pytest.approx(samples.mean())
    assert shape["std"] == pytest.approx(samples.std())
    assert shape["skewness"] == pytest.approx((centered**3).mean() / samples.std() ** 3)
    assert shape["kurtosis"] == pytest.approx((centered**4).mean() / samples.std() ** 4 - 3)
    assert shape_of(0.0, 1.0, [0, 4])["skewness"] == 0.0


@pytest.mark.parametrize(
    ("t", "expected"), [(-1.0, 0.0), (0.0, 0.0), (0.5, 0.25), (1.0, 0.5), (9.0, 1.0)]
)
def test_the_share_below_a_boundary_divides_the_bin_it_lies_in(t, expected) -> None:
    assert share_below(t, 0.0, 2.0, [3, 3]) == pytest.approx(expected)


def test_errors_at_the_boundary_are_counted_and_compared_with_normals() -> None:
    record = {"low": 0.0, "high": 1.0, "boundary": 0.5, "alpha": 2.0}
    numbers = describe_samples({**record, "matched": [1, 3], "mismatched": [4, 1]})
    assert numbers["matched_below"] == pytest.approx(25.0)
    assert numbers["mismatched_above"] == pytest.approx(20.0)
    assert numbers["error"] == pytest.approx(22.5)
    mean, std = numbers["matched_mean"], numbers["matched_std"]
    below = 0.5 * (1 + math.erf((0.5 - mean) / (std * math.sqrt(2))))
    mean, std = numbers["mismatched_mean"], numbers["mismatched_std"]
    above = 0.5 * (1 - math.erf((0.5 - mean) / (std * math.sqrt(2))))
    assert numbers["normal_error"] == pytest.approx(50 * (below + above))
    assert "error" not in describe_samples({**record, "matched": [0, 0], "mismatched": [4, 1]})


def test_the_epochs_of_the_figure_are_those_that_sampled_anything() -> None:
    side = {"low": 0, "high": 1, "matched": [1], "mismatched": [1], "boundary": 0.1}
    records = [
        {"kind": "epoch", "epoch": 1},
        {"kind": "epoch", "epoch": 2, "mismatch_histogram": {"t2i": {**side, "alpha": 2.0}}},
        {"kind": "epoch", "epoch": 3, "mismatch_histogram": {"i2t": {**side, "alpha": 2.0}}},
        {"kind": "epoch", "epoch": 4, "mismatch_histogram": {"t2i": {**side, "alpha": None}}},
    ]
    epochs = sampled_epochs(records)
    names = ("first", "unadjusted", "last")
    assert [choose_epoch(name, epochs)["epoch"] for name in names] == [2, 3, 4]
    assert choose_epoch("unadjusted", epochs[2:]) is None
    assert choose_epoch("last", []) is None


def scored(matrix: list[list[float]], captions: int) -> tuple[Split, SplitScores]:
    count = len(matrix)
    texts = [[f"caption {i} {k}" for k in range(captions)] for i in range(count)]
    split = Split("test", [f"image {i}" for i in range(count)], texts)
    order = list(range(len(split.texts)))
    return split, SplitScores(torch.tensor(matrix), split.image_of, list(range(count)), order, [])


def test_pairs_are_captions_that_confuse_the_model_with_its_best_wrong_image() -> None:
    # captions 0 and 2 are ranked right; caption 1 has image 2, then 0 above its own
    split, scores = scored([[3.0, 2.0, 0.0], [1.0, 1.0, 2.0], [2.0, 5.0, 4.0]], captions=1)
    chosen = choose_pairs(split, scores, 3)
    assert chosen[0] == (1, 1, 2)
    assert sorted(chosen[1:]) == [(0, 0, 2), (2, 2, 1)]
    assert choose_pairs(split, scores, 1) == chosen[:1]
    assert choose_pairs(split, scores, 3) == chosen


def test_an_image_with_the_same_caption_is_not_the_wrong_one_of_a_pair() -> None:
    # image 1 is above caption 0's own, and image 2 above caption 1's
    matrix = [[3.0, 0.0, 0.0], [4.0, 5.0, 0.0], [1.0, 6.0, 7.0]]
    split, scores = scored(matrix, captions=1)
    assert set(choose_pairs(split, scores, 2)) == {(0, 0, 1), (1, 1, 2)}
    twins = Split("test", split.ids, [["a dog"], ["a dog"], ["a cat"]])
    chosen = choose_pairs(twins, scores, 3)
    assert chosen[0] == (1, 1, 2)  # of caption 0, image 1 is no mistake, so it comes later
    assert (0, 0, 2) in chosen


def test_regions_of_a_scene_are_called_like_the_object_they_show() -> None:
    scene = make_scene((0, 0, 0, 0))
    first = scene.objects[0]
    box = [edge / SIZE for edge in first.boxes[0]]
    names = region_names(2, np.array([box, [0.0, 0.0, 0.01, 0.01]], dtype=np.float32), scene)
    assert names == [f"1 {first.color} {first.kind}", "2"]
    assert region_names(2, np.zeros((2, 4), dtype=np.float32)) == ["1", "2"]


def reproduction(kind: str, **parts) -> Reproduction:
    return Reproduction(
        name="tiny", kind=kind, title="T", paper="p", data="scenes", scale="full", seeds=1,
        overrides=[], columns=["Loss"], rows=[RowResult(label=["a"])], **parts,
    )  # fmt: skip


DISTRIBUTION = {
    "row": "a", "when": "last epoch", "epoch": 2, "low": 0.0, "high": 0.5, "matched": [0, 4],
    "mismatched": [3, 1], "boundary": 0.3, "alpha": None,
}  # fmt: skip
PAIR = {
    "caption": "a <dog> & a cat", "image": "x", "own": True, "words": ["a", "<dog>"],
    "regions": ["1", "2 red dog", "3"],
    "maps": [
        {"row": "a", "quantity": "s − t", "score": 0.5, "values": [[-0.1, 0.2, 0.0]] * 2},
        {"row": "b", "quantity": "attention", "score": 0.1, "values": [[0.0, 0.0, 0.0]] * 2},
    ],
}  # fmt: skip


def with_numbers(one: dict) -> dict:
    told = describe_samples(one)
    return {**one, "numbers": {key: {"mean": x, "seeds": 1} for key, x in told.items()}}


@pytest.mark.parametrize(
    ("kind", "parts", "names"),
    [
        ("histograms", {"distributions": [with_numbers(DISTRIBUTION)]}, ["distributions"]),
        ("maps", {"pairs": [PAIR, {**PAIR, "own": False}, PAIR]}, ["pair-1", "pair-2"]),
        ("histograms", {}, []),
        ("maps", {}, []),
    ],
)
def test_figures_are_written_as_svg_and_png(tmp_path, kind, parts, names) -> None:
    result = reproduction(kind, **parts)
    assert [path.stem for path in write_charts(result, tmp_path)] == names
    for name in names:
        ElementTree.fromstring((tmp_path / f"{name}.svg").read_text())  # noqa: S314 - ours
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_bars_of_a_panel_have_an_area_of_one() -> None:
    [chart] = charts_of(reproduction("histograms", distributions=[with_numbers(DISTRIBUTION)]))
    (axes,) = chart.draw().axes
    data = [patch.get_data() for patch in axes.patches]
    areas = [(heights * np.diff(edges)).sum() for heights, edges, _ in data]
    assert areas == pytest.approx([1.0, 1.0])
    title = axes.get_title("left")
    assert "t = 0.300" in title
    assert "100.0 % matched below" not in title


def test_the_picture_of_several_seeds_has_the_normals_and_errors_of_the_seed_it_draws() -> None:
    one = with_numbers(DISTRIBUTION)
    moved = {key: {**each, "mean": each["mean"] + 1} for key, each in one["numbers"].items()}
    pictures = [
        to_svg(charts_of(reproduction("histograms", distributions=[each]))[0].draw())
        for each in (one, {**one, "numbers": moved})
    ]
    assert pictures[0] == pictures[1]


def test_a_store_keeps_the_distributions_of_rows_that_were_not_asked_for() -> None:
    before = reproduction("histograms", distributions=[with_numbers(DISTRIBUTION)])
    other = {**with_numbers(DISTRIBUTION), "row": "b"}
    now = reproduction("histograms", distributions=[other])
    now = now.model_copy(update={"rows": [RowResult(label=["b"])]})
    rows = [["b"], ["a"], ["c"]]
    assert [one.row for one in merged(before, now, order=rows).distributions] == ["b", "a"]
    assert [one.row for one in merged(before, now, order=rows[1::-1]).distributions] == ["a", "b"]
    assert [one.row for one in merged(before, now, order=rows[:1]).distributions] == ["b"]
    pairs = reproduction("maps", pairs=[PAIR])
    assert merged(pairs, reproduction("maps")).pairs == pairs.pairs


@pytest.mark.parametrize("kind", ["histograms", "maps"])
def test_a_row_of_several_runs_has_no_histograms_or_maps(kind) -> None:
    rows = [{"label": ["both"], "ensemble": ["all", "hard"]}]
    more = {"confused": "all"} if kind == "maps" else {}
    with pytest.raises(ConfigError, match=f"'both': rows of the kind '{kind}' need one run each"):
        build_artifact(tiny(kind=kind, rows=rows, **more), "tiny.yaml")


@pytest.mark.slow
def test_the_row_without_masks_runs_by_its_command(reproduce, tmp_path) -> None:
    result, _ = reproduce("naaf.table4", "train.epochs=1", *some_rows("without masks"))
    [row] = result["rows"]
    assert "rsum" in row["numbers"]
    assert not row["errors"]
    config = yaml.safe_load((tmp_path / row["runs"][0] / "config.yaml").read_text())
    assert config["model"]["matcher"]["masks"] is False


@pytest.mark.slow
def test_the_rows_without_maximum_updating_masks_and_glove_run(reproduce, tmp_path) -> None:
    glove = tmp_path / "glove.txt"
    glove.write_text("dog 1 0 0 0 0 0 0 0\na 0 1 0 0 0 0 0 0\n")
    words = f"model.text.glove={glove}"
    sampling, _ = reproduce("naaf.table3", words, *some_rows("mismatches not*", "without up*"))
    design, _ = reproduce("naaf.table4", words, *some_rows("without masks", "without GloVe"))
    rows = [*sampling["rows"], *design["rows"]]
    assert [row["published"]["f30k"][-1] for row in rows] == [500.9, 500.9, 492.1, 491.6]
    assert all("rsum" in row["numbers"] and not row["errors"] for row in rows)
    files = [tmp_path / row["runs"][0] / "config.yaml" for row in rows]
    models = [yaml.safe_load(file.read_text())["model"] for file in files]
    given = [model["text"].get("glove") for model in models]
    assert given == [str(glove), str(glove), str(glove), None]
    assert [model["matcher"].get("mismatched") for model in models] == ["all", None, None, None]
    assert models[1]["matcher"]["update_mismatched"] is False
    assert models[2]["matcher"]["masks"] is False
