"""`counterfoil audit` and `evaluate-judgements`, from a run to their files and exit codes."""

from __future__ import annotations

import csv
import io
import json
import re

import numpy as np
import pytest
import torch

from counterfoil.audit import Decision, DecisionLog
from counterfoil.audit.decisions import CaptionKey
from counterfoil.cli import app
from counterfoil.cli.audit import TOO_MANY_CODE
from counterfoil.core.config import build_config
from counterfoil.core.errors import BusyError, ConfigError, CounterfoilError, DataError
from counterfoil.core.progress import Silent
from counterfoil.core.storage.locks import LOCK
from counterfoil.data.convert import convert
from counterfoil.data.images import open_image
from counterfoil.models import create_model, save_pretrained
from counterfoil.models.correct import correct
from counterfoil.training.run_data import read_data
from counterfoil.training.run_folder import load_model
from tests.cli.test_cli import invoke, runner
from tests.holding import content, held

SCENES = {"source": "scenes", "options": {"images": [20, 4, 12]}, "min_count": 1}
NAAF = {"name": "naaf", "embed_size": 16, "text": {"word_dim": 8}}
CORRECTOR = {
    "name": "uniter-small",
    "embed_size": 16,
    "matcher": {"layers": 1, "heads": 2, "extras": ["discrimination", "correction"]},
}


@pytest.fixture(scope="module")
def pairs(cache):
    return read_data(build_config({"data": SCENES}), cache, Silent())


def run_folder(pairs, folder, section, data=SCENES):
    """An untrained run, complete on disk."""
    config = build_config({"data": data, "model": section})
    torch.manual_seed(0)
    model = create_model(config.model, pairs.train, config.data)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.fragments_from = config.data.features.extractor
    model.fragments_options = config.data.features.options
    save_pretrained(model, folder / "best")
    (folder / "config.yaml").write_text(config.to_yaml())
    return folder


@pytest.fixture(scope="module")
def run(pairs, tmp_path_factory):
    return run_folder(pairs, tmp_path_factory.mktemp("naaf"), NAAF)


@pytest.fixture(scope="module")
def corrector(pairs, tmp_path_factory):
    folder = run_folder(pairs, tmp_path_factory.mktemp("tags-dc"), CORRECTOR)
    (folder / "correction_rule.json").write_text('{"threshold": 0.0, "margin": 0.0}')
    return folder


def lines_of(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "findings.jsonl").read_text().splitlines()]


def test_a_run_is_audited_on_its_own_data(run, cache, tmp_path) -> None:
    out = tmp_path / "report"
    asked = ["audit", run, "--split", "test", "--out", out, "--threshold", 0.05, "--cache", cache]
    printed = invoke(*asked)
    assert f"report: {out / 'index.html'}" in printed.replace("\n", "")
    assert "no corrections: this model was not taught to correct" in " ".join(printed.split())
    told = json.loads((out / "summary.json").read_text())
    assert (told["captions"], told["model"], told["passed"]) == (60, "naaf", True)
    assert told["splits"][0]["images"] == 12
    found = lines_of(out)
    wrong = sum(line["kind"] == "mismatch" for line in found)
    assert told["listed"] == {"threshold": 0.05, "captions": wrong}
    assert wrong == told["suspicious"] > sum(line["suspicion"] >= 0.5 for line in found)
    assert all(line["correction"] is None for line in found)
    rows = list(csv.DictReader(io.StringIO((out / "findings.csv").read_text("utf-8-sig"))))
    assert [row["kind"] for row in rows] == [line["kind"] for line in found]
    assert [row["image"] for row in rows] == [line["image"] for line in found]
    page = (out / "index.html").read_text()
    near = {line["text"] for line in found if line["near_duplicate"]}
    assert page.count("<article") == wrong + len(near)
    assert "data:image/jpeg;base64," in page
    assert "no corrections" in page


