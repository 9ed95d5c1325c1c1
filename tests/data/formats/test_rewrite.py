"""Captions corrected in a data set's own files: read again, only they have changed."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from counterfoil.core.errors import DataError
from counterfoil.data.formats.rewrite import can_rewrite, caption_files, rewrite
from counterfoil.data.formats.text_edits import CaptionChange
from counterfoil.data.load import load_pairs, open_source
from counterfoil.data.pairs import ProblemLog

CAPTIONS = {
    "a": ["a dog, running", 'a "brown" dog', "ein Hund für Ärzte", "a dog, running"],
    "b": ["two cats", "cats asleep"],
    "c": ["a cow"],
    "d": ["a horse in a field"],
    "e": ["a red car", "a car"],
}
FIXED = 'the "new", text — größer; =1'


def csv_text(end="\n", quote_all=False, delimiter=",", bom="") -> str:
    def cell(text: str) -> str:
        plain = not quote_all and not any(sign in text for sign in f'{delimiter}"')
        return text if plain else '"' + text.replace('"', '""') + '"'

    rows = [["image", "caption", "rater", "note"]]
    rows += [
        [f"{name}.png", text, str(n), "x y"]
        for name, texts in CAPTIONS.items()
        for n, text in enumerate(texts)
    ]
    return bom + end.join(delimiter.join(map(cell, row)) for row in rows) + end


def json_lines(one_per_line: bool, **style) -> str:
    lines = []
    for name, texts in CAPTIONS.items():
        about = {"zeta": [1, 2.50, {"k": None}], "id": name, "file_name": f"{name}.png"}
        if one_per_line:
            lines += [json.dumps({**about, "caption": text}, **style) for text in texts]
        else:
            lines.append(json.dumps({**about, "captions": texts, "last": True}, **style))
    return "\n".join(lines)  # no line feed at the end


def numbered(kind: str) -> str:
    names = [f"caption_{n}" for n in range(1, 5)]
    rows = []
    for name, texts in CAPTIONS.items():
        cells = [*texts, *[""] * (4 - len(texts))]
        cells = [*cells[1:], cells[0]] if name == "b" else cells  # gaps are no captions
        rows.append({"image": f"{name}.png", **dict(zip(names, cells, strict=True)), "more": 7})
    if kind == "jsonl":
        return "".join(json.dumps(row) + "\n" for row in rows)
    quoted = [",".join('"' + str(v).replace('"', '""') + '"' for v in row.values()) for row in rows]
    return "\n".join([",".join(rows[0]), *quoted]) + "\n"


def cells_with_lists() -> str:
    lines = ["image,captions,extra"]
    for name, texts in CAPTIONS.items():
        listed = json.dumps(texts, ensure_ascii=False).replace('"', '""')
        lines.append(f'{name}.png,"{listed}",1')
    return "\n".join(lines) + "\n"


def karpathy(**style) -> str:
    images, number = [], 0
    for name, texts in CAPTIONS.items():
        sentences = []
        for text in texts:
            tokens = text.lower().split()
            sentences.append({"tokens": tokens, "raw": text, "imgid": 1, "sentid": number})
            number += 1
        ids = [one["sentid"] for one in sentences]
        about = {"sentids": ids, "imgid": 1, "split": "train", "filename": f"{name}.png"}
        images.append({**about, "sentences": sentences, "other": {"deep": [1.0]}})
    return json.dumps({"images": images, "dataset": "small"}, **style)


def coco(**style) -> str:
    images = [{"id": n, "file_name": f"{name}.png", "width": 8} for n, name in enumerate(CAPTIONS)]
    pairs = [(n, text) for n, texts in enumerate(CAPTIONS.values()) for text in texts]
    pairs = pairs[::2] + pairs[1::2]  # captions of an image are not side by side
    annotations = [
        {"image_id": image, "id": 100 + n, "caption": text, "extra": "é"}
        for n, (image, text) in enumerate(pairs)
    ]
    return json.dumps({"info": {}, "images": images, "annotations": annotations}, **style)


def tokens(end="\n") -> str:
    return "".join(
        f"{name}.png#{n}\t{text}{end}"
        for name, texts in CAPTIONS.items()
        for n, text in enumerate(texts)
    )


TSV = csv_text(delimiter="\t").replace('"', "") + 'e.png\ta lone " quote\t2\tx y\n'
LAYOUTS = {
    "csv": ("captions.csv", csv_text()),
    "csv with its separator stated": (
        "captions.csv",
        csv_text("\r\n", delimiter=";", bom="\ufeffsep=;\r\n"),
    ),
    "csv, every field quoted": ("captions.csv", csv_text(quote_all=True)),
    "csv of Windows": ("captions.csv", csv_text("\r\n", delimiter=";", bom="\ufeff")),
    "csv of lists": ("captions.csv", cells_with_lists()),
    "csv, numbered": ("captions.csv", numbered("csv")),
    "tsv": ("captions.tsv", csv_text(delimiter="\t")),
    "tsv without quotes": ("captions.tsv", TSV),
    "kaggle": ("captions.txt", csv_text()),
    "jsonl": ("captions.jsonl", json_lines(one_per_line=True)),
    "jsonl of lists": ("captions.jsonl", json_lines(one_per_line=False, ensure_ascii=False)),
    "jsonl, compact": ("captions.jsonl", json_lines(False, separators=(",", ":")) + "\n"),
    "jsonl, numbered": ("captions.jsonl", numbered("jsonl")),
    "karpathy": ("dataset_small.json", karpathy()),
    "karpathy, indented": ("dataset_small.json", karpathy(indent=2, ensure_ascii=False)),
    "coco": ("captions_train2017.json", coco()),
    "coco, indented": ("captions_train2017.json", coco(indent=1)),
    "flickr8k": ("Flickr8k.token.txt", tokens()),
    "flickr8k of Windows": ("Flickr8k.token.txt", tokens("\r\n")),
}


def captions_of(path: Path, images: Path) -> dict[str, list[str]]:
    pairs = load_pairs(path, options={"images": str(images)})
    return {
        Path(split.pixels[n].name).stem: list(split.captions[n])
        for split in pairs
        for n in range(len(split))
    }


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for name in CAPTIONS:
        Image.new("RGB", (8, 8)).save(folder / f"{name}.png")
    return folder


@pytest.fixture(params=LAYOUTS, ids=list(LAYOUTS))
def data(request, tmp_path) -> Path:
    name, text = LAYOUTS[request.param]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_bytes(text.encode())
    return tmp_path / "data" / name


def corrected(path: Path, photos: Path, changes):
    log = ProblemLog()
    source = open_source(path, None, {"images": str(photos)}, log)
    draft = source.read(path, log)
    log.refuse_fatal()
    assert can_rewrite(source, draft)
    assert caption_files(draft) == [path]
    ids = {Path(item.image.name).stem: (item.split, item.id) for item in draft.items}
    wanted = [CaptionChange(*ids[image], number, text, new) for image, number, text, new in changes]
    return rewrite(source, draft, wanted)


def write(result, path: Path, folder: Path) -> Path:
    folder.mkdir()
    (folder / path.name).write_bytes(result.copies[0].edited().encode())
    return folder / path.name


def test_only_the_decided_captions_change(data, photos, tmp_path) -> None:
    before = captions_of(data, photos)
    changes = [
        ("a", 1, before["a"][1], FIXED),
        ("a", 3, before["a"][3], None),
        ("b", 0, before["b"][0], None),
        ("d", 0, before["d"][0], "ein neuer Satz ü"),
        ("e", 1, before["e"][1], None),
    ]
    result = corrected(data, photos, changes)
    assert (result.missing, result.emptied) == ([], [])
    expected = {name: list(texts) for name, texts in before.items()}
    for name, number, _, new in sorted(changes, key=lambda change: -change[1]):
        expected[name][number : number + 1] = [] if new is None else [new]
    assert captions_of(write(result, data, tmp_path / "out"), photos) == expected


def test_without_changes_the_copy_has_the_same_bytes(data, photos) -> None:
    result = corrected(data, photos, [])
    assert result.copies[0].edited().encode() == data.read_bytes()
    assert result.copies[0].diff() == ""


def test_a_change_and_its_reverse_give_the_original(data, photos, tmp_path) -> None:
    """Nothing beside a caption moves: no field, no quote, no line end."""
    before = captions_of(data, photos)
    there = corrected(data, photos, [("c", 0, "a cow", "a bull")])
    path = write(there, data, tmp_path / "there")
    back = corrected(path, photos, [("c", 0, "a bull", "a cow")])
    assert back.copies[0].edited().encode() == data.read_bytes()
    assert captions_of(path, photos) == {**before, "c": ["a bull"]}


def test_an_image_may_lose_every_caption(data, photos, tmp_path) -> None:
    before = captions_of(data, photos)
    changes = [(name, n, text, None) for name in "ac" for n, text in enumerate(before[name])]
    result = corrected(data, photos, changes)
    assert len(result.emptied) == 2
    path = write(result, data, tmp_path / "out")
    assert captions_of(path, photos) == {k: v for k, v in before.items() if k not in "ac"}
    every = [
        (name, n, text, None) for name, texts in before.items() for n, text in enumerate(texts)
    ]
    gone = corrected(data, photos, every)
    assert len(gone.emptied) == len(before)


def test_a_caption_that_the_data_lack_is_reported(data, photos) -> None:
    changes = [("c", 0, "a cow that nobody wrote", "x")]
    result = corrected(data, photos, changes)
    assert len(result.missing) == 1
    assert result.copies[0].edited().encode() == data.read_bytes()


@pytest.mark.skipif(shutil.which("patch") is None, reason="no patch on this machine")
def test_the_diff_makes_the_copy_from_the_original(data, photos, tmp_path) -> None:
    before = captions_of(data, photos)
    changes = [("a", 0, before["a"][0], FIXED), ("d", 0, before["d"][0], None)]
    result = corrected(data, photos, changes)
    shutil.copy(data, tmp_path / "patched")
    done = subprocess.run(
        ["patch", "--binary", str(tmp_path / "patched")],
        input=result.copies[0].diff().encode(),
        capture_output=True,
    )
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "patched").read_bytes() == result.copies[0].edited().encode()


def test_other_fields_follow_the_captions_of_karpathys_file(photos, tmp_path) -> None:
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "dataset_small.json"
    path.write_text(karpathy())
    changes = [("a", 1, CAPTIONS["a"][1], "A new Dog, here."), ("a", 0, CAPTIONS["a"][0], None)]
    tree = json.loads(corrected(path, photos, changes).copies[0].edited())
    first = tree["images"][0]
    assert first["sentids"] == [1, 2, 3]
    assert [one["sentid"] for one in first["sentences"]] == [1, 2, 3]
    assert first["sentences"][0]["tokens"] == ["a", "new", "dog", "here"]
    assert first["other"] == {"deep": [1.0]}
    assert tree["images"][1:] == json.loads(karpathy())["images"][1:]


def test_a_correction_that_looks_like_a_list_stays_a_text(photos, tmp_path) -> None:
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "captions.csv"
    path.write_text(csv_text())
    result = corrected(path, photos, [("c", 0, "a cow", '["a", "b"]')])
    assert captions_of(write(result, path, tmp_path / "out"), photos)["c"] == ['["a", "b"]']


def test_a_long_line_is_shown_caption_by_caption(photos, tmp_path) -> None:
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "dataset_small.json"
    path.write_text(karpathy().replace('"small"', '"' + "s" * 9000 + '"'))
    diff = corrected(path, photos, [("c", 0, "a cow", "a bull")]).copies[0].diff()
    assert "-a cow\n+a bull\n" in diff
    assert len(diff) < 500


def table(tmp_path: Path, text: str, name: str = "captions.csv") -> Path:
    (tmp_path / "data").mkdir(exist_ok=True)
    path = tmp_path / "data" / name
    path.write_bytes(text.encode())
    return path


QUOTINGS = {
    "a note in quotes": ('a.png,%s,"x y"\n', "two dogs", "a fox", "a fox"),
    "only captions in quotes": ('a.png,"%s",x\n', "two dogs", "a fox", "a fox"),
    "quotes that are needed": ("a.png,%s,x\n", "two dogs", "a, b", '"a, b"'),
    "quotes that are needed no more": ('a.png,"%s",x\n', "a, b", "a b", "a b"),
    "quotes within a plain cell": ("a.png,%s,x\n", 'a "big" dog', 'a "small" dog', 'a "small" dog'),
    "a lone carriage return in a note": ('a.png,%s,"x\ry"\n', "two dogs", "a fox", "a fox"),
    "lines in the note, no end": ('a.png,%s,"l1\nl2"', "two dogs", "a fox", "a fox"),
    "lines in the note, then an end": ('a.png,%s,"l1\r\nl2"\r\n', "two dogs", "a fox", "a fox"),
    "an empty cell at the end": ("a.png,%s,\n", "two dogs", "a fox", "a fox"),
    "a new text that starts with a quote": ("a.png,%s,x", "two dogs", '"a" b', '"""a"" b"'),
}


