"""Two reviewers' decisions in one log: agreement, conflicts, and nothing lost."""

from __future__ import annotations

import pytest

from counterfoil.audit.decisions import (
    ANONYMOUS,
    LOG,
    CaptionKey,
    Decision,
    DecisionLog,
    Review,
    key_of,
)
from counterfoil.audit.merge import cohen_kappa, merge_log
from counterfoil.core.errors import DataError
from tests.audit.test_report import finding

FINDINGS = [finding(f"a red dog {n}", n) for n in range(6)]
KEYS = [key_of(one) for one in FINDINGS]


def reviewed(folder, reviewer: str, *actions: str | None) -> DecisionLog:
    """A log with one decision per finding; an action with a colon is a fix."""
    folder.mkdir(exist_ok=True)
    log = DecisionLog(folder)
    for key, action in zip(KEYS, actions, strict=False):
        if action is not None:
            name, _, correction = action.partition(":")
            log.append(Decision.on(key, name, reviewer, correction or None))
    return log


def outcomes(folder) -> list:
    review = Review.of(DecisionLog(folder), FINDINGS)
    finals = [review.of_finding(one).final for one in FINDINGS]
    return [None if final is None else final.outcome[0] for final in finals]


@pytest.fixture
def pair(tmp_path):
    mine = reviewed(tmp_path / "a", "ann", "keep", "keep", "fix:a cat", "discard", None, None)
    reviewed(tmp_path / "b", "bob", "keep", "discard", "fix:a cow", "discard", "keep", None)
    return mine, tmp_path / "b"


def test_agreement_is_counted_and_conflicts_stay_open(pair, tmp_path) -> None:
    mine, other = pair
    merged = merge_log(mine, other, FINDINGS)
    assert (merged.added, merged.present) == (5, 0)
    agreement = merged.agreement
    assert (agreement.both, agreement.same, agreement.corrections_differ) == (4, 3, 1)
    assert agreement.share == 0.75
    actions = [("keep", "keep"), ("keep", "discard"), ("fix", "fix"), ("discard", "discard")]
    assert agreement.kappa == pytest.approx(cohen_kappa(actions))
    assert [one.theirs.outcome for one in merged.conflicts] == [("discard", None), ("fix", "a cow")]
    assert outcomes(tmp_path / "a") == ["keep", None, None, "discard", "keep", None]
    counts = Review.of(DecisionLog(tmp_path / "a"), FINDINGS).counts()
    assert (counts["conflicts"], counts["decided"], counts["open"]) == (2, 3, 3)


def test_nothing_is_lost_and_merging_again_adds_nothing(pair, tmp_path) -> None:
    mine, other = pair
    merge_log(mine, other, FINDINGS)
    before = (tmp_path / "a" / LOG).read_bytes()
    votes = [one.reviewer for each in mine.standings().values() for one in each.votes]
    assert sorted(votes) == ["ann"] * 4 + ["bob"] * 3
    assert before.count(b"bob") == 5
    again = merge_log(DecisionLog(tmp_path / "a"), other, FINDINGS)
    assert (again.added, again.present, len(again.conflicts), again.remaining) == (0, 5, 2, 2)
    assert (tmp_path / "a" / LOG).read_bytes() == before


@pytest.mark.parametrize(
    ("prefer", "expected"),
    [
        ("mine", ["keep", "fix"]),
        ("theirs", ["discard", "fix"]),
        ("latest", ["discard", "fix"]),  # bob decided after ann
    ],
)
def test_an_option_resolves_conflicts(pair, tmp_path, prefer, expected) -> None:
    mine, other = pair
    merged = merge_log(mine, other, FINDINGS, prefer)
    assert all(one.chosen is not None for one in merged.conflicts)
    assert outcomes(tmp_path / "a")[1:3] == expected
    corrections = [one.decision.correction for one in mine.standings().values()]
    assert corrections[2] == ("a cat" if prefer == "mine" else "a cow")
    assert (tmp_path / "a" / LOG).read_bytes().count(b"bob") >= 5


def test_a_new_decision_ends_a_conflict_and_undo_brings_it_back(pair, tmp_path) -> None:
    mine, other = pair
    merge_log(mine, other, FINDINGS)
    mine.append(Decision.on(KEYS[1], "fix", "eve", "a dog in snow"))
    assert outcomes(tmp_path / "a")[1] == "fix"
    mine.append(Decision.on(KEYS[1], "undo", "eve"))
    assert outcomes(tmp_path / "a")[1] is None
    assert len(mine.standings()[KEYS[1]].votes) == 2


