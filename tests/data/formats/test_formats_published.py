"""Karpathy's JSON, the original Flickr8k files, COCO's caption files."""

from __future__ import annotations

import json
import re

import pytest

from counterfoil.core.errors import ConfigError, DataError
from counterfoil.data import load_pairs
from tests.data.tiny import kinds, write_images, write_json, write_lines


def karpathy(folder, name="dataset_coco.json", **changes):
    images = [
        {
            "filepath": "val2014",
            "filename": f"{i}.jpg",
            "cocoid": 500 + i,
            "imgid": i,
            "split": split,
            "sentids": [2 * i, 2 * i + 1],
            "sentences": [
                {"raw": f"Raw {k}, {i}.", "tokens": ["raw"], "imgid": i, "sentid": 2 * i + k}
                for k in range(i % 2 + 1)
            ],
        }
        for i, split in enumerate(["train", "restval", "val", "test"])
    ]
    images[0].update(changes)
    write_images(folder, [f"val2014/{i}.jpg" for i in range(4)])
    return write_json(folder / name, {"images": images, "dataset": "coco"})


def test_karpathy_splits_are_read_with_restval_in_train(tmp_path):
    file = karpathy(tmp_path)
    for path in (tmp_path, file):
        pairs = load_pairs(path)
        assert list(pairs.train.ids) == ["500", "501"]
        assert list(pairs.splits) == ["train", "dev", "test"]
        assert pairs.train.captions[1] == ["Raw 0, 1.", "Raw 1, 1."]
        assert pairs.test.pixels[0].read()
        assert pairs.train.extras[1] == {
            "filepath": "val2014", "cocoid": 501, "imgid": 1, "sentids": [2, 3]
        }  # fmt: skip


def test_restval_can_be_dropped_or_kept_apart(tmp_path):
    karpathy(tmp_path)
    assert list(load_pairs(tmp_path, options={"restval": "drop"}).train.ids) == ["500"]
    assert list(load_pairs(tmp_path, options={"restval": "keep"})["restval"].ids) == ["501"]
    with pytest.raises(ConfigError, match="did you mean 'drop'"):
        load_pairs(tmp_path, options={"restval": "drops"})
    with pytest.raises(ConfigError, match="no option 'rest'; did you mean 'restval'"):
        load_pairs(tmp_path, options={"rest": "drop"})


def test_a_flickr_image_is_called_by_its_file_name(tmp_path):
    record = {"filename": "12_ab.jpg", "split": "train", "imgid": 3, "sentences": [{"raw": "x"}]}
    write_json(tmp_path / "dataset_flickr8k.json", {"images": [record]})
    pairs = load_pairs(tmp_path)
    assert list(pairs.train.ids) == ["12_ab"]
    assert pairs.train.pixels is None
    assert pairs.train.extras == [{"imgid": 3, "filename": "12_ab.jpg"}]
    assert "no-image-folder" in kinds(pairs.problems)
    write_images(tmp_path / "elsewhere", ["12_ab.jpg"])
    with_images = load_pairs(tmp_path, options={"images": tmp_path / "elsewhere"})
    assert with_images.train.pixels[0].name == "12_ab.jpg"


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"filename": "../../secret.jpg"}, "unsafe-path"),
        ({"filename": "/etc/passwd", "filepath": None}, "unsafe-path"),
        ({"cocoid": 501}, "duplicate-id"),
        ({"sentences": [{}]}, "bad-json"),
        ({"split": None}, "bad-json"),
    ],
)
def test_faults_of_karpathy_files_are_fatal(tmp_path, changes, kind):
    karpathy(tmp_path, **changes)
    with pytest.raises(DataError, match=kind):
        load_pairs(tmp_path)


def test_a_dropped_caption_takes_its_sentence_id_with_it(tmp_path):
    sentences = [{"raw": "", "sentid": 7}, {"raw": "good", "sentid": 8}]
    karpathy(tmp_path, sentences=sentences)
    train = load_pairs(tmp_path).train
    assert (train.captions[0], train.extras[0]["sentids"]) == (["good"], [8])


def test_broken_json_is_named_with_its_line(tmp_path):
    (tmp_path / "dataset_coco.json").write_text('{"images": [\n{"a": }]}')
    with pytest.raises(DataError, match=r"dataset_coco\.json:2: not JSON"):
        load_pairs(tmp_path)


def flickr8k(folder, text="Flickr8k_text"):
    lines = [f"{i}.jpg#{k}\tA dog , {i}#{k} ." for i in range(4) for k in (1, 0)]
    write_lines(folder / text / "Flickr8k.token.txt", lines)
    for split, names in {"train": ["1.jpg", "0.jpg"], "dev": ["2.jpg"], "test": ["3.jpg"]}.items():
        write_lines(folder / text / f"Flickr_8k.{split}Images.txt", names)
    write_images(folder / "Flicker8k_Dataset", [f"{i}.jpg" for i in range(4)])


@pytest.mark.parametrize("text", ["Flickr8k_text", "."])
def test_the_original_flickr8k_files_are_read(tmp_path, text):
    flickr8k(tmp_path, text)
    pairs = load_pairs(tmp_path)
    assert list(pairs.train.ids) == ["1", "0"]
    assert pairs.dev.captions[0] == ["A dog , 2#0 .", "A dog , 2#1 ."]
    assert pairs.test.pixels[0].name == "3.jpg"
    assert not pairs.problems


