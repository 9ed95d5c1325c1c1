"""A folder of images with a table of captions."""

from __future__ import annotations

import csv
import json
import re

import numpy as np
import pytest

from counterfoil.core.errors import DataError
from counterfoil.data import load_pairs
from tests.data.tiny import features, kinds, write_images, write_lines

ROWS = [
    ("a.png", "one, with a comma", "train"),
    ("b.png", 'a "quoted" word', "train"),
    ("a.png", "two\nlines", "train"),
    ("c.png", "tab\there", "test"),
]


def write_table(path, kind, rows=ROWS, header=("image", "caption", "split")):
    if kind == "jsonl":
        lines = [json.dumps(dict(zip(header, row, strict=True))) for row in rows]
        return write_lines(path / "captions.jsonl", lines)
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        columns = dict(zip(header, map(list, zip(*rows, strict=True)), strict=True))
        parquet.write_table(pyarrow.table(columns), path / "captions.parquet")
        return path / "captions.parquet"
    with (path / f"captions.{kind}").open("w", newline="") as file:
        writer = csv.writer(file, delimiter="\t" if kind == "tsv" else ",")
        writer.writerows([header, *rows])
    return path / f"captions.{kind}"


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet"])
@pytest.mark.parametrize("images", ["images", "."])
def test_every_kind_of_table_is_read_and_grouped_by_image(tmp_path, kind, images):
    write_images(tmp_path / images, ["a.png", "b.png", "c.png"])
    file = write_table(tmp_path, kind)
    for path in (tmp_path, file):
        pairs = load_pairs(path)
        assert list(pairs.train.ids) == ["a", "b"]
        assert pairs.train.captions[0] == ["one, with a comma", "two\nlines"]
        assert pairs.test.captions[0] == ["tab\there"]
        assert pairs.train.pixels[1].name == "b.png"
        assert not pairs.problems


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_cell_may_hold_a_list_of_captions(tmp_path, kind):
    write_images(tmp_path, ["a.png"])
    header = ("file", "captions", "id", "split", "stars")
    write_table(tmp_path, kind, [("a.png", ["x", "y"], 7, "val", 5)], header)
    pairs = load_pairs(tmp_path)
    assert list(pairs.dev.ids) == ["7"]
    assert pairs["val"].captions[0] == ["x", "y"]
    assert pairs.dev.extras == [{"stars": 5}]


@pytest.mark.parametrize("name", ["image", "file", "filename", "image_path", "Image"])
@pytest.mark.parametrize("caption", ["caption", "text", "captions"])
def test_columns_go_by_their_usual_names(tmp_path, name, caption):
    write_images(tmp_path, ["a.png"])
    write_table(tmp_path, "csv", [("a.png", "x", "train")], (name, caption, "split"))
    assert load_pairs(tmp_path).train.captions[0] == ["x"]


def test_numbered_columns_beside_a_plain_one_are_captions_too(tmp_path):
    write_images(tmp_path, ["a.png", "b.png"])
    rows = [("a.png", "x", "train", "y", "z"), ("b.png", "", "train", "u", "")]
    write_table(tmp_path, "csv", rows, ("image", "caption", "split", "caption_2", "Caption 3"))
    assert load_pairs(tmp_path).train.captions == [["x", "y", "z"], ["u"]]
    alone = load_pairs(tmp_path, options={"caption_column": "caption"})
    assert alone.train.captions == [["x"]]


def test_columns_of_other_names_are_options(tmp_path):
    write_images(tmp_path, ["a.png"])
    write_table(tmp_path, "csv", [("a.png", "x", "train")], ("photo", "says", "part"))
    options = {"image_column": "photo", "caption_column": "says", "split_column": "part"}
    assert load_pairs(tmp_path, options=options).train.captions[0] == ["x"]
    with pytest.raises(DataError, match="no column 'sayz'; did you mean 'says'"):
        load_pairs(tmp_path, options={**options, "caption_column": "sayz"})


