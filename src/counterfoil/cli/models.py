"""`counterfoil models`: models and the parts they are composed of."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markdown import Markdown

import counterfoil.cli.options as opt
from counterfoil.cli.output import console, print_json, print_line, print_list
from counterfoil.core.errors import ConfigError, nearest
from counterfoil.core.registry import Registry

if TYPE_CHECKING:
    from counterfoil.core.zoo import ZooEntry


def models(
    pattern: Annotated[
        str, typer.Argument(help="Name, or names with wildcards such as 'vse*' (in quotes).")
    ] = "*",
    kind: Annotated[
        str,
        typer.Option(
            "--kind",
            help="List one kind only: models, objectives, matchers, 'image encoders', 'text "
            "encoders', poolings, 'feature extractors' or 'data sources'.",
        ),
    ] = "",
    pretrained: Annotated[
        bool,
        typer.Option(
            "--pretrained",
            help="List pretrained models, which every command takes in place of a run; with a "
            "name, show its card.",
        ),
    ] = False,
    cache: opt.Cache = opt.CACHE,
    as_json: opt.Json = False,
) -> None:
    """List models, objectives and the parts of models; with a name or kind, also their options.

    Most objectives train every model; some need a cross-encoder (see their descriptions). Options
    are set as model.matcher.NAME=VALUE or objective.OBJECTIVE.NAME=VALUE.

    [bold]Examples[/]

      counterfoil models
      counterfoil models 'vse*'
      counterfoil models --kind objectives
      counterfoil models naaf --json
      counterfoil models --pretrained
      counterfoil models --pretrained scenes-naaf
    """
    if pretrained:
        if kind:
            raise ConfigError(f"--kind {kind}: kinds are of parts; leave it out with --pretrained")
        _list_pretrained(pattern, cache, as_json)
        return
    catalogue = _catalogue(pattern)
    if kind:
        if kind not in catalogue:
            raise ConfigError(
                f"--kind {kind}: unknown{nearest(kind, catalogue)} (kinds: {', '.join(catalogue)})"
            )
        catalogue = {kind: catalogue[kind]}
    if not any(catalogue.values()):
        raise ConfigError(f"'{pattern}': no such name; `counterfoil models` lists all")
    if as_json:
        print_json(catalogue)
        return
    with_options = bool(kind) or pattern != "*"
    for title, entries in catalogue.items():
        if entries:
            _print_kind(title, entries, with_options)
    if not with_options:
        print_line("Options of one: counterfoil models NAME, or of a kind: --kind objectives")


def _list_pretrained(pattern: str, cache: Path, as_json: bool) -> None:
    """A table of the zoo, or the card of the one model that is named."""
    from counterfoil.core import zoo

    entries = {name: zoo.entries()[name] for name in zoo.names(pattern)}
    if not entries:
        known = ", ".join(zoo.names())
        raise ConfigError(
            f"'{pattern}': no such pretrained model{nearest(pattern, zoo.names())} (known: {known})"
        )
    where = {name: zoo.location(name, cache=cache) for name in entries}
    if as_json:
        print_json(
            {
                name: {**entry.model_dump(), "size": entry.size, "where": where[name]}
                for name, entry in entries.items()
            }
        )
    elif pattern in entries:
        text = zoo.card(pattern, entries[pattern].model_dump()).partition("---\n# ")[2]
        if console().is_terminal:
            console().print(Markdown(f"# {text}"))
        else:
            typer.echo(f"# {text}", nl=False)
    else:
        gap = "\n" if console().is_terminal else "  "
        rows = [
            [name, zoo.size_text(entry.size), where[name], gap.join(_described(entry))]
            for name, entry in entries.items()
        ]
        print_list(["name", "size", "where", "description"], rows, title="pretrained models")
        print_line("The card of one: counterfoil models --pretrained NAME")


def _described(entry: ZooEntry) -> list[str]:
    needs = f'Needs: pip install "counterfoil[{entry.extra}]"' if entry.extra else ""
    results = "; ".join(f"{one.name}: {one.value:.4g}" for one in entry.results)
    return [*filter(None, [entry.summary, f"Trained on {entry.trained_on}.", f"{results}.", needs])]


def _print_kind(title: str, entries: dict[str, dict[str, Any]], with_options: bool) -> None:
    gap = "\n" if console().is_terminal else "  "
    rows = []
    for name, one in entries.items():
        options = _short(one["options"]) if with_options else ""
        rows.append([name, gap.join(filter(None, [one["summary"], options]))])
    print_list(["name", "description"], rows, title=title)
    typer.echo()


def _catalogue(pattern: str) -> dict[str, dict[str, dict[str, Any]]]:
    from counterfoil.data.formats import sources
    from counterfoil.encoders import image_encoders, poolings, text_encoders
    from counterfoil.features import extractors
    from counterfoil.matchers import matchers
    from counterfoil.models import models as named
    from counterfoil.objectives import objectives

    catalogue: dict[str, dict[str, dict[str, Any]]] = {
        "models": {
            name: {"summary": named.summary(name), "options": _parts(named[name]())}
            for name in named.names(pattern)
        }
    }
    parts: dict[str, Registry[Any]] = {
        "objectives": objectives,
        "matchers": matchers,
        "image encoders": image_encoders,
        "text encoders": text_encoders,
        "poolings": poolings,
        "feature extractors": extractors,
        "data sources": sources,
    }
    for kind, registry in parts.items():
        catalogue[kind] = {
            name: {"summary": registry.summary(name), "options": registry.options(name)}
            for name in registry.names(pattern)
        }
    return catalogue


def _parts(spec: Any) -> dict[str, Any]:
    return {"image": spec.image, "text": spec.text, "matcher": spec.matcher}


def _short(options: dict[str, Any]) -> str:
    parts = []
    for key, value in options.items():
        if isinstance(value, dict):
            parts.append(f"{key}: {_part(value)}")
        else:
            parts.append(f"{key}={value}")
    return ", ".join(parts)


def _part(options: dict[str, Any]) -> str:
    """A part with its options: ``bigru pooling=relations(dropout=0.1)``."""
    words = []
    for key, value in options.items():
        if isinstance(value, dict):
            inner = ", ".join(f"{k}={v}" for k, v in value.items() if k != "name")
            value = f"{value['name']}({inner})"
        words.append(str(value) if key == "name" else f"{key}={value}")
    return " ".join(words)
