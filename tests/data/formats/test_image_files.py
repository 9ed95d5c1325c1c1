"""Names of images in tables: how they are written, where they lead, and the ids they give."""

from __future__ import annotations

import os

import pytest

from counterfoil.core.errors import DataError
from counterfoil.data import load_pairs
from tests.data.formats.test_table import write_table
from tests.data.tiny import write_images, write_lines


@pytest.mark.parametrize("folder", ["images", "images/more"])
def test_names_with_decomposed_accents_are_found(tmp_path, folder):
    composed, decomposed = "caf\u00e9.png", "cafe\u0301.png"
    write_images(tmp_path / folder, [decomposed])
    write_table(tmp_path, "csv", [(composed, "a dog", "train")])
    (image,) = load_pairs(tmp_path).train.pixels
    assert image.path.samefile(tmp_path / folder / decomposed)


def test_an_image_outside_the_folder_is_found_with_the_option_that_the_error_names(tmp_path):
    write_images(tmp_path / "photos", ["a.png"])
    (tmp_path / "tables").mkdir()
    rows = [(str(tmp_path / "photos" / "a.png"), "a dog", "train")]
    write_table(tmp_path / "tables", "csv", rows)
    with pytest.raises(DataError, match=r"leads out of .* option images=FOLDER \[unsafe-path\]"):
        load_pairs(tmp_path / "tables")
    assert len(load_pairs(tmp_path / "tables", options={"images": tmp_path / "photos"}).train) == 1


@pytest.mark.parametrize(
    "written",
    [
        "sub/a.png",
        r"sub\a.png",
        "./sub/a.png",
        r".\sub\a.png",
        "{folder}/sub/a.png",
        "../d/sub/a.png",
    ],
)
def test_an_image_has_one_id_however_its_path_is_written(tmp_path, written):
    folder = tmp_path / "d"
    write_images(folder / "sub", ["a.png"])
    write_table(folder, "csv", [(written.format(folder=folder), "a dog", "train")])
    assert list(load_pairs(folder).train.ids) == ["sub/a"]


@pytest.mark.parametrize("stored", ["a.png", "b.png"])
@pytest.mark.parametrize("written", ["./a.png", r".\a.png", "{folder}/a.png"])
def test_captions_of_one_image_are_together_however_its_path_is_written(tmp_path, written, stored):
    write_images(tmp_path, [stored, "c.png"])
    names = ["c.png", "a.png", written.format(folder=tmp_path)]
    rows = [(name, f"a dog {number}", "train") for number, name in enumerate(names)]
    write_table(tmp_path, "csv", rows)
    pairs = load_pairs(tmp_path)
    captions = dict(zip(pairs.train.ids, map(list, pairs.train.captions), strict=True))
    together = {"a": ["a dog 1", "a dog 2"]} if stored == "a.png" else {}
    assert captions == {"c": ["a dog 0"], **together}


@pytest.mark.skipif(os.sep != "/", reason="file names have no backslashes there")
def test_a_folder_whose_name_has_a_backslash_is_no_folder_in_another_one(tmp_path):
    names = [r"d\e/a.png", "d/e/a.png"]
    for name in names:
        write_images((tmp_path / name).parent, ["a.png"])
    write_table(tmp_path, "csv", [(name, "a dog", "train") for name in names])
    assert list(load_pairs(tmp_path).train.ids) == [r"d\e/a", "d/e/a"]


@pytest.mark.skipif(os.sep != "/", reason="file names have no backslashes there")
def test_a_backslash_in_the_name_of_a_file_stays_in_its_id(tmp_path):
    write_images(tmp_path, [r"a\b.png"])
    write_table(tmp_path, "csv", [(r"a\b.png", "a dog", "train")])
    assert list(load_pairs(tmp_path).train.ids) == [r"a\b"]


@pytest.mark.parametrize("up", ["../photos/", "./../photos/", "..\\photos\\", "../photos/sub/../"])
def test_a_name_that_starts_at_the_table_is_found_in_the_folder_of_images(tmp_path, up):
    write_images(tmp_path / "photos", ["a.png"])
    (tmp_path / "tables").mkdir()
    write_table(tmp_path / "tables", "csv", [(f"{up}a.png", "a dog", "train")])
    with pytest.raises(DataError, match=r"leads out of .* option images=FOLDER \[unsafe-path\]"):
        load_pairs(tmp_path / "tables")
    pairs = load_pairs(tmp_path / "tables", options={"images": tmp_path / "photos"})
    assert pairs.train.pixels[0].path == tmp_path / "photos" / "a.png"
    with pytest.raises(DataError, match="leads out of"):
        load_pairs(tmp_path / "tables", options={"images": tmp_path / "tables"})


@pytest.mark.parametrize(
    ("named", "stored"),
    [
        ("a.jpg", "images/a.JPG"),
        ("A.PNG", "a.png"),
        ("a", "images/a.png"),
        ("photos/images/a.png", "images/a.png"),
        ("images\\a.png", "images/a.png"),
        ("./images/a.png", "images/a.png"),
        ("a.png", "airport/north/a.png"),
        ("my photo.png", "images/my photo.png"),
    ],
)
def test_an_image_is_found_though_its_name_is_written_otherwise(tmp_path, named, stored):
    folder = tmp_path / "photos"
    write_images((folder / stored).parent, ["x.png"])
    (folder / stored).parent.joinpath("x.png").rename(folder / stored)
    write_table(folder, "csv", [(named, "a dog", "train")])
    pairs = load_pairs(folder / "captions.csv")
    assert pairs.train.pixels[0].path == folder / stored
    assert not pairs.problems


