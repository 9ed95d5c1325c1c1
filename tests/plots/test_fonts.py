"""Words in pictures: characters that the first font lacks are drawn by another one, or as boxes."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from PIL import Image, ImageFont

from counterfoil.plots import fonts
from counterfoil.plots.fonts import Face, draw_text, text_length

DOG = "犬"
SIZE = 20


def square(side: int):
    pen = TTGlyphPen(None)
    pen.moveTo((0, 0))
    for point in ((0, side), (side, side), (side, 0)):
        pen.lineTo(point)
    pen.closePath()
    return pen.glyph()


@pytest.fixture
def other_font(tmp_path):
    """A font with one character, a filled square as wide as its size."""
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder([".notdef", "dog"])
    builder.setupCharacterMap({ord(DOG): "dog"})
    builder.setupGlyf({".notdef": square(0), "dog": square(1000)})
    builder.setupHorizontalMetrics({".notdef": (500, 0), "dog": (1000, 0)})
    builder.setupHorizontalHeader(ascent=1000, descent=0)
    builder.setupNameTable({"familyName": "Test", "styleName": "Regular"})
    builder.setupOS2(sTypoAscender=1000, usWinAscent=1000)
    builder.setupPost()
    builder.save(tmp_path / "dog.ttf")
    return tmp_path / "dog.ttf"


@pytest.fixture(autouse=True)
def fresh_caches(monkeypatch):
    """No other fonts than those of a test."""
    monkeypatch.setattr(fonts, "FALLBACKS", ())
    cached = (fonts.font, fonts.fallback, fonts._face_for, fonts._has_glyph, fonts._file_of)
    for one in cached:
        one.cache_clear()
    yield
    for one in cached:
        one.cache_clear()


def drawn(text: str, anchor: str = "la", at: tuple[int, int] = (0, 0)) -> np.ndarray:
    page = Image.new("RGB", (160, 40), "white")
    draw_text(page, at, text, (0, 0, 0), SIZE, anchor)
    return np.asarray(page)[..., 0]


def test_a_character_that_the_first_font_lacks_is_drawn_by_another(other_font, monkeypatch) -> None:
    boxes = drawn(DOG)
    fonts._face_for.cache_clear()
    monkeypatch.setattr(fonts, "FALLBACKS", ("no such font.ttf", str(other_font)))
    assert (drawn(DOG) == 0).sum() == SIZE * SIZE > (boxes == 0).sum()
    assert text_length(DOG, SIZE) == SIZE
    assert text_length(f"a{DOG}b", SIZE) == text_length("a", SIZE) + SIZE + text_length("b", SIZE)
    right = drawn(f"a{DOG}", "rm", (160, 20))
    assert (right[:, -SIZE + 1 : -1] == 0).any(axis=0).all()


def test_pictures_of_a_color_font_are_scaled(other_font, monkeypatch) -> None:
    large = Face(ImageFont.truetype(str(other_font), 4 * SIZE), 0.25)
    monkeypatch.setattr(fonts, "FALLBACKS", ("color",))
    monkeypatch.setattr(fonts, "fallback", lambda name, size: large)
    page = drawn(f"{DOG}{DOG}")
    assert (page == 0).sum() == 2 * SIZE * SIZE
    assert text_length(DOG, SIZE) == SIZE


def test_without_another_font_the_first_one_draws_a_box_and_nothing_is_said(capfd) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        page = drawn(f"a {DOG}\U0001f9ff")
    assert (page == 0).any()
    assert capfd.readouterr() == ("", "")


def test_a_text_that_the_first_font_has_is_drawn_at_once(monkeypatch) -> None:
    monkeypatch.setattr(fonts, "fallback", lambda name, size: pytest.fail("not needed"))
    monkeypatch.setattr(fonts, "FALLBACKS", ("any.ttf",))
    assert (drawn("Hündchen") < 128).any()


def test_a_selector_of_a_style_is_not_drawn() -> None:
    assert (drawn("❤\ufe0f") == drawn("❤")).all()


def test_fonts_of_the_working_directory_are_not_used(other_font, monkeypatch) -> None:
    monkeypatch.chdir(other_font.parent)
    assert fonts.fallback(str(other_font), SIZE) is not None
    assert fonts.fallback(other_font.name, SIZE) is None
