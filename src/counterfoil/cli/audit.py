"""`counterfoil audit`: which captions do not match their image, and what reviewers decided."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

import counterfoil.cli.options as opt
from counterfoil.cli.audit_benchmark import benchmark
from counterfoil.cli.audit_review import export, merge
from counterfoil.cli.inputs import DataChoice, check_inputs
from counterfoil.cli.output import (
    MAX_NAMED,
    print_json,
    print_left_out,
    print_line,
    print_table,
    say_fallback,
)
from counterfoil.cli.signals import interruptible
from counterfoil.core.errors import ConfigError
from counterfoil.core.printable import plural
from counterfoil.core.storage.reading import read_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from counterfoil.audit import Audit, Corrector, Summary
    from counterfoil.data.pairs import Pairs, Problem, Split
    from counterfoil.models.model import Model


TOO_MANY_CODE = 7
"""Exit code if more captions are suspicious than allowed; no error uses it."""


class CheckByDefault(TyperGroup):
    """`counterfoil audit RUN …` is short for `counterfoil audit check RUN …`.

    `--benchmark` as the first argument is another name of the command `benchmark`.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] == "--benchmark":
            args = ["benchmark", *args[1:]]
        elif args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = ["check", *args]
        return super().parse_args(ctx, args)


audit_app = typer.Typer(
    cls=CheckByDefault,
    help="Find captions that do not match their image: counterfoil audit RUN PAIRS --out AUDIT",
    epilog="`counterfoil audit RUN …` is short for `counterfoil audit check RUN …`, whose options "
    "`counterfoil audit check --help` lists. Decide on the findings on the page of `counterfoil "
    "serve RUN --audit AUDIT`.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@audit_app.command()
def check(
    run: opt.Run,
    pairs: opt.Pairs = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Report folder to write.")] = Path(
        "audit"
    ),
    format: opt.Format = None,
    option: opt.SourceOptions = None,
    split: opt.Splits = None,
    corrector: opt.Corrector = None,
    threshold: Annotated[
        float,
        typer.Option(
            callback=opt.ABOVE_0_TO_1,
            help="List captions with at least this suspicion (above 0, at most 1); only these "
            "count as suspicious in the summary, for --fail-above and for --max-suspicious.",
        ),
    ] = 0.5,
    examine: Annotated[
        int,
        typer.Option(min=2, help="Most suspicious captions per split to examine word by word."),
    ] = 5000,
    details: Annotated[
        int,
        typer.Option(min=0, help="Findings to show on the page and to correct, at most."),
    ] = 500,
    fail_above: Annotated[
        float | None,
        typer.Option(
            callback=opt.SHARE,
            help="Exit with 7 if more than this share of captions (0–1) is listed.",
        ),
    ] = None,
    max_suspicious: Annotated[
        int | None,
        typer.Option(min=0, help="Exit with 7 if more than this many captions are listed."),
    ] = None,
    false_alarms: Annotated[
        float | None,
        typer.Option(
            callback=opt.SHARE,
            help="List about this share of right captions, and name about this share of right "
            "words (0–1). Replaces --threshold; needs --trusted, a split of about the same size.",
        ),
    ] = None,
    trusted: Annotated[
        str | None,
        typer.Option(help="Split whose captions are all right (with --false-alarms)."),
    ] = None,
    checked: Annotated[
        Path | None,
        typer.Option(
            help="Captions that you have checked, to learn the weights of the signs from: an audit "
            "folder with decisions, its decisions.jsonl, or a CSV or JSON Lines table with the "
            "columns image, text (or caption) and wrong (true or false).",
        ),
    ] = None,
    device: opt.Device = "auto",
    cache: opt.Cache = opt.CACHE,
    as_json: opt.Json = False,
) -> None:
    """Find captions that do not match their image, and the words that are wrong.

    Every split is audited separately; data that state no splits are one split for a pretrained
    model, and are divided as in training for a run. Writes index.html for people, and
    findings.jsonl, findings.csv and summary.json for programs. If interrupted, repeat the command
    to continue. Without --corrector, RUN itself suggests corrections if it was trained with
    tags-dc. Exit code 7: more captions are listed than --fail-above or --max-suspicious allow.

    [bold]Examples[/]

      counterfoil audit runs/scenes-naaf --split test --out report
      counterfoil audit runs/naaf my_photos/ --out report \\
        --corrector runs/scenes-tags-dc
      counterfoil audit runs/naaf captions.jsonl --fail-above 0.02
      counterfoil audit runs/naaf my_photos/ --split train \\
        --false-alarms 0.05 --trusted dev
      counterfoil audit runs/naaf captions.jsonl --out report --checked report
    """
    check_inputs([run, corrector], pairs, format)
    _check_rate(false_alarms, trusted)
    if checked is not None and false_alarms is not None:
        raise ConfigError(
            "--checked and --false-alarms exclude each other: the rate is measured with the "
            "default weights of signs"
        )
    from counterfoil.audit import (
        NO_CORRECTOR,
        audit_split,
        calibrate,
        can_correct,
        check_report_folder,
        left_out,
        read_checked,
        review_of,
        total,
        write_report,
    )
    from counterfoil.audit.false_alarms import check_trusted
    from counterfoil.core.storage.locks import locked_folder
    from counterfoil.data.load import is_named
    from counterfoil.data.splits import WHOLE
    from counterfoil.training.run_data import data_for_run
    from counterfoil.training.run_folder import load_model, run_config

    check_report_folder(out, None if pairs is None or is_named(pairs, format) else Path(pairs))
    source = DataChoice(pairs, format, option, cache, quiet=as_json)
    wanted = [*split, *filter(None, [trusted])] if split else None
    # a run may have been trained on some of the images: only its own splits tell them apart
    whole = {*(split or ()), trusted} <= {WHOLE, None} and run_config(run) is None

    def check_choices(data: Pairs) -> None:
        """Refuse what cannot be audited like this, before features are extracted."""
        clean, splits = _chosen(data, split, trusted)
        if clean is not None and false_alarms is not None:
            check_trusted(clean, false_alarms)
        if checked is not None:
            read_checked(checked, splits)

    bars = source.progress
    data = source.read(run, wanted, whole=whole, check=check_choices)
    model = load_model(run, device)
    say_fallback(bars, [model])

    def read(folder: Path) -> Pairs:
        """The same images with the features of another run."""
        config = run_config(run) if pairs is None else None
        if config is None:
            return source.read(folder, wanted, whole=whole)
        own = config.data
        return data_for_run(folder, own.source, own.format, own.options, cache, bars, wanted)

    clean, splits = _chosen(data, split, trusted)
    if clean is not None and any(one is clean for one in splits):
        bars.say(
            f"warning: --trusted {trusted}: this split is audited itself, so its captions are "
            "listed at that rate whether they are right or not; name another split"
        )
    labels = read_checked(checked, splits) if checked is not None else None
    correct = _correctors(run, corrector, model, read, device)
    checkpoints = {one.name: out / f".{one.name}.scored" for one in splits}
    # refused now, not after an hour of scoring
    with locked_folder(out, "writing an audit there", "wait for it, or choose another --out"):
        with interruptible(bars, lambda: any(path.is_file() for path in checkpoints.values())):
            limits = None
            if clean is not None and false_alarms is not None:
                reference = audit_split(model, clean, examined=examine, progress=bars)
                limits = calibrate(reference, false_alarms)
            audits = [
                audit_split(
                    model,
                    one,
                    threshold=threshold,
                    examined=examine,
                    corrector=correct(one),
                    details=details,
                    progress=bars,
                    keep=checkpoints[one.name],
                    false_alarms=limits,
                    checked=None if labels is None else labels.splits.get(one.name),
                )
                for one in splits
            ]
        able = corrector is not None or can_correct(model)
        about: dict[str, Any] = {"run": str(run), "model": model.spec.name, "data": data.name}
        _, captions = total([one.summary for one in audits])
        listed = sum(one.listed for one in audits)
        level = audits[0].threshold
        failed = _too_many(listed, captions, level, fail_above, max_suspicious)
        about["passed"] = not failed
        if limits is not None:
            about["false_alarms"] = limits.as_dict()
        title = f"{data.name}, read by {run.resolve().name}"
        if labels is not None:
            about["checked"] = {
                one.split.name: one.weights.as_dict() for one in audits if one.weights is not None
            }
        notes = [] if able else [NO_CORRECTOR]
        notes += labels.notes() if labels is not None else []
        page = write_report(
            out,
            title,
            audits,
            about,
            details=details,
            notes=notes,
            problems=data.problems,
            source=_source(run, source),
        )
        for path in checkpoints.values():
            path.unlink(missing_ok=True)
    chosen_by = "--threshold" if limits is None else "--false-alarms"
    lost = left_out(data.problems, [one.split.name for one in audits])
    _show(page, audits, lost, notes, failed, chosen_by, as_json)
    counts = review_of(out).counts()
    if not as_json and counts["decided"] + counts["conflicts"] + counts["unknown"]:
        print_line(f"decisions in {out}: {_progress(counts)}")
    if failed:
        raise typer.Exit(TOO_MANY_CODE)


