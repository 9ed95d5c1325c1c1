"""`counterfoil foils`: false captions, of one caption or of a whole data set."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from counterfoil.cli.output import (
    ABOVE_0,
    CACHE_OPTION,
    JSON_OPTION,
    FormatOption,
    SourceOptions,
    console,
    parse_options,
    print_json,
    print_table,
    progress,
)
from counterfoil.core.errors import ConfigError
from counterfoil.core.printable import printable
from counterfoil.data.text.words import check_sentence

if TYPE_CHECKING:
    from counterfoil.data.pairs import Pairs
    from counterfoil.foils.files import FoilCounts
    from counterfoil.objectives.services import GeneratorOptions


Maker = Literal["rules", "model"]


def foils(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN] [IMAGE] [CAPTION]",
            help="A run whose model writes foils; an image file or id and a caption of it, to see "
            "the foils of one caption. With rules, the caption alone will do.",
        ),
    ] = None,
    maker: Annotated[
        Maker | None,
        typer.Option(help="rules, or the model of a run (by default where one is named)."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option("--data", help="Data set; by default the one of the run."),
    ] = None,
    format: FormatOption = None,
    option: SourceOptions = None,
    split: Annotated[
        str | None,
        typer.Option(help="Split; by default train, or any that has the image."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Write the foils of the whole split to this JSONL file."),
    ] = None,
    keep: Annotated[int, typer.Option(min=1, help="Foils kept of a caption, the hardest (m).")] = 5,
    kinds: Annotated[
        str, typer.Option(help="With rules: of noun, numeral, relation, attribute, swap.")
    ] = "noun,numeral,relation",
    masks: Annotated[int, typer.Option(min=1, help="With a model: masked versions (K).")] = 20,
    samples: Annotated[int, typer.Option(min=1, help="With a model: fillings of each (L).")] = 20,
    temperature: Annotated[
        float,
        typer.Option(callback=ABOVE_0, help="With a model: temperature of its words, above 0 (τ)."),
    ] = 1.5,
    masking: Annotated[
        Literal["scene-graph", "words"],
        typer.Option(help="With a model: mask whole units of the scene graph, or single words."),
    ] = "scene-graph",
    extractor: Annotated[
        str, typer.Option(help="With a model: of scene graphs: rules, spacy, spacy:PIPELINE.")
    ] = "rules",
    seed: Annotated[int, typer.Option(min=0, help="Of all that is drawn.")] = 0,
    batch_size: Annotated[
        int, typer.Option(min=1, help="With a model: captions at once; draws depend on it.")
    ] = 16,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a finished file.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
    cache: Path = CACHE_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Make captions false: as extra negatives for any matcher, or to see what a model confuses.

    [bold]Examples[/]

      counterfoil foils "a man on a red bicycle"
      counterfoil foils runs/scenes-tags photo.png "a man on a red bicycle"
      counterfoil foils runs/scenes-tags --split train --out foils.jsonl --masking words
      counterfoil foils --maker rules --data scenes --split train --out foils.jsonl
      counterfoil train scenes/scan-t2i \\
        "objective={hardest: 1, foils: {weight: 0.5, source: foils.jsonl}}"

    A model fills masked captions given the image; what is likely true of it is left out, and the
    sentences that match best are kept. Killed at any moment, the same command goes on to the same
    file.
    """
    asked = _understood(list(what or []), maker, data, out)
    if out is not None and out.exists() and not overwrite:
        raise ConfigError(f"{out} is there already: --overwrite replaces it, --out names another")
    source = _Source(data, format, option or [], split, cache, as_json)
    if asked.maker == "rules":
        rules = [kind.strip() for kind in kinds.split(",") if kind.strip()]
        if asked.caption is not None:
            _show(asked.caption, _by_rule(asked.caption, rules, keep, seed), as_json)
        elif out is not None:
            _report(_write_by_rule(asked, source, out, rules, keep, seed), out, as_json)
        return
    from counterfoil.objectives.services import GeneratorOptions

    options = GeneratorOptions(
        masks=masks,
        samples=samples,
        kept=keep,
        temperature=temperature,
        unit="graph" if masking == "scene-graph" else "word",
        extractor=extractor,
    )
    if asked.caption is not None:
        _show(asked.caption, _by_model(asked, source, options, seed, device), as_json)
    elif out is not None:
        counts = _write_by_model(asked, source, out, options, seed, batch_size, device)
        _report(counts, out, as_json)


@dataclass(frozen=True)
class _Asked:
    """What the arguments mean."""

    maker: Maker
    run: Path | None = None
    image: str | None = None
    caption: str | None = None


@dataclass(frozen=True)
class _Source:
    """Where captions come from, as the options say."""

    data: str | None
    format: str | None
    option: list[str]
    split: str | None
    cache: Path
    quiet: bool

    @property
    def name(self) -> str:
        return self.split or "train"


def _understood(
    words: list[str], maker: Maker | None, data: str | None, out: Path | None
) -> _Asked:
    run = Path(words[0]) if words and _is_model(Path(words[0])) else None
    rest = words[1:] if run is not None else words
    maker = maker or ("model" if run is not None else "rules")
    if maker == "model" and run is None:
        where = f"{words[0]}: neither a run nor a saved model" if words else "no run is named"
        raise ConfigError(f"{where}; a model that writes foils is a run trained with tags")
    if maker == "rules" and len(rest) == 2:
        rest = rest[1:]  # rules do not look at the image
    if len(rest) == (1 if maker == "rules" else 2):
        if out is not None:
            taken = "" if run is not None else f"'{rest[-1][:80]}' is no run; "
            raise ConfigError(f"{taken}--out is for the foils of a data set: leave the caption out")
        check_sentence(rest[-1], "make false")
        return _Asked(maker, run, rest[0] if maker == "model" else None, rest[-1])
    if rest:
        raise ConfigError(
            f"{' '.join(rest)}: expected RUN IMAGE CAPTION, or RUN and --out for a whole data set; "
            "a caption with spaces is put in quotes"
        )
    if out is None:
        raise ConfigError("name the file to write with --out, or give a caption")
    if run is None and data is None:
        raise ConfigError("whose captions? Name a data set with --data, or a run")
    return _Asked(maker, run)