def test_a_flickr8k_token_file_may_be_named_itself(tmp_path):
    flickr8k(tmp_path)
    pairs = load_pairs(tmp_path / "Flickr8k_text/Flickr8k.token.txt")
    assert pairs.train.pixels is not None


def test_lemmas_are_an_option(tmp_path):
    flickr8k(tmp_path)
    lemma = write_lines(tmp_path / "Flickr8k_text/Flickr8k.lemma.token.txt", ["1.jpg#0\tdog"])
    pairs = load_pairs(tmp_path, options={"captions": lemma}, strict=False)
    assert pairs.train.captions[0] == ["dog"]
    assert "no-captions" in kinds(pairs.problems)


def test_flickr8k_images_in_no_list_are_left_out_and_said_so(tmp_path):
    flickr8k(tmp_path)
    with (tmp_path / "Flickr8k_text/Flickr8k.token.txt").open("a") as file:
        file.write("9.jpg.1#0\tnobody lists me\n")
    pairs = load_pairs(tmp_path)
    assert sum(map(len, pairs)) == 4
    assert kinds(pairs.problems) == {"unlisted-images"}


def test_flickr8k_without_lists_is_split_by_a_hash(tmp_path):
    flickr8k(tmp_path)
    for file in (tmp_path / "Flickr8k_text").glob("*Images.txt"):
        file.unlink()
    pairs = load_pairs(tmp_path)
    assert sum(map(len, pairs)) == 4
    assert kinds(pairs.problems) == {"hashed-split"}


def test_faults_of_flickr8k_files_are_found_together(tmp_path):
    flickr8k(tmp_path)
    with (tmp_path / "Flickr8k_text/Flickr8k.token.txt").open("ab") as file:
        file.write(b"no tab here\n0.jpg#2\tcaf\xe9\n")
    write_lines(tmp_path / "Flickr8k_text/Flickr_8k.devImages.txt", ["2.jpg", "2.jpg", "7.jpg"])
    (tmp_path / "Flicker8k_Dataset/3.jpg").unlink()
    result = kinds(load_pairs(tmp_path, strict=False).problems)
    expected = {"bad-line", "bad-encoding", "duplicate-id", "no-captions", "missing-image"}
    assert expected <= result


def coco(folder, annotations="annotations"):
    for split, ids in {"train2017": [1, 2], "val2017": [3]}.items():
        content = {
            "info": {},
            "images": [
                {"id": i, "file_name": f"{i:012d}.jpg", "height": 4, "width": 6} for i in ids
            ],
            "annotations": [
                {"id": 10 * i + k, "image_id": i, "caption": f"c {k} of {i}"}
                for k in range(3)
                for i in ids
                if k < i
            ],
        }
        write_json(folder / annotations / f"captions_{split}.json", content)
        write_images(folder / split, [f"{i:012d}.jpg" for i in ids])


@pytest.mark.parametrize("annotations", ["annotations", "."])
def test_coco_caption_files_are_read(tmp_path, annotations):
    coco(tmp_path, annotations)
    pairs = load_pairs(tmp_path)
    assert list(pairs.splits) == ["train", "dev"]
    assert [list(c) for c in pairs.train.captions] == [["c 0 of 1"], ["c 0 of 2", "c 1 of 2"]]
    assert pairs.train.extras[1] == {"height": 4, "width": 6, "annotation_ids": [20, 21]}
    assert pairs.dev.pixels[0].name == "000000000003.jpg"
    assert pairs["val"] is pairs.dev


def test_one_coco_file_is_one_split(tmp_path):
    coco(tmp_path)
    pairs = load_pairs(tmp_path / "annotations/captions_val2017.json")
    assert list(pairs.splits) == ["dev"]
    assert pairs.dev.pixels is not None


def test_an_annotation_of_an_unknown_image_is_fatal(tmp_path):
    content = {"images": [], "annotations": [{"id": 1, "image_id": 9, "caption": "x"}]}
    write_json(tmp_path / "captions_train2017.json", content)
    with pytest.raises(DataError, match="no image has the id 9"):
        load_pairs(tmp_path)


def test_two_coco_images_of_one_id_are_named_by_their_files(tmp_path):
    coco(tmp_path)
    path = tmp_path / "annotations/captions_train2017.json"
    content = json.loads(path.read_text())
    content["images"][1]["id"] = 1
    write_json(path, content)
    message = (
        f"{path}: image '1' (000000000002.jpg): the id is taken by the image at "
        f"{path}: image '1' (000000000001.jpg)"
    )
    with pytest.raises(DataError, match=re.escape(message)):
        load_pairs(tmp_path)


def test_a_null_caption_of_coco_is_left_out_and_counted(tmp_path):
    coco(tmp_path)
    path = tmp_path / "annotations/captions_train2017.json"
    content = json.loads(path.read_text())
    content["annotations"][1]["caption"] = None
    write_json(path, content)
    pairs = load_pairs(tmp_path)
    assert list(pairs.train.captions[1]) == ["c 1 of 2"]
    assert pairs.train.extras[1]["annotation_ids"] == [21]
    (problem,) = pairs.problems
    assert problem.kind == "empty-caption"
    assert problem.where == f"{path}: image '2', caption 1"
    for faulty in ({"image_id": 2}, {"image_id": 2, "caption": 5}, None):
        content["annotations"][1] = faulty
        write_json(path, content)
        with pytest.raises(DataError, match=r"annotations\[1\]: expected an object"):
            load_pairs(tmp_path)