audit_app.command()(export)
audit_app.command()(merge)
audit_app.command()(benchmark)


def _check_rate(false_alarms: float | None, trusted: str | None) -> None:
    if (false_alarms is None) != (trusted is None):
        raise ConfigError(
            "--false-alarms and --trusted belong together: name the rate and a split whose "
            "captions are all right"
        )
    if false_alarms is not None and not 0.0 < false_alarms < 1.0:
        raise ConfigError(
            f"--false-alarms: expected a share above 0 and below 1, got {false_alarms}"
        )


def _chosen(
    data: Pairs, split: Sequence[str] | None, trusted: str | None
) -> tuple[Split | None, list[Split]]:
    """The trusted split, if one is named, and the splits to audit."""
    clean = data[trusted] if trusted is not None else None
    others = [one.name for one in data if len(one) and one is not clean]
    splits = [data[name] for name in dict.fromkeys(split or others)]
    if not splits:
        reason = "the data have no images to audit"
        if trusted is not None:
            reason = f"--trusted {trusted}: the data have no other split to audit"
        raise ConfigError(reason)
    return clean, splits


def _source(run: Path, choice: DataChoice) -> dict[str, Any] | None:
    """Where the audited captions can be read again; None if a run changed them."""
    from counterfoil.audit import DataSource
    from counterfoil.training.run_folder import run_config

    if choice.data is not None:
        return DataSource(choice.data, choice.format, choice.options).as_dict()
    config = run_config(run)
    if config is None or config.data.noise or config.data.noise_index:
        return None
    data = config.data
    return DataSource(data.source, data.format, data.options).as_dict()


