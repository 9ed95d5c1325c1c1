"""Write an audit as an HTML page, JSON lines, CSV and a summary.

The page is self-contained, and captions are always escaped.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from counterfoil.audit.audit import MAX_LISTED, Audit
from counterfoil.audit.describe import writable
from counterfoil.audit.findings import (
    LINES,
    SIGN_NAMES,
    Finding,
    OtherCaption,
    Summary,
    UnknownWord,
    WrongWord,
    diverse_first,
    skipped_images,
    threshold_text,
    to_csv,
    to_jsonl,
    to_summary,
    total,
)
from counterfoil.core.errors import ConfigError
from counterfoil.core.printable import clean, page_policy
from counterfoil.core.storage.atomic import write_atomically
from counterfoil.data.images import as_json
from counterfoil.data.pairs import Problem, Severity, Split
from counterfoil.plots.sentences import UNKNOWN_NOTE, signed
from counterfoil.training.report import STYLE as BASE_STYLE
from counterfoil.training.report import picture

SIDE, SMALL = 190, 110
MAX_SAME_SHOWN = 8
"""Pictures of other images with the same caption."""
PLANTED_NAMES = {"swapped": "caption of another image", "words": "words exchanged"}

ORDERS = {
    "suspicion": "most suspicious",
    "score": "lowest score",
    "margin": "largest lead of another image",
    "rank": "worst rank",
    "image": "image",
}

SUSPICIOUS, NEAR = "Suspicious captions", "Near-duplicates"

NEAR_NOTE = (
    "Captions that say nearly the same of different images: likely false negatives in training, "
    "not errors. Identical captions are one entry."
)

PAGE, TABLE, SUMMARY = "index.html", "findings.csv", "summary.json"
BYTE_ORDER_MARK = "\ufeff"
"""Start of the table: without it, Excel does not read UTF-8, and umlauts are garbled."""
IMAGES_FILE = "images.jsonl"


class Pictures:
    """Thumbnails of images by split and id; the id alone for an unknown image."""

    def __init__(self, splits: Mapping[str, Split]) -> None:
        self.splits = splits
        self.index_of = {
            name: {image: index for index, image in enumerate(split.ids)}
            for name, split in splits.items()
        }

    def show(self, split: str, image: str, side: int) -> str:
        index = self.index_of.get(split, {}).get(image)
        if index is None:
            return f'<div class="nopixels">{clean(image)}</div>'
        return picture(self.splits[split], index, side)


def finding_html(finding: Finding, pictures: Pictures, same: Sequence[Finding] = ()) -> str:
    """A card that the page can focus, and sort and filter by its data attributes.

    ``same`` are findings with the same caption, which share the card.
    """
    names = " ".join(one.image for one in (finding, *same))
    searched = f"{finding.text} {names} {finding.split}"
    margin = 0.0 if finding.margin is None else finding.margin
    decidable = _decidable(finding) if finding.kind == "mismatch" and not same else ""
    return (
        f'<article class="finding {finding.kind}" tabindex="0" data-kind="{finding.kind}" '
        f'data-signs="{" ".join(finding.signs)}" data-suspicion="{finding.suspicion:.6g}" '
        f'data-score="{finding.score:.6g}" data-margin="{margin:.6g}" '
        f'data-rank="{finding.rank}" data-image="{clean(finding.image)}" '
        f'data-text="{clean(searched)}"{decidable}>'
        f'<div class="own">{pictures.show(finding.split, finding.image, SIDE)}</div>'
        f"<div>{_head(finding)}<h3><bdi>{_sentence(finding)}</bdi>{_times(same)}</h3>"
        f"{_reasons(finding)}<dl>{_facts(finding, pictures)}{_same(finding, same, pictures)}</dl>"
        "</div></article>"
    )


def _decidable(finding: Finding) -> str:
    """What the page needs to store a decision: the caption as it is in the data."""
    key = {"split": finding.split, "image": finding.image, "caption": finding.caption}
    key_json = json.dumps({**key, "text": finding.text})
    suggestion = json.dumps(finding.correction.text) if finding.correction else "null"
    return f' data-key="{escape(key_json)}" data-suggestion="{escape(suggestion)}"'


def _times(same: Sequence[Finding]) -> str:
    return f" <small>×{1 + len(same)}</small>" if same else ""


def _same(finding: Finding, same: Sequence[Finding], pictures: Pictures) -> str:
    """Other images with the same caption: a few pictures and the number of the rest."""
    others = {one.image: one for one in same if one.image != finding.image}
    if not others:
        return ""
    pictures_html = "".join(
        f'<div class="small">{pictures.show(one.split, one.image, SMALL)}'
        f"<small>{clean(one.image)}</small></div>"
        for one in list(others.values())[:MAX_SAME_SHOWN]
    )
    rest = len(others) - MAX_SAME_SHOWN
    more = f"<small>and {rest} more</small>" if rest > 0 else ""
    return f'<dt>same caption</dt><dd class="row">{pictures_html}{more}</dd>'


def _head(finding: Finding) -> str:
    share = f"{100 * finding.suspicion:.0f}"
    return (
        f'<header><span><span class="bar"><i style="width:{share}%"></i></span>suspicion {share} %'
        f"</span><span>{clean(finding.split)} · {clean(finding.image)} · caption "
        f"{finding.caption + 1}</span><span>score {finding.score:.3f}, rank {finding.rank} of "
        f"{finding.compared}</span></header>"
    )


def _sentence(finding: Finding) -> str:
    """The caption with wrong and unknown words marked."""
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
            parts.append(f'<span class="unknown" title="{UNKNOWN_NOTE}">{letters}</span>')
        last = end
    return "".join([*parts, clean(finding.text[last:])])


def _reasons(finding: Finding) -> str:
    items = "".join(f"<li>{clean(reason.text)}</li>" for reason in finding.reasons)
    return f"<ul>{items}</ul>"


def _facts(finding: Finding, pictures: Pictures) -> str:
    facts: list[tuple[str, str]] = []
    if finding.planted is not None:
        was = f"<bdi>{clean(finding.planted.original)}</bdi>"
        facts.append(("planted", f"{PLANTED_NAMES[finding.planted.error]}; the caption was: {was}"))
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
        picture_html = pictures.show(finding.split, other.image, SMALL)
        note = f"<small>{clean(other.image)}, score {other.score:.3f}</small>"
        facts.append(("better image", f'<div class="small">{picture_html}</div>{note}'))
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


STYLE, SCRIPT = (
    (Path(__file__).parent / name).read_text(encoding="utf-8") for name in ("page.css", "page.js")
)


def render(
    title: str,
    summaries: Sequence[Summary],
    findings: Sequence[Finding],
    splits: Mapping[str, Split],
    most: int = 500,
    notes: Sequence[str] = (),
    problems: Sequence[Problem] = (),
) -> str:
    """The HTML page; ``splits`` (by name) provide the pictures."""
    wrong = [finding for finding in findings if finding.kind == "mismatch"]
    # A suspicious near-duplicate is in both sections.
    duplicates = group_by_caption(
        [one for one in findings if one.kind != "mismatch" or one.near_duplicate]
    )
    chosen, groups = _select(wrong, duplicates, most)
    pictures = Pictures(splits)
    remarks = [*notes, *(f"{one.split}: {note}" for one in summaries for note in one.notes)]
    near, near_shown = sum(map(len, duplicates)), sum(map(len, groups))
    if len(chosen) < len(wrong) or near_shown < near:
        remarks.append(
            f"This page shows {len(chosen)} of {len(wrong)} listed suspicious captions and "
            f"{near_shown} of {near} near-duplicates; findings.jsonl has all."
        )
    skipped = [*map(str, problems), *(line for one in summaries for line in one.skipped)]
    remarks += [f"Left out: {line}" for line in skipped[:MAX_LISTED]]
    if len(skipped) > MAX_LISTED:
        remarks.append(f"… and {len(skipped) - MAX_LISTED} more; summary.json counts them.")
    return PAGE_TEMPLATE.format(
        policy=escape(page_policy(SCRIPT)),
        title=escape(title),
        style=BASE_STYLE + STYLE,
        counts=_counts(summaries, problems),
        notes="".join(f'<p class="note">{clean(note)}</p>' for note in remarks),
        chips=_chips(chosen),
        orders=_options(ORDERS),
        tabs=_tab("suspicious", SUSPICIOUS, len(wrong)) + _tab("near-duplicates", NEAR, near),
        suspicious=SUSPICIOUS,
        near=NEAR,
        near_note=NEAR_NOTE,
        total=len(chosen) + len(groups),
        cards="".join(finding_html(finding, pictures) for finding in chosen)
        or _none_shown(len(wrong), "no caption is listed as suspicious"),
        groups="".join(finding_html(group[0], pictures, group[1:]) for group in groups)
        or _none_shown(near, "no caption is nearly the same as another"),
        script=SCRIPT,
    )


def group_by_caption(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Near-duplicates grouped by caption, those with the most images first."""
    groups: dict[tuple[str, str], list[Finding]] = defaultdict(list)
    for finding in findings:
        groups[finding.split, finding.text].append(finding)
    return sorted(groups.values(), key=lambda group: -group[0].near_duplicate_images)


