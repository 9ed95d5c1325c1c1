"""The audit as one HTML page: no file or address besides it, and no caption is ever markup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from counterfoil.audit.findings import SIGN_NAMES, Finding, Summary
from counterfoil.audit.page_finding import Pictures, finding_html
from counterfoil.audit.page_script import SCRIPT
from counterfoil.audit.page_style import STYLE
from counterfoil.audit.tables import skipped_images, total
from counterfoil.data.pairs import Split
from counterfoil.data.problems import Problem
from counterfoil.markup import clean, page_policy
from counterfoil.training.report_style import STYLE as BASE_STYLE

ORDERS = {
    "suspicion": "most suspicious",
    "score": "lowest score",
    "margin": "largest lead of another image",
    "rank": "worst rank",
    "image": "image",
}
LISTED = 20
KINDS = {"": "everything", "mismatch": "suspicious", "false-negative": "likely false negatives"}


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
    chosen = _shown(findings, most)
    pictures = Pictures(splits)
    cards = "".join(finding_html(finding, pictures) for finding in chosen)
    remarks = [*notes, *(f"{one.split}: {note}" for one in summaries for note in one.notes)]
    if len(chosen) < len(findings):
        remarks.append(
            f"This page shows {len(chosen)} of {len(findings)} findings; findings.jsonl has all."
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
        kinds=_options(KINDS),
        total=len(chosen),
        cards=cards or '<p class="note">Nothing found: no caption is suspicious.</p>',
        script=SCRIPT,
    )


def _shown(findings: Sequence[Finding], most: int) -> list[Finding]:
    """The first mismatches; likely false negatives have a fifth of the room, or what is left."""
    wrong = [finding for finding in findings if finding.kind == "mismatch"]
    alike = [finding for finding in findings if finding.kind != "mismatch"]
    kept = wrong[: max(most - min(len(alike), most // 5), 0)]
    return kept + alike[: most - len(kept)]


def _counts(summaries: Sequence[Summary], problems: Sequence[Problem]) -> str:
    suspicious, captions = total(summaries)
    cells = {
        "captions": f"{captions:,}",
        "suspicious": f"{suspicious:,}",
        "share": f"{100 * suspicious / max(1, captions):.1f} %",
        "likely false negatives": f"{sum(one.false_negatives for one in summaries):,}",
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
<div class="tools" role="search" hidden>
<fieldset><legend>Only with all of these reasons</legend>{chips}</fieldset>
<label>Show <select id="kind">{kinds}</select></label>
<label>Sort by <select id="order">{orders}</select></label>
<input id="search" type="search" placeholder="words of a caption, an image id"
 aria-label="Filter by text" title="/ to type here; j and k move between findings">
</div>
<p id="shown" role="status">{total} findings</p>
<div id="findings">{cards}</div>
</main><script>{script}</script></body></html>
"""
