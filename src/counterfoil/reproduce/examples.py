"""Example sentences that models wrote, retrieved or corrected (TAGS-DC, figures 1 and 3)."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from PIL import Image

from counterfoil.core.errors import ConfigError, DataError
from counterfoil.data.images import open_image
from counterfoil.data.pairs import Split
from counterfoil.data.text.tokenizers import known_text
from counterfoil.data.text.words import words
from counterfoil.evaluation.foils.scores import score_foils
from counterfoil.evaluation.foils.sets import FoilPair, FoilSet, readable_images
from counterfoil.evaluation.report import markdown_table
from counterfoil.models import Model
from counterfoil.models.correct import Correction, correct
from counterfoil.reproduce.columns import OWN, MeasureColumn
from counterfoil.reproduce.measure import MeasureEvaluator
from counterfoil.reproduce.plan import Plan, PlannedRun
from counterfoil.reproduce.results import (
    Example,
    ExampleLine,
    ExampleSheet,
    ExampleWord,
    PointMap,
    TableRow,
)
from counterfoil.reproduce.spec import Examples
from counterfoil.training.run_folder import load_model

IMAGE_SIDE = 320
"""Pixels of the longer side of a picture."""
MAX_MAP_POINTS = 400
"""Most points per row on the map of scores; of more, a random sample is drawn."""
SUSPECTED_FROM = 0.5
"""Words that are wrong with at least this probability are marked."""
SHEET_REVISION = 1
"""Part of the cache key of a sheet, so that sheets of other revisions are made again."""


@dataclass(frozen=True)
class _Source:
    """A row at one seed: its run, its model and its foils."""

    name: str
    run: PlannedRun
    model: Model
    foils: FoilSet


def collect_sheet(
    plan: Plan, table: Sequence[TableRow], evaluator: MeasureEvaluator
) -> ExampleSheet | None:
    """Examples of the first seed whose runs are all finished, cached; None if there is none."""
    artifact = plan.artifact
    if not isinstance(artifact, Examples):
        raise ConfigError(f"{artifact.name}: expected an artifact of the kind 'examples'")
    for index in range(plan.settings.seeds):
        inputs = [_row_inputs(plan, row, index) for row in table]
        runs = [one for _, run, writer in inputs for one in (run, writer) if one is not None]
        if all(run.state == "finished" for run in runs):
            names = [row.result.name for row in table]
            columns = [[column.foils, column.blind] for column, _, _ in inputs]
            digests, options = [run.digest for run in runs], evaluator.options.model_dump()
            shape = [artifact.show, artifact.examples, names, columns]
            return evaluator.cached(
                ["sheet", SHEET_REVISION, *shape, digests, options],
                ExampleSheet,
                lambda: _sheet(artifact, names, inputs, index, evaluator),  # noqa: B023
            )
    return None


def _row_inputs(
    plan: Plan, row: TableRow, index: int
) -> tuple[MeasureColumn, PlannedRun, PlannedRun | None]:
    """The source of a row's foils, its run at a seed, and the run that writes the foils."""
    column = MeasureColumn(title="foils", foils=OWN, number="accuracy")
    column = column.of_row(row.foils, row.blind)
    (run,) = row.runs[index]
    if column.foils == OWN:
        return column, run, run
    return column, run, plan.runs[column.writer][index] if column.writer else None


def _sheet(
    artifact: Examples,
    names: Sequence[str],
    inputs: Sequence[tuple[MeasureColumn, PlannedRun, PlannedRun | None]],
    index: int,
    evaluator: MeasureEvaluator,
) -> ExampleSheet:
    split = evaluator.evaluator.split_of(inputs[0][1])
    sources = [
        _Source(
            name,
            run,
            load_model(run.folder, run.config.train.device),
            evaluator.foil_set(column, run, writer),
        )
        for name, (column, run, writer) in zip(names, inputs, strict=True)
    ]
    used = sources if artifact.show == "negatives" else sources[-1:]
    seed = evaluator.options.seed
    captions = choose(split, [one.foils for one in used], artifact.examples, seed)
    make = _negatives if artifact.show == "negatives" else _corrections
    examples = [
        Example(
            image=split.ids[image],
            picture=picture_of(split, image),
            lines=make(split, caption, sources),
        )
        for caption in captions
        for image in [int(split.image_of[caption])]
    ]
    rule = (
        f"{len(examples)} captions of {split.name}, drawn at random (seed {seed}) from those with "
        "a foil of every source, at most one per image. They were not selected by hand."
    )
    maps = [_map(split, sources)] if artifact.show == "negatives" else []
    return ExampleSheet(split=split.name, seed=index, rule=rule, examples=examples, maps=maps)