@pytest.mark.parametrize(
    ("rows", "line", "reason"),
    [
        (['a.png,"a dog', "b.png,a cat", "c.png,a car"], 2, "is never closed"),
        (['a.png,"a ""dog', "b.png,a cat"], 2, "is never closed"),
        (['a.png,"a', 'dog, sat"', 'b.png,"a cat', "c.png,a car"], 4, "is never closed"),
        (["a.png,a dog", 'b.png,"a "big" cat"'], 3, "in line 3"),
        (['a.png,"a dog', "b.png,a cat", 'c.png,"a car"'], 2, "in line 4"),
        (['a.png,"a', 'b","a "big" dog","c"'], 3, "in line 3"),
    ],
)
def test_a_wrong_quote_is_named_with_the_line_where_it_opens(tmp_path, rows, line, reason):
    path = tmp_path / "captions.csv"
    write_lines(path, ["image,caption", *rows])
    with pytest.raises(DataError, match=re.escape(f"{path}:{line}: the quote")) as caught:
        load_pairs(tmp_path)
    assert reason in str(caught.value)
    assert 'double each quote within the text ("")' in str(caught.value)


@pytest.mark.parametrize(
    ("name", "stated", "sign"),
    [
        ("captions.csv", "sep=;", ";"),
        ("captions.csv", "\ufeffSEP=,\r", ","),
        ("captions.csv", '"sep=|"', "|"),
        ("captions.csv", "sep=;;;", ";"),
        ("captions.csv", "sep=\t", "\t"),
        ("captions.csv", "sep=^", "^"),
        ("captions.tsv", "sep=;", ";"),
        ("captions.csv", "\r", ";"),
    ],
)
def test_a_first_line_may_state_the_separator_for_excel_or_be_empty(tmp_path, name, stated, sign):
    write_images(tmp_path, ["a.png", "b.png"])
    rows = [["image", "caption", "split"], ["a.png", '"one, two; three|"', "train"]]
    lines = [stated, *map(sign.join, rows)]
    write_lines(tmp_path / name, lines)
    assert load_pairs(tmp_path).train.captions == [["one, two; three|"]]
    write_lines(tmp_path / name, [*lines, sign.join(["b.png", "x", "y", "z"])])
    with pytest.raises(DataError, match=re.escape(f"{name}:4: 4 fields")):
        load_pairs(tmp_path)


@pytest.mark.parametrize("stated", [b'sep=\r"', b'"sep=\r"'])
def test_an_end_of_line_is_no_separator(tmp_path, stated):
    (tmp_path / "captions.csv").write_bytes(stated + b"\nimage,caption\na.png,a dog\n")
    with pytest.raises(DataError, match="bad-row"):
        load_pairs(tmp_path)


def test_a_table_with_the_line_ends_of_old_macs_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "captions.csv").write_bytes(b"image,caption\ra.png,a dog\r")
    with pytest.raises(DataError, match=r"captions.csv:1: .*save the file with the line ends LF"):
        load_pairs(tmp_path)


def test_a_tsv_without_quoting_keeps_its_quotes(tmp_path):
    write_images(tmp_path, ["a.png"])
    lines = ["image\tcaption\tsplit", 'a.png\t"open quote\ttrain', 'a.png\t"so" he said\ttrain']
    write_lines(tmp_path / "captions.tsv", lines)
    assert load_pairs(tmp_path).train.captions[0] == ['"open quote', '"so" he said']


def test_without_a_split_column_the_split_is_a_hash_of_the_id_and_is_said(tmp_path):
    names = [f"{i}.png" for i in range(200)]
    write_images(tmp_path, names)
    rows = [(name, "x") for name in names]
    write_table(tmp_path, "csv", rows, ("image", "caption"))
    first = load_pairs(tmp_path)
    assert [kinds(first.problems), set(first.splits)] == [
        {"hashed-split"},
        {"train", "dev", "test"},
    ]
    assert 140 < len(first.train) < 180
    write_table(tmp_path, "csv", rows[::-1], ("image", "caption"))
    second = load_pairs(tmp_path)
    assert {s.name: set(s.ids) for s in first} == {s.name: set(s.ids) for s in second}


