"""The audit as one HTML page: no file or address besides it, and no caption is ever markup."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from counterfoil.audit.findings import SIGN_NAMES, Finding, Summary
from counterfoil.audit.page_finding import Pictures, finding_html
from counterfoil.audit.tables import skipped_images, total
from counterfoil.data.pairs import Split
from counterfoil.data.problems import Problem
from counterfoil.markup import clean, page_policy
from counterfoil.training.report import STYLE as BASE_STYLE

STYLE, SCRIPT = (
    (Path(__file__).parent / name).read_text(encoding="utf-8") for name in ("page.css", "page.js")
)
ORDERS = {
    "suspicion": "most suspicious",
    "score": "lowest score",
    "margin": "largest lead of another image",
    "rank": "worst rank",
    "image": "image",
}
LISTED = 20
SUSPICIOUS, NEAR = "Suspicious captions", "Near-duplicates"
NEAR_NOTE = (
    "Captions that say nearly the same of different images: likely false negatives in training, "
    "no errors. Identical captions are one entry."
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
    """The page; pictures come from ``splits``, by the name of a finding's split."""
    wrong = [finding for finding in findings if finding.kind == "mismatch"]
    # one that is suspicious, too, is in both sections: the threshold takes nothing from this one
    alike = grouped([one for one in findings if one.kind != "mismatch" or one.near_duplicate])
    chosen, groups = _shown(wrong, alike, most)
    pictures = Pictures(splits)
    remarks = [*notes, *(f"{one.split}: {note}" for one in summaries for note in one.notes)]
    near, near_shown = sum(map(len, alike)), sum(map(len, groups))
    if len(chosen) < len(wrong) or near_shown < near:
        remarks.append(
            f"This page shows {len(chosen)} of {len(wrong)} listed suspicious captions and "
            f"{near_shown} of {near} near-duplicates; findings.jsonl has all."
        )
    skipped = [*map(str, problems), *(line for one in summaries for line in one.skipped)]
    remarks += [f"Left out: {line}" for line in skipped[:LISTED]]
    if len(skipped) > LISTED:
        remarks.append(f"… and {len(skipped) - LISTED} more; summary.json counts them.")
    return PAGE.format(
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
        or '<p class="note">Nothing found: no caption is listed as suspicious.</p>',
        groups="".join(finding_html(group[0], pictures, group[1:]) for group in groups)
        or '<p class="note">Nothing found: no caption is nearly the same as another.</p>',
        script=SCRIPT,
    )


def grouped(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Near-duplicates with the same caption together, those of the most images first."""
    groups: dict[tuple[str, str], list[Finding]] = defaultdict(list)
    for finding in findings:
        groups[finding.split, finding.text].append(finding)
    return sorted(groups.values(), key=lambda group: -group[0].near_duplicate_images)


def _shown(
    wrong: list[Finding], alike: list[list[Finding]], most: int
) -> tuple[list[Finding], list[list[Finding]]]:
    """The first suspicious captions; near-duplicates have a fifth of the room, or what is left."""
    kept = wrong[: max(most - min(len(alike), most // 5), 0)]
    return kept, alike[: most - len(kept)]


def _tab(section: str, name: str, count: int) -> str:
    return f'<button type="button" data-section="{section}">{name} ({count:,})</button>'


def _counts(summaries: Sequence[Summary], problems: Sequence[Problem]) -> str:
    suspicious, captions = total(summaries)
    cells = {
        "captions": f"{captions:,}",
        "suspicious": f"{suspicious:,}",
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


PAGE = """<!doctype html>
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
<input id="search" type="search" placeholder="words of a caption, an image id"
 aria-label="Filter by text" title="/ to type here; j and k move between findings">
</div>
<p id="shown" role="status">{total} findings</p>
<div id="findings">
<section id="suspicious"><h2>{suspicious}</h2><div class="list">{cards}</div></section>
<section id="near-duplicates"><h2>{near}</h2><p class="note">{near_note}</p>
<div class="list">{groups}</div></section>
</div>
</main><script>{script}</script></body></html>
"""
