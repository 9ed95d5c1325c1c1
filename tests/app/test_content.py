"""The Audit tab for data that the index does not hold."""

from __future__ import annotations

import io
import json
import os
import shutil
from dataclasses import replace
from urllib.parse import urlencode

import numpy as np
import pytest
from PIL import Image, ImageChops

from counterfoil.app.content import Audit, audited_name
from counterfoil.app.images import Library, shrunk
from counterfoil.app.problems import Problem
from counterfoil.audit import audit_split, write_report
from counterfoil.core.errors import DataError
from counterfoil.data.images import FileImage, open_image
from counterfoil.training.run_folder import load_model
from tests.app.conftest import LIMITS, running
from tests.app.test_application_page import Page


@pytest.fixture(scope="module")
def split(pairs):
    """Another split than that of the index; two captions stand at many images."""
    chosen = pairs.train.select(range(12))
    same = ["a red dog next to a green tree"] * 9
    captions = [[text, *own[1:]] for text, own in zip(same, chosen.captions, strict=False)]
    return replace(chosen, captions=[*captions, *chosen.captions[len(same) :]])


@pytest.fixture(scope="module")
def report(run, split, tmp_path_factory):
    folder = tmp_path_factory.mktemp("other-split")
    result = audit_split(load_model(run, "cpu"), split, threshold=0.05, examined=4)
    assert result.listed
    write_report(folder, "another split", [result], {})
    return folder


@pytest.fixture(scope="module")
def other(content, report):
    with running(replace(content, audit=Audit(report)), LIMITS) as client:
        yield client


def test_pictures_of_an_audit_come_from_the_audited_data(other, split) -> None:
    entries = other.get("/api/audit").json["findings"]
    assert entries
    for entry in entries:
        name = entry["image_names"][entry["image"]]
        answer = other.get(f"/api/picture?{urlencode({'image': name, 'side': 160})}")
        assert answer.status == 200
        shown = Image.open(io.BytesIO(answer.body)).convert("RGB")
        own = shrunk(open_image(split.pixels[list(split.ids).index(entry["image"])]), 160)
        assert shown.size == own.size
        assert max(high for _, high in ImageChops.difference(shown, own).getextrema()) < 120


def test_a_finding_of_an_image_that_the_index_lacks_can_be_opened(other, run, split) -> None:
    entry = other.get("/api/audit").json["findings"][0]
    name, place = entry["image_names"][entry["image"]], list(split.ids).index(entry["image"])
    about = other.get(f"/api/image?{urlencode({'image': name})}").json
    assert about["captions"] == list(split.captions[place])
    match = other.post("/api/explain", {"image": name, "text": entry["text"]}).json
    wanted = load_model(run, "cpu").explain(split.fragments.read(place), entry["text"])
    assert match["score"] == pytest.approx(wanted.score, abs=1e-4)


@pytest.mark.parametrize(
    "name",
    ["audit:train:../../etc/passwd", "audit:train:/etc/passwd", "audit:", "audit:other:x"],
)
def test_an_audited_image_is_looked_up_and_no_path_is_opened(other, name) -> None:
    for path in ("/api/picture", "/api/image"):
        assert other.get(f"{path}?{urlencode({'image': name})}").status == 404


def test_an_image_of_other_data_with_the_same_id_is_not_taken_for_the_audited_one(
    content, pairs, report, tmp_path
) -> None:
    """The index has the id, too, but for another image."""
    taken = pairs.test.ids[0]
    result = json.loads((report / "findings.jsonl").read_text().splitlines()[0])
    own = {"split": "train", "id": taken, "captions": ["another"], "pixels": None}
    for image, folder in ((None, tmp_path / "bare"), ("red", tmp_path / "pixels")):
        folder.mkdir()
        line = {**result, "image": taken, "better_image": None, "better_caption": None}
        (folder / "findings.jsonl").write_text(json.dumps({**line, "near_duplicate": None}))
        if image is not None:
            Image.new("RGB", (64, 64), image).save(tmp_path / "red.png")
            own["pixels"] = {"file": str(FileImage(tmp_path / "red.png").path), "name": "red.png"}
        (folder / "images.jsonl").write_text(json.dumps(own))
        with running(replace(content, audit=Audit(folder)), LIMITS) as client:
            answer = client.get(f"/api/picture?image={audited_name('train', taken)}")
        if image is None:
            assert answer.status == 404
        else:
            shown = Image.open(io.BytesIO(answer.body)).convert("RGB").getpixel((30, 30))
            assert shown[0] > 200 > 60 > max(shown[1:])


