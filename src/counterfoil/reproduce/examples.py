"""Examples of sentences that models wrote, found or corrected (TAGS-DC, figures 1 and 3)."""

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
from counterfoil.reproduce.results import Example, ExampleLine, ExampleSheet, ExampleWord, PointMap
from counterfoil.reproduce.spec import Examples
from counterfoil.reproduce.table_rows import TableRow
from counterfoil.training.run_folder import load_model

IMAGE_SIDE = 320
"""Pixels of the longer side of a picture."""
MAX_MAP_POINTS = 400
"""Of each row on the map of scores; more are drawn by chance."""
SUSPECTED_FROM = 0.5
"""Words that are wrong with at least this probability are marked."""
SHEET_REVISION = 1
"""What a kept sheet holds; sheets of other versions are made again."""


@dataclass(frozen=True)
class _Source:
    """A row at one seed: its run with its model, and the foils of its source."""

    name: str
    run: PlannedRun
    model: Model
    foils: FoilSet


def collect_sheet(
    plan: Plan, shown: Sequence[TableRow], evaluator: MeasureEvaluator
) -> ExampleSheet | None:
    """Examples of the first seed of which all runs are finished; None if there is none.

    A sheet is kept beside the judge's other results, and not made twice.
    """
    artifact = plan.artifact
    if not isinstance(artifact, Examples):
        raise ConfigError(f"{artifact.name}: only artefacts of the kind 'examples' have examples")
    for index in range(plan.settings.seeds):
        asked = [_asked(plan, row, index) for row in shown]
        runs = [one for _, run, writer in asked for one in (run, writer) if one is not None]
        if all(run.state == "finished" for run in runs):
            names = [row.result.name for row in shown]
            columns = [[column.foils, column.blind] for column, _, _ in asked]
            digests, options = [run.digest for run in runs], evaluator.options.model_dump()
            wanted = [artifact.show, artifact.examples, names, columns]
            return evaluator.kept(
                ["sheet", SHEET_REVISION, *wanted, digests, options],
                ExampleSheet,
                lambda: _sheet(artifact, names, asked, index, evaluator),  # noqa: B023
            )
    return None


def _asked(
    plan: Plan, row: TableRow, index: int
) -> tuple[MeasureColumn, PlannedRun, PlannedRun | None]:
    """The source of a row's foils, its run at a seed, and the run that writes them."""
    column = MeasureColumn(title="foils", foils=OWN, number="accuracy")
    column = column.of_row(row.foils, row.blind)
    (run,) = row.runs[index]
    if column.foils == OWN:
        return column, run, run
    return column, run, plan.runs[column.writer][index] if column.writer else None


def _sheet(
    artifact: Examples,
    names: Sequence[str],
    asked: Sequence[tuple[MeasureColumn, PlannedRun, PlannedRun | None]],
    index: int,
    evaluator: MeasureEvaluator,
) -> ExampleSheet:
    split = evaluator.evaluator.split_of(asked[0][1])
    sources = [
        _Source(
            name,
            run,
            load_model(run.folder, run.config.train.device),
            evaluator.foil_set(column, run, writer),
        )
        for name, (column, run, writer) in zip(names, asked, strict=True)
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
        "a foil of every source, each of another image. None was exchanged for a better one."
    )
    maps = [_map(split, sources)] if artifact.show == "negatives" else []
    return ExampleSheet(split=split.name, seed=index, rule=rule, examples=examples, maps=maps)


def choose(split: Split, foils: Sequence[FoilSet], count: int, seed: int) -> list[int]:
    """Captions that all sets have a foil of, by chance, at most one of each image."""
    common = set.intersection(*({pair.caption for pair in one.pairs} for one in foils))
    shuffled = random.Random(f"{seed}/examples").sample(sorted(common), len(common))
    by_image: dict[int, int] = {}
    for caption in shuffled:
        by_image.setdefault(int(split.image_of[caption]), caption)
    return list(by_image.values())[:count]


