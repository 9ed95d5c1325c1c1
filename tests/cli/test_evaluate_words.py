"""`counterfoil evaluate-words`, and the rate of false alarms of `counterfoil audit`."""

from __future__ import annotations

import json

import pytest

from counterfoil.cli import app
from counterfoil.cli.evaluate_words import _language
from counterfoil.core.errors import ConfigError, DataError
from counterfoil.data.pairs import Pairs
from tests.cli.test_audit import pairs, run  # noqa: F401 - fixtures
from tests.cli.test_cli import invoke, runner


def test_methods_are_compared_printed_and_stored(run, cache, tmp_path) -> None:  # noqa: F811
    asked = ["evaluate-words", run, "--foils", "truth", "--cache", cache, "--bootstrap", 0]
    asked += ["--max-captions", 5, "--dev-captions", 5, "--out", tmp_path / "table.json"]
    found = json.loads(invoke(*asked, "--json"))
    assert json.loads((tmp_path / "table.json").read_text()) == found
    assert found["foils"] == "truth"
    methods = {one["method"] for one in found["results"]}
    assert {"parts", "gradient", "word class", "replacement"} <= methods
    fewer = json.loads(invoke(*asked, "--json", "--no-replacement"))
    left = {one["method"] for one in fewer["results"]}
    assert left == {method for method in methods if "replacement" not in method}


def test_a_note_says_which_rows_a_missing_language_model_leaves_out(cache) -> None:
    asked = ["evaluate-words", "scenes-naaf", "--data", "scenes", "--foils", "truth"]
    few = ["--option", "images=[0,4,4]", "--max-captions", 3, "--dev-captions", 3]
    result = runner.invoke(
        app, [str(word) for word in (*asked, *few, "--bootstrap", 0, "--cache", cache)]
    )
    assert result.exit_code == 0, result.exception
    assert "no rows with surprise or replacement" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--split", "dev"], "are both 'dev'"),
        (["--foils", "nobody"], "expected rules, fluent, truth"),
    ],
)
def test_a_comparison_that_means_nothing_is_refused(run, cache, options, message) -> None:  # noqa: F811
    asked = ["evaluate-words", str(run), "--cache", str(cache), *options]
    result = runner.invoke(app, asked)
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        (["--false-alarms", "0.05"], ConfigError, "belong together"),
        (["--trusted", "dev"], ConfigError, "belong together"),
        (["--false-alarms", "0", "--trusted", "dev"], ConfigError, "above 0 and below 1"),
        (["--false-alarms", "0.05", "--trusted", "dev"], DataError, "too few"),
    ],
)
def test_a_rate_needs_enough_trusted_captions(run, cache, tmp_path, options, kind, message) -> None:  # noqa: F811
    asked = ["audit", str(run), "--cache", str(cache), "--split", "test", "--out", str(tmp_path)]
    result = runner.invoke(app, [*asked, *options])
    assert isinstance(result.exception, kind)
    assert message in str(result.exception)


def test_right_captions_are_listed_at_the_rate(run, cache, tmp_path) -> None:  # noqa: F811
    asked = ["audit", run, "--cache", cache, "--split", "train", "--out", tmp_path, "--json"]
    found = json.loads(invoke(*asked, "--false-alarms", 0.2, "--trusted", "train"))
    assert found["false_alarms"]["captions"] == found["captions"] == 100
    assert found["listed"]["captions"] <= 20
    assert found["listed"]["captions"] >= 17
    command = [*asked[:-1], "--false-alarms", 0.2, "--trusted", "train"]
    result = runner.invoke(app, [str(word) for word in command])
    assert "(--false-alarms)" in result.stdout
    assert "(--threshold)" not in result.stdout
    assert "--trusted train: this split is audited itself" in " ".join(result.stderr.split())


def test_a_language_model_needs_enough_training_captions(pairs) -> None:  # noqa: F811
    few = Pairs("few", {"train": pairs.train.select(range(4))})
    assert _language(None, few, "rules") is None
    with pytest.raises(ConfigError, match="at least 100 captions"):
        _language(None, few, "fluent")
    assert _language(None, pairs, "fluent") is not None
