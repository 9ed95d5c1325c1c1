"""The corrected copy of audited data: decisions applied, the original untouched."""

from __future__ import annotations

import csv
import io
import json
import os
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from counterfoil.audit.corrected import CORRECTED, DataSource, export_corrected
from counterfoil.audit.decisions import Decision, DecisionLog, key_of
from counterfoil.audit.findings import LINES, to_jsonl
from counterfoil.audit.report import IMAGES_FILE
from counterfoil.core.errors import ConfigError, DataError
from counterfoil.data.convert import convert
from counterfoil.data.load import load_pairs
from tests.audit.test_report import finding

CSV = "image,caption,rater\na.png,a dog,1\na.png,two dogs,2\nb.png,a cat,3\nc.png,a cow,4\n"


@pytest.fixture
def data(tmp_path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in "abc":
        Image.new("RGB", (8, 8), "red").save(folder / f"{name}.png")
    (folder / "captions.csv").write_text(CSV)
    return folder


def audited(folder: Path, source: Path | str, decisions, *, options=None, format=None, **about):
    """A report of findings, one per decision: (image, caption, text, action, correction)."""
    folder.mkdir()
    findings = [
        finding(text, n, image=image, caption=caption, split=about.get("split", "train"))
        for n, (image, caption, text, _, _) in enumerate(decisions)
    ]
    (folder / LINES).write_text(to_jsonl(findings), encoding="utf-8")
    record = DataSource(str(source), format, options or {}).as_dict()
    (folder / "summary.json").write_text(json.dumps({"source": record}))
    log = DecisionLog(folder)
    for one, (_, _, _, action, correction) in zip(findings, decisions, strict=True):
        if action is not None:
            log.append(Decision.on(key_of(one), action, "ann", correction))
    return folder


DECISIONS = [
    ("a", 0, "a dog", "fix", "a red dog"),
    ("a", 1, "two dogs", "keep", None),
    ("b", 0, "a cat", "discard", None),
    ("c", 0, "a cow", None, None),
]


def test_decisions_are_applied_and_the_rest_stays(data, tmp_path) -> None:
    report = audited(tmp_path / "report", data / "captions.csv", DECISIONS)
    out = tmp_path / "out.csv"
    exported = export_corrected(report, out)
    assert out.read_text() == CSV.replace("a dog", "a red dog").replace("b.png,a cat,3\n", "")
    assert (data / "captions.csv").read_text() == CSV
    assert (exported.fixed, exported.discarded, exported.kept, exported.open) == (1, 1, 1, 1)
    assert exported.emptied == ("b",)
    diff = (tmp_path / "out.csv.diff").read_text()
    assert "-a.png,a dog,1\n+a.png,a red dog,1\n" in diff
    assert "-b.png,a cat,3\n" in diff


def test_a_folder_of_data_is_copied_under_the_names_of_its_files(data, tmp_path) -> None:
    (data / "captions.csv").unlink()
    (data / "train.csv").write_text("image,caption\na.png,a dog\nb.png,a cat\n")
    (data / "test.csv").write_text("image,caption\nc.png,a cow\n")
    report = audited(tmp_path / "report", data, [("a", 0, "a dog", "fix", "a fox")])
    exported = export_corrected(report, tmp_path / "out")
    assert sorted(Path(file).name for file in exported.files) == ["test.csv", "train.csv"]
    train = (tmp_path / "out" / "train.csv").read_text()
    assert train == "image,caption\na.png,a fox\nb.png,a cat\n"
    assert "+a.png,a fox" in (tmp_path / "out" / "changes.diff").read_text()
    pairs = load_pairs(tmp_path / "out", options={"images": str(data)})
    assert {split.name: len(split) for split in pairs} == {"train": 2, "test": 1}


@pytest.mark.parametrize("name", ["out.jsonl", "out.tsv", "out.parquet", "out.json", "out.xlsx"])
def test_a_copy_that_its_name_would_make_unreadable_is_refused(data, tmp_path, name) -> None:
    report = audited(tmp_path / "report", data / "captions.csv", DECISIONS)
    with pytest.raises(ConfigError, match=r"captions\.csv; choose a name that ends in \.csv"):
        export_corrected(report, tmp_path / name)
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("how", ["itself", "symbolic link", "hard link", "folder"])
def test_the_original_is_never_written(data, tmp_path, how) -> None:
    original = data / "captions.csv"
    report = audited(tmp_path / "report", original, DECISIONS)
    out = {"itself": original, "folder": data}.get(how, tmp_path / "other.csv")
    if how == "symbolic link":
        out.symlink_to(original)
    if how == "hard link":
        os.link(original, out)
    with pytest.raises(ConfigError, match="never changed"):
        export_corrected(report, out, overwrite=True)
    assert original.read_text() == CSV
    assert not list(data.glob("*.diff"))


def test_files_of_the_audit_and_existing_files_are_not_overwritten(data, tmp_path) -> None:
    report = audited(tmp_path / "report", data / "captions.csv", DECISIONS)
    with pytest.raises(ConfigError, match="never changed"):
        export_corrected(report, report / LINES, overwrite=True)
    out = tmp_path / "out.csv"
    export_corrected(report, out)
    with pytest.raises(ConfigError, match="exists already"):
        export_corrected(report, out)
    export_corrected(report, out, overwrite=True)


def test_captions_that_the_data_lost_since_are_counted(data, tmp_path) -> None:
    report = audited(tmp_path / "report", data / "captions.csv", DECISIONS)
    changed = CSV.replace("a dog", "another dog")
    (data / "captions.csv").write_text(changed)
    exported = export_corrected(report, tmp_path / "out.csv")
    assert (exported.fixed, exported.discarded, exported.missing) == (0, 1, 1)
    assert (tmp_path / "out.csv").read_text() == changed.replace("b.png,a cat,3\n", "")


def test_moved_data_can_be_named(data, tmp_path) -> None:
    report = audited(tmp_path / "report", data / "captions.csv", DECISIONS)
    data.rename(tmp_path / "moved")
    with pytest.raises(DataError, match="no such file or folder"):
        export_corrected(report, tmp_path / "out.csv")
    moved = DataSource(str(tmp_path / "moved" / "captions.csv"), None, {})
    assert export_corrected(report, tmp_path / "out.csv", source=moved).fixed == 1


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
@pytest.mark.parametrize("layout", ["scan", "shards"])
def test_layouts_without_a_text_of_captions_become_a_table(
    tmp_path, concepts, layout, suffix
) -> None:
    convert(concepts, tmp_path / "converted", layout)
    read = load_pairs(tmp_path / "converted")
    split = read.train
    changes = [
        (split.ids[0], 0, split.captions[0][0], "fix", 'a "new", caption'),
        (split.ids[1], 0, split.captions[1][0], "discard", None),
    ]
    report = audited(tmp_path / "report", tmp_path / "converted", changes)
    out = tmp_path / f"out{suffix}"
    exported = export_corrected(report, out)
    assert any("one table of all splits" in note for note in exported.notes)
    again = load_pairs(out)
    for name in read.splits:
        expected = {i: list(c) for i, c in zip(read[name].ids, read[name].captions, strict=True)}
        if name == "train":
            expected[split.ids[0]][0] = 'a "new", caption'
            del expected[split.ids[1]][0]
        expected = {image: texts for image, texts in expected.items() if texts}
        result = {i: list(c) for i, c in zip(again[name].ids, again[name].captions, strict=True)}
        assert result == expected
    with pytest.raises(ConfigError, match=r"name a \.csv or \.jsonl file"):
        export_corrected(report, tmp_path / "out.parquet")


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_a_table_of_a_parquet_file_names_the_image_files(data, tmp_path, suffix) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    (data / "captions.csv").unlink()
    (data / "more").mkdir()
    (data / "b.png").rename(data / "more" / "b.png")
    names, texts = ["a.png", "a.png", "more/b.png"], ["a dog", "two dogs", "a cat"]
    parquet.write_table(pyarrow.table({"image": names, "caption": texts}), data / "photos.parquet")
    changes = [("a", 0, "a dog", "fix", "a red dog")]
    report = audited(tmp_path / "report", data / "photos.parquet", changes)
    exported = export_corrected(report, tmp_path / f"out{suffix}")
    assert any("images=FOLDER" in note for note in exported.notes)
    train = load_pairs(tmp_path / f"out{suffix}", options={"images": str(data)}).train
    assert list(train.texts) == ["a red dog", "two dogs", "a cat"]
    assert [image.path for image in train.pixels] == [data / "a.png", data / "more" / "b.png"]


def written_parquet(data: Path, columns: dict[str, list[str]]) -> Path:
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    (data / "captions.csv").unlink()
    parquet.write_table(pyarrow.table(columns), data / "photos.parquet")
    return data / "photos.parquet"


@pytest.mark.parametrize(
    ("splits", "stated"),
    [
        (None, [None] * 3),
        ([""] * 3, [None] * 3),
        (["train", "test", "other"], ["train", "test", "other"]),
        (["train", "", ""], ["train", None, None]),
    ],
)
def test_a_table_states_only_the_splits_that_the_data_state(data, tmp_path, splits, stated) -> None:
    columns = {"image": ["a.png", "b.png", "c.png"], "caption": ["a dog", "a cat", "a cow"]}
    source = written_parquet(data, columns | ({"split": splits} if splits else {}))
    report = audited(tmp_path / "report", source, [("a", 0, "a dog", "fix", "a red dog")])
    notes = [
        export_corrected(report, tmp_path / f"out{suffix}").notes for suffix in (".csv", ".jsonl")
    ]
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = {row["id"]: row for row in csv.DictReader(file)}
    lines = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    records = {record["id"]: record for record in lines}
    assert [rows[image].get("split") or None for image in "abc"] == stated
    assert [records[image].get("split") for image in "abc"] == stated
    assert ("split" in rows["a"]) is any(stated)
    assert all(("of all splits" in each[0]) is any(stated) for each in notes)
    assert rows["a"]["caption"] == "a red dog"


def test_a_table_of_shards_states_no_split_that_a_hash_chose(tmp_path, concepts) -> None:
    convert(concepts, tmp_path / "converted", "shards")
    stated = load_pairs(tmp_path / "converted").train
    (tmp_path / "photos").mkdir()
    (shard,) = (tmp_path / "converted").glob("*train*.tar")
    with tarfile.open(shard) as old, tarfile.open(tmp_path / "photos" / "a.tar", "w") as new:
        for member in old.getmembers():
            content = old.extractfile(member).read()
            if member.name.endswith(".json"):
                record = json.loads(content)
                record.pop("split", None)
                content = json.dumps(record).encode()
            member.size = len(content)
            new.addfile(member, io.BytesIO(content))
    changes = [(stated.ids[0], 0, stated.captions[0][0], "fix", "a new caption")]
    report = audited(tmp_path / "report", tmp_path / "photos", changes)
    export_corrected(report, tmp_path / "out.jsonl")
    records = list(map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines()))
    assert len(records) == len(stated)
    assert not any("split" in record for record in records)