def test_three_reviewers_can_be_merged(pair, tmp_path) -> None:
    mine, other = pair
    third = reviewed(tmp_path / "c", "cem", "discard", "discard", None, None, "keep", "keep").path
    for path in (other, third):
        merge_log(mine, path, FINDINGS)
    assert outcomes(tmp_path / "a") == [None, None, None, "discard", "keep", "keep"]
    assert len(mine.standings()[KEYS[1]].votes) == 3


def test_decisions_on_captions_that_are_not_listed_are_stored_and_counted(pair) -> None:
    mine, other = pair
    gone = CaptionKey("test", "elsewhere", 0, "a lost caption")
    DecisionLog(other).append(Decision.on(gone, "discard", "bob"))
    merged = merge_log(mine, other, FINDINGS)
    assert (merged.added, merged.unknown) == (6, 1)
    assert gone in mine.standings()
    assert Review.of(mine, FINDINGS).counts()["unknown"] == 1


def test_a_caption_with_another_number_there_is_still_compared(tmp_path) -> None:
    mine = reviewed(tmp_path / "a", "ann", "keep")
    (tmp_path / "b").mkdir()
    moved = KEYS[0]._replace(caption=4)
    DecisionLog(tmp_path / "b").append(Decision.on(moved, "discard", "bob"))
    merged = merge_log(mine, tmp_path / "b", FINDINGS)
    assert len(merged.conflicts) == 1
    assert outcomes(tmp_path / "a")[0] is None


def test_a_file_of_something_else_is_refused_and_damaged_lines_are_counted(pair, tmp_path) -> None:
    mine, other = pair
    (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(200))
    with pytest.raises(DataError, match="none of its lines is a decision"):
        merge_log(mine, tmp_path / "image.png", FINDINGS)
    with pytest.raises(DataError, match="no such file"):
        merge_log(mine, tmp_path / "nowhere", FINDINGS)
    (other / LOG).write_bytes((other / LOG).read_bytes()[:-20])
    merged = merge_log(mine, other / LOG, FINDINGS)
    assert (merged.added, merged.damaged) == (4, 1)


@pytest.mark.parametrize("between", [None, "mine", "theirs", "decided"])
def test_merging_again_gives_the_same_agreement(pair, tmp_path, between) -> None:
    mine, other = pair
    first = merge_log(mine, other, FINDINGS).agreement
    if between == "decided":
        mine.append(Decision.on(KEYS[1], "discard", "ann"))
    elif between is not None:
        merge_log(mine, other, FINDINGS, between)
    assert merge_log(DecisionLog(tmp_path / "a"), other, FINDINGS).agreement == first
    assert first.both == 4


def test_a_copy_of_a_reviewers_own_log_is_no_second_opinion(pair, tmp_path) -> None:
    mine, _ = pair
    copy = reviewed(tmp_path / "copy", "ann", "discard")
    with copy.path.open("ab") as file:
        file.write(mine.path.read_bytes())
    merged = merge_log(mine, tmp_path / "copy", FINDINGS)
    assert (merged.added, merged.agreement.both, merged.conflicts) == (0, 0, ())


def test_logs_of_reviewers_without_names_are_compared(tmp_path) -> None:
    mine = reviewed(tmp_path / "a", ANONYMOUS, "keep", "keep")
    reviewed(tmp_path / "b", ANONYMOUS, "discard", "keep")
    merged = merge_log(mine, tmp_path / "b", FINDINGS)
    assert (merged.agreement.both, merged.agreement.same, len(merged.conflicts)) == (2, 1, 1)


@pytest.mark.parametrize(
    ("prefer", "expected"), [("mine", "keep"), ("theirs", "discard"), ("latest", "discard")]
)
def test_an_option_resolves_conflicts_that_were_merged_before(
    pair, tmp_path, prefer, expected
) -> None:
    mine, other = pair
    assert merge_log(mine, other, FINDINGS).remaining == 2
    merged = merge_log(mine, other, FINDINGS, prefer)
    assert (merged.added, len(merged.conflicts), merged.remaining) == (0, 2, 0)
    assert outcomes(tmp_path / "a")[1] == expected
    assert merge_log(mine, other, FINDINGS, prefer).conflicts == ()


