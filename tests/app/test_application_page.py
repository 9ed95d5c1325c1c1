"""The page in a real browser: search, hover, correct, upload, keyboard, phone."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlencode

import pytest
from PIL import Image

from counterfoil.app.access import Access
from counterfoil.search import SearchIndex
from counterfoil.training.run_folder import load_model
from tests.app.browser import Browser
from tests.app.conftest import LIMITS, Client, running
from tests.conftest import thinned

LIT = "getComputedStyle(document.querySelector('.regions .dim')).opacity > 0.3"


class Page:
    """The browser on the page of the service."""

    def __init__(self, browser: Browser, client: Client) -> None:
        self.browser, self.client = browser, client
        browser.complaints.clear()
        browser.size(1200, 900)
        browser.colors("light")

    def open(self, view: str = "", **params: str) -> Browser:
        query = f"?{urlencode(params)}" if params else ""
        self.browser.go(f"{self.client.base}/#/{view}{query}")
        return self.browser

    def complaints(self) -> list[str]:
        """What the browser noted, without pictures of a service that a test before stopped."""
        elsewhere = re.compile(
            rf"http://(?!{re.escape(self.client.base.removeprefix('http://'))}/)"
        )
        return [text for text in self.browser.complaints if not elsewhere.search(text)]


@pytest.fixture
def page(browser, client):
    opened = Page(browser, client)
    yield opened
    assert opened.complaints() == []


@pytest.fixture
def image(pairs) -> str:
    return pairs.test.ids[3]


def corrected(client: Client, pairs, start: str = "") -> dict:
    """A pair that the corrector would change; the text begins with ``start``."""
    for name, captions in zip(pairs.test.ids, pairs.test.captions, strict=True):
        found = client.post("/api/correct", {"image": name, "text": start + captions[0]}).json
        if found["agreed"]["changes"]:
            return found
    raise AssertionError("nothing to correct")


def test_the_first_thing_seen_is_the_library(page, client) -> None:
    browser = page.open()
    assert browser.count(".ticket") == 24
    assert browser.text("h1")
    browser.wait("document.querySelector('.ticket img').naturalWidth > 0")
    first = client.get("/api/images?limit=1").json["images"][0]
    assert first["captions"][0][:20] in browser.text(".ticket .says")


def test_a_sentence_is_searched_and_a_result_opened(page, client) -> None:
    text = "a red car next to a tree"
    browser = page.open()
    browser.click("#query")
    browser.write(text)
    browser.press("Enter")
    browser.wait("document.querySelectorAll('.ticket .score').length > 0")
    found = client.post("/api/search", {"text": text}).json["hits"]
    assert browser.count(".ticket") == len(found)
    assert browser.text(".ticket .score") == f"{found[0]['score']:.3f}"
    browser.click(".ticket")
    browser.wait("document.querySelectorAll('.word').length === 7")
    assert browser.js("document.getElementById('sentence').value") == text
    score = client.post("/api/explain", {"image": found[0]["id"], "text": text}).json["score"]
    assert browser.text("output.number") == f"{score:.3f}"


def test_every_word_is_colored_by_its_effect(page, client, image) -> None:
    text = "a cat and two large boats"
    browser = page.open("match", image=image, text=text)
    words = client.post("/api/explain", {"image": image, "text": text}).json["words"]
    kinds = browser.js(
        "[...document.querySelectorAll('.word')].map(w => w.classList.contains('for'))"
    )
    assert kinds == [word["known"] and word["effect"] >= 0 for word in words]
    shades = browser.js(
        "[...document.querySelectorAll('.word')].map(w => +w.style.getPropertyValue('--shade'))"
    )
    assert shades == pytest.approx([abs(word["shade"]) for word in words], abs=1e-3)
    assert browser.count(".scale .dot") == sum(word["known"] for word in words)
    assert "boundary" in browser.js("document.querySelector('.scale svg').textContent")


def test_pointing_at_a_word_lights_its_regions(page, client, image) -> None:
    browser = page.open("match", image=image, text="a cat and two large boats")
    match = client.post("/api/explain", {"image": image, "text": "a cat and two large boats"}).json
    assert not browser.js(LIT)
    browser.hover('.word[data-place="1"]')
    browser.wait(LIT)
    weights = match["words"][1]["region_weights"]
    lit = browser.js(
        "[...document.querySelectorAll('.frame')].map(f => f.classList.contains('lit'))"
    )
    assert lit == [weight > 0.3 * max(weights) for weight in weights]
    assert browser.js("document.querySelector('.dot.on').dataset.place") == "1"
    browser.hover("#sentence")
    browser.wait(f"!({LIT})")


@pytest.mark.slow
def test_pointing_at_a_region_lights_its_words(page, client, image) -> None:
    browser = page.open("match", image=image, text="a cat and two large boats")
    match = client.post("/api/explain", {"image": image, "text": "a cat and two large boats"}).json
    small = min(
        range(len(match["boxes"])),
        key=lambda at: (
            (match["boxes"][at][2] - match["boxes"][at][0])
            * (match["boxes"][at][3] - match["boxes"][at][1])
        ),
    )
    x1, y1, x2, y2 = match["boxes"][small]
    area = browser.js(
        "(b => [b.x, b.y, b.width, b.height])"
        "(document.querySelector('.regions').getBoundingClientRect())"
    )
    browser.mouse(
        "mouseMoved", area[0] + (x1 + x2) / 2 * area[2], area[1] + (y1 + y2) / 2 * area[3]
    )
    browser.wait("document.querySelector('.weighed').classList.contains('lit')")
    looked = browser.js(
        "[...document.querySelectorAll('.word')].map(w => w.classList.contains('looked'))"
    )
    assert looked == [word["region_weights"][small] > 0.12 for word in match["words"]]


def test_one_click_corrects_a_word_and_the_score_moves(page, client, pairs) -> None:
    found = corrected(client, pairs)
    change = found["agreed"]["changes"][0]
    browser = page.open("match", image=found["image"], text=found["text"])
    browser.wait("document.querySelector('.word.struck s') !== null")
    before = browser.text("output.number")
    match = client.post("/api/explain", {"image": found["image"], "text": found["text"]}).json
    place = change["place"]
    assert browser.text(f'.word[data-place="{place}"] s').lower() == change["word"].lower()
    browser.click(f'li:has([data-place="{place}"]) .mend')
    start, end = found["words"][place]["span"]
    wanted = found["text"][:start] + change["instead"] + found["text"][end:]
    browser.wait(f"document.getElementById('sentence').value === {json.dumps(wanted)}")
    score = client.post("/api/explain", {"image": found["image"], "text": wanted}).json["score"]
    browser.wait(f"document.querySelector('output.number').textContent === '{score:.3f}'")
    assert score > float(before)
    assert browser.text(".moved") == f"+{score - match['score']:.3f}"


@pytest.mark.slow
def test_words_behind_an_emoji_are_colored_and_corrected(page, client, pairs) -> None:
    correction = corrected(client, pairs, start="😀👩‍👩‍👧 🚗 ")
    asked = {"image": correction["image"], "text": correction["text"]}
    match = client.post("/api/explain", asked).json
    words = [asked["text"][slice(*one["span"])] for one in match["words"]]
    browser = page.open("match", **asked)
    browser.wait("document.querySelector('.word.struck s') !== null")
    shown = browser.js("[...document.querySelectorAll('.word .letters')].map(w => w.textContent)")
    assert shown == words
    browser.click(".mend-all")
    wanted = json.dumps(correction["agreed"]["text"])
    browser.wait(f"document.getElementById('sentence').value === {wanted}")


def test_effects_change_as_a_sentence_is_typed(page, client, image) -> None:
    browser = page.open("match", image=image, text="a cat")
    browser.js("document.getElementById('sentence').focus()")
    browser.js("document.getElementById('sentence').setSelectionRange(9, 9)")
    browser.write(" on a beach")
    browser.wait("document.querySelectorAll('.word').length === 5")
    score = client.post("/api/explain", {"image": image, "text": "a cat on a beach"}).json["score"]
    browser.wait(f"document.querySelector('output.number').textContent === '{score:.3f}'")
    assert "beach" in browser.js("decodeURIComponent(location.hash)")


KINDS = """[...document.querySelectorAll('.word')].map((word) =>
  ['for', 'against', 'neutral', 'unknown'].find((kind) => word.classList.contains(kind)))"""


@pytest.mark.slow
def test_a_dot_and_a_word_of_one_color_mean_the_same(page, client, pairs) -> None:
    for name in pairs.test.ids[:2]:
        text = "a red dog, a cow and a zyzzyva in front of a house."
        match = client.post("/api/explain", {"image": name, "text": text}).json
        browser = page.open("match", image=name, text=text)
        kinds = browser.js(KINDS)
        assert kinds == [
            "unknown"
            if not word["known"]
            else "neutral"
            if word["word"] in ",."
            else "against"
            if word["effect"] < 0
            else "for"
            for word in match["words"]
        ]
        dots = browser.js(
            "[...document.querySelectorAll('.dot')].map(d => [Number(d.dataset.place),"
            " d.classList[1]])"
        )
        assert dots == [[n, kind] for n, kind in enumerate(kinds) if kind in ("for", "against")]
        assert browser.count(".key") == 1
        assert browser.count(".scale b") == 0  # no legend of its own


def test_an_unknown_word_is_marked_and_a_sentence_of_such_words_refused(page, image) -> None:
    browser = page.open("match", image=image, text="a zyzzyva dog")
    assert browser.text(".word.unknown .letters") == "zyzzyva"
    assert browser.text(".word.unknown .effect") == "unknown"
    assert "dotted" in browser.js(
        "getComputedStyle(document.querySelector('.word.unknown .letters')).outlineStyle"
    )
    page.open("match", image=image, text="zyzzyva")
    assert "knows no word" in browser.text(".problem")
    browser.complaints.clear()  # the browser notes the refusal


def test_a_score_has_its_yardstick_beside_it(page, client, image) -> None:
    match = client.post("/api/explain", {"image": image, "text": "a dog"}).json
    browser = page.open("match", image=image, text="a dog")
    assert match["standing"].startswith("higher than ")
    assert browser.text(".standing") == match["standing"]


@pytest.mark.slow
def test_what_to_try_are_captions_of_the_library(page, client, pairs) -> None:
    browser = page.open()
    examples = client.get("/api/about").json["examples"]
    captions = {text.rstrip(".") for texts in pairs.test.captions for text in texts}
    assert len(examples) == 4
    assert set(examples) <= captions
    assert browser.js("document.getElementById('query').placeholder") == examples[0]
    assert browser.text(".tries a") in examples


@pytest.mark.slow
def test_identical_captions_are_one_result_with_the_images_behind_it(
    browser, content, run, pairs, tmp_path
) -> None:
    same = "a red dog next to a green tree"
    split = pairs.test.select(range(12))
    captions = [[same, *texts[:1]] for texts in split.captions]
    model = load_model(run, "cpu")
    index = SearchIndex.build(
        tmp_path / "index", model, replace(split, captions=captions), first_stage="pooled"
    )
    with running(replace(content, index=index), LIMITS) as client:
        found = client.post("/api/search", {"image": split.ids[0], "k": 13}).json["hits"]
        texts = [hit["text"] for hit in found]
        distinct = {text for texts in captions for text in texts}
        assert len(texts) == len(distinct)
        assert set(texts) == distinct
        assert [hit["rank"] for hit in found] == list(range(1, len(distinct) + 1))
        group = found[texts.index(same)]
        assert group["count"] == 12
        assert set(group["images"]) == set(split.ids)
        for k in (1, 3):
            fewer = client.post("/api/search", {"image": split.ids[0], "k": k}).json["hits"]
            assert [(hit["text"], hit["count"]) for hit in fewer] == [
                (hit["text"], hit["count"]) for hit in found[:k]
            ]
        page = Page(browser, client)
        page.open(image=split.ids[0])
        assert "×12" in browser.text(".sentences")
        assert browser.count(".sentence-hit") == len(distinct)
        browser.click(".behind summary")
        browser.wait("document.querySelector('.behind .strip img').naturalWidth > 0")
        behind = sum(hit["count"] for hit in found if hit["count"] > 1)
        assert browser.count(".behind .strip a") == behind


@pytest.mark.slow
def test_the_table_of_a_run_fits_a_phone(page) -> None:
    page.browser.size(390, 844, phone=True)
    browser = page.open("runs")
    assert browser.js("document.documentElement.scrollWidth") <= 390
    sizes = browser.js(
        "(({scrollWidth, clientWidth}) => [scrollWidth, clientWidth])"
        "(document.querySelector('.scroll'))"
    )
    assert sizes[0] <= sizes[1]


@pytest.mark.parametrize("way", thinned(["chosen", "dropped"], "chosen"))
def test_an_image_finds_sentences(page, client, photo, tmp_path, way) -> None:
    path = tmp_path / "photo.png"
    path.write_bytes(photo)
    browser = page.open()
    if way == "chosen":
        browser.choose_file("#file", path)
    else:
        browser.drop_file(path)
    browser.wait("document.querySelectorAll('.sentence-hit').length === 15")
    browser.wait("document.querySelector('.asked img').naturalWidth > 0")
    name = browser.js("new URLSearchParams(location.hash.split('?')[1]).get('image')")
    wanted = client.post("/api/search", {"image": name}).json["hits"][0]["text"]
    assert browser.text(".sentence-hit .says") == wanted


def test_a_file_that_is_no_image_is_refused_in_words(page, browser, tmp_path) -> None:
    path = tmp_path / "photo.png"
    path.write_bytes(b"no image")
    page.open()
    browser.choose_file("#file", path)
    browser.wait("document.querySelector('.problem') !== null")
    assert "not an image" in browser.text(".problem")
    browser.complaints.clear()  # the browser notes the refusal


def test_everything_can_be_done_by_keyboard(page) -> None:
    browser = page.open()
    browser.press("/")
    assert browser.js("document.activeElement.id") == "query"
    browser.write("a dog")
    browser.press("Enter")
    browser.wait("document.querySelectorAll('.ticket .score').length > 0")
    for _ in range(40):
        browser.press("Tab")
        if browser.js("document.activeElement.matches('.ticket')"):
            break
    first = browser.js("document.activeElement.ariaLabel")
    browser.press("ArrowRight")
    assert browser.js("document.activeElement.ariaLabel") != first
    browser.press("Enter")
    browser.wait("document.querySelectorAll('.word').length === 2")
    browser.js("document.querySelector('.word').focus()")
    browser.press("ArrowRight")
    assert browser.js("document.activeElement.dataset.place") == "1"
    browser.wait(LIT)
    browser.js("document.querySelector('.regions').focus()")
    browser.press("ArrowRight")
    browser.wait("document.querySelector('.weighed').classList.contains('lit')")
    browser.press("Escape")
    browser.wait("!document.querySelector('.weighed').classList.contains('lit')")


@pytest.mark.parametrize("view", thinned(["", "search", "match", "audit", "runs"], "match"))
def test_nothing_scrolls_sideways_on_a_phone(page, image, view) -> None:
    page.browser.size(390, 844, phone=True)
    long = "a large dog in front of some incomprehensibilities"
    views = {"search": ("", {"q": long}), "match": ("match", {"image": image, "text": long})}
    name, params = views.get(view, (view, {}))
    browser = page.open(name, **params)
    assert browser.js("document.documentElement.scrollWidth") <= 390
    small = browser.js(
        "[...document.querySelectorAll('button, .ticket, nav a')].filter(e => e.offsetHeight"
        " && e.offsetHeight < 24).map(e => e.outerHTML)"
    )
    assert small == []  # large enough for a finger


def test_the_audit_strikes_wrong_words_and_shows_hostile_text_as_text(page) -> None:
    browser = page.open("audit")
    assert browser.count(".finding") == 3
    assert browser.text(".finding s") == "red"
    assert browser.text(".finding ins") == "brown"
    assert "<img src=x" in browser.text(".findings")
    assert browser.text(".notes summary") == "4 notes on this audit"
    browser.click(".notes summary")  # folded, so that the findings stay in sight
    assert "<b>a note</b>" in browser.text(".notes details[open]")
    browser.js("document.querySelector('.tag[href*=wrong-words]').click()")
    browser.wait("document.querySelectorAll('.finding').length === 2")
    browser.click(".finding .caption a")
    browser.wait("document.getElementById('sentence')?.value === 'a red dog on a beach'")


@pytest.mark.slow
def test_the_audit_shows_the_whole_picture(page) -> None:
    browser = page.open("audit")
    style = "getComputedStyle(document.querySelector('.finding .shot img'))"
    assert browser.js(f"{style}.objectFit") == "contain"
    assert browser.js("document.querySelector('.finding .shot').clientWidth") >= 200


@pytest.mark.slow
def test_the_match_view_offers_images_of_the_library(page, client) -> None:
    browser = page.open("match")
    assert browser.count(".ticket") == 5
    browser.click(".ticket")
    first = client.get("/api/images?limit=1").json["images"][0]
    browser.wait(f"document.getElementById('sentence')?.value === {first['captions'][0]!r}")


def test_runs_show_their_curves(page) -> None:
    browser = page.open("runs")
    assert browser.count(".chart svg polyline") >= 3
    assert "loss loss" not in browser.text(".charts").lower()
    assert "R@1" in browser.text("table")
    browser.hover(".chart svg")
    assert browser.text(".chart .read").startswith("epoch")


def test_the_documentation_lists_every_route(page, browser, client) -> None:
    browser.go(f"{client.base}/docs")
    routes = client.get("/openapi.json").json["paths"].values()
    assert browser.count(".operation") == sum(len(methods) for methods in routes)
    browser.click("#theme")
    assert browser.js("document.documentElement.dataset.theme") == "dark"
    browser.js("localStorage.clear()")


def ground(browser: Browser, path: Path) -> tuple[int, ...]:
    browser.picture(path)
    return Image.open(io.BytesIO(path.read_bytes())).convert("RGB").getpixel((5, 400))


@pytest.mark.slow
def test_light_and_dark_follow_the_system_and_the_button(page, tmp_path) -> None:
    browser = page.open()
    assert min(ground(browser, tmp_path / "light.png")) > 200
    browser.colors("dark")
    assert max(ground(browser, tmp_path / "dark.png")) < 60
    browser.click("#theme")
    assert min(ground(browser, tmp_path / "chosen.png")) > 200
    browser.js("localStorage.clear(); delete document.documentElement.dataset.theme")


def test_the_token_in_the_address_opens_the_page(browser, content, pairs) -> None:
    token = "a-token-of-the-tests"  # noqa: S105
    with running(content, LIMITS, access=Access.to("127.0.0.1", token=token)) as client:
        browser.go(f"{client.base}/#/")
        browser.wait("document.querySelector('form.token input') !== null")
        browser.go(f"{client.base}/#token={token}")
        browser.wait("document.querySelectorAll('.ticket').length === 24")
        browser.wait("document.querySelector('.ticket img').naturalWidth > 0")
        assert token not in browser.js("location.href")
    browser.complaints.clear()  # it complains of the first 401
