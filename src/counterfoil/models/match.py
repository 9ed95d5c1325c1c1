"""`Match`: the score of an image and a caption, explained per word, with a notebook view."""

from __future__ import annotations

import base64
import io
import json
import math
import sys
import tempfile
import webbrowser
from dataclasses import asdict, dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from counterfoil.core.errors import CheckpointError
from counterfoil.core.storage.reading import read_text
from counterfoil.data.text.words import (
    CaptionWord,
    is_content_word,
    join_emoji,
    without_punctuation,
)

Floats = NDArray[np.float32]
Method = Literal[
    "parts", "leave-one-out", "mask", "gradient", "combined", "rollout", "discrimination"
]

METHODS: tuple[Method, ...] = get_args(Method)
"""Ways to measure the effect of a word; `word_effects` says what each of them is."""

UNSIGNED: tuple[Method, ...] = ("rollout",)
"""Methods that say how much a word matters, but not whether for or against the match."""

YARDSTICK = "yardstick.json"
FILE_BYTES = 1 << 16
POINTS = 101
"""Quantiles of the scores: 0, 1, … 100 %."""

MIN_AGAINST_SCALE = 0.25
"""Smallest scale of effects against a match, relative to those for it."""


@dataclass(frozen=True)
class Yardstick:
    """Score quantiles of right and wrong pairs, and the word effects that get the full color.

    ``effect_for`` and ``effect_against`` are positive: effects of at least that size, for and
    against a match, have the full color in every picture. ``word_method`` is the kind of effects
    whose signs were right most often on the split; None if there is one kind only.
    """

    split: str
    pairs: int
    right: tuple[float, ...]
    wrong: tuple[float, ...]
    effect_for: float
    effect_against: float
    word_method: Method | None = None

    def above(self, score: float) -> dict[str, float]:
        """Shares of right and of wrong pairs that score lower."""
        return {"right": _share_below(self.right, score), "wrong": _share_below(self.wrong, score)}

    def to_json(self) -> str:
        return json.dumps(asdict(self)) + "\n"


def load_yardstick(folder: Path) -> Yardstick | None:
    """The yardstick of a run or of a saved model; None if it has none."""
    path = folder / YARDSTICK
    if not path.is_file():
        return None
    try:
        values = json.loads(read_text(path, FILE_BYTES))
        right, wrong = (tuple(map(float, values.pop(side))) for side in ("right", "wrong"))
        loaded = Yardstick(**values, right=right, wrong=wrong)
        ordered = all(list(side) == sorted(side) and len(side) == POINTS for side in (right, wrong))
        numbers = (*right, *wrong, loaded.effect_for, loaded.effect_against)
        if not ordered or not all(map(math.isfinite, numbers)) or min(numbers[-2:]) <= 0:
            raise ValueError("expected sorted finite scores and positive effects")
        if loaded.word_method not in (None, *METHODS):
            raise ValueError(f"word_method: expected one of {', '.join(METHODS)}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: damaged ({error}); delete it: colors are then scaled per picture"
        ) from None
    return loaded


def _share_below(quantiles: tuple[float, ...], score: float) -> float:
    """Share of values below a score, interpolated between two quantiles."""
    low = int(np.searchsorted(quantiles, score, side="left"))
    if low == 0:
        return 0.0
    if low == len(quantiles):
        return 1.0
    before, after = quantiles[low - 1], quantiles[low]
    return float((low - 1 + (score - before) / (after - before)) / (len(quantiles) - 1))


@dataclass(frozen=True)
class WordEffect:
    """What one word adds to the score: ``effect`` = ``positive`` + ``negative``.

    ``region_weights`` are its attention to the regions, with a sum of at most 1; None for a model
    without regions. ``span`` is the character range in the caption, None for ``special`` tokens. A
    word that is not ``known`` was removed before scoring, so its effect is 0.
    """

    word: str
    effect: float
    positive: float
    negative: float
    region_weights: Floats | None = None
    span: tuple[int, int] | None = None
    special: bool = False
    known: bool = True

    @property
    def is_punctuation(self) -> bool:
        return not any(letter.isalnum() for letter in self.word)

    def as_dict(self) -> dict[str, Any]:
        weights = self.region_weights
        return {**vars(self), "region_weights": None if weights is None else weights.tolist()}


