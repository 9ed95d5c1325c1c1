"""`counterfoil audit export` and `merge`: what reviewers decided about the findings of an audit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

import counterfoil.cli.options as opt
from counterfoil.cli.inputs import DataChoice
from counterfoil.cli.output import print_json, print_line
from counterfoil.core.printable import plural

if TYPE_CHECKING:
    from counterfoil.audit import Exported, Merged

MAX_PRINTED = 20

AuditFolder = Annotated[
    Path, typer.Argument(metavar="AUDIT", help="Report folder of `counterfoil audit`.")
]


def export(
    folder: AuditFolder,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            help="File to write, in the layout of the data; a folder if they have several caption "
            "files. The diff is written beside it.",
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option("--data", help="Data set: a path or a name. Default: the audited data."),
    ] = None,
    format: opt.Format = None,
    option: opt.SourceOptions = None,
    overwrite: opt.Overwrite = False,
    cache: opt.Cache = opt.CACHE,
    as_json: opt.Json = False,
) -> None:
    """Write the audited data with the decisions applied, and the changes as a diff.

    The copy has the layout of the original: columns, order and other fields stay, discarded
    captions are left out. The original is never changed. Data without captions in text files
    (scenes, shards, features) become one table of all splits: name a .csv or .jsonl file.

    [bold]Example[/]

      counterfoil audit export report --out corrected/captions.csv
    """
    from counterfoil.audit import DataSource, export_corrected
    from counterfoil.core.errors import ConfigError

    _check_audit(folder)
    if data is None and (format or option):
        raise ConfigError("--option and --format say how to read --data: name it, too")
    choice = DataChoice(data, format, option, cache, quiet=as_json)
    source = None if data is None else DataSource(data, format, choice.options)
    exported = export_corrected(
        folder, out, source=source, cache=cache, overwrite=overwrite, progress=choice.progress
    )
    if as_json:
        print_json(exported.as_dict())
    else:
        _show_exported(exported)


def merge(
    folder: AuditFolder,
    others: Annotated[
        list[Path],
        typer.Argument(
            metavar="OTHER...", help="Audit folders or decisions files of other reviewers."
        ),
    ],
    prefer: Annotated[
        Literal["none", "mine", "theirs", "latest"],
        typer.Option(help="Which of two different decisions counts. none: the finding stays open."),
    ] = "none",
    as_json: opt.Json = False,
) -> None:
    """Add the decisions of other reviewers, and print how far they agree.

    Every decision is stored with its reviewer. Findings with different decisions are conflicts:
    they stay open until somebody decides, or --prefer chooses.

    [bold]Example[/]

      counterfoil audit merge report colleague/decisions.jsonl
    """
    from counterfoil.audit import DecisionLog, merge_log, read_findings

    _check_audit(folder)
    findings = read_findings(folder)
    log = DecisionLog(folder)
    results = [merge_log(log, other, findings, prefer) for other in others]
    if as_json:
        print_json([result.as_dict() for result in results])
        return
    for result in results:
        _show_merged(result)
    if results[-1].remaining:
        print_line(f"conflicts that remain: {results[-1].remaining}; decide again, or use --prefer")


def _check_audit(folder: Path) -> None:
    """Refuse a folder without findings, before torch is imported."""
    from counterfoil.core.errors import DataError

    if not (folder / "findings.jsonl").is_file():
        raise DataError(
            f"{folder}: not an audit (there is no findings.jsonl); write one with: counterfoil "
            f"audit RUN PAIRS --out {folder}"
        )


def _show_exported(exported: Exported) -> None:
    print_line(
        f"fixed: {exported.fixed}, discarded: {exported.discarded}, kept: {exported.kept}, open "
        f"and unchanged: {exported.open}"
    )
    if exported.conflicts:
        verb = "is a conflict" if exported.conflicts == 1 else "are conflicts"
        print_line(f"{exported.conflicts} of the open findings {verb} between reviewers")
    if exported.unknown:
        decisions = plural(exported.unknown, "decision")
        verb = "was" if exported.unknown == 1 else "were"
        print_line(f"{decisions} on captions that are not listed {verb} not applied")
    if exported.missing:
        decisions = plural(exported.missing, "decision")
        print_line(f"{decisions} on captions that the data do not have (any more)")
    if exported.emptied:
        names = ", ".join(exported.emptied[:MAX_PRINTED])
        more = len(exported.emptied) - MAX_PRINTED
        rest = f" and {more} more" if more > 0 else ""
        print_line(f"images without any caption now: {names}{rest}")
    for note in exported.notes:
        print_line(note)
    for file in exported.files:
        print_line(f"corrected: {file}")
    print_line(f"changes: {exported.diff}")


def _show_merged(merged: Merged) -> None:
    agreement = merged.agreement
    print_line(
        f"{merged.source}: {plural(merged.added, 'decision')} added, {merged.present} already here"
    )
    if merged.withdrawn:
        print_line(f"  taken back by their reviewers since: {merged.withdrawn}, removed here too")
    if merged.unknown:
        print_line(f"  {merged.unknown} on captions that are not listed here; stored all the same")
    if merged.damaged:
        print_line(f"  {plural(merged.damaged, 'damaged line was', 'damaged lines were')} skipped")
    if agreement.share is not None:
        kappa = "not defined" if agreement.kappa is None else f"{agreement.kappa:.2f}"
        print_line(
            f"  agreement on {plural(agreement.both, 'finding')} that both decided: "
            f"{100 * agreement.share:.1f} %, Cohen's kappa {kappa}; "
            f"{agreement.corrections_differ} fixed differently"
        )
    chosen = sum(one.chosen is not None for one in merged.conflicts)
    if merged.conflicts:
        print_line(f"  conflicts: {len(merged.conflicts)}, resolved by --prefer: {chosen}")
    for one in merged.conflicts[:MAX_PRINTED]:
        outcomes = " / ".join(
            f"{each.reviewer}: {each.action}" + (f" “{each.correction}”" if each.correction else "")
            for each in (one.mine, one.theirs)
        )
        print_line(f"    {one.mine.image}, “{one.mine.text}”: {outcomes}")
    if len(merged.conflicts) > MAX_PRINTED:
        print_line(f"    … and {len(merged.conflicts) - MAX_PRINTED} more; --json lists all")