def test_theirs_is_the_decision_of_the_merged_log_and_other_conflicts_stay(tmp_path) -> None:
    mine = reviewed(tmp_path / "a", "ann", None, "keep")
    reviewed(tmp_path / "b", "bob", "keep", None)
    reviewed(tmp_path / "c", "cem", "discard", "discard")
    for name in "bc":
        merge_log(mine, tmp_path / name, FINDINGS)
    merged = merge_log(mine, tmp_path / "b", FINDINGS, "theirs")
    assert [one.chosen.reviewer for one in merged.conflicts] == ["bob"]
    assert merged.remaining == 1
    assert outcomes(tmp_path / "a")[:2] == ["keep", None]


@pytest.mark.parametrize("own", [None, "keep", "discard"])
def test_a_reviewer_who_decides_again_replaces_the_own_decision(tmp_path, own) -> None:
    mine = reviewed(tmp_path / "a", "ann", own)
    for action in ("keep", "discard", "keep"):
        reviewed(tmp_path / "b", "bob", action)
        merge_log(mine, tmp_path / "b", FINDINGS)
        expected = action if own in (None, action) else None
        assert outcomes(tmp_path / "a")[0] == expected
        assert all(one.reviewer == "bob" for one in mine.standings()[KEYS[0]].rivals)


def test_an_older_copy_of_a_log_replaces_nothing(tmp_path) -> None:
    mine = reviewed(tmp_path / "a", "ann", "keep")
    other = reviewed(tmp_path / "b", "bob", "discard")
    old = other.path.read_bytes()
    reviewed(tmp_path / "b", "bob", "keep")
    merge_log(mine, tmp_path / "b", FINDINGS)
    (tmp_path / "old.jsonl").write_bytes(old)
    merged = merge_log(mine, tmp_path / "old.jsonl", FINDINGS)
    assert (merged.added, merged.conflicts) == (1, ())
    assert outcomes(tmp_path / "a")[0] == "keep"


def test_a_decision_after_a_preferred_one_is_no_conflict_with_oneself(tmp_path) -> None:
    mine = reviewed(tmp_path / "a", "ann", "keep")
    reviewed(tmp_path / "b", "bob", "discard")
    merge_log(mine, tmp_path / "b", FINDINGS, "theirs")
    reviewed(tmp_path / "b", "bob", "fix:a cat")
    assert merge_log(mine, tmp_path / "b", FINDINGS).conflicts == ()
    assert outcomes(tmp_path / "a")[0] == "fix"


@pytest.mark.parametrize("theirs", ["keep", "discard"])
def test_undo_after_a_merge_leaves_the_decision_of_the_other(tmp_path, theirs) -> None:
    mine = reviewed(tmp_path / "a", "ann", "keep")
    reviewed(tmp_path / "b", "bob", theirs)
    merge_log(mine, tmp_path / "b", FINDINGS)
    mine.append(Decision.on(KEYS[0], "undo", "ann"))
    standing = DecisionLog(tmp_path / "a").standings()[KEYS[0]]
    assert (standing.decision.reviewer, standing.rivals) == ("bob", ())
    assert outcomes(tmp_path / "a")[0] == theirs
    mine.append(Decision.on(KEYS[0], "undo", "ann"))  # nothing of her own is left
    mine.append(Decision.on(KEYS[0], "undo", "bob"))  # his was made elsewhere
    assert outcomes(tmp_path / "a")[0] == theirs


def test_a_decision_that_its_reviewer_took_back_is_taken_back_at_the_next_merge(tmp_path) -> None:
    mine = reviewed(tmp_path / "a", "ann", "keep", None, "keep")
    theirs = reviewed(tmp_path / "b", "bob", "discard", "discard", "keep")
    first = merge_log(mine, tmp_path / "b", FINDINGS)
    assert (first.withdrawn, len(first.conflicts)) == (0, 1)
    for key in KEYS[:2]:
        theirs.append(Decision.on(key, "undo", "bob"))
    second = merge_log(mine, tmp_path / "b", FINDINGS)
    assert (second.withdrawn, second.added, second.conflicts) == (2, 0, ())
    assert outcomes(tmp_path / "a") == ["keep", None, "keep", None, None, None]
    before = mine.path.read_bytes()
    assert merge_log(DecisionLog(tmp_path / "a"), tmp_path / "b", FINDINGS).withdrawn == 0
    assert mine.path.read_bytes() == before
    theirs.append(Decision.on(KEYS[0], "fix", "bob", "a cat"))
    third = merge_log(mine, tmp_path / "b", FINDINGS)
    assert (third.withdrawn, third.added, len(third.conflicts)) == (0, 1, 1)