@dataclass(frozen=True, repr=False)
class Match:
    """The score of an image and a caption, and the effect of each word.

    ``words`` are those of the caption, in order. ``method`` says what an effect is: the word's part
    of the score ("parts"; if ``additive``, the effects of ``words`` and ``specials`` sum to the
    score), or the drop of the score without the word ("leave-one-out"). ``boundary`` is NAAF's,
    below which a word counts against the pair. ``picture`` is the image if it was given as pixels.

    A notebook shows the caption with colored words: green for the match, red against it.
    """

    text: str
    score: float
    words: list[WordEffect]
    specials: list[WordEffect]
    method: Method
    additive: bool
    boundary: float | None = None
    boxes: Floats | None = None
    yardstick: Yardstick | None = None
    picture: Image.Image | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        worst = f", worst={self.worst.word!r}" if any(word.known for word in self.words) else ""
        return f"Match({shortened(self.text)!r}, score={self.score:.4f}{worst})"

    def _repr_html_(self) -> str:
        return match_html(self)

    @property
    def has_common_scale(self) -> bool:
        """Whether the yardstick's usual effects were measured by the method of these."""
        return self.yardstick is not None and self.yardstick.word_method in (None, self.method)

    def show(self) -> None:
        """Display the explanation in the running notebook, otherwise in the web browser."""
        shell = sys.modules.get("IPython")
        if shell is not None and shell.get_ipython() is not None:
            shell.display.display(self)
            return
        page = f'<!doctype html><meta charset="utf-8"><title>{escape(self.text)}</title>'
        with tempfile.NamedTemporaryFile(
            "w", suffix=".html", prefix="counterfoil-", delete=False, encoding="utf-8"
        ) as file:
            file.write(page + self._repr_html_())
        webbrowser.open(Path(file.name).as_uri())

    @property
    def above(self) -> dict[str, float] | None:
        """Shares of right and of wrong dev pairs that score lower; None without a yardstick."""
        return None if self.yardstick is None else self.yardstick.above(self.score)

    @property
    def worst(self) -> WordEffect:
        """The known word with the lowest effect; a function word only if there are no others."""
        known = [word for word in self.words if word.known]
        spoken = [word for word in known if not word.is_punctuation]
        content = [word for word in spoken if is_content_word(word.word)]
        return min(content or spoken or known, key=lambda word: word.effect)

    @property
    def unknown(self) -> list[str]:
        """Distinct words that the model does not know."""
        return list(dict.fromkeys(w.text for w in without_punctuation(self._left_out())))

    def display_words(self) -> list[WordEffect]:
        """The words, with the unknown characters of an emoji as one word."""
        starts = {word.start: word.text for word in join_emoji(self._left_out())}
        return [
            word if word.known or word.span is None else replace(word, word=starts[word.span[0]])
            for word in self.words
            if word.known or word.span is None or word.span[0] in starts
        ]

    def _left_out(self) -> list[CaptionWord]:
        return [
            CaptionWord(word.word, *word.span)
            for word in self.words
            if not word.known and word.span is not None
        ]

    def as_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold."""
        return {
            "text": self.text,
            "score": self.score,
            "above": self.above,
            "boundary": self.boundary,
            "method": self.method,
            "additive": self.additive,
            "words": [word.as_dict() for word in self.words],
            "unknown": self.unknown,
            "specials": [word.as_dict() for word in self.specials],
            "boxes": None if self.boxes is None else [[float(x) for x in b] for b in self.boxes],
        }


def shades(match: Match) -> list[float]:
    """Color intensity per word, from −1 (against the match) to 1 (for it).

    The scale is the yardstick's, the same for every picture, or that of this match without one.
    Punctuation and unknown words have no color.
    """
    scale_for, scale_against = effect_scale(match)
    return [
        0.0
        if word.is_punctuation or not word.known or not scale_for
        else max(-1.0, min(1.0, word.effect / (scale_for if word.effect > 0 else scale_against)))
        for word in match.words
    ]


def effect_scale(match: Match) -> tuple[float, float]:
    """Sizes of the effects, for and against, at which a word gets the full color.

    Effects against are often small, so they are shown up to four times as strong.
    """
    if match.yardstick is not None and match.has_common_scale:
        return match.yardstick.effect_for, match.yardstick.effect_against
    effects = [word.effect for word in match.words if word.known and not word.is_punctuation]
    largest = max(map(abs, effects), default=0.0)
    return largest, max(-min(effects, default=0.0), MIN_AGAINST_SCALE * largest)


PICTURE_SIDE = 320
GREEN, RED = "22, 163, 74", "220, 38, 38"


def match_html(match: Match) -> str:
    """The image, if any, and the caption with words colored by their effects."""
    parts, end = [], 0
    for word, shade in zip(match.words, shades(match), strict=True):
        if word.span is None:
            continue
        start, stop = word.span
        style = f"background: rgba({GREEN if shade > 0 else RED}, {0.85 * abs(shade):.2f})"
        if not word.known:
            style = "border-bottom: 1px dotted"
        title = f"{word.effect:+.4f}" if word.known else "unknown word, left out"
        parts += [
            escape(match.text[end:start]),
            f'<span style="{style}; padding: 1px 3px; border-radius: 4px" title="{title}">'
            f"{escape(match.text[start:stop])}</span>",
        ]
        end = stop
    sentence = "".join(parts) + escape(match.text[end:])
    return (
        f'<div style="font-family: sans-serif">{_picture_html(match.picture)}'
        f'<p style="font-size: 1.2em; line-height: 1.7">{sentence}</p>'
        f"<p>score {match.score:.4f}</p></div>"
    )


def _picture_html(picture: Image.Image | None) -> str:
    if picture is None:
        return ""
    small, buffer = picture.convert("RGB"), io.BytesIO()
    small.thumbnail((PICTURE_SIDE, PICTURE_SIDE))
    small.save(buffer, format="PNG")
    return (
        f'<img alt="" src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}">'
    )


def shortened(text: str, length: int = 60) -> str:
    """A text of at most ``length`` characters."""
    return text if len(text) <= length else f"{text[: length - 1]}…"
