"""`counterfoil demo PHOTOS`: any folder of photos becomes a library, with or without captions."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from PIL import Image

from counterfoil.app.content import Audit
from counterfoil.app.review import AuditReview
from counterfoil.audit import export_corrected
from counterfoil.audit.decisions import Decision, DecisionLog, key_of
from counterfoil.audit.findings import Finding, read_findings
from counterfoil.cli.demo import _library_folder
from counterfoil.cli.demo_photos import MARK, demo_photos, read_library
from counterfoil.core.errors import ConfigError, DataError, MissingExtraError
from counterfoil.core.progress import Silent
from counterfoil.models import save_pretrained
from counterfoil.search import SearchIndex
from counterfoil.training.run_folder import load_model
from tests.cli.test_cli import invoke

MODEL = "scenes-naaf"
"""Reads any picture without the weights of a backbone, unlike the models for photos."""

NAMES = ("beach 1.jpg", "more/Harbor.PNG", "more/deep/straße.jpeg")
IDS = ("beach 1", "more/Harbor", "more/deep/straße")


class Said(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def photos(tmp_path) -> Path:
    """Three photos in nested folders, two that are damaged, and other files."""
    folder = tmp_path / "my photos"
    for number, name in enumerate(NAMES):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        picture = Image.new("RGB", (64, 48), (90 * number, 200 - 60 * number, 40))
        picture.paste((250, 250, 250), (8 * number, 8, 8 * number + 20, 30))
        picture.save(path)
    (folder / "empty.jpg").write_bytes(b"")
    (folder / "more" / "torn.png").write_bytes((folder / "more" / "Harbor.PNG").read_bytes()[:60])
    (folder / "phone.HEIC").write_bytes(b"\0\0\0\x18ftypheic")
    (folder / "more" / "film.mov").write_bytes(b"moov")
    (folder / ".DS_Store").write_bytes(b"hidden")
    return folder


@pytest.fixture
def prepare(photos, cache, tmp_path, capsys) -> Callable[[], dict]:
    """Prepares the photos as without a terminal; the result that it prints as JSON."""

    def run() -> dict:
        demo_photos(
            photos, tmp_path / "out", cache, Silent(), None, True, searcher=MODEL, explainer=MODEL
        )
        return json.loads(capsys.readouterr().out)

    return run


def test_a_folder_of_images_alone_is_searchable(prepare, tmp_path) -> None:
    made = prepare()
    assert (made["photos"], made["captions"]) == (3, 0)
    with SearchIndex.open(tmp_path / "out" / "index") as index:
        hits = index.search("a white box", k=3).hits
        assert {hit.id for hit in hits} == set(IDS)
    assert "--audit" not in made["serve"]


def test_what_no_demo_made_is_replaced_only_if_asked(
    photos, prepare, cache, tmp_path, capsys
) -> None:
    out = tmp_path / "out"
    page = out / "audit" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text("my own page")
    with pytest.raises(ConfigError, match=r"audit: not made by this demo; .*--overwrite"):
        invoke("demo", photos, "--no-serve", "--out", out, "--cache", cache)
    assert page.read_text() == "my own page"
    page.unlink()
    page.parent.rmdir()
    prepare()
    (out / MARK).unlink()  # as if the index were of another command
    before = (out / "index" / "index.json").read_bytes()
    with pytest.raises(ConfigError, match="index: not made by this demo"):
        prepare()
    assert (out / "index" / "index.json").read_bytes() == before
    models = {"searcher": MODEL, "explainer": MODEL}
    demo_photos(photos, out, cache, Silent(), None, True, overwrite=True, **models)
    capsys.readouterr()
    assert prepare()["photos"] == 3  # made by a demo now


def test_damaged_photos_are_named_and_other_files_are_counted(prepare) -> None:
    made = prepare()
    assert len(made["unreadable"]) == 2
    assert {"empty.jpg" in one or "torn.png" in one for one in made["unreadable"]} == {True}
    assert made["skipped"] == {".heic": 1, ".mov": 1}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("captions.csv", "image,caption\nbeach 1.jpg,a green box\nHarbor.PNG,a white box\n"),
        ("captions.txt", "image,caption\nbeach 1.jpg,a green box\nmore/Harbor.PNG,a white box\n"),
        (
            "captions.jsonl",
            '{"image": "beach 1.jpg", "captions": ["a green box"]}\n'
            '{"image": "more/harbor", "captions": ["a white box"]}\n',
        ),
        (
            "dataset.json",
            json.dumps(
                {
                    "images": [
                        {
                            "filename": name,
                            "split": "train",
                            "sentences": [{"raw": text, "tokens": text.split()}],
                        }
                        for name, text in (
                            ("beach 1.jpg", "a green box"),
                            ("more/Harbor.PNG", "a white box"),
                        )
                    ]
                }
            ),
        ),
    ],
)
def test_captions_beside_the_photos_are_attached_to_them(photos, name, text) -> None:
    (photos / name).write_text(text, encoding="utf-8")
    library = read_library(photos, Silent())
    by_name = dict(zip(library.split.ids, library.split.captions, strict=True))
    assert list(by_name["beach 1"]) == ["a green box"]
    assert list(by_name["more/Harbor"]) == ["a white box"]
    assert list(by_name["more/deep/straße"]) == []
    assert library.captions is not None


def write_captions(photos: Path, texts: Sequence[str], names: Sequence[str] = NAMES) -> None:
    rows = (f"{name},{text}" for name in names for text in texts)
    (photos / "captions.csv").write_text("image,caption\n" + "\n".join(rows), encoding="utf-8")


def test_captions_are_audited(photos, prepare, tmp_path) -> None:
    write_captions(photos, ("a white box", "two small dogs"))
    made = prepare()
    assert made["captions"] == 6
    assert made["captions_from"] is not None
    assert f"--explainer {MODEL} --audit" in made["serve"]
    # the same captions for all photos: each is a near-duplicate of the others
    assert Audit(tmp_path / "out" / "audit").page(0, 10, None, "near-duplicates")["total"] > 0
    summary = json.loads((tmp_path / "out" / "audit" / "summary.json").read_text())
    assert summary["run"] == MODEL


@pytest.mark.parametrize(
    ("texts", "names"),
    [
        (("ein Hund rennt", "zwei Boote"), NAMES),
        (("犬が走っている",), NAMES),
        (("🐶",), NAMES),
        (("a white box",), NAMES[:1]),
    ],
)
def test_captions_that_cannot_be_audited_are_reported_and_the_photos_are_served(
    texts, names, photos, cache, tmp_path, capsys
) -> None:
    write_captions(photos, texts, names)
    said = Said()
    demo_photos(photos, tmp_path / "out", cache, said, None, True, searcher=MODEL, explainer=MODEL)
    made = json.loads(capsys.readouterr().out)
    assert made["captions"] == len(texts) * len(names)
    assert "--audit" not in made["serve"]
    assert [line for line in said.lines if "captions not audited: " in line]


def decide(audit: Path, correction: str) -> Finding:
    """Correct the caption of the first finding."""
    finding = read_findings(audit)[0]
    DecisionLog(audit).append(Decision.on(key_of(finding), "fix", "Ann", correction))
    return finding


@pytest.mark.parametrize("second", [None, "numbers.csv"])
def test_an_audit_is_exported_in_the_layout_of_the_captions(
    second, photos, prepare, tmp_path, monkeypatch
) -> None:
    """All captions, also those of photos that were not audited; with an id column of their own."""
    monkeypatch.setattr("counterfoil.cli.demo_photos.MAX_AUDITED", 2)
    lines = ["key;image;caption;note"]
    lines += [f"{number};{name};a white box;mine" for number, name in enumerate(NAMES)]
    (photos / "captions.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if second is not None:  # the folder is ambiguous, so the file itself is the source
        (photos / second).write_text("month,sum\nMay,3\n", encoding="utf-8")
    prepare()
    finding = decide(tmp_path / "out" / "audit", "a green box")
    exported = export_corrected(tmp_path / "out" / "audit", tmp_path / "corrected.csv")
    assert (exported.layout, exported.fixed, exported.missing) == ("csv", 1, 0)
    row = next(number for number, line in enumerate(lines) if finding.image in line)
    lines[row] = lines[row].replace("a white box", "a green box")
    assert (tmp_path / "corrected.csv").read_text(encoding="utf-8").splitlines() == lines


def test_a_report_below_the_photos_is_exported_again(photos, cache, capsys) -> None:
    write_captions(photos, ("a white box",))
    out = photos / "library"
    demo_photos(photos, out, cache, Silent(), None, True, searcher=MODEL, explainer=MODEL)
    decide(out / "audit", "a green box")
    for _ in range(2):
        assert AuditReview(out / "audit", read_findings(out / "audit"), cache).export()["fixed"]


@pytest.mark.slow
def test_pretrained_models_for_photos(photos, cache, tmp_path, capsys) -> None:
    write_captions(photos, ("a white box on a wall", "two dogs run on the beach"))
    demo_photos(photos, tmp_path / "out", cache, Silent(), None, True)
    made = json.loads(capsys.readouterr().out)
    assert (made["photos"], made["captions"]) == (3, 6)
    assert "--explainer photos-naaf --audit" in made["serve"]
    with SearchIndex.open(tmp_path / "out" / "index") as index:
        assert {hit.id for hit in index.search("a dog", k=3).hits} == set(IDS)


def test_used_captions_and_own_files_are_not_skipped_files(photos, cache, monkeypatch) -> None:
    write_captions(photos, ("a white box",))
    monkeypatch.chdir(photos)
    here = Path()
    for name in ("runs/demo/report.html", "library/index/index.json", "cache/scene.png"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_bytes(b"made by a command")
    own = (here / "library/index", here / "library/audit", here / "cache")
    library = read_library(here, Silent(), own)
    assert library.skipped == {".heic": 1, ".mov": 1}
    assert not [name for name in library.split.ids if name.startswith("cache")]
    assert library.captions is not None


def test_photos_in_the_folder_to_write_are_used(photos, cache) -> None:
    own = (photos / "index", photos / "audit", photos.parent)
    assert len(read_library(photos, Silent(), own).split) == 5


def test_of_two_caption_files_the_one_that_is_used_is_named(photos) -> None:
    (photos / "a.csv").write_text("image,caption\nbeach 1.jpg,a dog\n", encoding="utf-8")
    (photos / "b.csv").write_text("image,caption\nbeach 1.jpg,a cat\n", encoding="utf-8")
    said = Said()
    library = read_library(photos, said)
    assert library.split.texts == ["a dog"]
    assert library.skipped[".csv"] == 1
    (line,) = said.lines
    assert "b.csv: not used as captions: the captions are from a.csv" in line


def test_a_second_table_beside_captions_csv_is_named_once(photos) -> None:
    for name in ("captions.csv", "odd.csv"):
        (photos / name).write_text("image,caption\nbeach 1.jpg,a dog\n", encoding="utf-8")
    said = Said()
    read_library(photos, said)
    (line,) = said.lines
    assert "odd.csv: not used as captions: the captions are from captions.csv" in line


def test_captions_that_need_a_missing_package_do_not_stop_the_demo(photos, monkeypatch) -> None:
    (photos / "x.parquet").write_bytes(b"PAR1 and more")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    said = Said()
    assert read_library(photos, said).captions is None
    assert [line for line in said.lines if "x.parquet" in line and "pip install" in line]


@pytest.mark.parametrize("option", ["--scenes", "--train-scenes", "--epochs"])
def test_options_of_scenes_are_refused_with_photos(option, photos) -> None:
    with pytest.raises(ConfigError, match=f"{option}: only for generated scenes") as error:
        invoke("demo", photos, option, 100)
    assert error.value.exit_code == 2


def test_folders_of_one_name_have_libraries_of_their_own(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    one, other = (_library_folder(Path(parent) / "photos") for parent in ("a", "b"))
    assert one != other
    assert one == _library_folder(tmp_path / "a" / "photos")
    assert one.name.startswith("demo-photos-")


def test_a_table_that_is_no_captions_is_reported_and_the_photos_are_served(photos) -> None:
    (photos / "budget.csv").write_text("month,sum\nMay,3\n", encoding="utf-8")
    said = Said()
    library = read_library(photos, said)
    assert library.captions is None
    assert len(library.split) == 5
    assert any("not used as captions" in line and "budget.csv" in line for line in said.lines)


def test_a_second_call_reuses_the_features(photos, cache, tmp_path, prepare) -> None:
    prepare()
    said = Said()
    demo_photos(photos, tmp_path / "out", cache, said, None, True, searcher=MODEL, explainer=MODEL)
    assert [line for line in said.lines if "from the cache" in line]
    assert all("3 of " in line for line in said.lines if "from the cache" in line)


@pytest.mark.parametrize("name", ["empty", "missing", "captions.csv"])
def test_a_folder_without_photos_is_a_clear_error(name, tmp_path, cache) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "captions.csv").write_text("image,caption\n")
    folder = tmp_path / name
    with pytest.raises(DataError, match=r"no images|no such folder") as error:
        demo_photos(
            folder, tmp_path / "out", cache, Silent(), None, True, searcher=MODEL, explainer=MODEL
        )
    assert str(folder) in str(error.value)
    assert not (tmp_path / "out").exists()


def test_missing_weights_are_reported_before_any_work(photos, cache, tmp_path, monkeypatch) -> None:
    model = load_model(MODEL, "cpu")
    model.fragments_from, model.fragments_options = "efficientnet-lite", {"variant": 2}
    save_pretrained(model, tmp_path / "model")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    name = str(tmp_path / "model")
    with pytest.raises(MissingExtraError, match="pip install"):
        demo_photos(
            photos, tmp_path / "out", cache, Silent(), None, True, searcher=name, explainer=name
        )
    assert not (tmp_path / "out").exists()