def choose(split: Split, foils: Sequence[FoilSet], count: int, seed: int) -> list[int]:
    """Random captions for which all sets have a foil, at most one per image."""
    common = set.intersection(*({pair.caption for pair in one.pairs} for one in foils))
    shuffled = random.Random(f"{seed}/examples").sample(sorted(common), len(common))
    by_image: dict[int, int] = {}
    for caption in shuffled:
        by_image.setdefault(int(split.image_of[caption]), caption)
    return list(by_image.values())[:count]


def _negatives(split: Split, caption: int, sources: Sequence[_Source]) -> list[ExampleLine]:
    """The caption, then one foil per row, scored by the row's own run."""
    text, own = split.texts[caption], split.captions[int(split.image_of[caption])]
    foils = [_foil_of(one.foils, caption) for one in sources]
    scores = [
        _scores(one.model, split, caption, [foil]) for one, foil in zip(sources, foils, strict=True)
    ]
    titles = [one.run.name for one in sources]
    lines = [
        ExampleLine(
            kind="caption",
            words=[ExampleWord(text=word) for word in text.split()],
            scores={title: score[0] for title, score in zip(titles, scores, strict=True)},
        )
    ]
    for one, foil, score in zip(sources, foils, scores, strict=True):
        lines.append(
            ExampleLine(kind=one.name, words=_foreign(own, foil), scores={one.run.name: score[1]})
        )
    return lines


def _corrections(split: Split, caption: int, sources: Sequence[_Source]) -> list[ExampleLine]:
    """The caption, a foil of the last row and its correction by that row's run, scored by all."""
    writer, text = sources[-1], split.texts[caption]
    foil = _foil_of(writer.foils, caption)
    image = int(split.image_of[caption])
    fragments = readable_images(split, [image])[image]
    # as in the paper, without a margin chosen on dev
    result = correct(writer.model, fragments, foil, threshold=SUSPECTED_FROM, margin=0.0)
    sentences = [text, foil, result.corrected]
    scores = {one.name: _read_scores(one.model, split, caption, sentences) for one in sources}
    lines = (
        ("positive", [ExampleWord(text=word) for word in text.split()]),
        ("synthetic", _suspected(text, result)),
        ("corrected", _marked(text, result.corrected)),
    )
    return [
        ExampleLine(
            kind=kind, words=marked, scores={name: each[index] for name, each in scores.items()}
        )
        for index, (kind, marked) in enumerate(lines)
    ]


def _foil_of(foils: FoilSet, caption: int) -> str:
    """The first foil of a caption, which scores highest among those that a run writes."""
    return next(pair.foil for pair in foils.pairs if pair.caption == caption)


def _scores(model: Model, split: Split, caption: int, sentences: Sequence[str]) -> list[float]:
    """Scores of a caption and of other sentences with the caption's image."""
    pairs = [FoilPair(caption, sentence) for sentence in sentences]
    scored = score_foils(model, split, FoilSet.of("examples", pairs, 1))
    return [float(scored.true[0]), *(float(score) for score in scored.foil)]


def _read_scores(model: Model, split: Split, caption: int, sentences: Sequence[str]) -> list[float]:
    """Scores of sentences with a caption's image, without unknown words as in `correct`."""
    read = [known_text(model.text, sentence).text or sentence for sentence in sentences]
    return _scores(model, split, caption, read)[1:]


def _foreign(own: Sequence[str], sentence: str) -> list[ExampleWord]:
    """The words of a sentence; new are those that no caption of the image has."""
    known = {word for text in own for word in words(text)}
    return [
        ExampleWord(text=word, new=not known.issuperset(words(word))) for word in sentence.split()
    ]