@pytest.mark.parametrize("case", QUOTINGS, ids=list(QUOTINGS))
def test_only_the_cell_of_the_caption_is_written_again(photos, tmp_path, case) -> None:
    row, old, new, cell = QUOTINGS[case]
    before = 'image,caption,note\n"b.png",a cat,"y"\n'
    path = table(tmp_path, before + row % old)
    result = corrected(path, photos, [("a", 0, old, new)])
    copy = write(result, path, tmp_path / "out")
    assert copy.read_bytes() == (before + row % cell).encode()
    assert captions_of(copy, photos) == {"a": [new], "b": ["a cat"]}


def test_captions_of_an_image_in_two_tables_are_corrected_in_their_own(photos, tmp_path) -> None:
    train = "image,caption,split\na.png,a dog,train\nb.png,keep me,train\nc.png,keep,train\n"
    val = "image,caption,split\nb.png,other,val\na.png,wrong cat,train\na.png,gone,train\n"
    table(tmp_path, train, "train.csv")
    folder = table(tmp_path, val, "val.csv").parent
    log = ProblemLog()
    source = open_source(folder, None, {"images": str(photos)}, log)
    draft = source.read(folder, log)
    changes = [
        CaptionChange("train", "a", 1, "wrong cat", "right cat"),
        CaptionChange("train", "a", 2, "gone", None),
    ]
    texts = {copy.path.name: copy.edited() for copy in rewrite(source, draft, changes).copies}
    expected = val.replace("wrong cat", "right cat").replace("a.png,gone,train\n", "")
    assert texts == {"train.csv": train, "val.csv": expected}


