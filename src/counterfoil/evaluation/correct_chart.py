"""A correction as a picture: the image, the words that are wrong, the sentence that is right."""

from __future__ import annotations

from PIL import Image, ImageDraw

from counterfoil.evaluation.word_chips import (
    FAINT,
    INK,
    MARGIN,
    PAPER,
    RULE,
    WIDTH,
    Chip,
    draw_chips,
    fitted,
    font,
    height_of,
    png,
)
from counterfoil.models.correct import Correction

HEADING = 44


def correct_png(found: Correction, image: Image.Image | None = None) -> bytes:
    """The sentence with how likely each word is wrong, and below it what was changed in green.

    Without an image, the sentences alone.
    """
    changed = {change.place: change.instead for change in found.changes}
    before = [
        Chip(word.word, f"{word.wrong:.2f}" if word.known else "unknown", -word.wrong, word.known)
        for word in found.words
    ]
    after = [
        Chip(changed.get(place, word.word), "", 1.0 if place in changed else 0.0)
        for place, word in enumerate(found.words)
    ]
    picture = fitted(image) if image is not None else None
    top = MARGIN + (picture.height + 24 if picture is not None else 0)
    middle = top + HEADING + height_of(before)
    bottom = middle + HEADING + (height_of(after) if changed else 0)
    page = Image.new("RGB", (WIDTH, bottom + 12), PAPER)
    draw = ImageDraw.Draw(page)
    if picture is not None:
        page.paste(picture, ((WIDTH - picture.width) // 2, MARGIN))
    _heading(draw, top, found.score, "how likely each word is wrong")
    draw_chips(draw, before, top + HEADING)
    draw.line((MARGIN, middle - 4, WIDTH - MARGIN, middle - 4), fill=RULE, width=2)
    said = "corrected" if changed else "nothing was changed"
    _heading(draw, middle + 8, found.corrected_score, said)
    if changed:
        draw_chips(draw, after, middle + 8 + HEADING)
    return png(page)


def _heading(draw: ImageDraw.ImageDraw, y: float, score: float, said: str) -> None:
    text = f"score {score:.4f}".replace("−", "-")
    draw.text((MARGIN, y), text, INK, font(24))
    draw.text((WIDTH - MARGIN, y + 14), said, FAINT, font(17), "rm")