def test_one_table_a_split_needs_no_split_column(tmp_path):
    write_images(tmp_path, ["a.png", "b.png"])
    for name, image in (("train", "a.png"), ("test", "b.png")):
        write_lines(tmp_path / f"{name}.csv", ["image,caption", f"{image},x"])
    assert list(load_pairs(tmp_path).splits) == ["train", "test"]


def test_several_tables_of_unclear_meaning_are_refused(tmp_path):
    for name in ("one", "two"):
        write_lines(tmp_path / f"{name}.csv", ["image,caption", "a.png,x"])
    with pytest.raises(DataError, match=r"several tables: one\.csv, two\.csv"):
        load_pairs(tmp_path)


def test_images_of_one_stem_get_different_ids(tmp_path):
    write_images(tmp_path, ["a.png", "a.jpg", "x/b.png", "y/b.png"])
    names = ["a.png", "a.jpg", "x/b.png", "y/b.png"]
    write_table(tmp_path, "csv", [(name, "c", "train") for name in names])
    assert list(load_pairs(tmp_path).train.ids) == ["a.png", "a.jpg", "x/b", "y/b"]


def test_columns_that_differ_by_caption_stay_with_their_caption(tmp_path):
    write_images(tmp_path, ["a.png"])
    rows = [("a.png", "x", "train", "ann", 1), ("a.png", "", "train", "bob", 1)]
    rows.append(("a.png", "z", "train", "cat", 1))
    write_table(tmp_path, "csv", rows, ("image", "caption", "split", "author", "year"))
    assert load_pairs(tmp_path).train.extras == [{"author": ["ann", "cat"], "year": "1"}]


def test_kaggle_keeps_its_csv_in_a_text_file(tmp_path):
    write_images(tmp_path / "Images", ["a.png"])
    write_lines(tmp_path / "captions.txt", ["image,caption", "a.png,A dog ."])
    assert sum(map(len, load_pairs(tmp_path))) == 1


def test_a_text_file_is_read_as_a_table_if_the_format_is_given(tmp_path):
    write_images(tmp_path, ["a.png"])
    table = write_lines(tmp_path / "list.txt", ["image|comment", "a.png|A dog, running ."])
    assert load_pairs(table, "table").train.texts == ["A dog, running ."]
    write_lines(tmp_path / "list.json", ["[]"])
    with pytest.raises(DataError, match=r"looked for a \.csv, \.tsv, \.jsonl or \.parquet file"):
        load_pairs(tmp_path / "list.json", "table")


def test_features_beside_the_table_go_by_the_order_of_the_split(tmp_path):
    rows = [{"id": i, "split": "train", "captions": ["x"]} for i in range(3)]
    write_lines(tmp_path / "captions.jsonl", [json.dumps(row) for row in rows])
    np.save(tmp_path / "train_ims.npy", array := features(3))
    pairs = load_pairs(tmp_path)
    np.testing.assert_array_equal(pairs.train.fragments.read(2).features, array[2])
    assert pairs.train.pixels is None
    np.save(tmp_path / "train_ims.npy", features(2))
    with pytest.raises(DataError, match="count-mismatch"):
        load_pairs(tmp_path)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (b'{"image": "a.png", "captions": ["x"]', "bad-json"),
        (b"[1, 2]", "bad-json"),
        (b'{"image": "a.png", "split": "train"}', "missing-column"),
        (b'{"captions": ["x"], "split": "train"}', "missing-column"),
        (b'{"image": "../a.png", "captions": ["x"], "split": "train"}', "unsafe-path"),
        (b'{"image": "/a.png", "captions": ["x"], "split": "train"}', "unsafe-path"),
        (b'{"image": "C:\\\\a.png", "captions": ["x"], "split": "train"}', "unsafe-path"),
        (b'{"image": "a.png", "captions": ["\xff"], "split": "train"}', "bad-encoding"),
        (b'{"id": "b", "image": "c.png", "captions": ["x"], "split": "train"}', "duplicate-id"),
    ],
)
def test_a_fatal_line_is_named_by_its_number(tmp_path, line, kind):
    write_images(tmp_path, ["b.png", "c.png"])
    good = b'{"id": "b", "image": "b.png", "captions": ["x"], "split": "train"}\n'
    (tmp_path / "captions.jsonl").write_bytes(good + line + b"\n")
    with pytest.raises(DataError, match=rf"captions\.jsonl:2.*\[{kind}\]"):
        load_pairs(tmp_path)
    assert "b" in load_pairs(tmp_path, strict=False).train.ids