def _select(
    wrong: list[Finding], duplicates: list[list[Finding]], most: int
) -> tuple[list[Finding], list[list[Finding]]]:
    """The first suspicious captions; near-duplicates get a fifth of the cards, or the rest."""
    selected = wrong[: max(most - min(len(duplicates), most // 5), 0)]
    return selected, duplicates[: most - len(selected)]


def _tab(section: str, name: str, count: int) -> str:
    return f'<button type="button" data-section="{section}">{name} ({count:,})</button>'


def _counts(summaries: Sequence[Summary], problems: Sequence[Problem]) -> str:
    suspicious, captions = total(summaries)
    cells = {
        "captions": f"{captions:,}",
        f"suspicious (suspicion ≥ {threshold_text(summaries)})": f"{suspicious:,}",
        "share": f"{100 * suspicious / max(1, captions):.1f} %",
        "near-duplicates": f"{sum(one.false_negatives for one in summaries):,}",
        "images skipped": f"{skipped_images(summaries, problems):,}",
    }
    return "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in cells.items())


def _chips(findings: Sequence[Finding]) -> str:
    parts = []
    for sign, name in SIGN_NAMES.items():
        count = sum(sign in finding.signs for finding in findings)
        if count:
            box = f'<input type="checkbox" value="{sign}">'
            parts.append(f'<label class="chip">{box}{escape(name)} ({count})</label>')
    return "".join(parts)


def _options(choices: Mapping[str, str]) -> str:
    return "".join(
        f'<option value="{key}">{escape(name)}</option>' for key, name in choices.items()
    )


PAGE_TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Counterfoil audit: {title}</title><style>{style}</style></head><body>
<a class="skip" href="#findings">to the findings</a><main>
<header><p class="brand">Counterfoil audit</p><h1>{title}</h1></header>
<dl class="counts">{counts}</dl>
{notes}
<nav class="tabs" aria-label="Sections" hidden>{tabs}</nav>
<div class="tools" role="search" hidden>
<fieldset><legend>Only with all of these reasons</legend>{chips}</fieldset>
<label>Sort by <select id="order">{orders}</select></label>
<label>Show <select id="state"><option value="all">all</option><option value="open">open</option>
<option value="decided">decided</option></select></label>
<input id="search" type="search" placeholder="words of a caption, an image id"
 aria-label="Filter by text" title="/ to type here">
</div>
<div class="review" hidden><p id="progress" role="status"></p>
<label>Reviewer <input id="reviewer" type="text" maxlength="100" placeholder="anonymous"></label>
<button type="button" id="download">Download decisions</button>
<p class="note">Keys: <b>k</b> keep, <b>e</b> edit, <b>s</b> take the suggestion, <b>d</b> discard,
<b>u</b> undo, <b>j ↓</b> next, <b>↑</b> previous, <b>/</b> filter. This page keeps decisions in
the browser; add the downloaded file with <code>counterfoil audit merge AUDIT FILE</code>.</p></div>
<p id="shown" role="status">{total} findings</p>
<div id="findings">
<section id="suspicious"><h2>{suspicious}</h2><div class="list">{cards}</div></section>
<section id="near-duplicates"><h2>{near}</h2><p class="note">{near_note}</p>
<div class="list">{groups}</div></section>
</div>
</main><script>{script}</script></body></html>
"""


def _none_shown(count: int, none: str) -> str:
    text = "None is shown here; findings.jsonl has all." if count else f"Nothing found: {none}."
    return f'<p class="note">{text}</p>'


def check_report_folder(folder: Path, data: Path | None = None) -> None:
    """Refuse a file, and a folder in which a report would replace files that no audit wrote.

    ``data`` is the audited file or folder. Beside it, the findings would be read as captions.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: is a file; name a folder for the report")
    names = [name for name in (PAGE, TABLE, SUMMARY, IMAGES_FILE) if (folder / name).exists()]
    if names and not (folder / LINES).exists():  # an audit writes these lines first
        raise ConfigError(
            f"{folder}: has a file '{names[0]}' that no audit wrote; name another folder"
        )
    beside = data.parent if data is not None and data.is_file() else data
    if beside is not None and beside.is_dir() and folder.resolve() == beside.resolve():
        raise ConfigError(
            f"{folder}: is the folder of the audited data, where the findings would be taken for "
            "captions; name another folder"
        )


def write_report(
    folder: Path,
    title: str,
    audits: Sequence[Audit],
    about: Mapping[str, Any],
    *,
    details: int = 500,
    notes: Sequence[str] = (),
    problems: Sequence[Problem] = (),
    source: Mapping[str, Any] | None = None,
) -> Path:
    """Write the page, the findings and the summary of one audit per split; the page's path.

    ``about`` (model and data) is copied into the summary. The page shows the first ``details``
    findings, the other files have all. ``problems`` of the data set are counted as skipped images.
    ``source`` says where the data can be read again; without it, the report has all captions.
    """
    summaries = [audit.summary for audit in audits]
    findings = [finding for audit in audits for finding in audit.findings]
    findings.sort(key=lambda finding: (finding.kind != "mismatch", -finding.suspicion))
    wrong = [finding for finding in findings if finding.kind == "mismatch"]
    findings[: len(wrong)] = diverse_first(wrong)
    splits = {audit.split.name: audit.split for audit in audits}
    lost = left_out(problems, list(splits))
    listed = {
        "threshold": max(audit.threshold for audit in audits),
        "captions": sum(audit.listed for audit in audits),
    }
    page = render(title, summaries, findings, splits, details, notes, lost)
    write_atomically(folder / LINES, to_jsonl(findings))
    write_atomically(folder / IMAGES_FILE, _image_lines(findings, splits, source is None))
    write_atomically(folder / TABLE, BYTE_ORDER_MARK + to_csv(findings))
    facts = {**about, "source": source, "listed": listed, "notes": list(notes)}
    write_atomically(folder / SUMMARY, to_summary(summaries, facts, lost))
    write_atomically(folder / PAGE, page)
    return folder / PAGE


def _image_lines(findings: Sequence[Finding], splits: Mapping[str, Split], every: bool) -> str:
    """Captions and pixel sources of ``every`` image or those in findings, one JSON line per image.

    `counterfoil serve` reads it to show pictures that its index may not contain.
    """
    index_of = {
        name: {image: index for index, image in enumerate(split.ids)}
        for name, split in splits.items()
    }
    lines = []
    named = (key for finding in findings for key in finding.images)
    if every:
        named = ((name, image) for name, split in splits.items() for image in split.ids)
    for name, image in dict.fromkeys(named):
        split, index = splits[name], index_of[name][image]
        pixels = as_json(split.pixels[index]) if split.pixels is not None else None
        captions = [writable(text) for text in split.captions[index]]
        line = {"split": name, "id": image, "captions": captions, "pixels": pixels}
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    return "".join(lines)


def left_out(problems: Sequence[Problem], splits: Sequence[str]) -> list[Problem]:
    """Problems that skipped items of these splits, or of an unnamed split."""
    return [
        problem
        for problem in problems
        if problem.severity is Severity.SKIP
        and (problem.kind != "unreadable-image" or problem.where.split("/")[0] in splits)
    ]
