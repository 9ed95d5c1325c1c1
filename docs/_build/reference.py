"""The reference, from the code itself: commands, configuration, registered parts, Python names."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from counterfoil.cli import app
from counterfoil.core import zoo
from counterfoil.core.config import RunConfig
from counterfoil.core.registry import Registry
from counterfoil.reproduce.catalogue import load_artifact, names

PACKAGES = {
    "counterfoil": "What `import counterfoil as cf` offers.",
    "counterfoil.data": "Data sets: pairs of images and captions, read, checked and converted.",
    "counterfoil.features": "Photos to fragments.",
    "counterfoil.foils": "Wrong captions made from true ones, by rules.",
    "counterfoil.encoders": "Images and texts to vectors.",
    "counterfoil.matchers": "Two encoded batches to scores.",
    "counterfoil.objectives": "Scores to a loss.",
    "counterfoil.adapters": "Our objectives in other people's trainers.",
    "counterfoil.models": "Encoders and a matcher as one model, saved and loaded.",
    "counterfoil.evaluation": "Ranks, recall and their intervals.",
    "counterfoil.search": "An index of images and captions, searched both ways.",
    "counterfoil.audit": "Captions that do not match their image.",
}
FURTHER = {
    "counterfoil": ["counterfoil.training.trainer.RunResult", "counterfoil.models.match.Match"],
    "counterfoil.adapters": [
        "counterfoil.adapters.sentence_transformers.ImageTextLoss",
        "counterfoil.adapters.open_clip.ObjectiveLoss",
    ],
}
"""Classes that a package returns or holds, but does not export."""

REGISTRIES = {
    "Models": ("models", "models", "`model.name`"),
    "Image encoders": ("encoders", "image_encoders", "`model.image.name`"),
    "Text encoders": ("encoders", "text_encoders", "`model.text.name`"),
    "Poolings": ("encoders", "poolings", "`pooling` of an encoder"),
    "Matchers": ("matchers", "matchers", "`model.matcher.name`"),
    "Objectives": ("objectives", "objectives", "`objective`"),
    "Protections": ("objectives.protection", "protections", "`objective.protect`"),
    "Feature extractors": ("features", "extractors", "`counterfoil features --backbone`, `data.features.extractor`"),
    "Data formats": ("data", "sources", "`--format`"),
    "Named data sets": ("data", "named_sources", "`data.source`"),
    "Conversion targets": ("data", "writers", "`counterfoil data convert --to`"),
    "Search backends": ("search", "backends", "`counterfoil index --backend`"),
    "Importers": ("models.importers", "importers", "`counterfoil import --from`"),
}


def pages() -> dict[str, str]:
    """Every page of the reference, as Markdown by path."""
    written = {
        "reference/cli.md": cli_page(),
        "reference/configuration.md": configuration_page(),
        "reference/parts.md": parts_page(),
    }
    seen: set[str] = set()
    for package in PACKAGES:
        paths = [path for path in documented(package) if path not in seen]
        seen.update(paths)
        written[f"reference/python/{package}.md"] = python_page(package, paths)
    return written


# The command line


def cli_page() -> str:
    parts = [
        "# Command line",
        "Every command with its arguments and options, as `counterfoil COMMAND --help` prints them. "
        "Exit codes: [training](../training.md#exit-codes).",
    ]
    for path, command in commands():
        parts += _command(path, command)
    return "\n\n".join(parts) + "\n"


def commands() -> Iterator[tuple[str, Any]]:
    """Full name and click command of every command, groups before their members."""
    waiting = [("counterfoil", typer.main.get_command(app))]
    while waiting:
        path, command = waiting.pop(0)
        if path != "counterfoil":
            yield path, command
        members = getattr(command, "commands", {})
        waiting = [(f"{path} {name}", members[name]) for name in members] + waiting


def _command(path: str, command: Any) -> Iterator[str]:
    context = command.context_class(command, info_name=path)
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    yield f"## {path}"
    yield f"```text\n{usage}\n```"
    yield _help(command.help or "")
    records = [parameter.get_help_record(context) for parameter in command.params]
    rows = [(f"`{name}`", _cell(about)) for name, about in filter(None, records)]
    if rows:
        yield table(("option", "meaning"), rows)


def _help(text: str) -> str:
    """A help text as Markdown: rich's markup removed, indented lines as code."""
    plain = re.sub(r"\[/?(?:bold|italic|dim)?\]", "", text)
    blocks = []
    for block in plain.split("\n\n"):
        indented = [line.removeprefix("  ") for line in block.splitlines()]
        is_code = all(line.startswith("  ") for line in block.splitlines() if line)
        blocks.append("```sh\n" + "\n".join(indented) + "\n```" if is_code and block else block)
    return "\n\n".join(blocks)


def _cell(text: str) -> str:
    """Text in a table: home folder, bars and angle brackets as the reader should see them."""
    text = " ".join(text.split()).replace(str(Path.home()), "~")
    return text.replace("|", "\\|").replace("<", "&lt;")


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# The configuration