def test_a_fault_of_a_caption_names_its_own_table(photos, tmp_path) -> None:
    table(tmp_path, "image,caption,split\na.png,a dog,train\nb.png,a cat,train\n", "train.csv")
    path = table(tmp_path, "image,caption,split\nb.png,x,val\na.png,,train\n", "val.csv")
    pairs = load_pairs(path.parent, options={"images": str(photos)})
    assert [one.where for one in pairs.problems if one.kind == "empty-caption"] == [f"{path}:3"]


def test_a_file_that_changed_since_it_was_read_is_refused(data, photos) -> None:
    log = ProblemLog()
    source = open_source(data, None, {"images": str(photos)}, log)
    draft = source.read(data, log)
    item = next(item for item in draft.items if "a cow" in item.captions)
    change = CaptionChange(item.split, item.id, 0, "a cow", "a bull")
    assert "a bull" in rewrite(source, draft, [change]).copies[0].edited()
    text = data.read_text(encoding="utf-8")
    words = text.replace("a cow", "a pig").replace('"cow"', '"pig"')
    for changed in (words, text[: len(text) // 20], "", "\n\n"):
        data.write_text(changed, encoding="utf-8")
        with pytest.raises(DataError, match=r"export again|no column of captions"):
            rewrite(source, draft, [change])
