"""`counterfoil reproduce`: a paper's table or figure as one command."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

import counterfoil.cli.options as opt
from counterfoil.cli.output import print_json, print_line, print_list, print_table, progress
from counterfoil.core.errors import ConfigError, DataError, nearest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from counterfoil.reproduce.measure import RunEvaluator
    from counterfoil.reproduce.plan import Job, Plan
    from counterfoil.reproduce.results import Reproduction
    from counterfoil.reproduce.runner import Outcome
    from counterfoil.reproduce.store import ResultCache


OUT = Path("runs") / "reproduce"


def reproduce(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Table or figure to reproduce, e.g. selhn.table1, or a YAML file of your own. "
            "With wildcards ('naaf.*'), or without a name: list."
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Config overrides for every run: train.epochs=5 train.device=cpu"),
    ] = None,
    data: Annotated[
        str,
        typer.Option(
            "--data", help="'scenes', or the path of a data set, trained with the paper's settings."
        ),
    ] = "scenes",
    published: Annotated[
        str | None,
        typer.Option(
            "--published",
            help="Published numbers to print beside ours: f30k, coco-1k or coco-5k. With --data "
            "PATH this also selects the settings. Default: derived from the folder's name.",
        ),
    ] = None,
    seeds: Annotated[
        int, typer.Option("--seeds", min=1, help="Runs per row, each with its own random seed.")
    ] = 3,
    scale: Annotated[
        Literal["full", "smoke"],
        typer.Option("--scale", help="smoke: tiny runs, a few minutes on a CPU."),
    ] = "full",
    jobs: Annotated[
        int, typer.Option("--jobs", "-j", min=1, help="Runs to train in parallel.")
    ] = 1,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for runs and results.")] = OUT,
    rows: Annotated[
        list[str] | None,
        typer.Option("--rows", help="Only rows with this label or run, e.g. 'NAAF*'. Repeatable."),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(
            "--store",
            help="Folder of stored results. Rows found there are not trained again; new results "
            "are added, so that run folders can be deleted.",
        ),
    ] = None,
    tuned: Annotated[
        list[Path] | None,
        typer.Option(
            "--tuned",
            help="Stored result of a sweep on dev; runs use its best values. Repeatable: one file "
            "for each sweep.",
        ),
    ] = None,
    render_page: Annotated[
        Path | None,
        typer.Option(
            "--render-page",
            help="Rewrite the tables of this Markdown page, or of every page in this folder, from "
            "--store (default: the folder around it), and train nothing.",
        ),
    ] = None,
    retrain: Annotated[
        bool, typer.Option("--retrain", help="Also train rows whose results are in --store.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the planned runs and their state, then exit.")
    ] = False,
    list_all: Annotated[
        bool, typer.Option("--list", help="List all tables and figures, then exit.")
    ] = False,
    cache: opt.Cache = opt.CACHE,
    as_json: opt.Json = False,
) -> None:
    """Train and evaluate a paper's table or figure, and print it beside the published numbers.

    Every row is trained once per seed and evaluated on the test split. Finished runs are reused: an
    interrupted command continues when repeated, and tables that share a row share its runs. A row
    that fails reports its error without stopping the others; the exit code is then 1. Results are
    printed, and written as Markdown, JSON, SVG and PNG.

    [bold]Examples[/]

      counterfoil reproduce 'naaf.*'
      counterfoil reproduce selhn.table1 --scale smoke --seeds 1
      counterfoil reproduce selhn.table1 --data data/f30k_precomp --dry-run
      counterfoil reproduce selhn.figure6 --seeds 5 --jobs 2 train.device=cpu
      counterfoil reproduce my-table.yaml --out runs/mine
      counterfoil reproduce naaf.table3 --rows 'α = 2' --store results --retrain
      counterfoil reproduce --render-page docs/results/flickr8k
    """
    if render_page is not None:
        _render(render_page, store)
        return
    if name is None or list_all or any(letter in name for letter in "*?["):
        _list("*" if name is None or list_all else name, as_json)
        return
    if "=" in name:
        raise ConfigError(
            f"'{name}': expected the name of a table or figure before the overrides "
            "(counterfoil reproduce lists the names)"
        )
    from counterfoil.reproduce.store import ResultCache

    request = _Request(data, published, scale, seeds, tuple(overrides or []), tuple(tuned or []))
    plan, order = _plan(name, request, rows or [], out)
    _warn_of_equal_rows(plan)
    if store is not None:
        plan = _with_tried(plan, store)
    stored = ResultCache(store, plan, order) if store is not None else None
    if stored is not None and not retrain:
        stored.skip_known()
    if dry_run:
        _show_plan(plan, as_json)
    else:
        _run(plan, cache, jobs, as_json, stored)


def _list(pattern: str, as_json: bool) -> None:
    from counterfoil.reproduce.catalogue import load_artifact, names

    selected = [load_artifact(name) for name in names() if fnmatchcase(name, pattern)]
    if not selected:
        hint = nearest(pattern, names())
        raise ConfigError(f"'{pattern}': no table or figure has such a name{hint}")
    if as_json:
        print_json(
            [{"name": one.name, "kind": one.kind, "summary": one.summary} for one in selected]
        )
        return
    rows = [[one.name, one.kind, one.summary] for one in selected]
    print_list(["name", "kind", "description"], rows)
    typer.echo("\nRun one with: counterfoil reproduce NAME [--scale smoke] [--dry-run]")


class _Request(NamedTuple):
    """What the command line says about the runs."""

    data: str
    published: str | None
    scale: Literal["full", "smoke"]
    seeds: int
    overrides: tuple[str, ...]
    tuned: tuple[Path, ...] = ()


def _read_sweep(file: Path) -> Reproduction:
    from counterfoil.reproduce.store import read_stored

    sweep = read_stored(file)
    if sweep is None:
        raise DataError(f"--tuned {file}: no such file")
    return sweep


def _plan(name: str, request: _Request, rows: list[str], out: Path) -> tuple[Plan, list[list[str]]]:
    """The plan of the selected rows, and the labels of all rows."""
    from counterfoil.reproduce.catalogue import labels, load_artifact, only_rows
    from counterfoil.reproduce.plan import Settings, find_data_set, make_plan
    from counterfoil.reproduce.store import best_values, runs_at_edges

    artifact = load_artifact(name)
    if artifact.needs_data and request.data == "scenes" and request.scale == "full":
        raise ConfigError(
            f"{artifact.name} is about real photos: name a folder of their features with --data "
            "(counterfoil features makes one). To try it on drawn scenes: --scale smoke"
        )
    chosen = find_data_set(artifact, request.data, request.published)
    sweeps = [_read_sweep(file) for file in request.tuned]
    settings = Settings(
        request.data,
        chosen,
        request.scale,
        request.seeds,
        request.overrides,
        best_values(*sweeps),
        runs_at_edges(*sweeps),
    )
    return make_plan(only_rows(artifact, rows), settings, out), labels(artifact)


def _warn_of_equal_rows(plan: Plan) -> None:
    """Say which rows show the same run because of an override."""
    from counterfoil.reproduce.plan import made_equal

    groups = made_equal(plan) if plan.settings.overrides else []
    if groups:
        listed = "; ".join(" = ".join(names) for names in groups)
        overrides = " ".join(plan.settings.overrides)
        print_line(
            f"warning: {overrides}: these runs no longer differ, and their rows show the same "
            f"numbers: {listed}",
            stderr=True,
        )


def _with_tried(plan: Plan, store: Path) -> Plan:
    """A sweep with the values beyond its grid that were tried before."""
    from counterfoil.reproduce.artifact import Sweep
    from counterfoil.reproduce.grid import with_tried
    from counterfoil.reproduce.plan import make_plan
    from counterfoil.reproduce.store import read_stored, stored_name

    if not isinstance(plan.artifact, Sweep):
        return plan
    wider = with_tried(plan.artifact, read_stored(store / stored_name(plan)))
    return make_plan(wider, plan.settings, plan.out)


def _widened(plan: Plan, outcome: Outcome, judge: RunEvaluator, stored: ResultCache | None) -> bool:
    """Give the plan of a sweep more values where the best one is at an edge; False if none is."""
    from counterfoil.reproduce.artifact import Sweep
    from counterfoil.reproduce.collect import collect
    from counterfoil.reproduce.grid import latest, widened
    from counterfoil.reproduce.plan import make_plan

    if not isinstance(plan.artifact, Sweep) or not plan.artifact.beyond or outcome.interrupted:
        return False
    result = collect(plan, outcome, judge, with_measures=False)
    if stored is not None:
        result = latest(stored.add(result), result)
    wider = widened(plan.artifact, result)
    if wider is None:
        return False
    plan.artifact, plan.runs = wider, make_plan(wider, plan.settings, plan.out).runs
    return True


def _render(page: Path, store: Path | None) -> None:
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
        [job.title, "cannot run" if job.find_error() else states[job.digest], job.folder.name]
        for job in jobs
    ]
    done = " and ".join(_share_finished(jobs, kind) for kind in _kinds(jobs))
    title = f"{plan.artifact.name}: {done} finished, in {plan.out}"
    print_table([["run", "state", "folder"], *rows], title=title)
    for reason in dict.fromkeys(filter(None, (job.find_error() for job in jobs))):
        typer.echo(f"cannot run: {reason}")


def _states(plan: Plan, jobs: Sequence[Job]) -> dict[str, str]:
    """State of each job by its folder; else *known* (in the store) or *not needed*."""
    to_do = {job.digest for job in plan.missing()}

    def state(job: Job) -> str:
        if job.state == "finished" or job.digest in to_do:
            return job.state
        return "known" if job.digest in plan.settled else "not needed"

    return {job.digest: state(job) for job in jobs}


def _kinds(jobs: Sequence[Job]) -> list[str]:
    """Folders of the jobs: runs and, if there are any, guides."""
    return sorted({job.folder.parent.name for job in jobs}, reverse=True)


def _share_finished(jobs: Sequence[Job], kind: str) -> str:
    states = [job.state for job in jobs if job.folder.parent.name == kind]
    return f"{states.count('finished')} of {len(states)} {kind}"


def _described(job: Job, state: str) -> dict[str, Any]:
    from counterfoil.reproduce.plan import PlannedGuide

    common = {"state": state, "folder": str(job.folder)}
    if isinstance(job, PlannedGuide):
        return {"guide": job.title, **common, "runs": [str(run.folder) for run in job.teachers]}
    config = job.config.model_dump()
    return {"run": job.title, **common, "refused": job.find_error(), "config": config}


def _run(plan: Plan, cache: Path, jobs: int, as_json: bool, stored: ResultCache | None) -> None:
    from counterfoil.cli.signals import StopSignals
    from counterfoil.data.load import is_named
    from counterfoil.reproduce.collect import collect
    from counterfoil.reproduce.measure import RunEvaluator
    from counterfoil.reproduce.measure_parallel import measure_together
    from counterfoil.reproduce.present import write_reproduction
    from counterfoil.reproduce.runner import Outcome, carry_out

    data = plan.settings.data
    if not is_named(data, None) and not Path(data).exists():
        raise DataError(f"--data {data}: no such file or folder, nor a data set of that name")
    bars, signals = progress(quiet=as_json), StopSignals()
    outcome = Outcome()
    judge = RunEvaluator(plan.out / "evaluations", cache, bars)
    while True:
        carry_out(
            plan,
            cache,
            bars,
            outcome,
            jobs=jobs,
            should_stop=lambda: signals.stop_requested,
            on_training=signals.listen,
            on_trained=signals.stop_listening,
        )
        if not _widened(plan, outcome, judge, stored):
            break
        bars.say("the best value of a line is at an edge: one more is tried")
    if not outcome.interrupted:  # measuring may take hours, and has nothing to save
        signals.stop_listening()

    def measure(columns: bool) -> None:
        if not outcome.interrupted:
            measure_together(plan, judge, jobs, bars, columns=columns)

    if stored is not None:  # store recalls first: measuring is slow and may be interrupted
        measure(columns=False)
        stored.add(collect(plan, outcome, judge, with_measures=False))
    measure(columns=True)
    result = collect(plan, outcome, judge)
    if stored is not None:
        result = stored.add(result)
    folder = plan.out / plan.folder_name
    page = write_reproduction(result, folder)
    if as_json:
        print_json(result.as_dict())
    else:
        typer.echo(page)
        guides = f" and {outcome.built} guides built" if outcome.built else ""
        bars.say(f"{outcome.trained} runs trained{guides}; results written to {folder}")
    if outcome.interrupted:
        bars.say("interrupted; repeat the command to continue")
        raise typer.Exit(signals.exit_code)
    if outcome.errors:
        raise typer.Exit(1)