def _negatives(split: Split, caption: int, sources: Sequence[_Source]) -> list[ExampleLine]:
    """The caption, then the foil of each row; scores by each row's own run."""
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
    """The caption, a foil of the last row, what its run makes of the foil; scores by all runs."""
    writer, text = sources[-1], split.texts[caption]
    foil = _foil_of(writer.foils, caption)
    image = readable_images(split, [int(split.image_of[caption])])
    # as in the paper: no margin that was chosen on dev
    fragments = image[int(split.image_of[caption])]
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
            kind=kind, words=some, scores={name: each[place] for name, each in scores.items()}
        )
        for place, (kind, some) in enumerate(lines)
    ]


def _foil_of(foils: FoilSet, caption: int) -> str:
    """The first foil of a caption: of those that a run writes, the one that matches best."""
    return next(pair.foil for pair in foils.pairs if pair.caption == caption)


def _scores(model: Model, split: Split, caption: int, sentences: Sequence[str]) -> list[float]:
    """Scores of a caption and of other sentences with the caption's image."""
    pairs = [FoilPair(caption, sentence) for sentence in sentences]
    found = score_foils(model, split, FoilSet.of("examples", pairs, 1))
    return [float(found.true[0]), *(float(score) for score in found.foil)]


def _read_scores(model: Model, split: Split, caption: int, sentences: Sequence[str]) -> list[float]:
    """Scores of sentences with a caption's image, without unknown words, as `correct` scores."""
    read = [known_text(model.text, sentence).text or sentence for sentence in sentences]
    return _scores(model, split, caption, read)[1:]


def _foreign(own: Sequence[str], sentence: str) -> list[ExampleWord]:
    """The words of a sentence, those marked as new that no caption of the image has."""
    known = {word for text in own for word in words(text)}
    return [
        ExampleWord(text=word, new=not known.issuperset(words(word))) for word in sentence.split()
    ]


def _marked(text: str, other: str) -> list[ExampleWord]:
    """The words of another sentence, those marked as new that the caption lacks at their place."""
    before, after = text.split(), other.split()
    same = SequenceMatcher(
        None, [w.lower() for w in before], [w.lower() for w in after], autojunk=False
    ).get_matching_blocks()
    known = {block.b + offset for block in same for offset in range(block.size)}
    return [ExampleWord(text=word, new=place not in known) for place, word in enumerate(after)]


def _suspected(text: str, result: Correction) -> list[ExampleWord]:
    """The words of a foil with how likely each is wrong."""
    marked, place = [], 0
    suspects = list(result.words)
    for word in _marked(text, result.text):
        # one word of the sentence may be several of the model's: "dog." has a full stop
        rest, wrong = word.text, 0.0
        while place < len(suspects) and suspects[place].word in rest:
            rest = rest.partition(suspects[place].word)[2]
            wrong = max(wrong, suspects[place].wrong)
            place += 1
            if not rest:
                break
        marked.append(word.model_copy(update={"wrong": wrong}))
    return marked


def picture_of(split: Split, image: int) -> str:
    """A small JPEG in base64; empty where the pixels are not at hand or cannot be read."""
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
    """Scores of captions and of their foils, by the source of these."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for one in sources:
        pairs = one.foils.pairs
        chosen = random.Random("map").sample(range(len(pairs)), min(MAX_MAP_POINTS, len(pairs)))
        foils = FoilSet.of(one.name, [pairs[place] for place in chosen], len(chosen))
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
        note="Above the dashed line, the negative scores higher than the caption.",
    )


def sheet_markdown(sheet: ExampleSheet) -> list[str]:
    """The rule of choice, and a table for each example."""
    lines = ["### Examples", "", f"{sheet.rule} Runs of seed {sheet.seed}.", ""]
    suspects = any(
        word.wrong is not None
        for one in sheet.examples
        for line in one.lines
        for word in line.words
    )
    if suspects:
        lines += [
            "**Bold**: not in the caption at this place. In brackets: how likely the word is wrong,"
            f" if at least {SUSPECTED_FROM:g}. Corrected: such a word is exchanged for one of the"
            " same part of speech if the score rises.",
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
        aligned = "| --- | --- |" + " ---: |" * len(names)  # sentences begin at the left
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