@pytest.mark.parametrize(
    ("file", "content", "line"),
    [
        ("captions.csv", "picture,caption\nb.png,a dog\n", 1),
        ("captions.jsonl", '{"image": "b.png", "caption": "a dog"}\n{"caption": "a cat"}\n', 2),
    ],
)
def test_a_missing_column_is_named_where_columns_are_named(tmp_path, file, content, line):
    write_images(tmp_path, ["b.png"])
    (tmp_path / file).write_text(content)
    with pytest.raises(DataError, match=rf"{file}:{line}: no column of images") as error:
        load_pairs(tmp_path)
    assert ("first line of the file" in str(error.value)) is (file == "captions.csv")


@pytest.mark.parametrize(
    ("encoding", "named"),
    [
        ("utf-16", "UTF-16, not UTF-8"),
        ("utf-16-be", "looks like UTF-16, not UTF-8"),
        ("utf-16-le", "looks like UTF-16, not UTF-8"),
        ("utf-32", "UTF-32, not UTF-8"),
    ],
)
def test_a_table_in_utf_16_or_utf_32_is_named_once_not_line_by_line(tmp_path, encoding, named):
    write_images(tmp_path, ["b.png"])
    rows = ["image,caption", *(f"b.png,un éléphant {n}" for n in range(9))]
    (tmp_path / "captions.csv").write_bytes("\n".join(rows).encode(encoding))
    with pytest.raises(DataError) as error:
        load_pairs(tmp_path)
    assert str(error.value).count("[bad-encoding]") == 1
    assert f"captions.csv: {named}; save it as UTF-8" in str(error.value)


def test_two_images_with_one_id_are_an_error_without_stated_splits(tmp_path):
    names = ["0.png", "1.png", "2.png"]  # one image per split
    write_images(tmp_path, names)
    for twin in (1, 2):
        rows = [(str(n) if n != twin else "0", name, "x") for n, name in enumerate(names)]
        write_table(tmp_path, "csv", rows, header=("id", "image", "caption"))
        with pytest.raises(DataError, match=rf"captions\.csv:{twin + 2}.*\[duplicate-id\]"):
            load_pairs(tmp_path)


def test_a_csv_row_of_the_wrong_length_is_named(tmp_path):
    write_lines(tmp_path / "captions.csv", ["image,caption,split", "a.png,x,train", "a.png,a,b,c"])
    with pytest.raises(DataError, match=r"captions\.csv:3: 4 fields.*3 columns"):
        load_pairs(tmp_path)


def test_a_missing_column_is_named_with_those_found(tmp_path):
    write_lines(tmp_path / "captions.csv", ["picture,caption", "a.png,x"])
    with pytest.raises(DataError, match=r"no column of images .*found: picture, caption"):
        load_pairs(tmp_path)


def test_a_lost_image_is_skipped(tmp_path):
    write_images(tmp_path, ["a.png"])
    write_table(tmp_path, "csv", [("a.png", "x", "train"), ("gone.png", "y", "train")])
    pairs = load_pairs(tmp_path)
    assert list(pairs.train.ids) == ["a"]
    assert kinds(pairs.problems) == {"missing-image"}


def test_a_table_without_rows_is_fatal(tmp_path):
    write_lines(tmp_path / "captions.csv", ["image,caption"])
    with pytest.raises(DataError, match="no-images"):
        load_pairs(tmp_path)
    (tmp_path / "captions.csv").write_bytes(b"")
    with pytest.raises(DataError, match="no-images"):
        load_pairs(tmp_path)