@pytest.mark.parametrize(
    "chosen",
    [(), ("--threshold", 0.05), ("--false-alarms", 0.3, "--trusted", "train")],
    ids=["default", "threshold", "false-alarms"],
)
def test_tile_terminal_and_files_count_the_captions_above_the_chosen_threshold(
    run, cache, tmp_path, chosen
) -> None:
    command = ["audit", run, "--out", tmp_path, "--cache", cache, "--examine", 40, *chosen]
    printed = " ".join(invoke(*command, "--split", "test").split())
    wrong = [line for line in lines_of(tmp_path) if line["kind"] == "mismatch"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    threshold = summary["listed"]["threshold"]
    if "--false-alarms" in chosen:
        assert threshold == pytest.approx(summary["false_alarms"]["caption_threshold"])
    else:
        assert threshold == (0.05 if chosen else 0.5)
    assert all(line["suspicion"] >= threshold for line in wrong)
    count, share = len(wrong), len(wrong) / summary["captions"]
    assert summary["listed"]["captions"] == summary["suspicious"] == count
    assert summary["share"] == share
    (split,) = summary["splits"]
    assert (split["suspicious"], split["threshold"]) == (count, threshold)
    assert re.search(rf"suspicious\W+{count} \({100 * share:.1f} %\)", printed)
    assert f"listed: {count} captions with a suspicion of at least {threshold:.3g}" in printed
    page = (tmp_path / "index.html").read_text()
    assert f"<dt>suspicious (suspicion ≥ {threshold:.3g})</dt><dd>{count}</dd>" in page
    assert f"<dt>share</dt><dd>{100 * share:.1f} %</dd>" in page
    assert f"Suspicious captions ({count})" in page
    at_half = sum(line["suspicion"] >= 0.5 for line in wrong)
    assert count > at_half or not chosen


def test_every_split_is_audited_unless_some_are_named(run, cache, tmp_path) -> None:
    told = json.loads(
        invoke("audit", run, "--out", tmp_path, "--examine", 10, "--cache", cache, "--json")
    )
    assert [split["split"] for split in told["splits"]] == ["train", "dev", "test"]
    assert told["captions"] == 180


def test_too_many_suspicious_captions_are_an_exit_code(run, cache, tmp_path) -> None:
    asked = ["audit", run, "--split", "dev", "--out", tmp_path, "--cache", cache, "--json"]
    asked += ["--threshold", 0.05, "--examine", 10]
    found = json.loads(invoke(*asked, "--fail-above", 0.0, code=TOO_MANY_CODE))
    listed = found["listed"]["captions"]
    assert listed > 1
    assert found["passed"] is False
    assert (tmp_path / "index.html").is_file()
    invoke(*asked, "--max-suspicious", listed - 1, code=TOO_MANY_CODE)
    invoke(*asked, "--max-suspicious", listed, "--fail-above", listed / found["captions"])


def test_an_audit_learns_from_checked_captions(run, cache, tmp_path) -> None:
    out, table = tmp_path / "report", tmp_path / "labels.csv"
    asked = ["audit", run, "--split", "test", "--out", out, "--cache", cache, "--threshold", 0.01]
    invoke(*asked)
    found = [one for one in lines_of(out) if one["kind"] == "mismatch"][:24]
    rows = [(one["image"], one["text"], k % 3 == 0) for k, one in enumerate(found)]
    table.write_text("image,text,wrong\n" + "".join(f'{i},"{t}",{w}\n' for i, t, w in rows))
    printed = " ".join(invoke(*asked, "--checked", table).split())
    checked = json.loads((out / "summary.json").read_text())["checked"]["test"]
    assert (checked["wrong"], checked["learned"]) == (len(rows[::3]), True)
    assert f"weights of signs learned from {checked['wrong'] + checked['right']} " in printed
    # decisions of a review serve as well, here too few of them
    key = {name: found[0][name] for name in ("split", "image", "caption", "text")}
    decision = {**key, "action": "keep", "reviewer": "ann", "time": "2026-01-01T00:00:00Z"}
    gone = {**decision, "text": "a caption that is not there"}
    (out / "decisions.jsonl").write_text(f"{json.dumps(decision)}\n{json.dumps(gone)}\n")
    printed = " ".join(invoke(*asked, "--checked", out).split())
    assert "1 checked caption (0 wrong) is too few to learn" in printed
    assert "1 checked caption is not among the audited ones" in printed
    with pytest.raises(ConfigError, match="exclude each other"):
        invoke(*asked, "--checked", out, "--false-alarms", 0.1, "--trusted", "dev")
    with pytest.raises(DataError, match="no such file"):
        invoke(*asked, "--checked", tmp_path / "none.csv")


def test_near_duplicates_have_a_table_of_their_own_that_no_threshold_changes(
    run, cache, tmp_path
) -> None:
    asked = ["audit", run, "--split", "test", "--out", tmp_path, "--examine", 10, "--cache", cache]
    printed = [invoke(*asked, "--threshold", level) for level in (0.05, 0.9)]
    tables = [text[text.index("Audit") : text.index("listed:")] for text in printed]
    first, second = (text.partition("Near-duplicates") for text in tables)
    assert "suspicious" in first[0]
    assert "suspicious" not in first[2]
    assert first[2] == second[2]
    near = json.loads((tmp_path / "summary.json").read_text())["false_negatives"]
    assert str(near) in first[2]


def test_no_error_has_the_exit_code_of_too_many() -> None:
    kinds, codes = [CounterfoilError], set()
    while kinds:
        kind = kinds.pop()
        codes.add(kind.exit_code)
        kinds += kind.__subclasses__()
    assert TOO_MANY_CODE not in {0, 130, *codes}


def test_a_split_that_is_named_twice_is_audited_once(run, cache, tmp_path) -> None:
    asked = ["audit", run, "--out", tmp_path, "--examine", 10, "--cache", cache]
    told = json.loads(invoke(*asked, "--split", "dev", "--split", "dev", "--json"))
    assert [split["split"] for split in told["splits"]] == ["dev"]


def test_notes_say_of_which_split_they_are(run, cache, tmp_path) -> None:
    asked = ["audit", run, "--out", tmp_path, "--examine", 10, "--cache", cache]
    assert "test: words were examined in 10 of 60" in " ".join(invoke(*asked).split())


def test_what_was_scored_is_kept_until_the_report_is_written(
    run, cache, tmp_path, monkeypatch
) -> None:
    asked = ["audit", run, "--out", tmp_path, "--split", "dev", "--examine", 10, "--cache", cache]

    def stop(*_, **__) -> None:
        raise DataError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr("counterfoil.audit.write_report", stop)
        with pytest.raises(DataError, match="full"):
            invoke(*asked)
    assert (tmp_path / ".dev.scored").is_file()
    invoke(*asked)
    assert not list(tmp_path.glob(".*"))
    assert (tmp_path / "index.html").is_file()


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ("survey_split", "interrupted"),
        ("measure_effects", "interrupted; repeat the command to continue"),
    ],
)
def test_an_interrupted_audit_says_whether_it_goes_on(
    run, cache, tmp_path, monkeypatch, stage, said
) -> None:
    def stop(*_, **__) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"counterfoil.audit.audit.{stage}", stop)
    asked = ["audit", run, "--out", tmp_path, "--split", "dev", "--cache", cache]
    found = runner.invoke(app, [str(part) for part in asked])
    assert found.exit_code == 130
    assert found.stderr.splitlines()[-1] == said


