"""`counterfoil reproduce`: a paper's table or figure as one command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from counterfoil.cli.output import CACHE_OPTION, JSON_OPTION, print_json, print_table, progress
from counterfoil.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from counterfoil.reproduce.plan import Job, Plan
    from counterfoil.reproduce.store import Kept


OUT = Path("runs") / "reproduce"


def reproduce(
    name: Annotated[
        str | None,
        typer.Argument(help="What to reproduce, e.g. selhn.table1, or a YAML file of your own."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Changes to every run: train.epochs=5 train.device=cpu"),
    ] = None,
    data: Annotated[
        str, typer.Option("--data", help="'scenes', or a path: then with the paper's settings.")
    ] = "scenes",
    published: Annotated[
        str | None,
        typer.Option(
            "--published",
            help="Which published numbers stand beside ours (f30k, coco-1k, coco-5k); with --data "
            "PATH also which settings apply. By default what the folder is called.",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Runs of every row.")] = 3,
    scale: Annotated[
        str, typer.Option("--scale", help="'full', or 'smoke': a few minutes on a CPU.")
    ] = "full",
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Runs at the same time.")] = 1,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Where runs are kept and results written.")
    ] = OUT,
    rows: Annotated[
        list[str] | None,
        typer.Option("--rows", help="Only rows of this label or run, e.g. 'NAAF*'; repeatable."),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(
            "--store",
            help="Folder of results that outlive the runs: what it knows is not trained again.",
        ),
    ] = None,
    tuned: Annotated[
        Path | None,
        typer.Option("--tuned", help="Stored sweep on dev whose best values the runs take."),
    ] = None,
    fill: Annotated[
        Path | None,
        typer.Option("--fill", help="Page, or folder of pages, to fill from --store; no runs."),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Train rows that the store knows all the same.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show the runs and how far they are.")
    ] = False,
    list_all: Annotated[bool, typer.Option("--list", help="List what there is.")] = False,
    cache: Path = CACHE_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Run a paper's table or figure, and print it beside the published numbers.

    [bold]Examples[/]

      counterfoil reproduce
      counterfoil reproduce selhn.table1 --scale smoke --seeds 1
      counterfoil reproduce selhn.table1 --data data/f30k_precomp --dry-run
      counterfoil reproduce selhn.figure6 --seeds 5 --jobs 2 train.device=cpu
      counterfoil reproduce my-table.yaml --out runs/mine
      counterfoil reproduce naaf.table3 --rows 'α = 2' --store results --again
      counterfoil reproduce --fill docs/results/flickr8k --store docs/results

    Every row is trained once a seed, evaluated on the test split, and kept: the same command goes
    on where it was stopped, and tables that share a row share its runs. A row that fails says why
    and leaves the others alone. Results are printed and written as Markdown, JSON, SVG and PNG.
    """
    if fill is not None:
        _fill(fill, store)
        return
    if name is None or list_all:
        _list(as_json)
        return
    if "=" in name:
        raise ConfigError(f"'{name}': name first what to reproduce (counterfoil reproduce --list)")
    from counterfoil.reproduce.store import Kept

    settings = _Asked(data, published, _scale(scale), seeds, tuple(overrides or []), tuned)
    plan, order = _plan(name, settings, rows or [], out)
    kept = Kept(store, plan, order) if store is not None else None
    if kept is not None and not again:
        kept.settle()
    if dry_run:
        _show_plan(plan, as_json)
    else:
        _run(plan, cache, jobs, as_json, kept)


def _scale(text: str) -> Literal["full", "smoke"]:
    if text == "full":
        return "full"
    if text == "smoke":
        return "smoke"
    raise ConfigError(f"--scale {text}: 'full' or 'smoke'")


def _list(as_json: bool) -> None:
    from counterfoil.reproduce.catalogue import load_artefact, names

    known = [load_artefact(name) for name in names()]
    if as_json:
        print_json([{"name": one.name, "kind": one.kind, "summary": one.summary} for one in known])
        return
    wide = max(len(one.name) for one in known)
    kinds = max(len(one.kind) for one in known)
    for one in known:
        typer.echo(f"{one.name:{wide}}  {one.kind:{kinds}}  {one.summary}")
    typer.echo("\nRun one with: counterfoil reproduce NAME [--scale smoke] [--dry-run]")


class _Asked(NamedTuple):
    """What the command line says of the runs."""

    data: str
    published: str | None
    scale: Literal["full", "smoke"]
    seeds: int
    overrides: tuple[str, ...]
    tuned: Path | None