def _correctors(
    run: Path,
    named: Path | None,
    model: Model,
    read: Callable[[Path], Pairs],
    device: str,
) -> Callable[[Split], Corrector | None]:
    """The corrector of each split; None if no model was trained to correct."""
    from counterfoil.audit import Corrector, can_correct
    from counterfoil.models.correct import correction_matcher
    from counterfoil.training.run_folder import load_model

    if named is None and not can_correct(model):
        return lambda split: None
    if named is None or named.resolve() == run.resolve():
        return lambda split: Corrector(model, split)
    other = load_model(named, device)
    correction_matcher(other)  # refuse it now, not after an hour of scoring
    theirs = read(named)
    _refuse_other_features(named, other, theirs)
    return lambda split: Corrector(other, theirs[split.name])


def _refuse_other_features(named: Path, model: Model, data: Pairs) -> None:
    widths = {split.fragments.dim for split in data if split.fragments is not None}
    if widths != {model.input_dim}:
        dims = ", ".join(map(str, sorted(widths)))
        raise ConfigError(
            f"--corrector {named}: expects features of dimension {model.input_dim}, the data have "
            f"{dims}; use a corrector that was trained on the same kind of features"
        )


def _too_many(
    listed: int,
    captions: int,
    threshold: float,
    fail_above: float | None,
    max_suspicious: int | None,
) -> str:
    """Which limit was exceeded, in words; empty if none."""
    share, level = listed / max(1, captions), f"suspicion {threshold:g} or more"
    if fail_above is not None and share > fail_above:
        return f"{100 * share:.2f} % of the captions have {level}, allowed: {100 * fail_above:g} %"
    if max_suspicious is not None and listed > max_suspicious:
        these = plural(listed, "caption has", "captions have")
        return f"{these} {level}, allowed: {max_suspicious}"
    return ""


def _show(
    page: Path,
    audits: list[Audit],
    problems: list[Problem],
    notes: list[str],
    failed: str,
    chosen_by: str,
    as_json: bool,
) -> None:
    from counterfoil.audit.findings import threshold_text

    if as_json:
        print_json(_summary(page))
        return
    splits = [one.summary.split for one in audits]
    _print_columns("Audit", splits, [one.summary.rows() for one in audits])
    near = [one.summary.near_duplicate_rows() for one in audits]
    _print_columns("Near-duplicates (likely false negatives, not errors)", splits, near)
    listed = sum(one.listed for one in audits)
    level = threshold_text([one.summary for one in audits])
    print_line(
        f"listed: {plural(listed, 'caption')} with a suspicion of at least {level} ({chosen_by})"
    )
    print_left_out(problems, "see the report, or: counterfoil data inspect")
    for one in audits:
        _print_skipped(one.summary)
    remarks = (f"{one.summary.split}: {note}" for one in audits for note in one.summary.notes)
    for note in [*notes, *remarks]:
        print_line(note)
    print_line(f"report: {page}")
    if failed:
        print_line(failed, style="bold red", stderr=True)


def _print_skipped(summary: Summary) -> None:
    """Examples of the images that the data have, but that the model could not read."""
    for line in summary.skipped[:MAX_NAMED]:
        print_line(f"left out, {summary.split}: {line}")
    if summary.skipped_images > MAX_NAMED:
        print_line(f"  … and {summary.skipped_images - MAX_NAMED:,} more (see the report)")


def _print_columns(title: str, splits: list[str], columns: list[list[tuple[str, str]]]) -> None:
    """A table with a column per split; all columns have the same names of rows."""
    names = [name for name, _ in columns[0]]
    rows = [[name, *(column[k][1] for column in columns)] for k, name in enumerate(names)]
    print_table([["", *splits], *rows], title=title)


def _summary(page: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(read_text(page.parent / "summary.json"))
    return summary


def _progress(counts: dict[str, int]) -> str:
    text = f"{counts['decided']} decided, {counts['open']} open"
    if counts["conflicts"]:
        text += f" ({counts['conflicts']} in conflict)"
    if counts["unknown"]:
        verb = "applies" if counts["unknown"] == 1 else "apply"
        text += f"; {counts['unknown']} on captions that are not listed {verb} to nothing"
    if counts["damaged"]:
        text += f"; {plural(counts['damaged'], 'damaged line was', 'damaged lines were')} skipped"
    return text
