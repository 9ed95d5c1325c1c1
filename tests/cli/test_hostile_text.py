"""Text of a data set is shown, never obeyed, and half a character ends no command."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from counterfoil.cli import app, main
from counterfoil.cli.explain import colored
from counterfoil.data import load_pairs
from counterfoil.models.match import Match, WordEffect
from tests.data.tiny import write_images

GOOD = {"image": "a.png", "split": "train", "captions": ["a dog"], "id": "a"}
ODD = {
    "image": {"image": "b\ud800.png"},
    "image without a split": {"image": "b\ud800.png", "split": None, "id": None},
    "folder of an image": {"image": "\udc80/b.png"},
    "id": {"id": "\udfff"},
    "caption": {"captions": ["half \ud800"]},
    "one of two captions": {"captions": ["half \ud800", "a cat"]},
    "extra": {"colour": "\ud800", "\udc00": 1},
}


NOTES = {"hashed-split", "shared-captions", "similar-images", "identical-captions"}


def write(folder: Path, change: dict[str, object]) -> Path:
    write_images(folder, ["a.png", "b.png"])
    odd = {**GOOD, "image": "b.png", "id": "b", **change}
    lines = [json.dumps({k: v for k, v in row.items() if v is not None}) for row in (GOOD, odd)]
    (folder / "captions.jsonl").write_text("\n".join(lines))
    return folder


@pytest.mark.parametrize("name", ODD)
def test_half_a_character_in_a_data_set_is_a_counted_skip(name, tmp_path) -> None:
    folder = write(tmp_path, ODD[name])
    shown = CliRunner().invoke(app, ["data", "inspect", str(folder)])
    assert shown.exit_code == 0, shown.output
    result = CliRunner().invoke(app, ["data", "inspect", str(folder), "--json"])
    assert result.exit_code == 0, result.output
    problems = json.loads(result.stdout)["problems"]
    assert {p["severity"] for p in problems} <= {"skip", "note"}
    kinds = {p["kind"] for p in problems} - NOTES
    if name in ("id", "caption", "one of two captions"):
        assert "bad-text" in kinds
    assert bool(kinds) == (name != "extra")
    pairs = load_pairs(folder)
    assert pairs.train.ids[0] == "a"
    for split in pairs:
        json.dumps([list(split.ids), split.texts], ensure_ascii=False).encode()


def test_a_split_named_by_half_a_character_is_fatal_without_a_traceback(tmp_path) -> None:
    folder = write(tmp_path, {"split": "t\ud800"})
    for more in ([], ["--json"]):
        done = CliRunner().invoke(app, ["data", "inspect", str(folder), *more])
        assert done.exit_code == 3, done.output
        assert "bad-split-name" in done.stdout


HOSTILE = "x\x1b[2J\x1b]0;title\x07\r\nerror: all is lost\u202e.png"


def test_what_a_terminal_would_obey_is_escaped_in_an_inspection(tmp_path) -> None:
    folder = write(tmp_path, {"image": HOSTILE, "id": HOSTILE, "split": HOSTILE})
    done = CliRunner().invoke(app, ["data", "inspect", str(folder)])
    assert done.exit_code == 3
    assert "\\x1b[2J" in done.stdout
    assert not set("\x1b\x07\r\u202e") & set(done.stdout)
    assert not any(line.startswith("error: all") for line in done.stdout.splitlines())


def test_what_a_terminal_would_obey_is_escaped_in_an_error(tmp_path, monkeypatch, capsys) -> None:
    folder = write(tmp_path, {"image": f"../{HOSTILE}", "id": HOSTILE})
    arguments = ["counterfoil", "data", "convert", str(folder), str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr("counterfoil.cli.end_on_sigterm", lambda: None)  # of this process
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 3
    message = capsys.readouterr().err
    assert "x1b[2J" in message
    assert not set("\x1b\x07\r\u202e") & set(message)
    assert not any(line.startswith("error: all") for line in message.splitlines())


def test_an_explained_sentence_is_escaped_and_its_words_keep_their_colors() -> None:
    text = "a\x1b[31m dog\nruns"
    words = [
        WordEffect("dog", 1.0, 1.0, 0.0, span=(7, 10)),
        WordEffect("runs", -1.0, 0.0, -1.0, span=(11, 15)),
    ]
    sentence = colored(Match(text, 0.5, words, [], "parts", True))
    assert sentence.plain == "a\\x1b[31m dog\\nruns"
    assert [sentence.plain[span.start : span.end] for span in sentence.spans] == ["dog", "runs"]
