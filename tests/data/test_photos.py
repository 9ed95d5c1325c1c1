"""Folders of photos without captions: which folders are such, and the ids of their images."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from PIL import Image

from counterfoil.core.errors import DataError
from counterfoil.data import load_pairs
from counterfoil.data.pairs import Severity
from counterfoil.data.photos import has_only_photos, read_photos

NAMES = ("beach.jpg", "more/dog.PNG", "more/dog.webp", "more/.hidden.jpg", "scan.JFIF")
HIDDEN = ".thumbnails/beach.jpg"


@pytest.fixture
def folder(tmp_path) -> Path:
    for name in (*NAMES, HIDDEN):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), "green").save(path, "PNG")
    return tmp_path / "photos"


def test_ids_are_paths_without_endings_that_are_not_needed(folder) -> None:
    split = read_photos(folder)["all"]
    assert list(split.ids) == ["beach", "more/dog.PNG", "more/dog.webp", "scan"]
    assert [list(captions) for captions in split.captions] == [[], [], [], []]


def test_a_file_whose_name_is_no_text_is_left_out_with_its_reason(folder) -> None:
    try:
        (folder / os.fsdecode(b"bad\xff.jpg")).write_bytes((folder / "beach.jpg").read_bytes())
    except OSError:
        pytest.skip("this file system refuses such names")
    pairs = read_photos(folder)
    assert list(pairs["all"].ids) == ["beach", "more/dog.PNG", "more/dog.webp", "scan"]
    (problem,) = pairs.problems
    assert (problem.kind, problem.severity) == ("bad-text", Severity.SKIP)
    assert "bad\\udcff.jpg" in str(problem)
    for name in NAMES:
        (folder / name).unlink()
    with pytest.raises(DataError, match=r"no images .*the path is not UTF-8 text"):
        read_photos(folder)


def test_no_two_images_have_the_same_id(tmp_path) -> None:
    for name in ("a.jpg", "a.png", "a.jpg.png"):
        Image.new("RGB", (8, 8), "green").save(tmp_path / name, "PNG")
    assert list(read_photos(tmp_path)["all"].ids) == ["a.jpg", "a.jpg.png", "a.png"]


def test_a_table_of_captions_gives_the_same_ids(folder) -> None:
    ids = list(read_photos(folder)["all"].ids)
    lines = [f"{name},a green box" for name in NAMES if "hidden" not in name]
    (folder / "captions.csv").write_text("\n".join(["image,caption", *lines]) + "\n")
    assert sorted(image for split in load_pairs(folder) for image in split.ids) == ids


def test_folders_in_which_tables_look_for_images_are_no_part_of_ids(tmp_path) -> None:
    for name in ("images/dog.png", "images/more/cat.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), "green").save(tmp_path / name)
    ids = list(read_photos(tmp_path)["all"].ids)
    assert ids == ["dog", "more/cat"]
    table = "image,caption,split\ndog.png,a dog,train\nmore/cat.png,a cat,train\n"
    (tmp_path / "captions.csv").write_text(table)
    assert list(load_pairs(tmp_path)["train"].ids) == ids
    (tmp_path / "captions.csv").unlink()
    Image.new("RGB", (8, 8), "red").save(tmp_path / "dog.png")
    assert list(read_photos(tmp_path)["all"].ids) == ["dog", "images/dog", "images/more/cat"]


def test_only_folders_that_no_format_has(folder, tmp_path) -> None:
    assert has_only_photos(str(folder))
    assert not has_only_photos(str(folder), "table")
    assert not has_only_photos(str(folder / "beach.jpg"))
    assert not has_only_photos(str(tmp_path / "missing"))
    assert not has_only_photos("scenes")
    assert not has_only_photos("https://example.org/photos")
    (folder / "captions.csv").write_text("image,caption\nbeach.jpg,a green box\n")
    assert not has_only_photos(str(folder))


def test_without_any_image_it_says_what_it_looked_for(tmp_path) -> None:
    (tmp_path / "notes.md").write_text("a nice trip")
    assert not has_only_photos(str(tmp_path))
    with pytest.raises(DataError, match=r"no images \(looked for \.avif"):
        read_photos(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("prices.csv", "product,price\nlamp,12\n"),
        ("empty.csv", ""),
        ("log.jsonl", '{"level": "info"}\n'),
        ("orders.tsv", "id\tsum\n1\t2\n"),
    ],
)
def test_a_table_without_captions_is_passed_over_with_a_note(folder, name: str, text: str) -> None:
    (folder / name).write_text(text)
    assert has_only_photos(str(folder))
    (note,) = read_photos(folder).problems
    assert note.where == str(folder / name)
    assert note.severity is Severity.NOTE
    assert "not used as captions" in note.message


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("trip.csv", "image,caption\nbeach.jpg,a green box\n"),
        ("captions.csv", "image,beschreibung\nbeach.jpg,ein Kasten\n"),
        ("train.csv", "image,beschreibung\nbeach.jpg,ein Kasten\n"),
    ],
)
def test_a_table_of_captions_is_not_passed_over(folder, name: str, text: str) -> None:
    """Nor is one whose name says that it has captions: then its columns are a mistake."""
    (folder / "prices.csv").write_text("product,price\nlamp,12\n")
    (folder / name).write_text(text)
    assert not has_only_photos(str(folder))


def test_options_of_the_data_say_that_a_table_has_captions(folder) -> None:
    (folder / "trip.csv").write_text("datei,beschreibung\np0.png,ein Hund\n", encoding="utf-8")
    assert has_only_photos(str(folder))
    assert not has_only_photos(str(folder), options={"caption_column": "beschreibung"})


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("trip.csv", "image,caption\np0.png,ein Hund\n".encode("utf-16")),
        ("trip.csv", "image,caption\np0.png,für\n".encode("latin-1")),
        ("trip.jsonl", b'{"image": "p0.png", "capt'),
        ("trip.jsonl", b'{"version": 1}\n{"image": "p0.png", "caption": "a dog"}\n'),
    ],
)
def test_a_damaged_table_may_have_captions(folder, name, content) -> None:
    (folder / name).write_bytes(content)
    assert not has_only_photos(str(folder))


def test_a_folder_may_be_named_by_text_and_one_that_is_not_there_is_named(folder, tmp_path) -> None:
    assert list(read_photos(str(folder))["all"].ids) == list(read_photos(folder)["all"].ids)
    with pytest.raises(DataError, match="nowhere: no such folder"):
        read_photos(str(tmp_path / "nowhere"))
