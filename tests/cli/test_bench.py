"""`counterfoil bench` on a small file of every format, with scores that are worked out by hand."""

from __future__ import annotations

import json

import pytest

from counterfoil.core.errors import ConfigError, DataError
from counterfoil.evaluation.compositional.readers import read_benchmark
from counterfoil.training.run_folder import load_model
from tests.cli.test_cli import invoke
from tests.evaluation.compositional import small_files
from tests.evaluation.compositional.small_files import TREES, draw_images, write, write_results


@pytest.fixture
def images(tmp_path):
    return draw_images(tmp_path / "images")


def as_json(*arguments) -> dict:
    return json.loads(invoke("bench", *arguments, "--json", "--bootstrap", "0"))


def values(report: dict, row: str, subset: int = 0) -> dict[str, float]:
    own = report["subsets"][subset]["values"][row]
    return {metric: measured["value"] for metric, measured in own.items()}


SHORTER = {
    # of two items, the first has the shorter true caption
    "swap_obj.json": {"accuracy": 50.0},
    # first: both true captions are shorter than the foil; second: one is, one is not
    "swap_obj_pp.json": {"image-text": 50.0},
    # lengths 21 and 22, 18 and 28: median 21.5, so the second and third are called true
    "existence.json": {"pairwise accuracy": 100.0, "accuracy": 100.0},
    "cola.json": {"text": 0.0, "image": 0.0, "group": 0.0},
    "examples.jsonl": {"text": 0.0, "image": 0.0, "group": 0.0},
    "bivlc.jsonl": {"text": 0.0, "image": 0.0, "group": 0.0},
    "visual_genome_relation.json": {"accuracy": 0.0},  # the same words: ties
    "visual_genome_attribution.json": {"accuracy": 0.0},
    "coco_karpathy_test.json": {"accuracy": 0.0},
    # the wrong caption is the longer one, so it is found first
    "hat.json": {"detection AP": 100.0},
    # the foil is a letter shorter than the true caption: 1/2 at its rank
    "nocaps-val-foil.json": {"detection AP": 50.0},
    "foilv1.0_test_2017.json": {"detection AP": 100.0},
}


@pytest.mark.parametrize("name", sorted(TREES))
def test_scores_by_length_are_those_worked_out_by_hand(tmp_path, name) -> None:
    report = as_json(TREES[name][0], write(tmp_path, name))
    shorter = values(report, "shorter caption")
    assert {metric: shorter[metric] for metric in SHORTER[name]} == SHORTER[name]


@pytest.mark.parametrize("name", sorted(TREES))
def test_scores_of_a_model_are_those_of_a_plain_loop(tmp_path, name, images, run) -> None:
    path = write(tmp_path, name)
    report = as_json(TREES[name][0], path, "--model", run, "--images", images)
    assert not report["missing"]
    (subset,) = read_benchmark(TREES[name][0], [path]).subsets
    if subset.form == "words" or any(item.box for item in subset.items):
        assert values(report, run.name)  # compared in the tests of the scores
        return
    model = load_model(run, "cpu")
    wins, scored = [], []
    for item in subset.items:
        files = [next(images.glob(f"{image.removesuffix('.png')}.png")) for image in item.images]
        fragments = [model.reader.fragments(file) for file in files]
        scores = plain_scores(model, fragments, item.texts)
        scored.append(scores)
        if subset.form == "square":
            (a, b), (c, d) = scores
            wins.append((a > b and d > c, a > c and d > b))
        else:
            count = len(item.captions)
            wins.append(min(scores[0][:count]) > max(scores[0][count:]))
    result = values(report, run.name)
    if subset.form == "square":
        text, image = (sum(win[side] for win in wins) / len(wins) for side in (0, 1))
        both = sum(all(win) for win in wins) / len(wins)
        expected = {"text": 100 * text, "image": 100 * image, "group": 100 * both}
        assert result == expected
    else:
        assert next(iter(result.values())) == 100 * sum(wins) / len(wins)


def plain_scores(model, fragments, texts) -> list[list[float]]:
    """Each pair by itself, unknown words as the unknown word."""
    from counterfoil.data.batches.collate import pad_fragments, pad_texts

    model.eval().requires_grad_(False)
    rows = []
    for one in fragments:
        ids = [model.text.encode(text) for text in texts]
        each = [model(pad_fragments([one]), pad_texts([i], model.text.pad)) for i in ids]
        rows.append([score.item() for score in each])
    return rows


def test_published_results_are_scored_with_two_decimals(tmp_path) -> None:
    text = invoke("bench", "bivlc", write_results(tmp_path), "--markdown")
    assert "| stored results | 50.00 [" in text
    assert "25.00" in text