def test_rows_of_a_parquet_file_that_cannot_be_read_are_said_to_be_missing(data, tmp_path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    (data / "captions.csv").unlink()
    columns = {"image": ["a.png", "gone.png", "b.png"], "caption": ["a dog", "a cow", " "]}
    parquet.write_table(pyarrow.table(columns), data / "photos.parquet")
    report = audited(
        tmp_path / "report", data / "photos.parquet", [("a", 0, "a dog", "fix", "a red dog")]
    )
    (note,) = [
        note for note in export_corrected(report, tmp_path / "out.csv").notes if "cannot" in note
    ]
    assert "what cannot be read is not in the copy (" in note
    assert "gone.png" in note


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_fields_that_a_table_lacks_are_named(data, tmp_path, suffix) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    (data / "captions.csv").unlink()
    columns = {"image": ["a.png", "b.png"], "caption": ["a dog", "a cat"], "rating": [3, 4]}
    parquet.write_table(pyarrow.table(columns), data / "photos.parquet")
    report = audited(
        tmp_path / "report", data / "photos.parquet", [("a", 0, "a dog", "keep", None)]
    )
    notes = export_corrected(report, tmp_path / f"out{suffix}").notes
    if suffix == ".csv":
        assert "other fields are not in the CSV (rating); a .jsonl file has them" in notes
    else:
        assert not any("fields" in note for note in notes)
        extras = load_pairs(tmp_path / "out.jsonl", options={"images": str(data)}).train.extras
        assert [one["rating"] for one in extras] == [3, 4]


def test_scenes_become_a_table_of_all_splits(tmp_path) -> None:
    options = {"images": [6, 2, 2]}
    pairs = load_pairs("scenes", options=options, cache_dir=tmp_path / "cache")
    text = pairs.test.captions[0][0]
    report = audited(
        tmp_path / "report",
        "scenes",
        [(pairs.test.ids[0], 0, text, "discard", None)],
        options=options,
        split="test",
    )
    exported = export_corrected(report, tmp_path / "out.jsonl", cache=tmp_path / "cache")
    again = load_pairs(tmp_path / "out.jsonl")
    assert len(again.test.texts) == len(pairs.test.texts) - 1
    assert len(again.train.texts) == len(pairs.train.texts)
    assert "generated data set" in exported.notes[0]


def test_a_correction_that_a_spreadsheet_would_run_is_written_and_named(data, tmp_path) -> None:
    formula = '=HYPERLINK("x")'
    changes = [("a", 0, "a dog", "fix", formula)]
    report = audited(tmp_path / "report", data / "captions.csv", changes)
    exported = export_corrected(report, tmp_path / "out.csv")
    assert any(
        note.startswith("1 correction starts with") and "formula" in note for note in exported.notes
    )
    pairs = load_pairs(tmp_path / "out.csv", options={"images": str(data)})
    assert formula in [text for split in pairs for text in split.texts]


def test_a_correction_that_is_not_written_is_not_named(data, tmp_path) -> None:
    changes = [("a", 0, "a dog", "fix", "=1+1"), ("c", 0, "a cow", "fix", "a bull")]
    report = audited(tmp_path / "report", data / "captions.csv", changes)
    other = data / "other.csv"
    other.write_text("image,caption\nc.png,a cow\n")
    source = DataSource(str(other), None, {})
    exported = export_corrected(report, tmp_path / "out.csv", source=source)
    assert (exported.fixed, exported.missing) == (1, 1)
    assert not any("formula" in note for note in exported.notes)


@pytest.mark.parametrize(
    ("original", "copy", "is_noted"),
    [
        ("captions.csv", "c.csv", False),
        ("captions.csv", "c.CSV", False),
        ("captions.csv", "captions", True),
        ("captions.csv", "test.csv", True),
        ("train.csv", "c.csv", True),
        ("train.csv", "train.csv", False),
        ("captions.txt", "c.txt", True),
        ("captions_val2017.json", "c.json", True),
        ("captions_val2017.json", "captions_val2017.json", False),
        ("dataset_photos.json", "c.json", False),
        ("Flickr8k.token.txt", "c.txt", True),
        ("Flickr8k.token.txt", "c.token.txt", False),
    ],
)
def test_the_name_of_a_copy_is_noted_if_it_changes_how_that_is_read(
    data, tmp_path, original, copy, is_noted
) -> None:
    (data / "captions.csv").unlink()
    images = [{"id": 1, "file_name": "a.png"}]
    annotations = [{"id": 1, "image_id": 1, "caption": "a dog"}]
    sentences = [{"raw": "a dog", "tokens": ["a", "dog"], "sentid": 0}]
    karpathy = {"filename": "a.png", "imgid": 0, "split": "train", "sentences": sentences}
    texts = {
        "captions_val2017.json": json.dumps({"images": images, "annotations": annotations}),
        "dataset_photos.json": json.dumps({"images": [karpathy], "dataset": "photos"}),
        "Flickr8k.token.txt": "a.png#0\ta dog\n",
    }
    (data / original).write_text(texts.get(original, "image,caption\na.png,a dog\n"))
    image = "1" if original.startswith("captions_") else "a"
    changes = [(image, 0, "a dog", "fix", "a fox")]
    report = audited(tmp_path / "report", data / original, changes)
    (tmp_path / "out").mkdir()
    exported = export_corrected(report, tmp_path / "out" / copy)
    assert exported.fixed == 1
    assert any(original in note for note in exported.notes) is is_noted


def test_a_damaged_original_is_refused(data, tmp_path) -> None:
    report = audited(tmp_path / "report", data / "captions.csv", DECISIONS)
    (data / "captions.csv").write_bytes(b"image,caption\na.png,\xff\xfe\n")
    with pytest.raises(DataError, match="not UTF-8"):
        export_corrected(report, tmp_path / "out.csv")
    assert not (tmp_path / "out.csv").exists()


def test_the_page_can_export_again_if_the_report_lies_in_the_data(data) -> None:
    report = audited(data / "report", data, DECISIONS)
    (report / CORRECTED).mkdir()
    for _ in range(2):
        exported = export_corrected(report, report / CORRECTED, overwrite=True)
        assert [Path(file).parent for file in exported.files] == [report / CORRECTED]
    (data / "other.csv").write_text("x")
    with pytest.raises(ConfigError, match="never changed"):
        export_corrected(report, data / "other.csv", overwrite=True)
    assert (data / "captions.csv").read_text() == CSV


def test_a_link_from_the_folder_of_copies_to_the_data_is_refused(data) -> None:
    report = audited(data / "report", data, DECISIONS)
    (report / CORRECTED).symlink_to(data)
    with pytest.raises(ConfigError, match="never changed"):
        export_corrected(report, report / CORRECTED, overwrite=True)
    assert (data / "captions.csv").read_text() == CSV


def test_only_options_that_are_paths_are_stored_as_paths(data, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words").mkdir()
    (data / "captions.csv").write_text(CSV.replace("caption", "words"))
    options = {"caption_column": "words", "images": "data"}
    report = audited(tmp_path / "report", "data/captions.csv", DECISIONS, options=options)
    assert DataSource.read(report).options == {"caption_column": "words", "images": str(data)}
    monkeypatch.chdir(report)
    assert export_corrected(report, tmp_path / "out.csv").fixed == 1


def test_line_breaks_of_captions_survive_in_a_table(tmp_path) -> None:
    texts = ["one\rline", "two\nlines", "three\r\nlines", "the last"]
    report = audited(tmp_path / "report", "gone", [("a", 3, "the last", "fix", "new, and last")])
    (report / "summary.json").write_text("{}")
    record = {"split": "train", "id": "a", "captions": texts}
    (report / IMAGES_FILE).write_text(json.dumps(record) + "\n")
    export_corrected(report, tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.reader(file, strict=True))
    assert [row[2] for row in rows] == ["caption", *texts[:3], "new, and last"]