def test_a_broken_parquet_file_is_fatal(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "captions.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match="bad-parquet"):
        load_pairs(tmp_path)


def test_captions_in_numbered_columns_and_in_a_list_in_a_field_are_read(tmp_path):
    write_images(tmp_path, ["a.png", "b.png"])
    header = ("filename", "caption_1", "caption_2", "split")
    write_table(
        tmp_path, "csv", [("a.png", "one", "two", "train"), ("b.png", "x", "", "train")], header
    )
    assert load_pairs(tmp_path).train.captions == [["one", "two"], ["x"]]
    write_table(tmp_path, "csv", [("a.png", '["one", "two"]', "train")], ("path", "raw", "split"))
    assert load_pairs(tmp_path).train.captions == [["one", "two"]]


def test_an_id_for_each_caption_does_not_divide_the_captions_of_an_image(tmp_path):
    write_images(tmp_path, ["a.png", "b.png"])
    rows = [(1, "a.png", "one", "train"), (2, "a.png", "two", "train"), (3, "b.png", "x", "train")]
    write_table(tmp_path, "csv", rows, ("id", "image", "caption", "split"))
    train = load_pairs(tmp_path).train
    assert list(train.ids) == ["a", "b"]
    assert train.captions == [["one", "two"], ["x"]]


def test_splits_are_understood_in_upper_case_and_in_other_words(tmp_path):
    write_images(tmp_path, ["a.png", "b.png", "c.png"])
    rows = [("a.png", "x", "Training"), ("b.png", "y", "TEST"), ("c.png", "z", "Val")]
    write_table(tmp_path, "csv", rows)
    assert set(load_pairs(tmp_path).splits) == {"train", "test", "val"}


def test_a_table_whose_columns_are_not_known_says_how_to_name_them(tmp_path):
    write_table(tmp_path, "csv", [("a.png", "a dog", "train")], ("which", "what", "split"))
    with pytest.raises(DataError, match="caption_column=NAME"):
        load_pairs(tmp_path)


def test_a_small_set_without_splits_loses_no_more_than_a_broken_test_image(tmp_path):
    from counterfoil.features import with_fragments

    names = [f"{number}.png" for number in range(5)]
    write_images(tmp_path, names)
    rows = [(name, f"picture {name}") for name in names]
    write_table(tmp_path, "csv", rows, ("image", "caption"))
    only = load_pairs(tmp_path).test.pixels[0]
    only.path.write_bytes(b"no image")
    pairs = with_fragments(load_pairs(tmp_path), tmp_path / "cache")
    assert set(pairs.splits) == {"train", "dev"}
    only.path.unlink()  # the images that are there are divided among themselves
    assert set(load_pairs(tmp_path).splits) == {"train", "dev", "test"}


@pytest.mark.parametrize("prefix", ["a", "b", "c", "d", "e", "f"])
def test_images_that_are_missing_are_not_all_that_a_small_set_has_for_training(tmp_path, prefix):
    names = [f"{prefix}{number}.png" for number in range(8)]
    write_images(tmp_path, names[:3])
    rows = [(name, f"a photo of {name}") for name in names]
    table = write_table(tmp_path, "csv", rows, ("image", "caption"))
    sizes = {name: len(split) for name, split in load_pairs(table).splits.items()}
    assert sizes == {"train": 1, "dev": 1, "test": 1}
    (tmp_path / names[0]).unlink()
    sizes = {name: len(split) for name, split in load_pairs(table).splits.items()}
    assert sizes == {"train": 2}


def test_of_two_tables_the_one_with_captions_is_read(tmp_path) -> None:
    (tmp_path / "trip.csv").write_text("image,caption\nbeach.jpg,a beach\n")
    (tmp_path / "prices.csv").write_text("product,price\nlamp,12\n")
    pairs = load_pairs(tmp_path, strict=False)
    assert [text for split in pairs for text in split.texts] == ["a beach"]
    notes = {problem.where: problem.kind for problem in pairs.problems}
    assert notes[str(tmp_path / "prices.csv")] == "unrelated-table"
    named = load_pairs(
        tmp_path,
        options={"image_column": "product", "caption_column": "price"},
        strict=False,
    )
    assert [text for split in named for text in split.texts] == ["12"]


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet"])
def test_a_split_holds_for_all_rows_of_its_image(tmp_path, kind):
    write_images(tmp_path / "images", ["a.png", "b.png", "c.png"])
    rows = [
        ("a.png", "one", ""),
        ("a.png", "two", "test"),
        ("images/a.png", "three", ""),
        ("a.png", "four", " "),
        ("b.png", "one", "train"),
        ("B.PNG", "two", ""),
    ]
    pairs = load_pairs(write_table(tmp_path, kind, rows))
    assert set(pairs.splits) == {"train", "test"}
    assert pairs.test.captions == [["one", "two", "four"], ["three"]]  # as if stated
    assert pairs.train.captions == [["one", "two"]]
    assert not pairs.problems


def test_only_images_without_any_split_are_split_by_their_hash(tmp_path):
    write_images(tmp_path, ["a.png", "b.png", "c.png"])
    rows = [("a.png", "one", "test"), ("a.png", "two", ""), ("c.png", "x", ""), ("c.png", "y", "")]
    pairs = load_pairs(write_table(tmp_path, "csv", rows))
    assert pairs.test.captions[list(pairs.test.ids).index("a")] == ["one", "two"]
    assert [problem.kind for problem in pairs.problems] == ["partly-hashed-split"]
    assert "no split is stated for 1 of 2 images" in pairs.problems[0].message
    several = [("a.png", "one", "train"), ("a.png", "two", "test"), ("a.png", "three", "")]
    pairs = load_pairs(write_table(tmp_path, "csv", several), strict=False)
    assert {"partly-hashed-split", "shared-ids"} <= kinds(pairs.problems)


def test_rows_of_one_id_are_one_image_if_only_some_state_a_split(tmp_path):
    write_images(tmp_path, ["a.png", "b.png"])
    header = ("id", "image", "caption", "split")
    rows = [
        ("7", "a.png", "one", "train"),
        ("7", "a.png", "two", ""),
        ("8", "b.png", "one", "train"),
        ("8", "b.png", "two", ""),
    ]
    train = load_pairs(write_table(tmp_path, "csv", rows, header)).train
    assert (list(train.ids), train.captions) == (["7", "8"], [["one", "two"], ["one", "two"]])
    rows = [(str(number), *row[1:]) for number, row in enumerate(rows)]  # ids of captions
    train = load_pairs(write_table(tmp_path, "csv", rows, header)).train
    assert (list(train.ids), train.captions) == (["a", "b"], [["one", "two"], ["one", "two"]])


def test_a_second_table_of_captions_is_noted_if_another_is_preferred_by_its_name(tmp_path):
    write_table(tmp_path, "csv")
    write_lines(tmp_path / "more.csv", ["image,caption", "a.png,a dog"])
    write_lines(tmp_path / "prices.csv", ["product,price", "lamp,12"])
    notes = load_pairs(tmp_path, strict=False).problems
    assert [note.where for note in notes if note.kind == "unused-table"] == [
        str(tmp_path / "more.csv")
    ]
    assert "the captions are from captions.csv" in str(notes)
    for file in ("captions.csv", "more.csv"):  # which to read was said
        problems = load_pairs(tmp_path / file, strict=False).problems
        assert "unused-table" not in kinds(problems)


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet"])
def test_captions_that_are_a_word_for_a_missing_value_are_counted_and_used(tmp_path, kind):
    write_images(tmp_path, ["a.png", "b.png"])
    texts = ["nan", "NaN", " null ", "a man named nan", "none of them sits"]
    rows = [("a.png", "a dog", "train"), *(("b.png", text, "train") for text in texts)]
    file = write_table(tmp_path, kind, rows)
    pairs = load_pairs(file)
    assert pairs.train.captions == [["a dog"], texts]
    (note,) = pairs.problems
    line = 3 if kind in ("csv", "tsv") else 2
    assert (note.kind, note.where) == ("missing-value", f"{file}:{line}")
    assert "3 captions are only a word for a missing value, the first 'nan'" in note.message