@pytest.mark.parametrize("prefer", ["mine", "theirs"])
def test_a_preferred_decision_is_taken_back_with_the_one_it_copies(tmp_path, prefer) -> None:
    mine = reviewed(tmp_path / "a", "ann", "keep")
    theirs = reviewed(tmp_path / "b", "bob", "discard")
    merge_log(mine, tmp_path / "b", FINDINGS, prefer)
    theirs.append(Decision.on(KEYS[0], "undo", "bob"))
    assert merge_log(mine, tmp_path / "b", FINDINGS).withdrawn == 1
    assert outcomes(tmp_path / "a")[0] == "keep"


def test_only_the_decision_that_was_taken_back_goes_and_others_pass_it_on(tmp_path) -> None:
    mine = reviewed(tmp_path / "a", ANONYMOUS, "keep")
    theirs = reviewed(tmp_path / "b", ANONYMOUS, "discard")
    third = reviewed(tmp_path / "c", "cem")
    merge_log(mine, tmp_path / "b", FINDINGS)
    merge_log(third, tmp_path / "a", FINDINGS)
    theirs.append(Decision.on(KEYS[0], "undo", ANONYMOUS))
    assert merge_log(mine, tmp_path / "b", FINDINGS).withdrawn == 1
    assert outcomes(tmp_path / "a")[0] == "keep"
    assert merge_log(third, tmp_path / "a", FINDINGS).withdrawn == 1
    assert outcomes(tmp_path / "c")[0] == "keep"
    older = reviewed(tmp_path / "d", "bob", "discard")
    merge_log(mine, tmp_path / "d", FINDINGS)
    older.append(Decision.on(KEYS[0], "keep", "bob"))
    older.append(Decision.on(KEYS[0], "undo", "bob"))  # of what was never merged
    assert merge_log(mine, tmp_path / "d", FINDINGS).withdrawn == 0
    assert len(mine.standings()[KEYS[0]].rivals) == 1


def test_a_moved_decision_is_not_replaced_by_a_merged_one(tmp_path) -> None:
    mine = reviewed(tmp_path / "a", "ann")
    mine.append(Decision.on(KEYS[0]._replace(caption=4), "keep", "ann"))
    reviewed(tmp_path / "b", "bob", "discard")
    assert len(merge_log(mine, tmp_path / "b", FINDINGS).conflicts) == 1
    assert outcomes(tmp_path / "a")[0] is None


def test_merging_looks_at_the_whole_log_a_fixed_number_of_times(tmp_path, monkeypatch) -> None:
    def calls(count: int) -> int:
        findings = [finding(f"a red dog {n}", n) for n in range(count)]
        logs = []
        for name in ("ann", "bob"):
            (tmp_path / f"{name}{count}").mkdir()
            logs.append(DecisionLog(tmp_path / f"{name}{count}"))
            logs[-1].append(*(Decision.on(key_of(one), "keep", name) for one in findings))
        made, original = [], DecisionLog.standings
        monkeypatch.setattr(DecisionLog, "standings", lambda log: made.append(1) or original(log))
        merge_log(logs[0], logs[1].path, findings)
        monkeypatch.undo()
        return len(made)

    assert calls(40) == calls(4)


@pytest.mark.parametrize(
    ("table", "kappa"),
    [
        # Cohen (1960) by hand: 0.7 observed, 0.5 by chance
        ({("y", "y"): 20, ("y", "n"): 5, ("n", "y"): 10, ("n", "n"): 15}, 0.4),
        ({("y", "y"): 3}, None),
        ({("y", "n"): 1, ("n", "y"): 1}, -1.0),
        ({}, None),
    ],
)
def test_kappa_is_cohens(table, kappa) -> None:
    pairs = [pair for pair, count in table.items() for _ in range(count)]
    assert cohen_kappa(pairs) == (kappa if kappa is None else pytest.approx(kappa))
