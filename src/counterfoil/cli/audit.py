"""`counterfoil audit`: which captions do not match their image, which words are wrong."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from counterfoil.cli.output import (
    ABOVE_0_TO_1,
    CACHE_OPTION,
    JSON_OPTION,
    SHARE,
    FormatOption,
    SourceOptions,
    check_inputs,
    console,
    parse_options,
    print_json,
    print_table,
    progress,
    say_fallback,
)
from counterfoil.cli.signals import ENDED_BY
from counterfoil.core.storage.reading import read_text

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from counterfoil.audit import Audit, Corrector
    from counterfoil.core.progress import Progress
    from counterfoil.data.pairs import Pairs, Split
    from counterfoil.models.model import Model


TOO_MANY = 7
"""Exit code where more captions are suspicious than was allowed; no error has it."""


def audit(
    run: Annotated[Path, typer.Argument(help="Run or model folder.")],
    pairs: Annotated[
        str | None,
        typer.Argument(help="Data set: a path or a name; by default the one of the run."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the report.")] = Path("audit"),
    format: FormatOption = None,
    option: SourceOptions = None,
    split: Annotated[
        list[str] | None,
        typer.Option("--split", help="A split; repeat it for several. Default: all, each apart."),
    ] = None,
    corrector: Annotated[
        Path | None,
        typer.Option(help="Run trained with tags-dc, to suggest corrections; default: RUN."),
    ] = None,
    threshold: Annotated[
        float,
        typer.Option(
            callback=ABOVE_0_TO_1,
            help="Suspicion (above 0, at most 1) from which a caption is listed and counts for "
            "--fail-above and --max-suspicious. The summary always counts from 0.5.",
        ),
    ] = 0.5,
    examine: Annotated[
        int, typer.Option(min=2, help="Captions whose words are looked at, at most, in a split.")
    ] = 5000,
    details: Annotated[
        int, typer.Option(min=0, help="Findings on the page, and findings corrected, at most.")
    ] = 500,
    fail_above: Annotated[
        float | None,
        typer.Option(callback=SHARE, help="Exit with 7 if a larger share (0 to 1) is listed."),
    ] = None,
    max_suspicious: Annotated[
        int | None,
        typer.Option(min=0, help="Exit with 7 if more captions are listed."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
    cache: Path = CACHE_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Find the captions that do not match their image, and say why.

    [bold]Examples[/]

      counterfoil audit runs/scenes-naaf --split test --out report
      counterfoil audit runs/naaf my_photos/ --out report --corrector runs/scenes-tags-dc
      counterfoil audit runs/naaf captions.jsonl --fail-above 0.02

    Writes index.html (for people), findings.jsonl, findings.csv and summary.json (for programs).
    Scoring that was interrupted goes on where it stopped, with the same command.
    Exit code 7 means that more captions are listed than --fail-above or --max-suspicious allow.
    """
    check_inputs([run, *([corrector] if corrector else [])], pairs, format)
    from counterfoil.audit import NO_CORRECTOR, audit_split, can_correct, total, write_report
    from counterfoil.core.storage.locks import locked_folder
    from counterfoil.training.run_data import evaluation_split
    from counterfoil.training.run_folder import load_model, run_config

    bars = progress(quiet=as_json)
    options = parse_options(option or [])

    data = evaluation_split(run, pairs, format, options, cache, bars)
    model = load_model(run, device)
    say_fallback(bars, [model])

    def read(folder: Path) -> Pairs:
        """The same images as another run sees them."""
        own = run_config(run) if pairs is None else None
        if own is None:
            return evaluation_split(folder, pairs, format, options, cache, bars)
        source = own.data
        return evaluation_split(folder, source.source, source.format, source.options, cache, bars)

    named = dict.fromkeys(split or [one.name for one in data if len(one)])
    wanted = [data[name] for name in named]
    correct = _correctors(run, corrector, model, data, read, device)
    kept = {one.name: out / f".{one.name}.scored" for one in wanted}
    # refused now, not after an hour of scoring
    with locked_folder(out, "writing an audit there", "wait for it, or choose another --out"):
        with _interruptible(bars, kept.values()):
            audits = [
                audit_split(
                    model,
                    one,
                    threshold=threshold,
                    examined=examine,
                    corrector=correct(one),
                    details=details,
                    progress=bars,
                    keep=kept[one.name],
                )
                for one in wanted
            ]
        able = corrector is not None or can_correct(model)
        about: dict[str, Any] = {"run": str(run), "model": model.spec.name, "data": data.name}
        _, captions = total([one.summary for one in audits])
        listed = sum(one.listed for one in audits)
        failed = _too_many(listed, captions, threshold, fail_above, max_suspicious)
        about["passed"] = not failed
        title = f"{data.name}, read by {run.resolve().name}"
        notes = [] if able else [NO_CORRECTOR]
        page = write_report(
            out, title, audits, about, details=details, notes=notes, problems=data.problems
        )
        for path in kept.values():
            path.unlink(missing_ok=True)
    _show(page, audits, notes, failed, as_json)
    if failed:
        raise typer.Exit(TOO_MANY)


