"""Most captions of a data set stand at several images: what each command says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from counterfoil.cli import app
from tests.data.tiny import write_lines, write_scan

runner = CliRunner()
SMALL = [
    "data.format=scan", "data.min_count=1", "model.embed_size=8", "model.text.word_dim=8",
    "train.epochs=1", "train.batch_size=10", "train.device=cpu", "evaluation.bootstrap=0",
]  # fmt: skip
KINDS = ("harbor", "forest", "stadium")


def write_data(folder: Path) -> Path:
    for split, images in (("train", 12), ("dev", 6), ("test", 10)):
        write_scan(folder, split, images, each=5)
        lines = []
        for image in range(images):
            kind = KINDS[image % 3]
            lines += [f"This is a {kind} .", f"an aerial view of a {kind}", f"one {kind} by a road"]
            lines += [f"the {kind} is large", f"{split} image {image} shows a {kind}"]
        write_lines(folder / f"{split}_caps.txt", lines)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("twins")
    data = write_data(root / "data")
    args = ["train", f"data.source={data}", *SMALL, "--out", str(root / "run")]
    result = runner.invoke(app, args)
    assert result.exit_code == 0, result.output
    return root, result


def evaluate(root: Path, *more: str):
    args = ["evaluate", str(root / "run"), "--bootstrap", "0", "--device", "cpu", *more]
    result = runner.invoke(app, args)
    assert result.exit_code == 0, result.output
    return result


def one_line(text: str) -> str:
    return " ".join(text.split())


WARNING = "warning: 40 of 50 captions (80.0 %) stand word for word at another image, too"


def test_inspect_prints_duplicate_captions_of_each_split(run) -> None:
    root, _ = run
    result = runner.invoke(app, ["data", "inspect", str(root / "data"), "--format", "scan"])
    printed = one_line(result.stdout)
    assert "captions of 'test' shared with another image: 40 word for word (80.0%)" in printed
    assert "48 of 60 captions of 'train' stand word for word at another image" in printed


def test_training_says_what_it_leaves_out_and_prints_recalls_both_ways(run) -> None:
    root, result = run
    said = one_line(result.stderr)
    assert "48 of 60 training captions also belong to another image; such pairs are never" in said
    assert WARNING in said
    assert "identical captions as negatives" in one_line(result.stdout)
    assert "identical captions as positives" in one_line(result.stdout)
    assert "identical captions as positives" in (root / "run" / "report.html").read_text()
    tree = json.loads((root / "run" / "results.json").read_text())
    assert tree["identical_captions"]["positives"]["rsum"] > tree["rsum"]


@pytest.mark.parametrize("more", [(), ("--folds", "2")], ids=["full", "folds"])
def test_evaluate_warns_and_prints_recalls_both_ways(run, more) -> None:
    result = evaluate(run[0], *more)
    assert one_line(result.stderr).count(WARNING) == 1
    assert result.stdout.count("image → text") == 2
    assert "identical captions as positives" in one_line(result.stdout)


def test_evaluate_writes_both_ways_as_json(run, tmp_path) -> None:
    result = evaluate(run[0], "--json", "--out", str(tmp_path / "found.json"))
    tree = json.loads(result.stdout)
    twins = tree["identical_captions"]
    assert (twins["captions"], twins["share"], twins["counted_as"]) == (40, 80.0, "negatives")
    assert twins["negatives"]["i2t"] == tree["i2t"]
    assert twins["positives"]["t2i"]["recalls"]["10"] >= tree["t2i"]["recalls"]["10"]
    assert json.loads((tmp_path / "found.json").read_text()) == tree
    assert WARNING in one_line(result.stderr)


@pytest.mark.parametrize("way", ["positives", "negatives"])
def test_one_way_to_count_identical_captions_is_chosen_by_an_option(run, way) -> None:
    both = json.loads(evaluate(run[0], "--json").stdout)["identical_captions"]
    result = evaluate(run[0], "--json", "--identical-captions", way)
    tree = json.loads(result.stdout)
    assert WARNING not in one_line(result.stderr)
    assert (tree["i2t"], tree["t2i"]) == (both[way]["i2t"], both[way]["t2i"])
    assert tree["identical_captions"]["counted_as"] == way
    printed = evaluate(run[0], "--identical-captions", way).stdout
    assert printed.count("image → text") == 1
    assert f"identical captions as {way}" in one_line(printed)


def test_ensembles_comparisons_and_shortlists_count_both_ways_too(run) -> None:
    root, again = run[0], str(run[0] / "run")
    assert evaluate(root, again).stdout.count("image → text") == 2
    compared = evaluate(root, again, "--separately", "--markdown")
    assert "RSUM, identical right" in compared.stdout
    assert one_line(compared.stderr).count(WARNING) == 1
    listed = json.loads(
        evaluate(root, "--retriever", again, "--shortlist-size", "3", "--json").stdout
    )
    lists = listed["shortlist"]
    assert lists["t2i_recall_identical"] > lists["t2i_recall"]
    assert listed["identical_captions"]["positives"]["rsum"] > listed["rsum"]


def test_an_unknown_way_to_count_identical_captions_is_refused(run) -> None:
    args = ["evaluate", str(run[0] / "run"), "--identical-captions", "right"]
    result = runner.invoke(app, args)
    assert result.exit_code == 2
    assert "'right' is not one of" in result.output
    assert "'positives', 'negatives'" in result.output
