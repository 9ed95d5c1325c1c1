"""Checked captions from decisions and tables, and what is wrong with them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from counterfoil.audit import Decision, DecisionLog, read_checked
from counterfoil.audit.decisions import CaptionKey
from counterfoil.core.errors import DataError
from counterfoil.data.images import FileImage
from counterfoil.data.pairs import Split

TRAIN = Split("train", ["a", "b"], [["a dog", "a cat"], ["a dog", "a dog"]])
DEV = Split("dev", ["c", "a"], [["=a fish"], ["a bird"]])
SPLITS = [TRAIN, DEV]


def table(folder, text, name="labels.csv"):
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def decide(log, split, image, caption, text, action, correction=None, reviewer="ann") -> None:
    key = CaptionKey(split, image, caption, text)
    log.append(Decision.on(key, action, reviewer, correction))


def test_decisions_say_which_captions_are_wrong(tmp_path) -> None:
    log = DecisionLog(tmp_path / "decisions.jsonl")
    decide(log, "train", "a", 0, "a dog", "keep")
    decide(log, "train", "a", 1, "a cat", "fix", "a cow")
    decide(log, "train", "b", 1, "a dog", "discard")
    decide(log, "dev", "c", 0, "=a fish", "fix", "=a fish")  # nothing was changed
    decide(log, "dev", "c", 0, "an old text", "discard")
    decide(log, "dev", "a", 0, "a bird", "keep")
    decide(log, "dev", "a", 0, "a bird", "undo")
    expected = {"train": {0: False, 1: True, 3: True}, "dev": {0: False}}
    for path in (tmp_path, tmp_path / "decisions.jsonl"):
        read = read_checked(path, SPLITS)
        assert (read.splits, read.unknown, read.conflicts) == (expected, 1, 0)
    downloaded = tmp_path / "ann.jsonl"
    downloaded.write_bytes((tmp_path / "decisions.jsonl").read_bytes())
    assert read_checked(downloaded, SPLITS).splits == expected
    assert "1 checked caption is not among" in read_checked(downloaded, SPLITS).notes()[0]


def test_conflicts_between_reviewers_are_left_out(tmp_path) -> None:
    log = DecisionLog(tmp_path / "decisions.jsonl")
    decide(log, "train", "a", 0, "a dog", "keep")
    decide(log, "train", "a", 1, "a cat", "keep")
    other = Decision.on(CaptionKey("train", "a", 0, "a dog"), "discard", "bob")
    log.append(other.model_copy(update={"merged": True}))
    read = read_checked(tmp_path, SPLITS)
    assert (read.splits, read.conflicts) == ({"train": {1: False}}, 1)
    assert read.notes() == ["1 caption with conflicting decisions was not used"]


def test_a_decision_on_a_copy_elsewhere_replaces_none_of_the_caption_itself(tmp_path) -> None:
    log = DecisionLog(tmp_path / "decisions.jsonl")
    decide(log, "train", "a", 1, "a cat", "keep")
    decide(log, "an old split", "a", 5, "a cat", "discard")
    decide(log, "an old split", "b", 0, "a dog", "keep")
    decide(log, "an old split", "b", 1, "a dog", "discard")
    read = read_checked(tmp_path, SPLITS)
    assert (read.splits, read.unknown) == ({"train": {1: False, 2: False, 3: True}}, 0)


def test_lines_that_are_no_decisions_are_counted(tmp_path) -> None:
    log = DecisionLog(tmp_path / "decisions.jsonl")
    decide(log, "train", "a", 1, "a cat", "keep")
    decide(log, "train", "a", 0, "", "keep")  # no caption has this text
    with log.path.open("a") as file:
        file.write('{"image": "a", "action": "maybe"}\n')
    read = read_checked(tmp_path, SPLITS)
    assert (read.splits, read.unknown, read.damaged) == ({"train": {1: False}}, 1, 1)
    assert read.notes()[1] == "1 line that is no decision was skipped"
    table(tmp_path, '{"image": "a", "text": "a cat", "wrong": true}\n', "decisions.jsonl")
    with pytest.raises(DataError, match=r"can be used .*: 1 line that is no decision"):
        read_checked(tmp_path, SPLITS)


def test_the_split_of_a_row_decides_before_the_number_of_its_caption(tmp_path) -> None:
    again = Split("dev", ["a"], [["a cat", "a dog"]])  # the captions of `a` in another order
    rows = table(tmp_path, "split,image,caption,text,wrong\ndev,a,0,a dog,yes\n")
    assert read_checked(rows, [TRAIN, again]).splits == {"dev": {1: True}}


def test_findings_with_a_column_of_labels_are_a_table(tmp_path) -> None:
    """Texts and names that a spreadsheet would read as formulas have an apostrophe there."""
    odd = Split("test", ["@b", "'c"], [["-a dog", "a cat"], ["'tis a cat"]])
    rows = "split,image,caption,text,wrong\ntest,'@b,0,'-a dog,1\ntest,'@b,1,a cat,0\n"
    path = table(tmp_path, rows + "test,'c,0,'tis a cat,0\n")
    assert read_checked(path, [odd]).splits == {"test": {0: True, 1: False, 2: False}}


def test_headings_are_read_as_those_of_a_table_of_data(tmp_path) -> None:
    for heading in ("Image;Caption;Wrong", "FILE_NAME;Sentence; wrong", "image_id;text;WRONG"):
        rows = table(tmp_path, f"{heading}\na;a cat;yes\na;a bird;no\n")
        assert read_checked(rows, SPLITS).splits == {"train": {1: True}, "dev": {1: False}}


def test_tables_name_captions_by_text_or_number(tmp_path) -> None:
    by_text = table(tmp_path, "image,text,wrong\na,a cat,wrong\na,a bird,no\nc,'=a fish,1\n")
    assert read_checked(by_text, SPLITS).splits == {"train": {1: True}, "dev": {1: False, 0: True}}
    by_number = table(tmp_path, "split;image;caption;wrong\ntrain;b;1;yes\ntrain;b;0;\n")
    assert read_checked(by_number, SPLITS).splits == {"train": {3: True}}
    # the number tells identical captions apart; without one, the label is that of both
    both = table(tmp_path, "image,text,wrong\nb,a dog,FALSE\n")
    assert read_checked(both, SPLITS).splits == {"train": {2: False, 3: False}}
    one = table(tmp_path, "image,caption,text,wrong\nb,1,a dog,false\n")
    assert read_checked(one, SPLITS).splits == {"train": {3: False}}
    moved = table(tmp_path, "image,caption,text,wrong\na,7,a cat,false\na,0,a horse,true\n")
    read = read_checked(moved, SPLITS)
    assert (read.splits, read.unknown) == ({"train": {1: False}}, 1)
    rows = [
        {"image": "a", "text": "a cat", "wrong": True},
        {"image": "a", "caption": 0, "wrong": 0},
    ]
    lines = table(tmp_path, "\n".join(map(json.dumps, rows)), "labels.jsonl")
    assert read_checked(lines, [TRAIN]).splits == {"train": {0: False, 1: True}}


def test_a_table_of_captions_with_labels_beside_them_is_read(tmp_path) -> None:
    own = table(tmp_path, "image,caption,split,wrong\na,a cat,Train,1\na,a bird,training,0\n")
    assert read_checked(own, SPLITS).splits == {"train": {1: True}}
    digits = table(tmp_path, "image,caption,wrong\nb,1,yes\n")
    assert read_checked(digits, SPLITS).splits == {"train": {3: True}}


@pytest.mark.parametrize(
    ("named", "image"),
    [
        ("z.jpg", "z"),
        ("images/z.jpg", "z"),
        (r"images\z.jpg", "z"),
        ("p/y.jpg", "p/y"),
        ("other/z.jpg", None),
        ("y.jpg", None),
        ("a", "a"),
        ("Images/Z.JPG", "z"),
        ("../images/z.jpg", "z"),
        ("/photos/images/z.jpg", "z"),
        ("cafe\u0301.png", "e"),
        ("D.png", "d"),
        ("../", None),
    ],
)
def test_a_table_may_name_images_by_their_files(named, image, tmp_path) -> None:
    files = {"z": "images/z.jpg", "p/y": "images/p/y.jpg", "q/y": "images/q/y.jpg", "a": "a.png"}
    files |= {"e": "caf\u00e9.png", "d": "D.png", "small d": "d.png"}
    pixels = [FileImage(Path("/photos", file)) for file in files.values()]
    split = Split("train", list(files), [["a dog"]] * len(files), pixels)
    labels = table(tmp_path, f"image,text,wrong\n{named},a dog,1\n")
    if image is None:
        with pytest.raises(DataError, match="Images are named 'z', 'p/y' …"):
            read_checked(labels, [split])
    else:
        assert read_checked(labels, [split]).splits == {"train": {list(files).index(image): True}}


def test_files_that_are_named_alike_in_many_folders_are_found_without_comparing_all(
    tmp_path,
) -> None:
    count, reads = 100, Counter()

    class Photo(FileImage):
        def __getattribute__(self, name):
            reads[name] += 1
            return super().__getattribute__(name)

    pixels = [Photo(Path("/photos", str(number), "0.jpg")) for number in range(count)]
    split = Split("train", list(map(str, range(count))), [["a dog"]] * count, pixels)
    rows = "".join(f"{number}/0.jpg,a dog,1\n" for number in range(count))
    labels = table(tmp_path, f"image,text,wrong\n{rows}")
    reads.clear()
    assert len(read_checked(labels, [split]).splits["train"]) == count
    assert reads["path"] < 10 * count


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("image,text\na,a cat\n", "expected the columns image, wrong"),
        ("image,wrong\na,1\n", "and text or caption"),
        ("image,text,wrong\na,a cat,nan\n", "labels.csv:2: wrong: expected true or false"),
        ("image,text,wrong\na,a cat,0.5\n", "expected true or false"),
        ("image,caption,wrong\na,-1,1\n", "its number among the captions"),
        ("image,caption,text,wrong\na,x,a cat,1\n", "its number among the captions"),
        ("image,text,wrong\na,a cat,1\na,a cat,0\n", "labels.csv:3: says .* line 2 says the opp"),
        ("image,text,wrong\nz,a cat,1\n", "none of its .* for train, dev: 1 checked caption is"),
        ("image,text,wrong\n", "none of its checked captions .*: it has no labels"),
        ("image,text,wrong\na,a cat\n", "2 fields, but the header names 3"),
    ],
)
def test_faulty_tables_are_refused_with_their_line(text, message, tmp_path) -> None:
    with pytest.raises(DataError, match=message):
        read_checked(table(tmp_path, text), SPLITS)


def test_other_files_are_refused(tmp_path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_checked(tmp_path / "none.csv", SPLITS)
    with pytest.raises(DataError, match="decide on its findings first"):
        read_checked(tmp_path, SPLITS)
    with pytest.raises(DataError, match="expected an audit folder"):
        read_checked(table(tmp_path, "", "labels.txt"), SPLITS)
