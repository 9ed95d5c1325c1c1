"""`counterfoil demo PHOTOS`: any folder of photos becomes a library, with or without captions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from counterfoil.app.content import Audit
from counterfoil.cli.demo_photos import demo_photos, read_library
from counterfoil.core.errors import DataError, MissingExtraError
from counterfoil.core.progress import Silent
from counterfoil.models import save_pretrained
from counterfoil.search import SearchIndex
from counterfoil.training.run_folder import load_model

MODEL = "scenes-naaf"
"""Reads any picture without the weights of a backbone, unlike the models for photos."""

NAMES = ("beach 1.jpg", "more/Harbor.PNG", "more/deep/straße.jpeg")


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
        assert {hit.id for hit in hits} == set(NAMES)
    assert "--audit" not in made["serve"]


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
    assert list(by_name["beach 1.jpg"]) == ["a green box"]
    assert list(by_name["more/Harbor.PNG"]) == ["a white box"]
    assert list(by_name["more/deep/straße.jpeg"]) == []
    assert library.captions is not None


def test_captions_are_audited(photos, prepare, tmp_path) -> None:
    rows = (f"{name},{text}" for name in NAMES for text in ("a white box", "two small dogs"))
    (photos / "captions.csv").write_text("image,caption\n" + "\n".join(rows), encoding="utf-8")
    made = prepare()
    assert made["captions"] == 6
    assert f"--explainer {MODEL} --audit" in made["serve"]
    assert Audit(tmp_path / "out" / "audit").page(0, 10, None)["total"] >= 0
    summary = json.loads((tmp_path / "out" / "audit" / "summary.json").read_text())
    assert summary["run"] == MODEL


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
