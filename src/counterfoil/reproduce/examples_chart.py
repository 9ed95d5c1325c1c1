"""Examples as a page: Markdown tables, and one SVG with the pictures and coloured words."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from counterfoil.evaluation.chart_marks import document, label, rule
from counterfoil.evaluation.report import markdown_table
from counterfoil.reproduce.results import Example, ExampleLine, ExampleSheet, ExampleWord

WIDTH, PICTURE, MARGIN = 860, 200, 20
LINE, HEADING = 24, 20
LETTER, BOLD = 7.2, 8.2  # widths of a character
SUSPECTED = 0.5
"""Words that are wrong with at least this probability are marked."""


def sheet_markdown(sheet: ExampleSheet) -> list[str]:
    """The rule of choice, and a table for each example."""
    lines = ["### Examples", "", f"{sheet.rule} Runs of seed {sheet.seed}.", ""]
    suspects = any(
        word.wrong is not None
        for one in sheet.examples
        for line in one.lines
        for word in line.words
    )
    if suspects:
        lines += [
            "**Bold**: not in the caption at this place. In brackets: how likely the word is wrong,"
            f" if at least {SUSPECTED:g}. Corrected: such a word is exchanged for one of the same"
            " part of speech if the score rises.",
            "",
        ]
    else:
        lines += ["**Bold**: in none of the image's captions.", ""]
    for example in sheet.examples:
        names = list(dict.fromkeys(name for line in example.lines for name in line.scores))
        rows: list[tuple[str, ...]] = [(example.image, "sentence", *names)]
        rows += [
            (line.kind, _sentence(line), *(_score(line, name) for name in names))
            for line in example.lines
        ]
        head, _, *others = markdown_table(rows)
        aligned = "| --- | --- |" + " ---: |" * len(names)  # sentences begin at the left
        lines += [head, aligned, *others, ""]
    return lines


def _sentence(line: ExampleLine) -> str:
    return " ".join(map(_word, line.words)).replace("|", "\\|")


def _word(word: ExampleWord) -> str:
    text = f"**{word.text}**" if word.new else word.text
    if word.wrong is not None and word.wrong >= SUSPECTED:
        return f"{text} ({word.wrong:.2f})"
    return text


def _score(line: ExampleLine, name: str) -> str:
    return f"{line.scores[name]:.3f}" if name in line.scores else ""


def sheet_svg(examples: Sequence[Example], title: str) -> str:
    """A block for each example: its picture, and its sentences word by word."""
    body: list[str] = []
    y = 40.0
    for example in examples:
        bottom = y + PICTURE
        if example.picture:
            body.append(
                f'<image x="{MARGIN}" y="{y:.0f}" width="{PICTURE}" height="{PICTURE}" '
                'preserveAspectRatio="xMidYMin meet" '
                f'href="data:image/jpeg;base64,{example.picture}"/>'
            )
        else:
            body.append(rule(MARGIN, y, MARGIN + PICTURE, y, 0.3))
        body.append(label(MARGIN, bottom + 14, example.image, opacity=0.75))
        place = y + 4
        for line in example.lines:
            drawn, place = _drawn(line, place)
            body += drawn
        y = max(bottom + 24, place) + 16
    return document(title, WIDTH, round(y), body)


def _drawn(line: ExampleLine, y: float) -> tuple[list[str], float]:
    """The kind and the scores of a sentence, below them its words; and where the next begins."""
    left = MARGIN + PICTURE + 24.0
    scores = ", ".join(f"{name} {score:.3f}" for name, score in line.scores.items())
    marks = [label(left, y + 10, f"{line.kind}: {scores}", opacity=0.75)]
    x, y = left, y + HEADING
    for word in line.words:
        wide = len(word.text) * (BOLD if word.new else LETTER) + 8
        if x + wide > WIDTH - MARGIN and x > left:
            x, y = left, y + LINE
        if word.wrong is not None:
            marks.append(_ground(x, y, wide, word.wrong))
        style = ' font-weight="700" text-decoration="underline"' if word.new else ""
        marks.append(
            f'<text x="{x + 4:.1f}" y="{y + 14:.1f}" font-size="13"{style}>'
            f"{escape(word.text)}</text>"
        )
        x += wide + 2
    return marks, y + LINE + 8


def _ground(x: float, y: float, wide: float, wrong: float) -> str:
    """From green to yellow, as in the paper: the more, the likelier the word is wrong."""
    red = round(0x22 + wrong * (0xFA - 0x22))
    green = round(0xC5 + wrong * (0xCC - 0xC5))
    blue = round(0x5E + wrong * (0x15 - 0x5E))
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="20" rx="4" '
        f'fill="rgb({red},{green},{blue})" fill-opacity="0.45">'
        f"<title>wrong: {wrong:.2f}</title></rect>"
    )
