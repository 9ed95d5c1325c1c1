"""Several models on the page: a chooser, heat maps for cells, no library, a run that trains."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from counterfoil.app.content import Content, open_content
from counterfoil.app.runs import Runs
from counterfoil.core.progress import Silent
from counterfoil.models import Model, save_pretrained
from counterfoil.training.run_folder import load_model, locked_run
from tests.app.conftest import LIMITS, running
from tests.app.test_application_page import LIT, Page
from tests.conftest import thinned

SIDE = 5
TEXT = "a red car next to a tree"

HOT = """(([x, y]) => {
  const canvas = document.querySelector('canvas.heat');
  const at = canvas.getContext('2d').getImageData(x * canvas.width, y * canvas.height, 1, 1);
  return [...at.data];
})"""
MAP_ON = "getComputedStyle(document.querySelector('canvas.heat')).opacity === '1'"


@pytest.fixture(scope="module")
def cells(run, tmp_path_factory) -> Path:
    """A model of the cells of a grid, which was taught nothing but has attention."""
    words = load_model(run, "cpu")
    torch.manual_seed(0)
    options = {"size": 16 * SIDE, "patch": 16}
    model = Model(words.spec, 3 * 16**2, words.text, "pixels", options)
    folder = tmp_path_factory.mktemp("app-cells") / "cells"
    save_pretrained(model, folder)
    return folder


@pytest.fixture(scope="module")
def unlibraried(cells, run, cache) -> Content:
    """Two models and nothing to search."""
    opened = open_content(cells, explainer=run, cache=cache, progress=Silent())
    return replace(
        opened, models=opened.models[::-1], missing=("photos-naaf: needs the vision extra",)
    )


@pytest.fixture(scope="module")
def plain(unlibraried):
    with running(unlibraried, LIMITS) as started:
        yield started


@pytest.fixture
def photo_file(tmp_path) -> Path:
    picture = Image.effect_mandelbrot((300, 200), (-2, -1, 1, 1), 60).convert("RGB")
    picture.save(tmp_path / "photo.jpg")
    return tmp_path / "photo.jpg"


def sent(client, path: Path) -> str:
    return client.upload(path.read_bytes()).json["id"]


def test_without_a_library_a_photo_and_a_sentence_come_first(browser, plain, photo_file) -> None:
    page = Page(browser, plain)
    page.open()
    assert "fit the photo" in browser.text("h1")
    assert "nothing to search" in browser.text(".hero")
    assert "vision extra" in browser.text(".missing")
    browser.choose_file("#file", photo_file)
    browser.wait("document.activeElement?.id === 'sentence'")
    browser.write("a red car")
    browser.wait("document.querySelectorAll('.word').length === 3")
    name = browser.js("new URLSearchParams(location.hash.split('?')[1]).get('image')")
    score = plain.post("/api/explain", {"image": name, "text": "a red car"}).json["score"]
    browser.wait(f"document.querySelector('output.number').textContent === '{score:.3f}'")
    browser.drop_file(photo_file)  # the sentence is kept for the next photo
    browser.wait(
        "new URLSearchParams(location.hash.split('?')[1]).get('image') !== " + json.dumps(name)
    )
    browser.wait("document.querySelectorAll('.word').length === 3")
    page.open("search")
    assert "nothing to search" in browser.text(".empty")
    assert page.complaints() == []


def test_what_needs_a_library_is_refused_in_words(plain) -> None:
    refused = plain.post("/api/search", {"text": TEXT})
    assert (refused.status, refused.headers["content-type"]) == (409, "application/problem+json")
    assert "no library" in refused.json["detail"]
    assert plain.get("/api/images").json == {"total": 0, "offset": 0, "images": []}
    facts = plain.get("/api/about").json
    assert (facts["search_model"], facts["images"], facts["examples"]) == (None, 0, [])


def test_a_word_shows_its_cells_as_a_heat_map(browser, plain, photo_file) -> None:
    name = sent(plain, photo_file)
    match = plain.post("/api/explain", {"image": name, "text": TEXT}).json
    grid = match["grid"]
    assert (grid["rows"], grid["columns"]) == (SIDE, SIDE)
    page = Page(browser, plain)
    page.open("match", image=name, text=TEXT)
    browser.wait("document.querySelector('.regions img').naturalWidth > 0")
    assert not browser.js(MAP_ON)
    assert browser.count(".heat-key:not([hidden])") == 1
    for place in (1, 2):
        browser.hover(f'.word[data-place="{place}"]')
        browser.wait(f"document.querySelector('.word.on')?.dataset.place === '{place}'")
        browser.wait(MAP_ON)
        weights = [match["words"][place]["region_weights"][at] for at in grid["cells"]]
        order = sorted(range(SIDE**2), key=weights.__getitem__)

        def hot(cell: int) -> list[int]:
            center = [(cell % SIDE + 0.5) / SIDE, (cell // SIDE + 0.5) / SIDE]
            return browser.js(f"{HOT}({center})")

        mean = sum(weights) / len(weights)
        assert max(weights) > 2 * mean
        assert hot(order[-1])[3] > 200  # nearly opaque, and light
        assert min(hot(order[-1])[:2]) > 200
        below = [cell for cell in order if weights[cell] < 0.9 * mean]
        assert below
        assert max(hot(cell)[3] for cell in below) < 40
    browser.hover("#sentence")
    browser.wait(f"!({MAP_ON})")
    assert not browser.js(
        "getComputedStyle(document.querySelector('.regions svg')).display !== 'none'"
    )


@pytest.mark.slow
def test_a_heat_map_is_smooth_between_cells(browser, plain, photo_file) -> None:
    name = sent(plain, photo_file)
    page = Page(browser, plain)
    page.open("match", image=name, text=TEXT)
    browser.hover('.word[data-place="1"]')
    browser.wait(MAP_ON)
    jumps = browser.js(
        "(() => { const c = document.querySelector('canvas.heat');"
        "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; let most = 0;"
        "for (let i = 7; i < d.length; i += 4) if (((i - 3) / 4) % c.width)"
        " most = Math.max(most, Math.abs(d[i] - d[i - 4])); return most; })()"
    )
    assert 0 < jumps < 30  # boxes would jump by up to 209


@pytest.mark.parametrize("way", thinned(["tap", "keyboard"], "keyboard"))
def test_a_chosen_word_keeps_its_map(browser, plain, photo_file, way) -> None:
    name = sent(plain, photo_file)
    page = Page(browser, plain)
    browser.size(390, 844, phone=True)
    page.open("match", image=name, text=TEXT)
    if way == "tap":
        x, y = browser.middle('.word[data-place="1"]')
        browser.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        browser.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    else:
        browser.js("document.querySelector('.word').focus()")
        browser.press("ArrowRight")
        browser.press("Enter")
    browser.wait("document.querySelector('.word[aria-pressed=true]')?.dataset.place === '1'")
    browser.wait(MAP_ON)
    browser.js("document.activeElement.blur()")
    browser.wait(MAP_ON)
    assert browser.js("document.documentElement.scrollWidth") <= 390


@pytest.mark.slow
def test_arrow_keys_go_over_the_cells_of_a_photo(browser, plain, photo_file) -> None:
    page = Page(browser, plain)
    page.open("match", image=sent(plain, photo_file), text=TEXT)
    browser.js("document.querySelector('.regions').focus()")
    for key in ("ArrowRight", "ArrowDown"):
        browser.press(key)
    browser.wait(f"document.getElementById('status').textContent.startsWith('Region {SIDE + 1}:')")
    browser.wait(MAP_ON)
    browser.press("Escape")
    browser.wait(f"!({MAP_ON})")


def test_another_model_is_chosen_on_the_page(browser, plain, unlibraried, photo_file) -> None:
    names = [one.name for one in unlibraried.models]
    assert names == ["cells", "small-naaf"]
    image = sent(plain, photo_file)
    page = Page(browser, plain)
    page.open("match", image=image, text=TEXT)
    for name in reversed(names):
        browser.js(
            f"(s => {{ s.value = '{name}'; s.dispatchEvent(new Event('change')); }})"
            "(document.getElementById('model'))"
        )
        answer = plain.post("/api/explain", {"image": image, "text": TEXT, "model": name}).json
        browser.wait(
            f"document.querySelector('output.number').textContent === '{answer['score']:.3f}'"
        )
        assert (answer["grid"] is None) == (name == "small-naaf")
        browser.hover('.word[data-place="1"]')
        browser.wait(MAP_ON if name == "cells" else LIT)
        browser.hover("#sentence")
        assert name in browser.js("location.hash")
    refused = plain.post("/api/explain", {"image": image, "text": TEXT, "model": "nobody"})
    assert refused.status == 404
    assert "cells, small-naaf" in refused.json["detail"]


@pytest.mark.slow
def test_one_model_searches_and_another_explains(browser, cells, run, cache, pairs) -> None:
    content = open_content(run, explainer=cells, cache=cache, progress=Silent())
    try:
        with running(content, LIMITS) as client:
            facts = client.get("/api/about").json
            assert [one["name"] for one in facts["models"]] == ["cells", "small-naaf"]
            assert facts["search_model"] == "small-naaf"
            hits = client.post("/api/search", {"text": TEXT}).json["hits"]
            own = {"image": hits[0]["id"], "text": TEXT}
            assert client.post("/api/explain", own).json["grid"] is not None
            searching = client.post("/api/explain", {**own, "model": "small-naaf"}).json
            assert searching["score"] == pytest.approx(hits[0]["score"], abs=1e-4)
            page = Page(browser, client)
            page.open("search", q=TEXT)
            assert "Ranked by small-naaf" in browser.text(".note")
            browser.click(".ticket")
            browser.wait("document.getElementById('model')?.value === 'cells'")
    finally:
        content.close()


@pytest.mark.slow
def test_a_run_is_followed_while_it_trains(browser, content, run, tmp_path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    epochs = [at for at, line in enumerate(lines) if json.loads(line)["kind"] == "epoch"]
    folder = tmp_path / "runs" / "live"
    followed = replace(content, runs=Runs([run], below=tmp_path / "runs"))
    with running(followed, LIMITS) as client:
        assert len(client.get("/api/runs").json["runs"]) == 1
        with locked_run(folder):  # as a trainer does
            shutil.copy(run / "config.yaml", folder)
            (folder / "metrics.jsonl").write_text("".join(lines[: epochs[0]]))
            page = Page(browser, client)
            page.open("runs", name="live")
            assert "training: 0 of 2 epochs" in browser.text(".facts")
            assert browser.text(".tabs .live") == "training"
            browser.js("document.querySelector('details').open = true")
            with (folder / "metrics.jsonl").open("a") as log:
                log.write("".join(lines[epochs[0] :]))
            browser.wait("document.querySelector('.facts').innerText.includes('2 of 2 epochs')")
            assert browser.count(".chart svg polyline") >= 3
            assert browser.js("document.querySelector('details').open")
            shutil.copy(run / "results.json", folder)
        browser.wait("!document.querySelector('.live')")
        assert "R@1" in browser.text("table")
        assert client.get("/api/run?name=live").json["finished"]


def test_a_photo_is_read_as_its_file_is(plain, unlibraried, photo_file) -> None:
    model = unlibraried.models[0].model
    answer = plain.post("/api/score", {"images": [sent(plain, photo_file)], "texts": [TEXT]}).json
    direct = model.score([Image.open(io.BytesIO(photo_file.read_bytes()))], [TEXT])
    assert answer["scores"][0][0] == pytest.approx(float(direct[0, 0]), abs=1e-5)
