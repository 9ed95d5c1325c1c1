"""`counterfoil audit export` and `merge`: from an audit and its decisions to corrected data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from counterfoil.audit.decisions import LOG, Decision, DecisionLog, key_of
from counterfoil.audit.findings import read_findings
from counterfoil.core.errors import ConfigError, DataError
from counterfoil.data.images import open_image
from counterfoil.data.load import load_pairs
from tests.cli.test_audit import pairs, run  # noqa: F401
from tests.cli.test_cli import invoke


@pytest.fixture
def photos(pairs, tmp_path) -> Path:  # noqa: F811
    folder = tmp_path / "photos"
    folder.mkdir()
    rows = []
    for number in range(5):
        open_image(pairs.test.pixels[number]).save(folder / f"{number}.png")
        captions = list(pairs.test.captions[number][:2])
        rows.append({"image": f"{number}.png", "by": number, "captions": captions})
    (folder / "captions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def report(run, photos, tmp_path) -> Path:  # noqa: F811
    asked = ["audit", run, photos, "--out", tmp_path / "report", "--cache", tmp_path / "cache"]
    invoke(*asked, "--threshold", 0.001, "--examine", 4)
    return tmp_path / "report"


def decide(report: Path, reviewer: str, *actions: str) -> list:
    """Decide on the first findings; the findings."""
    findings = read_findings(report)
    log = DecisionLog(report)
    for one, action in zip(findings, actions, strict=False):
        correction = f"a caption by {reviewer}" if action == "fix" else None
        log.append(Decision.on(key_of(one), action, reviewer, correction))
    return findings


def test_an_audit_is_reviewed_and_exported(report, photos, tmp_path) -> None:
    findings = decide(report, "ann", "fix", "discard", "keep")
    out = tmp_path / "corrected" / "captions.jsonl"
    printed = " ".join(invoke("audit", "export", report, "--out", out).split())
    left = len([one for one in findings if one.kind == "mismatch"]) - 3
    assert f"fixed: 1, discarded: 1, kept: 1, open and unchanged: {left}" in printed
    assert "changes: " in printed
    before = list(load_pairs(photos))
    after = load_pairs(out, options={"images": str(photos)})
    texts = [text for split in after for text in split.texts]
    assert "a caption by ann" in texts
    assert len(texts) == sum(len(split.texts) for split in before) - 1
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["by"] for line in lines] == list(range(5))
    assert (out.parent / "captions.jsonl.diff").read_text().startswith("--- a/captions.jsonl")
    with pytest.raises(ConfigError, match="never changed"):
        invoke("audit", "export", report, "--out", photos / "captions.jsonl", "--overwrite")
    told = json.loads(invoke("audit", "export", report, "--out", out, "--overwrite", "--json"))
    assert (told["fixed"], told["files"]) == (1, [str(out)])


def test_two_reviewers_are_merged(report, tmp_path) -> None:
    decide(report, "ann", "keep", "keep", "discard", "keep")
    other = tmp_path / "theirs"
    other.mkdir()
    (other / "findings.jsonl").write_bytes((report / "findings.jsonl").read_bytes())
    decide(other, "bob", "keep", "discard", "discard")
    printed = " ".join(invoke("audit", "merge", report, other).split())
    assert "3 decisions added, 0 already here" in printed
    assert "agreement on 3 findings that both decided: 66.7 %, Cohen's kappa 0.40" in printed
    assert "conflicts: 1, resolved by --prefer: 0" in printed
    assert "ann: keep / bob: discard" in printed
    told = json.loads(invoke("audit", "merge", report, other / LOG, "--json"))
    assert (told[0]["added"], told[0]["present"]) == (0, 3)


def test_scenes_are_exported_as_a_table_that_says_so(run, cache, tmp_path) -> None:  # noqa: F811
    report = tmp_path / "report"
    invoke("audit", run, "--split", "test", "--out", report, "--threshold", 0.05, "--cache", cache)
    decide(report, "ann", "discard")
    out = tmp_path / "captions.csv"
    printed = " ".join(invoke("audit", "export", report, "--out", out, "--cache", cache).split())
    assert "one table of all splits (CSV)" in printed
    assert {split.name for split in load_pairs(out)} == {"train", "dev", "test"}


def test_a_new_audit_of_changed_data_says_which_decisions_apply(
    run,  # noqa: F811
    report,
    photos,
    tmp_path,
) -> None:
    findings = decide(report, "ann", "discard", "keep")
    path = photos / "captions.jsonl"
    path.write_text(path.read_text().replace(json.dumps(findings[0].text), '"a new caption"', 1))
    asked = ["audit", run, photos, "--out", report, "--cache", tmp_path / "cache"]
    printed = " ".join(invoke(*asked, "--threshold", 0.001, "--examine", 4).split())
    assert "1 on captions that are not listed applies to nothing" in printed
    assert "1 decided" in printed


@pytest.mark.parametrize("command", [["export", "--out", "x.csv"], ["merge", "other"]])
def test_a_folder_that_is_no_audit_is_refused(tmp_path, command) -> None:
    with pytest.raises(DataError, match=r"no findings\.jsonl"):
        invoke("audit", command[0], tmp_path, *command[1:])


def test_how_to_read_data_is_only_said_with_the_data(report, tmp_path) -> None:
    with pytest.raises(ConfigError, match="name it, too"):
        invoke("audit", "export", report, "--out", tmp_path / "x.jsonl", "--format", "table")
