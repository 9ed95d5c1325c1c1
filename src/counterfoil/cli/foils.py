"""`counterfoil foils`: false captions, of one caption or of a whole data set."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import counterfoil.cli.options as opt
from counterfoil.cli.inputs import DataChoice
from counterfoil.cli.output import print_json, print_line, print_table
from counterfoil.core.errors import ConfigError
from counterfoil.core.zoo import is_pretrained, resolve
from counterfoil.data.text.words import check_sentence

if TYPE_CHECKING:
    from counterfoil.data.pairs import Pairs
    from counterfoil.foils.files import FoilCounts
    from counterfoil.objectives.services import GeneratorOptions


Method = Literal["rules", "model"]

ONLY_FOR: dict[Method, tuple[str, ...]] = {
    "rules": ("kinds",),
    "model": ("masks", "samples", "temperature", "masking", "extractor", "batch_size"),
}
"""Options that have an effect with one method only."""


def foils(
    context: typer.Context,
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN] [IMAGE] [CAPTION]",
            help="RUN: the model that writes foils. IMAGE (file or id) and CAPTION: print the "
            "foils of one caption. With rules, the caption alone is enough.",
        ),
    ] = None,
    method: Annotated[
        Method | None,
        typer.Option(
            help="rules: exchange words by rule. model: let RUN fill in masked captions. Default: "
            "model if RUN is given, else rules."
        ),
    ] = None,
    data: opt.Data = None,
    format: opt.Format = None,
    option: opt.SourceOptions = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="Split of the captions. Default: train; for one image, any split that has it."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Write the foils of a whole split to this JSONL file."),
    ] = None,
    keep: Annotated[
        int, typer.Option(min=1, help="Foils to keep per caption, m; the model's hardest.")
    ] = 5,
    kinds: Annotated[
        str,
        typer.Option(
            help="Words to exchange, comma-separated (rules only): noun, numeral, relation, "
            "attribute, swap (subject and object), word-swap (any two nouns, adjectives …)."
        ),
    ] = "noun,numeral,relation",
    masks: opt.Masks = 20,
    samples: opt.Samples = 20,
    temperature: opt.Temperature = 1.5,
    masking: opt.Masking = "scene-graph",
    extractor: Annotated[
        str,
        typer.Option(
            help="Parser of scene graphs: rules, spacy or spacy:PIPELINE (model-made foils only)."
        ),
    ] = "rules",
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    batch_size: Annotated[
        int,
        typer.Option(
            min=1, help="Captions per batch; changes the random draws (model-made foils only)."
        ),
    ] = 16,
    overwrite: opt.Overwrite = False,
    device: opt.Device = "auto",
    cache: opt.Cache = opt.CACHE,
    as_json: opt.Json = False,
) -> None:
    """Generate foils: captions made false, as extra negatives or to see what a model confuses.

    A model fills in masked captions given the image. Fillings that are likely true of the image are
    dropped; those that score highest are kept. If interrupted, repeat the command to continue; the
    file will be the same.

    [bold]Examples[/]

      counterfoil foils "a man on a red bicycle"
      counterfoil foils runs/scenes-tags photo.png "a man on a red bicycle"
      counterfoil foils runs/scenes-tags --split train --out foils.jsonl \\
        --masking words
      counterfoil foils --method rules --data scenes --split train \\
        --out foils.jsonl
      counterfoil train scenes/scan-t2i \\
        "objective={hardest: 1, foils: {weight: 0.5, source: foils.jsonl}}"
    """
    request = _parse(list(what or []), method, data, out, cache)
    _refuse_useless(context, request.method)
    if out is not None and out.exists() and not overwrite:
        raise ConfigError(f"{out}: already exists; replace it with --overwrite, or change --out")
    source = DataChoice(data, format, option, cache, quiet=as_json)
    if request.method == "rules":
        rules = [kind.strip() for kind in kinds.split(",") if kind.strip()]
        if request.caption is not None:
            _show(request.caption, _by_rule(request.caption, rules, keep, seed), as_json)
        elif out is not None:
            from counterfoil.foils.files import write_rule_foils

            captions = _captions(request.run, source)[split or "train"]
            counts = write_rule_foils(
                captions, out, kinds=rules, count=keep, seed=seed, progress=source.progress
            )
            _report(counts, out, as_json)
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
    if request.caption is not None:
        rows = _by_model(request, source, split, options, seed, device)
        _show(request.caption, rows, as_json)
    elif out is not None:
        counts = _write_by_model(
            request, source, split or "train", out, options, seed, batch_size, device
        )
        _report(counts, out, as_json)


def _refuse_useless(context: typer.Context, method: Method) -> None:
    """Refuse options of the other method, which would be ignored."""
    other: Method = "model" if method == "rules" else "rules"
    author = "rules write these foils" if method == "rules" else "a model writes these foils"
    opt.refuse_useless(context, ONLY_FOR[other], f"{author} (see --method)")


@dataclass(frozen=True)
class _Request:
    """What the arguments mean."""

    method: Method
    run: Path | None = None
    image: str | None = None
    caption: str | None = None


def _parse(
    words: list[str], method: Method | None, data: str | None, out: Path | None, cache: Path
) -> _Request:
    run = _find_run(words[0], cache) if words else None
    rest = words[1:] if run is not None else words
    method = method or ("model" if run is not None else "rules")
    if method == "model" and run is None:
        where = f"{words[0]}: neither a run nor a saved model" if words else "no run is named"
        raise ConfigError(f"{where}; --method model needs a run trained with tags")
    if method == "rules" and len(rest) == 2:
        rest = rest[1:]  # rules do not look at the image
    if len(rest) == (1 if method == "rules" else 2):
        if out is not None:
            if run is None and os.path.exists(rest[-1]):
                raise ConfigError(f"{rest[-1]}: not a run; name a data set with --data")
            reason = "" if run is not None else f"'{rest[-1][:80]}' is not a run; "
            raise ConfigError(f"{reason}--out writes the foils of a data set: omit the caption")
        check_sentence(rest[-1], "make false")
        return _Request(method, run, rest[0] if method == "model" else None, rest[-1])
    if rest:
        raise ConfigError(
            f"{' '.join(rest)}: expected RUN IMAGE CAPTION, or RUN and --out for a whole data set; "
            "put a caption with spaces in quotes"
        )
    if out is None:
        raise ConfigError("nothing to do: give a caption, or a file to write with --out")
    if run is None and data is None:
        raise ConfigError("no captions: name a data set with --data, or a run")
    return _Request(method, run)


def _find_run(word: str, cache: Path) -> Path | None:
    """The folder of a run, a saved model or a pretrained one; None for a caption."""
    folder = resolve(word, cache=cache) if is_pretrained(word) else Path(word)
    return folder if _is_model(folder) else None


def _is_model(folder: Path) -> bool:
    files = ("best/config.json", "config.json", "config.yaml")
    try:
        return any((folder / file).is_file() for file in files)
    except OSError:  # a caption may be too long for a file name
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
    request: _Request,
    source: DataChoice,
    split: str | None,
    options: GeneratorOptions,
    seed: int,
    device: str,
) -> list[dict[str, Any]]:
    import numpy as np

    from counterfoil.models.foil_files import FoilAuthor
    from counterfoil.training.run_folder import load_model

    run, image, caption = request.run, request.image, request.caption
    assert run is not None and image is not None and caption is not None  # noqa: S101, PT018
    model = load_model(run, device)
    author = FoilAuthor(model, options)
    fragments, _, own = source.read_image(run, model, image, split)
    (made,) = author.write([fragments], [caption], [[caption, *own]], np.random.default_rng(seed))
    return [
        {"foil": x.text, "positions": list(x.positions), "kind": x.kind, "score": x.score}
        for x in made
    ]


def _captions(run: Path | None, source: DataChoice) -> Pairs:
    """The data set without features, which rules do not need."""
    from counterfoil.core.config import load_config
    from counterfoil.data.load import load_pairs

    name, format, options = source.data, source.format, source.options
    if name is None:
        if run is None or not (run / "config.yaml").is_file():
            raise ConfigError(f"{run}: a model without a run; name the data with --data")
        config = load_config(run / "config.yaml").data
        name, format, options = config.source, config.format, config.options
    return load_pairs(
        name, format, options=options, cache_dir=source.cache, progress=source.progress
    )


def _write_by_model(
    request: _Request,
    source: DataChoice,
    split: str,
    out: Path,
    options: GeneratorOptions,
    seed: int,
    batch_size: int,
    device: str,
) -> FoilCounts:
    from counterfoil.core.config import model_folder
    from counterfoil.models.foil_files import FoilAuthor, write_model_foils
    from counterfoil.training.guides.manifest import weights_digest
    from counterfoil.training.run_folder import load_model

    assert request.run is not None  # noqa: S101 - `_parse` checked it
    model = load_model(request.run, device)
    FoilAuthor(model, options)  # refuses a model without the heads before any data is read
    return write_model_foils(
        model,
        source.read(request.run)[split],
        out,
        options,
        weights=weights_digest(model_folder(request.run)),
        seed=seed,
        batch_size=batch_size,
        progress=source.progress,
    )


def _show(caption: str, rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json({"caption": caption, "foils": rows})
        return
    if not rows:
        print_line(
            "no foils: this caption has nothing of these kinds to exchange; --help lists other "
            "--kinds, such as attribute"
        )
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
        line += f"; {counts.unspelt:,} were dropped because their tokens form no text"
    print_line(line)
    for problem in counts.unreadable[:5]:
        print_line(f"left out: {problem}")
    if len(counts.unreadable) > 5:
        print_line(f"… and {len(counts.unreadable) - 5} more images")
    print_line(
        f'train with them: "objective={{hardest: 1, foils: {{weight: 0.5, source: {out}}}}}"'
    )
