"""`counterfoil models`: what can be composed."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from counterfoil.cli.output import JSON_OPTION, print_json, print_table
from counterfoil.core.errors import ConfigError, nearest
from counterfoil.core.registry import Registry


def models(
    pattern: Annotated[str, typer.Argument(help="Names to show, with wildcards: 'vse*'.")] = "*",
    kind: Annotated[
        str, typer.Option("--kind", help="Only these: models, objectives, matchers, poolings …")
    ] = "",
    as_json: bool = JSON_OPTION,
) -> None:
    """List models and the parts they are made of: any of them goes with any objective.

    [bold]Examples[/]

      counterfoil models
      counterfoil models 'vse*' --json
      counterfoil models --kind objectives
    """
    catalogue = _catalogue(pattern)
    if kind:
        if kind not in catalogue:
            raise ConfigError(
                f"--kind {kind}: unknown{nearest(kind, catalogue)} (kinds: {', '.join(catalogue)})"
            )
        catalogue = {kind: catalogue[kind]}
    if as_json:
        print_json(catalogue)
        return
    for kind, entries in catalogue.items():
        if entries:
            rows = [[name, entry["summary"], entry["options"]] for name, entry in entries.items()]
            shown = [[name, summary, _short(options)] for name, summary, options in rows]
            print_table([["name", "what it is", "options"], *shown], title=kind)


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
            value = " ".join(str(v) if k == "name" else f"{k}={v}" for k, v in value.items())
            parts.append(f"{key}: {value}")
        else:
            parts.append(f"{key}={value}")
    return ", ".join(parts)