def _plan(name: str, asked: _Asked, rows: list[str], out: Path) -> tuple[Plan, list[list[str]]]:
    """The plan of the rows that are asked for, and the labels of all rows."""
    from counterfoil.reproduce.catalogue import labels, load_artefact, only_rows
    from counterfoil.reproduce.plan import Settings, find_data_set, make_plan
    from counterfoil.reproduce.store import best_values, read_stored

    artefact = load_artefact(name)
    chosen = find_data_set(artefact, asked.data, asked.published)
    sweep = read_stored(asked.tuned) if asked.tuned is not None else None
    if asked.tuned is not None and sweep is None:
        raise DataError(f"--tuned {asked.tuned}: no such file")
    values = best_values(sweep) if sweep is not None else {}
    settings = Settings(asked.data, chosen, asked.scale, asked.seeds, asked.overrides, values)
    return make_plan(only_rows(artefact, rows), settings, out), labels(artefact)


def _fill(page: Path, store: Path | None) -> None:
    from counterfoil.reproduce.present import fill_page, pages_to_fill

    for one in pages_to_fill(page):
        names = fill_page(one, page.parent if store is None else store)
        typer.echo(f"{one}: {len(names)} sections written: {', '.join(names)}")


def _show_plan(plan: Plan, as_json: bool) -> None:
    jobs = plan.jobs()
    states = _states(plan, jobs)
    if as_json:
        print_json([_described(job, states[job.digest]) for job in jobs])
        return
    rows = [
        [job.title, "cannot run" if job.refused() else states[job.digest], job.folder.name]
        for job in jobs
    ]
    done = " and ".join(_share_finished(jobs, kind) for kind in _kinds(jobs))
    title = f"{plan.artefact.name}: {done} finished, in {plan.out}"
    print_table([["run", "state", "folder"], *rows], title=title)
    for reason in dict.fromkeys(filter(None, (job.refused() for job in jobs))):
        typer.echo(f"cannot run: {reason}")


def _states(plan: Plan, jobs: Sequence[Job]) -> dict[str, str]:
    """How far each is, as its folder says; else *known* to the store, or *not needed*."""
    to_do = {job.digest for job in plan.missing()}

    def state(job: Job) -> str:
        if job.state == "finished" or job.digest in to_do:
            return job.state
        return "known" if job.digest in plan.settled else "not needed"

    return {job.digest: state(job) for job in jobs}


def _kinds(jobs: Sequence[Job]) -> list[str]:
    """Folders that things to do lie in: runs and, where there are any, guides."""
    return sorted({job.folder.parent.name for job in jobs}, reverse=True)


def _share_finished(jobs: Sequence[Job], kind: str) -> str:
    states = [job.state for job in jobs if job.folder.parent.name == kind]
    return f"{states.count('finished')} of {len(states)} {kind}"


def _described(job: Job, state: str) -> dict[str, Any]:
    from counterfoil.reproduce.plan import PlannedGuide

    told = {"state": state, "folder": str(job.folder)}
    if isinstance(job, PlannedGuide):
        return {"guide": job.title, **told, "runs": [str(run.folder) for run in job.teachers]}
    return {"run": job.title, **told, "refused": job.refused(), "config": job.config.model_dump()}


def _run(plan: Plan, cache: Path, jobs: int, as_json: bool, kept: Kept | None) -> None:
    from counterfoil.cli.signals import StopSignals
    from counterfoil.data.load import is_named
    from counterfoil.reproduce.collect import collect
    from counterfoil.reproduce.measure import Judge
    from counterfoil.reproduce.measure_parallel import measure_together
    from counterfoil.reproduce.present import write_reproduction
    from counterfoil.reproduce.runner import carry_out

    data = plan.settings.data
    if not is_named(data, None) and not Path(data).exists():
        raise DataError(f"--data {data}: no such file or folder, nor a data set of that name")
    bars, signals = progress(quiet=as_json), StopSignals()
    outcome = carry_out(
        plan,
        cache,
        bars,
        jobs=jobs,
        should_stop=lambda: signals.asked,
        on_training=signals.listen,
        on_trained=signals.stop_listening,
    )
    if not outcome.interrupted:  # measuring may take hours, and has nothing to save
        signals.stop_listening()
    judge = Judge(plan.out / "evaluations", cache, bars)

    def measure(columns: bool) -> None:
        if not outcome.interrupted:
            measure_together(plan, judge, jobs, bars, columns=columns)

    if kept is not None:  # recalls at once: measuring takes a while, and may be cut short
        measure(columns=False)
        kept.add(collect(plan, outcome, judge, with_measures=False))
    measure(columns=True)
    found = collect(plan, outcome, judge)
    if kept is not None:
        found = kept.add(found)
    folder = plan.out / plan.folder_name
    page = write_reproduction(found, folder)
    if as_json:
        print_json(found.as_dict())
    else:
        typer.echo(page)
        guides = f" and {outcome.built} guides built" if outcome.built else ""
        bars.say(f"{outcome.trained} runs trained{guides} now; written to {folder}")
    if outcome.interrupted:
        bars.say("interrupted; the same command goes on")
        raise typer.Exit(signals.exit_code)
    if outcome.errors:
        raise typer.Exit(1)
