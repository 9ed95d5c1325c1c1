"""Heat maps of words × regions, model beside model: red is for a match, blue against it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from counterfoil.evaluation.chart_marks import CHARACTER, document, label
from counterfoil.reproduce.results import MappedPair, WordMap

LINE, WIDEST, NAMES, GAP = 18, 380, 110, 36
FOR, AGAINST = (200, 30, 30), (30, 70, 200)
LONGEST = 18


@dataclass(frozen=True)
class MapSheet:
    """One caption with some images; every pair is a line of maps."""

    title: str
    pairs: list[MappedPair]

    def svg(self) -> str:
        body: list[str] = []
        y, widest = 40.0, 0.0
        for pair in self.pairs:
            body.append(label(20, y + 12, _heading(pair)))
            left = 20 + CHARACTER * min(LONGEST, max(map(len, pair.words))) + 8
            body += _words(pair, left - 8, y + 34)
            x = left
            for one in pair.maps:
                wide = min(WIDEST, 22 * len(pair.regions))
                body += _map(pair, one, x, y + 34, wide)
                x += wide + GAP
            y += 34 + LINE * len(pair.words) + NAMES
            widest = max(widest, x, 20 + CHARACTER * len(_heading(pair)))
        return document(self.title, round(max(widest, 640)), round(y), body)

    def draw(self, figure: Any) -> None:
        columns = max(len(pair.maps) for pair in self.pairs)
        tall = sum(1.8 + 0.2 * len(pair.words) for pair in self.pairs)
        figure.set_size_inches(6.4 * columns, tall + 0.6)
        figure.suptitle(textwrap.fill(self.title, 110), fontweight="bold", fontsize=10)
        for number, pair in enumerate(self.pairs):
            for place, one in enumerate(pair.maps):
                axes = figure.add_subplot(len(self.pairs), columns, number * columns + place + 1)
                _draw(figure, axes, pair, one)


def map_sheets(pairs: Sequence[MappedPair]) -> list[MapSheet]:
    """A sheet for each caption, in order."""
    by_caption: dict[tuple[str, int], list[MappedPair]] = {}
    started = 0
    for pair in pairs:
        started += pair.own  # a caption begins with its own image
        by_caption.setdefault((pair.caption, started), []).append(pair)
    return [MapSheet(f"“{caption}”", some) for (caption, _), some in by_caption.items()]


def strongest(one: WordMap) -> float:
    """The value drawn in full colour."""
    return max([abs(value) for row in one.values for value in row] or [0.0]) or 1.0


def _heading(pair: MappedPair) -> str:
    return f"with {'its own' if pair.own else 'a wrong'} image, {pair.image}"


def _title(one: WordMap) -> str:
    return f"{one.row}: {one.quantity}, score {one.score:.3f}"


def _words(pair: MappedPair, right: float, top: float) -> Iterator[str]:
    for place, word in enumerate(pair.words):
        text = word if len(word) <= LONGEST else word[: LONGEST - 1] + "…"
        yield label(right, top + LINE * (place + 0.5) + 4, text, anchor="end", tooltip=word)


def _map(pair: MappedPair, one: WordMap, left: float, top: float, wide: float) -> Iterator[str]:
    cell = wide / max(1, len(pair.regions))
    full = strongest(one)
    yield label(left, top - 6, _title(one), opacity=0.8)
    for row, (word, values) in enumerate(zip(pair.words, one.values, strict=True)):
        for column, (region, value) in enumerate(zip(pair.regions, values, strict=True)):
            red, green, blue = FOR if value > 0 else AGAINST
            yield (
                f'<rect x="{left + column * cell:.1f}" y="{top + row * LINE:.1f}" '
                f'width="{cell:.1f}" height="{LINE}" fill="rgb({red},{green},{blue})" '
                f'fill-opacity="{abs(value) / full:.3f}" stroke="currentColor" '
                f'stroke-opacity="0.12"><title>{escape(f"{word} × {region}: {value:+.3f}")}'
                "</title></rect>"
            )
    bottom = top + LINE * len(pair.words) + 8
    for column, region in enumerate(pair.regions):
        text = region if len(region) <= LONGEST else region[: LONGEST - 1] + "…"
        x = left + (column + 0.5) * cell + 4
        yield (
            f'<text x="{x:.1f}" y="{bottom:.1f}" font-size="{min(10.0, cell):.1f}" '
            f'text-anchor="end" transform="rotate(-60 {x:.1f} {bottom:.1f})">'
            f"{escape(text)}</text>"
        )


def _draw(figure: Any, axes: Any, pair: MappedPair, one: WordMap) -> None:
    full = strongest(one)
    picture = axes.imshow(one.values, cmap="bwr", vmin=-full, vmax=full, aspect="auto")
    axes.set_yticks(range(len(pair.words)), pair.words, fontsize=7)
    axes.set_xticks(range(len(pair.regions)), pair.regions, fontsize=6, rotation=60, ha="right")
    axes.set_title(f"{_heading(pair)}\n{_title(one)}", loc="left", fontsize=8)
    figure.colorbar(picture, ax=axes)