@contextmanager
def _interruptible(bars: Progress, kept: Collection[Path]) -> Iterator[None]:
    """Where the work inside is interrupted, say whether all of it has to be done again."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        some = any(path.is_file() for path in kept)
        bars.say("interrupted; the same command goes on" if some else "interrupted")
        if isinstance(error, SystemExit):
            raise
        raise typer.Exit(ENDED_BY[signal.SIGINT]) from None


def _correctors(
    run: Path,
    named: Path | None,
    model: Model,
    data: Pairs,
    read: Callable[[Path], Pairs],
    device: str,
) -> Callable[[Split], Corrector | None]:
    """What corrects the captions of a split; nothing where no model was taught to."""
    from counterfoil.audit import Corrector, can_correct
    from counterfoil.training.run_folder import load_model

    if named is None and not can_correct(model):
        return lambda split: None
    if named is None or named.resolve() == run.resolve():
        return lambda split: Corrector(model, split)
    other = load_model(named, device)
    Corrector(other, next(iter(data)))  # refuse it now, not after an hour of scoring
    seen = read(named)
    _refuse_other_features(named, other, seen)
    return lambda split: Corrector(other, seen[split.name])


def _refuse_other_features(named: Path, model: Model, data: Pairs) -> None:
    from counterfoil.core.errors import ConfigError

    widths = {split.fragments.dim for split in data if split.fragments is not None}
    if widths != {model.input_dim}:
        found = ", ".join(map(str, sorted(widths)))
        raise ConfigError(
            f"--corrector {named}: it reads fragments of {model.input_dim} numbers, these data "
            f"have {found}; take a corrector that was trained on the same kind of features"
        )


def _too_many(
    listed: int,
    captions: int,
    threshold: float,
    fail_above: float | None,
    max_suspicious: int | None,
) -> str:
    """Which limit was passed, in words; empty where none was."""
    share, level = listed / max(1, captions), f"suspicion {threshold:g} or more"
    if fail_above is not None and share > fail_above:
        return f"{100 * share:.2f} % of the captions have {level}, allowed: {100 * fail_above:g} %"
    if max_suspicious is not None and listed > max_suspicious:
        return f"{listed} captions have {level}, allowed: {max_suspicious}"
    return ""


def _show(page: Path, audits: list[Audit], notes: list[str], failed: str, as_json: bool) -> None:
    if as_json:
        print_json(_summary(page))
        return
    splits = [one.summary.split for one in audits]
    _print_columns("Audit", splits, [one.summary.rows() for one in audits])
    near = [one.summary.near_duplicate_rows() for one in audits]
    _print_columns("Near-duplicates (likely false negatives, no errors)", splits, near)
    out = console()
    listed, level = sum(one.listed for one in audits), audits[0].threshold
    out.print(
        f"listed: {listed} captions with a suspicion of at least {level:g} (--threshold)",
        highlight=False,
        markup=False,
    )
    for kind, count in _summary(page)["problems"].items():
        out.print(f"left out of the data, {kind}: {count}", highlight=False, markup=False)
    found = (f"{one.summary.split}: {note}" for one in audits for note in one.summary.notes)
    for note in [*notes, *found]:
        out.print(note, highlight=False, markup=False)
    out.print(f"report: {page}", highlight=False, markup=False)
    if failed:
        console(stderr=True).print(failed, highlight=False, markup=False, style="bold red")


def _print_columns(title: str, splits: list[str], columns: list[list[tuple[str, str]]]) -> None:
    """A table with a column per split; all columns have the same names of rows."""
    names = [name for name, _ in columns[0]]
    rows = [[name, *(column[k][1] for column in columns)] for k, name in enumerate(names)]
    print_table([["", *splits], *rows], title=title)


def _summary(page: Path) -> dict[str, Any]:
    import json

    told: dict[str, Any] = json.loads(read_text(page.parent / "summary.json"))
    return told
