"""One finding on the audit page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from counterfoil.audit.findings import Finding, OtherCaption, UnknownWord, WrongWord
from counterfoil.data.pairs import Split
from counterfoil.evaluation.explain_chart import UNKNOWN, signed
from counterfoil.markup import clean
from counterfoil.training.report import picture

SIDE, SMALL = 190, 110
SAME_SHOWN = 8
"""Pictures of other images with the same caption."""
PLANTED = {"swapped": "caption of another image", "words": "words exchanged"}


class Pictures:
    """Thumbnails of images by split and id; the id alone where there are no pixels."""

    def __init__(self, splits: Mapping[str, Split]) -> None:
        self.splits = splits
        self.places = {
            name: {image: place for place, image in enumerate(split.ids)}
            for name, split in splits.items()
        }

    def show(self, split: str, image: str, side: int) -> str:
        place = self.places.get(split, {}).get(image)
        if place is None:
            return f'<div class="nopixels">{clean(image)}</div>'
        return picture(self.splits[split], place, side)


def finding_html(finding: Finding, pictures: Pictures, same: Sequence[Finding] = ()) -> str:
    """A card that can be focused, sorted and filtered by what it carries in its attributes.

    ``same`` are findings with the same caption, which share the card.
    """
    names = " ".join(one.image for one in (finding, *same))
    searched = f"{finding.text} {names} {finding.split}"
    margin = 0.0 if finding.margin is None else finding.margin
    return (
        f'<article class="finding {finding.kind}" tabindex="0" data-kind="{finding.kind}" '
        f'data-signs="{" ".join(finding.signs)}" data-suspicion="{finding.suspicion:.6g}" '
        f'data-score="{finding.score:.6g}" data-margin="{margin:.6g}" '
        f'data-rank="{finding.rank}" data-image="{clean(finding.image)}" '
        f'data-text="{clean(searched)}">'
        f'<div class="own">{pictures.show(finding.split, finding.image, SIDE)}</div>'
        f"<div>{_head(finding)}<h3><bdi>{_sentence(finding)}</bdi>{_times(same)}</h3>"
        f"{_reasons(finding)}<dl>{_facts(finding, pictures)}{_same(finding, same, pictures)}</dl>"
        "</div></article>"
    )


def _times(same: Sequence[Finding]) -> str:
    return f" <small>×{1 + len(same)}</small>" if same else ""


def _same(finding: Finding, same: Sequence[Finding], pictures: Pictures) -> str:
    """Other images with the same caption: some pictures, then how many more there are."""
    others = {one.image: one for one in same if one.image != finding.image}
    if not others:
        return ""
    shown = "".join(
        f'<div class="small">{pictures.show(one.split, one.image, SMALL)}'
        f"<small>{clean(one.image)}</small></div>"
        for one in list(others.values())[:SAME_SHOWN]
    )
    rest = len(others) - SAME_SHOWN
    more = f"<small>and {rest} more</small>" if rest > 0 else ""
    return f'<dt>same caption</dt><dd class="row">{shown}{more}</dd>'


def _head(finding: Finding) -> str:
    share = f"{100 * finding.suspicion:.0f}"
    return (
        f'<header><span><span class="bar"><i style="width:{share}%"></i></span>suspicion {share} %'
        f"</span><span>{clean(finding.split)} · {clean(finding.image)} · caption "
        f"{finding.caption + 1}</span><span>score {finding.score:.3f}, rank {finding.rank} of "
        f"{finding.compared}</span></header>"
    )


def _sentence(finding: Finding) -> str:
    """The caption with the words in doubt and the unknown ones marked."""
    marked: list[WrongWord | UnknownWord] = [*finding.wrong_words, *finding.unknown_words]
    parts, last = [], 0
    for word in sorted(marked, key=lambda each: each.span):
        start, end = word.span
        letters = clean(finding.text[start:end])
        parts.append(clean(finding.text[last:start]))
        if isinstance(word, WrongWord):
            title = f"effect {signed(word.effect)}, usually {signed(word.usual)}"
            parts.append(f'<mark title="{title}">{letters}</mark>')
        else:
            parts.append(f'<span class="unknown" title="{UNKNOWN}">{letters}</span>')
        last = end
    return "".join([*parts, clean(finding.text[last:])])


def _reasons(finding: Finding) -> str:
    items = "".join(f"<li>{clean(reason.text)}</li>" for reason in finding.reasons)
    return f"<ul>{items}</ul>"


def _facts(finding: Finding, pictures: Pictures) -> str:
    facts: list[tuple[str, str]] = []
    if finding.planted is not None:
        was = f"<bdi>{clean(finding.planted.original)}</bdi>"
        facts.append(("planted", f"{PLANTED[finding.planted.error]}; the caption was: {was}"))
    if finding.wrong_words:
        facts.append(("words", "; ".join(_word(word) for word in finding.wrong_words)))
    if finding.unknown_words:
        names = ", ".join(dict.fromkeys(clean(word.word) for word in finding.unknown_words))
        facts.append(("unknown, left out", names))
    if finding.correction is not None:
        fixed = finding.correction
        text = f"<ins><bdi>{clean(fixed.text)}</bdi></ins>"
        facts.append(("corrected", f"{text} <small>{fixed.before:.3f} → {fixed.after:.3f}</small>"))
    elif finding.correction_note:
        facts.append(("corrected", f"<small>{clean(finding.correction_note)}</small>"))
    if finding.better_caption is not None:
        facts.append(("fits better", _other(finding.better_caption, "score")))
    if finding.near_duplicate is not None:
        facts.append(("nearly the same", _other(finding.near_duplicate, "likeness")))
    if finding.better_image is not None and finding.kind == "mismatch":
        other = finding.better_image
        shown = pictures.show(finding.split, other.image, SMALL)
        note = f"<small>{clean(other.image)}, score {other.score:.3f}</small>"
        facts.append(("better image", f'<div class="small">{shown}</div>{note}'))
    return "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in facts)


def _word(word: WrongWord) -> str:
    instead = f" → <ins>{clean(', '.join(word.suggestions))}</ins>" if word.suggestions else ""
    effect = f"{signed(word.effect)}, usually {signed(word.usual)}"
    return f"{clean(word.word)} <small>({effect})</small>{instead}"


def _other(caption: OtherCaption, what: str) -> str:
    return (
        f"<bdi>{clean(caption.text)}</bdi> "
        f"<small>{clean(caption.image)}, {what} {caption.score:.3f}</small>"
    )