PLACES = [
    {"file": "/etc/passwd", "name": "a.png"},
    {"file": "/dev/zero"},
    {"file": "/proc/self/environ", "name": None},
    {"file": "a\0b.png", "name": "a.png"},
    {"file": "\ud800.png", "name": "a.png"},
    {"file": ["/etc/passwd"], "name": "a.png"},
    {"file": "FOLDER/fifo", "name": "a.png"},
    {"file": "FOLDER/link.png", "name": "a.png"},
    {"file": "FOLDER/loop.png", "name": 5},
    {"file": "FOLDER", "name": "a.png"},
    {"array": "/etc/passwd", "row": 0},
    {"array": "FOLDER/numbers.npy", "row": 0},
    {"array": "FOLDER/wide.npy", "row": 0},
    {"array": "FOLDER/pictures.npy", "row": 9},
    {"array": "FOLDER/pictures.npy", "row": -1},
    {"array": "FOLDER/pictures.npy", "row": "0"},
    {"archive": "/etc/passwd", "name": "a.png", "offset": 0, "size": 9},
    {"archive": "/etc/passwd", "name": "a.png", "offset": -1, "size": -1},
    {"archive": "/etc/passwd", "name": "a.png", "offset": 2**70, "size": 2**70},
    {"archive": "/etc/passwd"},
    {"name": "a.png"},
    {},
]