def test_an_absolute_name_inside_the_folder_is_read_and_one_outside_is_not(tmp_path):
    write_images(tmp_path / "photos", ["a.png"])
    write_images(tmp_path / "other", ["b.png"])
    inside = str(tmp_path / "photos" / "a.png")
    write_table(tmp_path / "photos", "csv", [(inside, "a dog", "train")])
    assert load_pairs(tmp_path / "photos").train.pixels[0].name == "a.png"
    write_table(tmp_path / "photos", "csv", [(str(tmp_path / "other" / "b.png"), "x", "train")])
    with pytest.raises(DataError, match="unsafe-path"):
        load_pairs(tmp_path / "photos")


@pytest.mark.parametrize(
    "name",
    [
        " ../b.png",
        "\t../b.png",
        " {folder}/b.png",
        "\u3000{folder}/b.png",
        "tables/{folder}/b.png",
        "./tables/{folder}/b.png",
    ],
)
def test_no_spelling_of_a_name_leads_out_of_the_folder(tmp_path, name):
    write_images(tmp_path / "tables", ["a.png"])
    write_images(tmp_path, ["b.png"])
    rows = [("a.png", "a dog", "train"), (name.format(folder=tmp_path), "x", "train")]
    write_table(tmp_path / "tables", "csv", rows)
    assert [image.name for image in load_pairs(tmp_path / "tables").train.pixels] == ["a.png"]


def test_a_name_that_several_folders_have_is_not_guessed(tmp_path):
    for place in ("one", "two"):
        write_images(tmp_path / place, ["a.png"])
    write_images(tmp_path, ["b.png"])
    write_table(tmp_path, "csv", [("a.png", "a dog", "train"), ("b.png", "a cat", "train")])
    pairs = load_pairs(tmp_path / "captions.csv")
    assert list(pairs.train.ids) == ["b"]
    assert "several have that name" in str(pairs.problems[0])
    write_images(tmp_path / "one", ["a.jpg"])
    (tmp_path / "two" / "a.png").unlink()
    write_table(tmp_path, "csv", [("a", "a dog", "train"), ("b", "a cat", "train")])
    pairs = load_pairs(tmp_path / "captions.csv")
    assert list(pairs.train.ids) == ["b"]
    assert "several have that name" in str(pairs.problems[0])


@pytest.mark.parametrize(
    ("stored", "named", "found"),
    [
        ("train/a.png", "test/a.png", False),
        ("train/a.png", "https://example.org/a.png", False),
        ("train/a.png", "a.png", True),
        ("photos/Train/a.png", "train/a.png", True),
        ("train/a.png", "data/train/a.png", True),
        ("a.png", "data/train/a.png", True),
        ("images/new/a.png", "images/a.png", True),
        ("images/new/a.png", "a", True),
        ("images/new/a.png", "images/A", True),
        ("train/new/a.png", "train/a.png", True),
        ("Flickr30k images/a.png", "flickr30k-images/a.png", True),
        ("images-1/a.png", "images-2/a.png", False),
        ("new/train/old/a.png", "test/train/a.png", False),
        ("train/a.png", "data\\test\\a.png", False),
    ],
)
def test_a_file_in_another_folder_than_its_name_says_is_another_image(
    tmp_path, stored, named, found
):
    write_images(tmp_path / stored.rpartition("/")[0], ["a.png"])
    write_images(tmp_path, ["b.png"])
    write_table(tmp_path, "csv", [(named, "a dog", "train"), ("b.png", "a cat", "train")])
    pairs = load_pairs(tmp_path / "captions.csv")
    assert len(pairs.train) == 1 + found
    assert found or "in another folder than the name says" in str(pairs.problems)


def test_one_file_is_one_image_however_its_name_is_written(tmp_path):
    write_images(tmp_path, ["p1.jpg", "p2.jpg"])
    rows = ["P1.JPG,a dog,train", "p1.jpg,a cat,train", "p1,a cow,train", "p2.jpg,a pig,train"]
    write_lines(tmp_path / "captions.csv", ["image,caption,split", *rows])
    train = load_pairs(tmp_path)["train"]
    assert list(train.ids) == ["P1", "p2"]
    assert [list(captions) for captions in train.captions] == [
        ["a dog", "a cat", "a cow"],
        ["a pig"],
    ]


def test_files_whose_names_differ_in_case_are_different_images(tmp_path):
    write_images(tmp_path, ["p1.jpg", "P1.jpg"])
    if len(list(tmp_path.iterdir())) < 2:
        pytest.skip("this file system ignores case")
    rows = ["P1.jpg,a dog,train", "p1.jpg,a cat,train"]
    write_lines(tmp_path / "captions.csv", ["image,caption,split", *rows])
    assert list(load_pairs(tmp_path)["train"].ids) == ["P1", "p1"]
