"""Finding the format of a path, and data sets that have a name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from counterfoil.core.errors import ConfigError, DataError
from counterfoil.data import Pairs, Severity, Split, inspect, load_pairs, named_sources, sources
from tests.data.tiny import write_images, write_lines, write_scan


def test_an_unknown_folder_is_told_what_was_looked_for_and_the_nearest_format(tmp_path):
    write_lines(tmp_path / "train_cap.txt", ["x"])
    with pytest.raises(DataError) as caught:
        load_pairs(tmp_path)
    message = str(caught.value)
    assert "nearest is 'scan' ('train_cap.txt' resembles 'train_caps.txt')" in message
    for name in sources:
        assert f"{name}: {sources[name].looks_for}" in message


def test_a_folder_of_images_alone_is_told_how_captions_are_added(tmp_path):
    write_images(tmp_path, ["train_ims.png", "IMG_1.JPG"])
    (tmp_path / "holidays").mkdir()
    with pytest.raises(
        DataError, match=r"images but no captions: list these in captions\.csv"
    ) as one:
        load_pairs(tmp_path)
    assert "resembles" not in str(one.value)
    (tmp_path / "README.txt").write_text("x")
    with pytest.raises(DataError, match="images but no captions"):
        load_pairs(tmp_path)
    (tmp_path / "notes.md").write_text("x")
    with pytest.raises(DataError) as other:
        load_pairs(tmp_path)
    assert "'train_ims.png' resembles" not in str(other.value)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(DataError, match="images but no captions"):
        load_pairs(tmp_path)
    (tmp_path / "train_cap.txt").write_text("x")
    with pytest.raises(DataError, match=r"'train_cap\.txt' resembles 'train_caps\.txt'"):
        load_pairs(tmp_path)


def test_images_in_subfolders_alone_are_told_the_same(tmp_path):
    write_images(tmp_path / "images" / "more", ["a.png"])
    for name in ("README.md", "notes.txt"):
        (tmp_path / name).write_text("x")
        with pytest.raises(DataError, match="images but no captions"):
            load_pairs(tmp_path)
    (tmp_path / "train_cap.txt").write_text("x")
    with pytest.raises(DataError, match=r"'train_cap\.txt' resembles"):
        load_pairs(tmp_path)


def test_an_image_file_is_no_data_set_and_its_folder_may_be_one(tmp_path):
    write_images(tmp_path, ["IMG_1.JPG"])
    with pytest.raises(DataError, match="it is an image: name the folder that it is in"):
        load_pairs(tmp_path / "IMG_1.JPG")


def test_an_empty_folder_and_a_missing_one_are_told_apart(tmp_path):
    with pytest.raises(DataError, match="the folder is empty"):
        load_pairs(tmp_path)
    with pytest.raises(DataError, match="no such file or folder"):
        load_pairs(tmp_path / "nowhere")


def test_a_misspelt_format_is_named_with_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'karpathy'"):
        load_pairs(tmp_path, "karpaty")


@pytest.mark.parametrize("name", list(sources))
def test_every_source_reports_an_empty_folder_and_never_crashes(tmp_path, name):
    pairs = load_pairs(tmp_path, name, strict=False)
    assert "no-images" in {problem.kind for problem in pairs.problems}
    with pytest.raises(DataError):
        load_pairs(tmp_path, name)


@pytest.mark.parametrize("name", list(sources))
def test_every_source_has_a_summary_and_checked_options(tmp_path, name):
    assert sources.summary(name)
    with pytest.raises(ConfigError, match="has no option 'nonsense'"):
        load_pairs(tmp_path, name, options={"nonsense": 1})


def test_all_problems_are_in_the_pairs_with_their_severity(tmp_path):
    write_scan(tmp_path, "train", 2)
    write_lines(tmp_path / "train_caps.txt", ["a", ""])
    pairs = load_pairs(tmp_path)
    assert {(p.kind, p.severity) for p in pairs.problems} == {
        ("empty-caption", Severity.SKIP),
        ("no-captions", Severity.SKIP),
    }


def test_a_registered_name_is_a_source(tmp_path):
    name = "sentences-for-a-test"

    def make(cache_dir, progress=None, *, size: int = 1) -> Pairs:
        split = Split("train", [str(i) for i in range(size)], [[str(cache_dir)]] * size)
        return Pairs(name, {"train": split})

    if name not in named_sources:
        named_sources.register(name)(make)
    pairs = load_pairs(name, options={"size": 3}, cache_dir=tmp_path)
    assert len(pairs.train) == 3
    assert pairs.train.texts[0] == str(tmp_path)
    assert inspect(name, cache_dir=tmp_path).splits["train"].images == 1
    for options in ({"sizes": 3}, {"cache_dir": "x"}):
        with pytest.raises(ConfigError):
            load_pairs(name, options=options)
    with pytest.raises(DataError, match=f"did you mean '{name}'"):
        load_pairs(name[:-1])


def test_loading_data_does_not_import_torch():
    code = "import sys, counterfoil.data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
