"""`counterfoil audit benchmark` from the command line, at its smallest scale."""

from __future__ import annotations

import json

import pytest

from counterfoil.core.errors import ConfigError, DataError
from counterfoil.models import save_pretrained
from counterfoil.training.run_folder import load_model
from tests.cli.test_audit import pairs, run  # noqa: F401 - fixtures
from tests.cli.test_cli import invoke


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def asked(cache, out, *more):
    small = ["--images", 12, "--noise", "random", "--seed", 0, "--cache", cache, "--out", out]
    return [*small, "--examine", 10, "train.device=cpu", "train.batch_size=16", *more]


def test_a_benchmark_is_one_command_and_resumes(cache, tmp_path) -> None:
    task = asked(cache, tmp_path, "--json")
    first = json.loads(invoke("audit", "benchmark", "--scale", "smoke", *task))
    assert [cell["noise"] for cell in first] == ["random"]
    assert set(first[0]["methods"]) >= {"audit", "similarity", "LEMoN, fixed weights"}
    assert {path.name for path in tmp_path.iterdir()} >= {"cells", "results.json", "results.md"}
    # under its other name, and from the stored cells: the time that it took is the same
    again = json.loads(invoke("audit", "--benchmark", "--scale", "smoke", *task))
    assert again == first
    collected = invoke("audit", "benchmark", "--collect", "--out", tmp_path)
    assert "1 cells" in collected
    page = tmp_path / "page.md"
    page.write_text("<!-- audit-results --><!-- /audit-results -->")
    invoke("audit", "benchmark", "--render-page", page, "--out", tmp_path)
    assert "| self-trained | audit |" in page.read_text()


def test_wrong_captions_of_another_split_are_a_table_of_their_own(run, cache, tmp_path) -> None:  # noqa: F811
    small = ["--images", 12, "--seed", 0, "--cache", cache, "--out", tmp_path, "--examine", 10]
    task = [*small, "--scale", "smoke", "--split", "test", "--model", run]
    invoke("audit", "benchmark", *task, "--noise", "random", "--json")
    donated = json.loads(invoke("audit", "benchmark", *task, "--donors", "dev", "--json"))
    assert [cell["noise"] for cell in donated] == ["random", "noun"]  # not word
    assert {cell["settings"]["donors"] for cell in donated} == {"dev"}
    tables = (tmp_path / "results.md").read_text()
    assert "test: random, 40 %" in tables
    assert "test: random from dev, 40 %" in tables
    with pytest.raises(ConfigError, match="--donors: noise 'word' changes captions in place"):
        invoke("audit", "benchmark", *task, "--donors", "dev", "--noise", "word")
    with pytest.raises(ConfigError, match="--donors test: is the audited split itself"):
        invoke("audit", "benchmark", *task, "--donors", "test")
    with pytest.raises(DataError, match="no split 'dve'"):
        invoke("audit", "benchmark", *task, "--donors", "dve")


def test_wrong_settings_are_refused_before_any_work(cache, tmp_path) -> None:
    task = asked(cache, tmp_path)
    with pytest.raises(ConfigError, match="nouns"):
        invoke("audit", "benchmark", "--scale", "smoke", *task, "--noise", "nouns")
    with pytest.raises(ConfigError, match=r"train\.epoch"):
        invoke("audit", "benchmark", "--scale", "smoke", *task, "train.epoch=1")
    with pytest.raises(DataError, match="no stored results"):
        invoke("audit", "benchmark", "--render-page", tmp_path / "x.md", "--out", tmp_path / "y")


def test_lemons_weights_are_tuned_by_one_command(run, cache, tmp_path) -> None:  # noqa: F811
    task = [*asked(cache, tmp_path)[:-2], "--rate", 0.3, "--split", "dev", "--tune-lemon"]
    with pytest.raises(ConfigError, match="expected one --model, got 0"):
        invoke("audit", "benchmark", *task)
    tuned = json.loads(invoke("audit", "benchmark", *task, "--model", run, "--json"))
    assert set(tuned["weights"]) == {"by_image", "by_caption", "near", "match"}
    printed = " ".join(invoke("audit", "benchmark", *task, "--model", run).split())
    assert f"mean of the best F1: {tuned['f1']:.1f}" in printed
    task += ["--model", run]
    one = json.loads(invoke("audit", "benchmark", *task, "--one-caption", "--json"))
    assert one != tuned
    with pytest.raises(ConfigError, match="leave out --collect, --folds"):
        invoke("audit", "benchmark", *task, "--folds", 2, "--collect")
    with pytest.raises(ConfigError, match="leave out --self-trained, config overrides"):
        invoke("audit", "benchmark", *task, "--self-trained", "train.epochs=1")
    assert not list(tmp_path.iterdir())


def test_models_with_different_features_are_refused(run, cache, tmp_path) -> None:  # noqa: F811
    model = load_model(run, "cpu")
    model.fragments_options = {"count": 3}
    save_pretrained(model, tmp_path / "other")
    with pytest.raises(ConfigError, match=r"other: reads features .*count=3.*one at a time"):
        invoke(
            *("audit", "benchmark", *asked(cache, tmp_path / "out"), "--split", "test"),
            *("--model", run, "--model", tmp_path / "other"),
        )
