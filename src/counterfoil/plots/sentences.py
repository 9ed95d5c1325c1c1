"""Draw explanations and corrections as PNG: green words speak for the match, red against it."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw

from counterfoil.models.correct import Correction
from counterfoil.models.match import Match, WordEffect, effect_scale, shades
from counterfoil.plots.fonts import Color, draw_text, text_length

FOR, AGAINST = (22, 163, 74), (220, 38, 38)
INK, FAINT, PAPER = (31, 41, 55), (107, 114, 128), (255, 255, 255)
GROUND, RULE = (243, 244, 246), (229, 231, 235)
WIDTH, MARGIN = 960, 36
MAX_CHARACTERS = 400  # of a word: more than fit a line
IMAGE_HEIGHT = 720
CHIP_HEIGHT, LINE_HEIGHT = 44, 78

MIN_WEIGHT = 0.04
UNKNOWN_NOTE = "unknown word, left out"
HEADING_SIZE = 44


def color_of(shade: float, ground: Color = PAPER) -> Color:
    """The background color of a word of that shade, mixed with ``ground``."""
    strength = 0.85 * abs(shade)
    hue = FOR if shade > 0 else AGAINST
    mixed = [round(g + strength * (h - g)) for g, h in zip(ground, hue, strict=True)]
    return mixed[0], mixed[1], mixed[2]


@dataclass(frozen=True)
class Chip:
    """A word, the label under it, and its shade from −1 (red) to 1 (green).

    A word unknown to the model has a dotted frame and gray letters.
    """

    word: str
    under: str
    shade: float
    known: bool = True


def draw_chips(page: Image.Image, chips: Sequence[Chip], top: float) -> None:
    """Draw words in lines from ``top`` down."""
    draw = ImageDraw.Draw(page)
    for chip, text, x, y, width in _layout(chips):
        upper = top + y
        ground = color_of(chip.shade, GROUND)
        draw.rounded_rectangle((x, upper, x + width, upper + CHIP_HEIGHT), 9, fill=ground)
        if not chip.known:
            _draw_dots(draw, (x, upper, x + width, upper + CHIP_HEIGHT))
        ink = (PAPER if _luminance(ground) < 0.5 else INK) if chip.known else FAINT
        draw_text(page, (x + width / 2, upper + CHIP_HEIGHT / 2), text, ink, 26, "mm")
        draw_text(page, (x + width / 2, upper + CHIP_HEIGHT + 13), chip.under, FAINT, 15, "mm")


def _draw_dots(draw: ImageDraw.ImageDraw, box: tuple[float, float, float, float]) -> None:
    """Draw a dotted frame."""
    left, upper, right, lower = map(round, box)
    across = [(x, y) for x in range(left + 4, right - 3, 7) for y in (upper, lower)]
    down = [(x, y) for y in range(upper + 4, lower - 3, 7) for x in (left, right)]
    for x, y in across + down:
        draw.ellipse((x - 1.5, y - 1.5, x + 1.5, y + 1.5), fill=FAINT)


def height_of(chips: Sequence[Chip]) -> int:
    """Height of all lines of words."""
    return int(max((y for _, _, _, y, _ in _layout(chips)), default=0.0)) + LINE_HEIGHT


def _layout(chips: Sequence[Chip]) -> list[tuple[Chip, str, float, float, float]]:
    """Each word with its text, shortened to fit, its x and y, and its width."""
    layout = []
    x, y = float(MARGIN), 0.0
    for chip in chips:
        text = chip.word if len(chip.word) <= MAX_CHARACTERS else f"{chip.word[:MAX_CHARACTERS]}…"
        while text_length(text, 26) > WIDTH - 2 * MARGIN - 20 and len(text) > 1:
            text = text[:-2] + "…"
        width = max(text_length(text, 26) + 20, 64.0)
        if x + width > WIDTH - MARGIN and x > MARGIN:
            x, y = float(MARGIN), y + LINE_HEIGHT
        layout.append((chip, text, x, y, width))
        x += width + 8
    return layout


def _luminance(color: Color) -> float:
    return (0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2]) / 255


def fit_to_page(image: Image.Image) -> Image.Image:
    """The image scaled to the largest size that fits the page."""
    scale = min((WIDTH - 2 * MARGIN) / image.width, IMAGE_HEIGHT / image.height)
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    return image.convert("RGB").resize(size, Image.Resampling.LANCZOS)


def png(page: Image.Image) -> bytes:
    buffer = io.BytesIO()
    page.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def score_note(match: Match) -> str:
    """How the score compares with those of other pairs; empty without a yardstick."""
    above = match.above
    if above is None or match.yardstick is None:
        return ""
    wrong, right = (f"{100 * above[side]:.0f} %" for side in ("wrong", "right"))
    split = match.yardstick.split
    return f"higher than {wrong} of wrong pairs and {right} of right pairs ({split})"


def color_note(match: Match) -> str:
    """One line about the scale of the colors."""
    if match.yardstick is None:
        return (
            "Colors compare within this sentence only: the run has no yardstick, which is "
            "measured at the end of training."
        )
    if not match.has_common_scale:
        return (
            "Colors compare within this sentence only: usual effects were measured by "
            f"{match.yardstick.word_method}, these are by {match.method}."
        )
    most, least = effect_scale(match)
    return (
        f"Colors mean the same in every picture: full green from {signed(most)}, full red from "
        f"{signed(-least)}."
    )


def signed(effect: float) -> str:
    """An effect with its sign, with a typographic minus.

    >>> signed(0.03121), signed(-0.2), signed(0.0)
    ('+0.0312', '−0.2000', '0.0000')
    """
    text = f"{abs(effect):.4f}"
    if float(text) == 0.0:
        return text
    return f"{'+' if effect > 0 else '−'}{text}"


def explain_png(match: Match, image: Image.Image | None = None) -> bytes:
    """The image with the regions that the worst word attends to, the sentence and the score.

    Without an image, the sentence alone.
    """
    chips = [
        Chip(_original_text(match, word), _effect_label(word), shade, word.known)
        for word, shade in zip(match.words, shades(match), strict=True)
    ]
    below = height_of(chips)
    picture = _picture(match, image) if image is not None else None
    top = MARGIN + (picture.height + 74 if picture is not None else 0)
    page = Image.new("RGB", (WIDTH, top + below + 156), PAPER)
    if picture is not None:
        page.paste(picture, ((WIDTH - picture.width) // 2, MARGIN))
        draw_text(page, (WIDTH / 2, MARGIN + picture.height + 24), _caption(match), FAINT, 19, "mm")
    draw_chips(page, chips, top)
    _draw_footer(page, match, top + below + 14)
    return png(page)


def _original_text(match: Match, word: WordEffect) -> str:
    start, end = word.span or (0, 0)
    return match.text[start:end] or word.word


def _draw_footer(page: Image.Image, match: Match, y: int) -> None:
    draw = ImageDraw.Draw(page)
    draw.line((MARGIN, y, WIDTH - MARGIN, y), fill=RULE, width=2)
    score = f"score {match.score:.4f}"
    draw_text(page, (MARGIN, y + 16), score, INK, 26)
    if match.boundary is not None:
        x = MARGIN + text_length(score, 26) + 28
        draw_text(page, (x, y + 21), f"boundary {match.boundary:.4f}", FAINT, 21)
    lines = (score_note(match), method_note(match), color_note(match))
    for number, line in enumerate(filter(None, lines)):
        draw_text(page, (MARGIN, y + 56 + 26 * number), line.replace("−", "-"), FAINT, 17)
    x = float(WIDTH - MARGIN)
    for name, shade in (("for", 1.0), ("against", -1.0)):
        x -= text_length(name, 17)
        draw_text(page, (x, y + 22), name, FAINT, 17)
        draw.rounded_rectangle((x - 26, y + 23, x - 8, y + 41), 4, fill=color_of(shade))
        x -= 46


METHOD_NOTES = {
    "leave-one-out": "An effect is how much the score falls when the word is left out "
    "(leave-one-out).",
    "mask": "An effect is how much the score falls when a mask replaces the word.",
    "gradient": "An effect is the gradient of the score by the word's embedding, times the "
    "embedding.",
    "combined": "An effect is the mean of leave-one-out and gradient × input.",
    "rollout": "An effect is the attention that reaches the word; it has no direction.",
    "discrimination": "An effect is the log odds that the word is original, not replaced.",
}


def method_note(match: Match) -> str:
    """One line about what an effect is."""
    if match.method in METHOD_NOTES:
        return METHOD_NOTES[match.method]
    if not match.additive:
        return "An effect is the word's own part of the score."
    rest = sum(word.effect for word in match.specials)
    names = " and ".join(word.word for word in match.specials)
    ends = f", {signed(rest)} of {names} included" if names else ""
    return f"Effects add up to the score{ends}."


def _caption(match: Match) -> str:
    worst = match.worst
    how = "counts most against" if worst.effect < 0 else "counts least for"
    looked = match.boxes is not None and worst.region_weights is not None
    return f"“{worst.word}” {how} this match" + ("; framed: where it looked" if looked else "")


def _picture(match: Match, image: Image.Image) -> Image.Image:
    """The scaled image, with frames around the regions of the worst word."""
    picture = fit_to_page(image)
    worst = match.worst
    if match.boxes is None or worst.region_weights is None:
        return picture
    hue = FOR if worst.effect > 0 else AGAINST
    largest = max(float(worst.region_weights.max(initial=0.0)), 1e-9)
    frames = sorted(zip(worst.region_weights.tolist(), match.boxes.tolist(), strict=False))
    for weight, box in frames:
        if weight >= MIN_WEIGHT:
            picture = _framed(picture, box, weight / largest, hue)
    return picture


def _framed(picture: Image.Image, box: list[float], strength: float, hue: Color) -> Image.Image:
    """Draw a frame whose width and opacity grow with the attention weight."""
    width, height = picture.size
    left, right = sorted((box[0] * width, box[2] * width))
    upper, lower = sorted((box[1] * height, box[3] * height))
    edge = (
        min(max(left, 0.0), width - 8.0),
        min(max(upper, 0.0), height - 8.0),
        max(min(right, width - 1.0), 7.0),
        max(min(lower, height - 1.0), 7.0),
    )
    layer = Image.new("RGBA", picture.size, (0, 0, 0, 0))
    draw = ImageDraw.Draw(layer)
    opacity = round(55 + 200 * strength)
    line = round(2 + 5 * strength)
    # A light rim keeps the frame visible on a background of the same color.
    draw.rounded_rectangle(edge, 6, outline=(255, 255, 255, opacity), width=line + 3)
    draw.rounded_rectangle(edge, 6, outline=(*hue, opacity), width=line)
    return Image.alpha_composite(picture.convert("RGBA"), layer).convert("RGB")


def _effect_label(word: WordEffect) -> str:
    """The label under a word; some fonts lack the typographic minus."""
    return signed(word.effect).replace("−", "-") if word.known else "unknown"


def correct_png(correction: Correction, image: Image.Image | None = None) -> bytes:
    """The sentence with each word's probability of being wrong, then its changes in green.

    Without an image, the sentences alone.
    """
    changed = {change.position: change.instead for change in correction.changes}
    before = [
        Chip(word.word, f"{word.wrong:.2f}" if word.known else "unknown", -word.wrong, word.known)
        for word in correction.words
    ]
    after = [
        Chip(changed.get(position, word.word), "", 1.0 if position in changed else 0.0)
        for position, word in enumerate(correction.words)
    ]
    picture = fit_to_page(image) if image is not None else None
    top = MARGIN + (picture.height + 24 if picture is not None else 0)
    middle = top + HEADING_SIZE + height_of(before)
    bottom = middle + HEADING_SIZE + (height_of(after) if changed else 0)
    page = Image.new("RGB", (WIDTH, bottom + 12), PAPER)
    draw = ImageDraw.Draw(page)
    if picture is not None:
        page.paste(picture, ((WIDTH - picture.width) // 2, MARGIN))
    _heading(page, top, correction.score, "how likely each word is wrong")
    draw_chips(page, before, top + HEADING_SIZE)
    draw.line((MARGIN, middle - 4, WIDTH - MARGIN, middle - 4), fill=RULE, width=2)
    heading = "corrected" if changed else "nothing was changed"
    _heading(page, middle + 8, correction.corrected_score, heading)
    if changed:
        draw_chips(page, after, middle + 8 + HEADING_SIZE)
    return png(page)


def _heading(page: Image.Image, y: float, score: float, note: str) -> None:
    text = f"score {score:.4f}".replace("−", "-")
    draw_text(page, (MARGIN, y), text, INK, 24)
    draw_text(page, (WIDTH - MARGIN, y + 14), note, FAINT, 17, "rm")