def _is_model(folder: Path) -> bool:
    places = ("best/config.json", "config.json", "config.yaml")
    try:
        return any((folder / place).is_file() for place in places)
    except OSError:  # a caption is often too long for the name of a file
        return False


def _by_rule(caption: str, kinds: list[str], keep: int, seed: int) -> list[dict[str, Any]]:
    from counterfoil.data.text.words import words
    from counterfoil.foils import rule_foils

    made = rule_foils(caption, random.Random(seed), kinds, keep, frozenset(words(caption)))
    return [
        {"foil": foil.text, "positions": list(foil.positions), "kind": foil.kind, "score": None}
        for foil in made
    ]


def _by_model(
    asked: _Asked, source: _Source, options: GeneratorOptions, seed: int, device: str
) -> list[dict[str, Any]]:
    import numpy as np

    from counterfoil.cli.explain import ImageSource
    from counterfoil.models.foil_files import FoilAuthor
    from counterfoil.training.run_folder import load_model

    run, image, caption = asked.run, asked.image, asked.caption
    assert run is not None and image is not None and caption is not None  # noqa: S101, PT018
    model = load_model(run, device)
    author = FoilAuthor(model, options)
    place = ImageSource(
        run, source.data, source.format, source.option, source.split, source.cache, source.quiet
    )
    fragments, _, own = place.read_with_captions(model, image)
    (made,) = author.write([fragments], [caption], [[caption, *own]], np.random.default_rng(seed))
    return [
        {"foil": x.text, "positions": list(x.positions), "kind": x.kind, "score": x.score}
        for x in made
    ]


def _write_by_rule(
    asked: _Asked, source: _Source, out: Path, kinds: list[str], keep: int, seed: int
) -> FoilCounts:
    from counterfoil.foils.files import write_rule_foils

    bars = progress(quiet=source.quiet)
    pairs = _captions(asked.run, source)
    return write_rule_foils(
        pairs[source.name], out, kinds=kinds, count=keep, seed=seed, progress=bars
    )


def _captions(run: Path | None, source: _Source) -> Pairs:
    """The data set without features, which rules do not look at."""
    from counterfoil.core.config import DataConfig
    from counterfoil.data.load import load_pairs

    bars = progress(quiet=source.quiet)
    if source.data is not None:
        options = parse_options(source.option)
        return load_pairs(
            source.data, source.format, options=options, cache_dir=source.cache, progress=bars
        )
    config: DataConfig | None = None
    if run is not None and (run / "config.yaml").is_file():
        from counterfoil.core.config import load_config

        config = load_config(run / "config.yaml").data
    if config is None:
        raise ConfigError(f"{run} is a model without a run: name the data with --data")
    return load_pairs(
        config.source, config.format, options=config.options, cache_dir=source.cache, progress=bars
    )


def _write_by_model(
    asked: _Asked,
    source: _Source,
    out: Path,
    options: GeneratorOptions,
    seed: int,
    batch_size: int,
    device: str,
) -> FoilCounts:
    from counterfoil.core.config import model_folder
    from counterfoil.models.foil_files import FoilAuthor, write_model_foils
    from counterfoil.training.guides.manifest import weights_digest
    from counterfoil.training.run_data import evaluation_split
    from counterfoil.training.run_folder import load_model

    assert asked.run is not None  # noqa: S101 - `_understood` saw to it
    model = load_model(asked.run, device)
    FoilAuthor(model, options)  # refuses a model without the heads before any data is read
    bars = progress(quiet=source.quiet)
    pairs = evaluation_split(
        asked.run, source.data, source.format, parse_options(source.option), source.cache, bars
    )
    return write_model_foils(
        model,
        pairs[source.name],
        out,
        options,
        weights=weights_digest(model_folder(asked.run)),
        seed=seed,
        batch_size=batch_size,
        progress=bars,
    )


def _show(caption: str, rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json({"caption": caption, "foils": rows})
        return
    if not rows:
        console().print("no foil was found: nothing in this caption can be exchanged")
        return
    table = [["foil", "kind", "words", "score"]]
    for row in rows:
        score = "–" if row["score"] is None else f"{row['score']:.4f}"
        table.append([row["foil"], row["kind"], ", ".join(map(str, row["positions"])), score])
    print_table(table)


def _report(counts: FoilCounts, out: Path, as_json: bool) -> None:
    if as_json:
        print_json({"file": str(out), **counts.as_dict()})
        return
    line = f"{counts.foils:,} foils of {counts.captions:,} captions; {counts.without:,} have none"
    if counts.unspelt:
        line += f"; {counts.unspelt:,} were dropped that no text stands for"
    console().print(line, highlight=False)
    for problem in counts.unreadable[:5]:
        console().print(printable(f"left out: {problem}"), highlight=False, markup=False)
    if len(counts.unreadable) > 5:
        console().print(f"… and {len(counts.unreadable) - 5} more images", highlight=False)
    console().print(
        f'train with them: "objective={{hardest: 1, foils: {{weight: 0.5, source: {out}}}}}"',
        highlight=False,
        markup=False,
    )