@pytest.mark.parametrize("pixels", PLACES, ids=str)
def test_a_report_that_names_no_image_of_data_shows_no_picture(
    content, report, pixels, tmp_path
) -> None:
    """Places in a report are read by the rules of an index: whole images, and nothing else."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link.png").symlink_to("/etc/passwd")
    (tmp_path / "loop.png").symlink_to("loop.png")
    np.save(tmp_path / "numbers.npy", np.zeros((2, 4)))
    np.save(tmp_path / "pictures.npy", np.zeros((2, 4, 4, 3), np.uint8))
    header = {"descr": "|u1", "fortran_order": False, "shape": (1, 10**5, 10**5, 3)}
    with (tmp_path / "wide.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(file.tell() + 3 * 10**10)
    place = json.loads(json.dumps(pixels).replace("FOLDER", str(tmp_path)))
    line = json.loads((report / "findings.jsonl").read_text().splitlines()[0])
    about = {"split": line["split"], "id": line["image"], "captions": ["a"], "pixels": place}
    (tmp_path / "findings.jsonl").write_text(json.dumps(line))
    (tmp_path / "images.jsonl").write_text(json.dumps(about))
    name = audited_name(line["split"], line["image"])
    library = Library(content.index, LIMITS, Audit(tmp_path).images)
    with pytest.raises(Problem) as refused:
        library.picture(name)
    assert refused.value.status == 404
    assert "passwd" not in refused.value.detail


def test_images_that_no_finding_names_are_not_served(report, tmp_path) -> None:
    line = (report / "findings.jsonl").read_text().splitlines()[0]
    (tmp_path / "findings.jsonl").write_text(line)
    other = {"split": "train", "id": "secret", "captions": [], "pixels": {"file": "/secret.png"}}
    (tmp_path / "images.jsonl").write_text(json.dumps(other))
    assert audited_name("train", "secret") not in Audit(tmp_path).images


def test_pixels_that_moved_are_taken_from_the_index_if_it_has_the_image(
    content, pairs, report, tmp_path
) -> None:
    name = pairs.test.ids[0]
    line = json.loads((report / "findings.jsonl").read_text().splitlines()[0])
    line |= {"image": name, "better_image": None, "better_caption": None, "near_duplicate": None}
    captions = list(pairs.test.captions[0])
    pixels = {"file": str(tmp_path / "gone.png"), "name": "gone.png"}
    about = {"split": line["split"], "id": name, "captions": captions, "pixels": pixels}
    (tmp_path / "findings.jsonl").write_text(json.dumps(line))
    (tmp_path / "images.jsonl").write_text(json.dumps(about))
    library = Library(content.index, LIMITS, Audit(tmp_path).images)
    shown = library.picture(audited_name(line["split"], name))
    assert shown.tobytes() == content.index.picture(name).tobytes()


@pytest.mark.parametrize(
    "change",
    [
        {"captions": "a dog"},
        {"captions": [5]},
        {"captions": None},
        {"id": ["x"]},
        {"pixels": "/etc/passwd"},
        {"split": {}},
    ],
    ids=str,
)
def test_images_of_a_report_with_other_types_are_refused(report, change, tmp_path) -> None:
    (tmp_path / "findings.jsonl").write_bytes((report / "findings.jsonl").read_bytes())
    about = {"split": "train", "id": "x", "captions": [], "pixels": None, **change}
    (tmp_path / "images.jsonl").write_text(json.dumps(about))
    with pytest.raises(DataError, match=r"images\.jsonl: line 1"):
        Audit(tmp_path)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_a_finding_with_a_number_that_cannot_be_sent_is_refused(report, number, tmp_path) -> None:
    line = json.loads((report / "findings.jsonl").read_text().splitlines()[0])
    (tmp_path / "findings.jsonl").write_text(json.dumps({**line, "suspicion": number}))
    with pytest.raises(DataError, match="line 1"):
        Audit(tmp_path)


def test_an_image_that_has_a_caption_twice_is_shown_once(report, tmp_path) -> None:
    near = json.loads((report / "findings.jsonl").read_text().splitlines()[-1])
    lines = [{**near, "image": name, "caption": k} for name in "ab" for k in range(2)]
    (tmp_path / "findings.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (entry,) = Audit(tmp_path).page(0, 9, None, "near-duplicates")["findings"]
    assert (entry["same"], entry["more_images"]) == (4, 0)
    assert entry["same_images"] == [audited_name(near["split"], name) for name in "ab"]


def test_near_duplicates_are_listed_apart_and_identical_captions_are_one_entry(
    other, split
) -> None:
    suspicious = other.get("/api/audit?limit=100").json
    near = other.get("/api/audit?section=near-duplicates&limit=100").json
    assert {entry["kind"] for entry in suspicious["findings"]} == {"mismatch"}
    assert "near-duplicate" not in {reason["sign"] for reason in suspicious["reasons"]}
    assert all(entry["near_duplicate"] for entry in near["findings"])
    same = next(e for e in near["findings"] if e["text"] == "a red dog next to a green tree")
    assert same["same"] == 9
    wanted = {audited_name(split.name, name) for name in split.ids[:9]}
    assert set(same["same_images"]) == wanted
    assert near["counts"] == suspicious["counts"]
    assert near["counts"]["near-duplicates"] == sum(e["same"] for e in near["findings"])


@pytest.mark.parametrize(
    ("summary", "notes"),
    [
        (
            {"notes": ["of all"], "splits": [{"split": "a", "notes": ["one", "two"]}]},
            ["of all", "a: one", "a: two"],
        ),
        ({"notes": "text", "splits": [None, {"notes": 3}]}, []),
        ({"splits": {}}, []),
    ],
)
def test_the_notes_of_an_audit_and_of_its_splits_are_shown(report, summary, notes, tmp_path):
    shutil.copy(report / "findings.jsonl", tmp_path)
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert Audit(tmp_path).page(0, 1, None)["notes"] == notes


def test_a_damaged_list_of_images_is_refused_with_its_line(report, tmp_path) -> None:
    (tmp_path / "findings.jsonl").write_bytes((report / "findings.jsonl").read_bytes())
    (tmp_path / "images.jsonl").write_text('{"split": "train"}\n')
    with pytest.raises(DataError, match="line 1"):
        Audit(tmp_path)


def test_the_audit_tab_shows_pictures_and_a_tab_of_near_duplicates(browser, other) -> None:
    page = Page(browser, other)
    page.open("audit")
    browser.complaints.clear()  # pictures of the page before, whose service has stopped
    browser.wait("[...document.querySelectorAll('.finding .shot img')].some(i => i.naturalWidth)")
    assert browser.count(".finding .nopixels") == 0
    assert "near-duplicate" not in browser.text(".filters")
    browser.click('.tabs a[href*="near-duplicates"]')
    browser.wait("document.querySelector('.times')?.textContent.startsWith('×')")
    assert "×9" in browser.text(".findings")
    browser.wait("[...document.querySelectorAll('.strip img')].some(i => i.naturalWidth)")
    browser.click(".strip a")
    browser.wait("document.querySelectorAll('.word').length === 8")
    browser.size(390, 844, phone=True)
    page.open("audit", section="near-duplicates")
    assert browser.js("document.documentElement.scrollWidth") <= 390
    assert browser.complaints == []