def test_a_report_that_cannot_be_written_is_refused_before_scoring(
    run, cache, tmp_path, monkeypatch
) -> None:
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setattr("counterfoil.audit.audit_split", lambda *args, **more: pytest.fail("late"))
    with pytest.raises(ConfigError, match="taken: is a file; name a folder"):
        invoke("audit", run, "--out", tmp_path / "taken", "--split", "dev", "--cache", cache)


@pytest.mark.parametrize("data", ["", "captions.csv"])
def test_a_report_is_not_written_into_the_folder_of_the_audited_data(run, tmp_path, data) -> None:
    (tmp_path / "captions.csv").write_text("image,caption\n")
    with pytest.raises(ConfigError, match="is the folder of the audited data"):
        invoke("audit", run, tmp_path / data, "--out", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["captions.csv"]


def test_a_report_does_not_replace_files_that_no_audit_wrote(run, cache, tmp_path) -> None:
    (tmp_path / "index.html").write_text("my site")
    with pytest.raises(ConfigError, match=r"'index.html' that no audit wrote"):
        invoke("audit", run, "--out", tmp_path, "--split", "dev", "--cache", cache)
    assert (tmp_path / "index.html").read_text() == "my site"


@pytest.mark.slow
def test_another_run_corrects_what_this_one_finds(run, corrector, cache, tmp_path) -> None:
    asked = ["audit", run, "--split", "train", "--out", tmp_path, "--cache", cache]
    asked += ["--threshold", 1e-9, "--details", 30, "--corrector", corrector]
    assert "no corrections" not in invoke(*asked)
    wrong = [line for line in lines_of(tmp_path) if line["kind"] == "mismatch"]
    assert len(wrong) > 30
    for line in wrong[:30]:
        assert (line["correction"] is None) == bool(line["correction_note"])
        for word in line["wrong_words"]:  # the corrector's rule may allow no word there
            assert word["word"] not in word["suggestions"]
    assert any(word["suggestions"] for line in wrong[:30] for word in line["wrong_words"])
    assert any(line["correction"] for line in wrong[:30])
    assert all("--details" in line["correction_note"] for line in wrong[30:])


@pytest.mark.slow
def test_a_corrector_sees_the_audited_images_with_its_own_eyes(run, cache, tmp_path) -> None:
    """Not those of the data it was trained on, nor the features of the audited run."""
    eyes = {"extractor": "segments", "options": {"max_fragments": 3}}
    small = {**SCENES, "options": {"images": [20, 4, 3]}, "features": eyes}
    its_own = read_data(build_config({"data": small}), cache, Silent())
    other = run_folder(its_own, tmp_path / "other", CORRECTOR, small)
    asked = ["audit", run, "--split", "test", "--out", tmp_path / "out", "--cache", cache]
    invoke(*asked, "--threshold", 0.05, "--corrector", other, "--details", 4)
    wrong = [line for line in lines_of(tmp_path / "out") if line["kind"] == "mismatch"]
    split = read_data(build_config({"data": {**SCENES, "features": eyes}}), cache, Silent()).test
    model = load_model(other, "cpu")
    assert any(line["correction"] for line in wrong[:4])
    for line in wrong[:4]:
        image = split.fragments.read(list(split.ids).index(line["image"]))
        expected = correct(model, image, line["text"])
        told = line["correction"]
        assert (told["text"] if told else line["text"]) == expected.corrected


def test_a_corrector_serves_one_split_of_named_data(run, corrector, cache, tmp_path) -> None:
    """Of which the others have no features."""
    asked = ["audit", run, "scenes", "--option", "images=[8,6,6]", "--split", "test"]
    asked += ["--out", tmp_path, "--cache", cache, "--threshold", 0.01, "--details", 1]
    assert "no corrections" not in invoke(*asked, "--corrector", corrector)
    wrong = [line for line in lines_of(tmp_path) if line["kind"] == "mismatch"]
    assert wrong[0]["correction"] or wrong[0]["correction_note"]


def test_a_corrector_of_other_features_is_refused(run, concepts, cache, tmp_path) -> None:
    other = run_folder(concepts, tmp_path / "other", CORRECTOR)
    asked = ["audit", run, "--out", tmp_path / "out", "--cache", cache, "--corrector", other]
    with pytest.raises(ConfigError, match=r"of dimension 16.*same kind of features"):
        invoke(*asked)
    assert not (tmp_path / "out").exists()


def test_a_run_that_can_correct_does(corrector, cache, tmp_path) -> None:
    asked = ["audit", corrector, "--split", "dev", "--out", tmp_path, "--cache", cache]
    assert "no corrections" not in invoke(*asked, "--threshold", 0.01)
    wrong = [line for line in lines_of(tmp_path) if line["kind"] == "mismatch"]
    assert all(line["correction"] or line["correction_note"] for line in wrong)


def test_a_corrector_that_cannot_is_refused_at_once(run, cache, tmp_path) -> None:
    with pytest.raises(ConfigError, match="cannot correct captions"):
        invoke("audit", run, "--out", tmp_path, "--corrector", run, "--cache", cache)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def photos(pairs, tmp_path):
    """Photos with a table of captions; one of them is broken, one caption is hostile."""
    folder = tmp_path / "photos"
    folder.mkdir()
    rows = []
    for number in range(5):
        open_image(pairs.test.pixels[number]).save(folder / f"{number}.png")
        rows.append({"image": f"{number}.png", "captions": list(pairs.test.captions[number])})
    rows[0]["captions"][0] = "<img src=x onerror=alert(1)> a dog"
    (folder / "3.png").write_bytes(b"not an image")
    (folder / "captions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_photos_are_audited_and_unreadable_ones_counted(run, photos, tmp_path) -> None:
    out = tmp_path / "out"
    asked = ["audit", run, photos, "--out", out, "--cache", tmp_path / "cache", "--json"]
    told = json.loads(invoke(*asked, "--threshold", 0.001))
    assert told["captions"] == 20
    assert told["skipped_images"] == 1
    assert told["problems"] == {"unreadable-image": 1}
    page = (out / "index.html").read_text()
    assert "<img src=x" not in page
    assert "&lt;img src=x" in page
    assert re.search("Left out: .*/3: ", page)


def test_what_is_left_out_is_named_in_the_terminal_too(run, photos, tmp_path) -> None:
    table = photos / "captions.jsonl"
    rows = [{"image": f"lost {n}.png", "captions": ["a dog"]} for n in range(7)]
    table.write_text(table.read_text() + "".join(json.dumps(row) + "\n" for row in rows))
    printed = invoke("audit", run, photos, "-o", tmp_path / "out", "--cache", tmp_path / "cache")
    assert "left out, unreadable-image: 1\n" in printed
    assert re.search(r"\n  train/3: .*3\.png.* \[unreadable-image\]\n", printed)
    assert "left out, missing-image: 7\n" in printed
    named = re.findall(r"there is no image file '(lost \d\.png)'", printed)
    assert named == [f"lost {n}.png" for n in range(5)]
    assert "  … and 2 more (see the report, or: counterfoil data inspect)\n" in printed


def test_images_that_the_model_cannot_read_are_named_in_the_terminal(run, pairs, tmp_path) -> None:
    convert(pairs, tmp_path / "data", "scan")
    features = tmp_path / "data" / "test_ims.npy"
    values = np.load(features)
    values[:7] = np.nan
    np.save(features, values)
    command = ["audit", run, tmp_path / "data", "--split", "test", "--out", tmp_path / "out"]
    printed = invoke(*command, "--cache", tmp_path / "cache")
    assert re.findall(r"left out, test: image (\S+): ", printed) == list(pairs.test.ids[:5])
    assert "  … and 2 more (see the report)\n" in printed


@pytest.mark.parametrize("form", ["scan", "shards"])
def test_other_forms_of_data_are_audited(run, pairs, tmp_path, form) -> None:
    convert(pairs, tmp_path / "data", form)
    command = ["audit", run, tmp_path / "data", "--split", "test", "--out", tmp_path / "out"]
    told = json.loads(invoke(*command, "--cache", tmp_path / "cache", "--json"))
    assert told["captions"] == 60


@pytest.fixture
def photos_without_splits(pairs, tmp_path):
    """A table of captions without splits, beside its images."""
    (tmp_path / "images").mkdir()
    with (tmp_path / "captions.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["image", "caption"])
        for split in pairs:
            for image, texts, pixels in zip(split.ids, split.captions, split.pixels, strict=True):
                open_image(pixels).save(tmp_path / "images" / f"{image}.png")
                table.writerows([f"{image}.png", text] for text in texts)
    return tmp_path / "captions.csv"


def test_data_without_splits_are_audited_whole_by_a_model_that_has_no_run(
    run, pairs, photos_without_splits, tmp_path
) -> None:
    photos = photos_without_splits
    common = ("--cache", tmp_path / "cache", "--json", "--threshold", 0.01)
    out = tmp_path / "whole"
    told = json.loads(invoke("audit", run / "best", photos, "--out", out, *common))
    captions = sum(len(split.texts) for split in pairs)
    assert [(one["split"], one["captions"]) for one in told["splits"]] == [("all", captions)]
    one = lines_of(out)[0]
    key = CaptionKey(one["split"], one["image"], one["caption"], one["text"])
    DecisionLog(out).append(Decision.on(key, "discard", "ann"))
    invoke("audit", "export", out, "--out", tmp_path / "corrected.csv")
    rows = [path.read_text().splitlines() for path in (photos, tmp_path / "corrected.csv")]
    assert set(rows[1]) < set(rows[0])
    assert len(rows[1]) == captions
    # of a run, some of the images may be training images: its splits stay apart
    for model, more, names in (
        (run, (), ["train", "dev", "test"]),
        (run / "best", ("--split", "dev"), ["dev"]),
        (run / "best", ("--split", "all"), ["all"]),
    ):
        told = json.loads(
            invoke("audit", model, photos, "--out", tmp_path / "parts", *more, *common)
        )
        assert [one["split"] for one in told["splits"]] == names


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        (["--split", "al"], DataError, "has no split 'al'"),
        (["--split", "train", "--split", "all"], DataError, "has no split 'all'"),
        (["--false-alarms", "0.2", "--trusted", "all"], ConfigError, "no other split to audit"),
        (["--false-alarms", "0.05", "--trusted", "dev"], DataError, "too few for 5 % false alarms"),
        (["--checked", "nope"], DataError, "no such file or folder of checked captions"),
        (["--checked", "captions.csv"], DataError, "expected the columns image, wrong, and text"),
    ],
)
def test_choices_that_do_not_fit_the_data_are_refused_before_features_are_extracted(
    run, photos_without_splits, tmp_path, monkeypatch, options, kind, message
) -> None:
    monkeypatch.chdir(tmp_path)
    cache, out = tmp_path / "cache", tmp_path / "report"
    asked = ["audit", run / "best", photos_without_splits, "--out", out, "--cache", cache]
    with pytest.raises(kind, match=message):
        invoke(*asked, *options)
    assert not cache.exists()


def test_human_judgements_are_correlated_with_scores(run, pairs, cache, tmp_path) -> None:
    ids = pairs.test.ids
    rows = [(ids[i], f"{ids[(i * 5 + 2) % 12]}#1", 1 + i % 4, 1, 4) for i in range(12)]
    path = tmp_path / "ExpertAnnotations.txt"
    path.write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))
    told = json.loads(invoke("evaluate-judgements", run, path, "--cache", cache, "--json"))
    assert (told["kind"], told["ratings"]) == ("expert", 36 - 3 * told["own_left_out"])
    printed = invoke("evaluate-judgements", run, path, "--cache", cache)
    assert f"{told['tau']:.1f}" in printed
    assert "CLIPScore" in printed
    twice = ["evaluate-judgements", run, run, path, "--cache", cache, "--standardize", "--json"]
    assert json.loads(invoke(*twice))["tau"] == pytest.approx(told["tau"])
    with pytest.raises(ConfigError, match="name two or more runs"):
        invoke("evaluate-judgements", run, path, "--cache", cache, "--standardize")
    with pytest.raises(DataError, match="columns"):
        invoke("evaluate-judgements", run, run / "config.yaml", "--cache", cache)


def test_a_second_audit_does_not_write_into_the_folder_of_the_first(run, cache, tmp_path) -> None:
    out = tmp_path / "audit"
    with held(out / LOCK), pytest.raises(BusyError, match="another process is writing an audit"):
        invoke("audit", run, "--split", "dev", "--out", out, "--cache", cache)
    assert content(out) == {}