def _marked(text: str, other: str) -> list[ExampleWord]:
    """The words of another sentence; new are those that the caption lacks at that position."""
    before, after = text.split(), other.split()
    same = SequenceMatcher(
        None, [w.lower() for w in before], [w.lower() for w in after], autojunk=False
    ).get_matching_blocks()
    known = {block.b + offset for block in same for offset in range(block.size)}
    return [ExampleWord(text=word, new=index not in known) for index, word in enumerate(after)]


def _suspected(text: str, result: Correction) -> list[ExampleWord]:
    """The words of a foil, each with its probability of being wrong."""
    marked, index = [], 0
    suspects = list(result.words)
    for word in _marked(text, result.text):
        # a word of the sentence may be several words of the model: "dog." has a full stop
        rest, wrong = word.text, 0.0
        while index < len(suspects) and suspects[index].word in rest:
            rest = rest.partition(suspects[index].word)[2]
            wrong = max(wrong, suspects[index].wrong)
            index += 1
            if not rest:
                break
        marked.append(word.model_copy(update={"wrong": wrong}))
    return marked


def picture_of(split: Split, image: int) -> str:
    """A small JPEG in base64; empty if the pixels are missing or unreadable."""
    if split.pixels is None:
        return ""
    try:
        picture = open_image(split.pixels[image]).convert("RGB")
    except DataError:
        return ""
    picture.thumbnail((IMAGE_SIDE, IMAGE_SIDE), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    picture.save(buffer, format="JPEG", quality=85)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def _map(split: Split, sources: Sequence[_Source]) -> PointMap:
    """Scores of captions and of their foils, grouped by the source of the foils."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for one in sources:
        pairs = one.foils.pairs
        chosen = random.Random("map").sample(range(len(pairs)), min(MAX_MAP_POINTS, len(pairs)))
        foils = FoilSet.of(one.name, [pairs[index] for index in chosen], len(chosen))
        scores = score_foils(one.model, split, foils)
        points = zip(scores.true.tolist(), scores.foil.tolist(), strict=True)
        groups[one.name] = [(float(x), float(y)) for x, y in points]
    judges = dict.fromkeys(one.run.name for one in sources)
    return PointMap(
        name="scores",
        title=f"Scores of captions and of their negatives, by {', '.join(judges)}",
        groups=groups,
        x_label="score of the caption",
        y_label="score of the negative",
        diagonal=True,
        note="Points above the dashed line: the negative scores higher than the caption.",
    )


def sheet_markdown(sheet: ExampleSheet) -> list[str]:
    """The rule that chose the examples, and one table per example."""
    lines = ["### Examples", "", f"{sheet.rule} Runs of seed {sheet.seed}.", ""]
    all_lines = [line for one in sheet.examples for line in one.lines]
    if any(word.wrong is not None for line in all_lines for word in line.words):
        lines += [
            "**Bold**: not in the caption at this position. In brackets: the probability that the "
            f"word is wrong, if at least {SUSPECTED_FROM:g}. Corrected: such a word is replaced by "
            "one of the same part of speech if this raises the score.",
            "",
        ]
    else:
        lines += ["**Bold**: in none of the image's captions.", ""]
    for example in sheet.examples:
        names = list(dict.fromkeys(name for line in example.lines for name in line.scores))
        rows: list[tuple[str, ...]] = [(example.image, "sentence", *names)]
        rows += [
            (line.kind, _sentence(line), *(_score(line, name) for name in names))
            for line in example.lines
        ]
        head, _, *others = markdown_table(rows)
        aligned = "| --- | --- |" + " ---: |" * len(names)  # sentences are left-aligned
        lines += [head, aligned, *others, ""]
    return lines


def _sentence(line: ExampleLine) -> str:
    return " ".join(map(_word, line.words)).replace("|", "\\|")


def _word(word: ExampleWord) -> str:
    text = f"**{word.text}**" if word.new else word.text
    if word.wrong is not None and word.wrong >= SUSPECTED_FROM:
        return f"{text} ({word.wrong:.2f})"
    return text


def _score(line: ExampleLine, name: str) -> str:
    return f"{line.scores[name]:.3f}" if name in line.scores else ""