def test_a_language_model_of_given_captions_is_described(tmp_path) -> None:
    captions = tmp_path / "captions.txt"
    captions.write_text("\n".join(["a red ball on a table", "a dog under a tree"] * 100))
    path = write(tmp_path, "swap_obj.json")
    report = as_json("sugarcrepe", path, "--blind", captions)
    assert report["language_model"].startswith("4-gram caption model, 196 captions, 1,078 words")
    # "a red ball" is known, "a blue ball" is not; "a dog and a cat" is less likely than "a dog"
    assert values(report, "caption likelihood") == {"accuracy": 50.0}


def test_scenes_need_no_files(run, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("counterfoil.evaluation.compositional.drawn._OTHER_FAMILIES", 20)
    chart = tmp_path / "scenes.png"
    arguments = ["scenes", "--items", "2", "--model", run, "--seed", "3", "--out", chart]
    report = as_json(*arguments)
    assert [subset["items"] for subset in report["subsets"]] == [2] * 8
    assert {run.name, f"{run.name}, words shuffled", "caption likelihood"} <= set(report["means"])
    assert chart.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_scenes_are_drawn_the_same_twice(run, monkeypatch) -> None:
    monkeypatch.setattr("counterfoil.evaluation.compositional.drawn._OTHER_FAMILIES", 20)
    arguments = ["scenes", "--items", "2", "--model", run, "--seed", "3"]
    assert as_json(*arguments) == as_json(*arguments)


def test_missing_images_are_counted_and_named(tmp_path, run, images) -> None:
    (images / "b.png").unlink()
    path = write(tmp_path, "swap_obj.json")
    report = as_json("sugarcrepe", path, "--model", run, "--images", images)
    assert report["missing"] == {"b.png": "not found"}
    assert [(one["items"], one["left_out"]) for one in report["subsets"]] == [(1, 1)]
    text = invoke("bench", "sugarcrepe", path, "-m", run, "--images", images)
    assert "1 images are missing or unreadable (b.png: not found): 1 items are left out" in text


def test_a_file_without_images_stays_and_its_json_has_null(tmp_path, run, images) -> None:
    path, other = write(tmp_path, "swap_obj.json"), tmp_path / "swap_att.json"
    items = json.loads(path.read_text())
    absent = [item | {"filename": "absent.png"} for item in items.values()]
    other.write_text(json.dumps(dict(enumerate(absent))))
    arguments = ["sugarcrepe", path, other, "-m", run, "--images", images]

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = invoke("bench", *arguments, "--json", "--bootstrap", "0")
    report = json.loads(text, parse_constant=refuse)
    sizes = {one["name"]: (one["items"], one["left_out"]) for one in report["subsets"]}
    assert sizes == {"swap_obj": (2, 0), "swap_att": (0, 2)}
    (empty,) = (one for one in report["subsets"] if one["name"] == "swap_att")
    assert empty["values"][run.name]["accuracy"]["value"] is None
    assert "means are over 1 of 2 parts" in invoke("bench", *arguments)


def test_all_images_missing_is_an_error(tmp_path, run, images) -> None:
    for name in ("a.png", "b.png"):
        (images / name).unlink()
    path = write(tmp_path, "swap_obj.json")
    with pytest.raises(DataError, match="none of its 2 images"):
        invoke("bench", "sugarcrepe", path, "-m", run, "--images", images)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sugarcrep"], "did you mean 'sugarcrepe'"),
        (["valse"], "name the files"),
        (["scenes", "a.json"], "drawn here"),
        (["sugarcrepe", "FILE", "--model", "RUN"], "--images"),
        (["sugarcrepe", "FILE", "--out", "a.jpg"], "PNG"),
        (["sugarcrepe", "FILE", "FILE"], "swap_obj.json is given twice"),
        (["sugarcrepe", "FOLDER", "FILE"], "swap_obj.json is given twice"),
        (["scenes", "-m", "RUN", "-m", "RUN"], "is given twice"),
        (["sugarcrepe", "FILE", "--model", "RUN", "--images", "absent"], "no such folder"),
    ],
)
def test_wrong_arguments_are_refused_with_what_to_do(tmp_path, run, arguments, words) -> None:
    path = write(tmp_path, "swap_obj.json")
    places = {"FILE": str(path), "FOLDER": str(path.parent), "RUN": str(run)}
    with pytest.raises(ConfigError, match=words):
        invoke("bench", *(places.get(one, one) for one in arguments))


def test_a_picture_that_cannot_be_written_is_refused_before_the_items_are_read(tmp_path) -> None:
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").write_text("mine")
    for out, reason in (("folder.png", "is a folder"), ("file/a.png", "file is not a folder")):
        with pytest.raises(ConfigError, match=reason):
            invoke("bench", "sugarcrepe", tmp_path / "absent.json", "--out", tmp_path / out)


def test_a_faulty_file_is_refused_with_item_and_field(tmp_path) -> None:
    path = write(tmp_path, "swap_obj.json", {"7": {**small_files.SUGARCREPE["0"], "caption": []}})
    with pytest.raises(DataError, match="item '7', field 'caption': expected text, got a list"):
        invoke("bench", "sugarcrepe", path)