def configuration_page() -> str:
    parts = [
        "# Configuration",
        "Every key of a recipe, with its type, default and bounds. On the command line a key is "
        "set as `train.epochs=5`; in a recipe, sections are nested. Options of models, encoders, "
        "matchers and objectives: [registered parts](parts.md).",
    ]
    parts += _section("", RunConfig)
    return "\n\n".join(parts) + "\n"


def _section(prefix: str, section: type[BaseModel]) -> Iterator[str]:
    sections, rows = [], []
    for name, field in section.model_fields.items():
        key = f"{prefix}{name}"
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            sections.append((key, kind))
        else:
            rows.append((f"`{key}`", _type(kind), _default(field), _meaning(field)))
    yield f"## {prefix.rstrip('.') or 'Top level'}"
    yield inspect.getdoc(section) or ""
    if rows:
        yield table(("key", "type", "default", "meaning"), rows)
    for key, kind in sections:
        yield from _section(f"{key}.", kind)


def _type(annotation: Any) -> str:
    """A type as a reader of YAML knows it."""
    if get_origin(annotation) is Annotated:
        return _type(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(_type(kind) for kind in get_args(annotation))
    if get_origin(annotation) is list:
        return f"list of {_type(get_args(annotation)[0])}"
    if get_origin(annotation) is dict:
        return "mapping"
    return {NoneType: "`null`", str: "text"}.get(annotation, annotation.__name__)


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    return "" if value is PydanticUndefined else f"`{_as_yaml(value)}`"


def _as_yaml(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)


def _meaning(field: FieldInfo) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    bounds = [
        f"{sign} {getattr(rule, name):,}"
        for rule in field.metadata
        for name, sign in signs.items()
        if hasattr(rule, name)
    ]
    return _cell("; ".join(filter(None, [field.description or "", ", ".join(bounds)])))


# Registered parts


def parts_page() -> str:
    parts = [
        "# Registered parts",
        "Every name that a recipe, an option or `counterfoil models` knows, with its options and "
        "their defaults. [Contributing](../contributing.md#where-things-go) says how to add one.",
    ]
    for title, (package, name, where) in REGISTRIES.items():
        registry = getattr(importlib.import_module(f"counterfoil.{package}"), name)
        rows = [
            (f"`{key}`", _cell(registry.summary(key)), _options(registry, key)) for key in registry
        ]
        head: tuple[str, ...] = ("name", "what", "options")
        if not any(options for _, _, options in rows):
            head, rows = head[:2], [row[:2] for row in rows]
        parts += [f"## {title}", f"Chosen by {where}.", table(head, rows)]
    return "\n\n".join(parts) + "\n"


def _options(registry: Registry[Any], name: str) -> str:
    return "<br>".join(
        f"`{key}`" if default is inspect.Parameter.empty else f"`{key}={_as_yaml(default)}`"
        for key, default in registry.options(name).items()
    )


# Pretrained models


def zoo_table() -> str:
    """The registry of pretrained models: what for, size, data, results with their commands."""
    rows = []
    for name, entry in sorted(zoo.entries().items()):
        results = [f"{one.name}: {one.value:.4g} (`{one.command}`)" for one in entry.results]
        needs = f" Needs `counterfoil[{entry.extra}]`." if entry.extra else ""
        rows.append(
            (
                f"`{name}`",
                _cell(entry.summary + needs),
                zoo.size_text(entry.size),
                _cell(entry.trained_on),
                "<br>".join(map(_cell, results)),
                _cell(f"{entry.license}. {entry.terms}"),
            )
        )
    return table(("name", "what for", "size", "trained on", "results", "terms"), rows)


# Tables and figures of the papers


def tables_of(paper: str) -> str:
    """What `counterfoil reproduce` can make of a paper, on its own data and on Flickr8k."""
    rows = []
    for name in names():
        if name.startswith(f"{paper}.") or name == f"flickr8k.{paper}":
            artifact = load_artifact(name)
            rows.append((f"`counterfoil reproduce {name}`", artifact.kind, _cell(artifact.summary)))
    return table(("command", "kind", "what"), rows)


# Python


def python_page(package: str, paths: list[str]) -> str:
    lines = [f"# {package}", PACKAGES[package], *(f"::: {path}" for path in paths)]
    return "\n\n".join(lines) + "\n"


def documented(package: str) -> list[str]:
    """Public classes and functions of a package, and the classes that it registers."""
    module = importlib.import_module(package)
    public = [getattr(module, name) for name in getattr(module, "__all__", [])]
    values = [value for value in public if inspect.isclass(value) or inspect.isroutine(value)]
    for registry in public:
        if isinstance(registry, Registry):
            values += [registry[name] for name in registry if inspect.isclass(registry[name])]
    for value in values:
        if not inspect.getdoc(value):
            raise ValueError(f"{package}: {value.__qualname__} is public; write its docstring")
    paths = [f"{value.__module__}.{value.__qualname__}" for value in values]
    return list(dict.fromkeys([*paths, *FURTHER.get(package, [])]))
