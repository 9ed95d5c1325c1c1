"""Maps of words × regions for test pairs, for several models (NAAF, figure 4).

A fixed rule selects the pairs. Captions are ordered by the SHA-256 of image id and caption; those
for which one model (``confused``) ranks a wrong image above their own come first. Each is shown
with its own image and with the wrong image that this model ranks highest. An image that has the
same caption, or a drawn scene of which the caption is true, does not count as wrong.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from counterfoil.core.errors import DataError
from counterfoil.data.pairs import Split
from counterfoil.data.scenes import captions_of, could_be_true, scene_of, statement_of
from counterfoil.data.scenes.scene import SIZE, Box, Scene
from counterfoil.evaluation.foils.truth import caption_positions
from counterfoil.evaluation.report import markdown_table
from counterfoil.matchers.naaf import NAAF
from counterfoil.models import Model
from counterfoil.models.explain import word_map
from counterfoil.reproduce.measure import RunEvaluator
from counterfoil.reproduce.plan import Plan
from counterfoil.reproduce.results import MappedPair, Reproduction, WordMap
from counterfoil.reproduce.spec import Maps
from counterfoil.scoring.encode import SplitScores, score_split
from counterfoil.training.run_folder import load_model

MIN_OVERLAP = 0.3
"""Smallest intersection over union at which a region is named after an object."""


def map_pairs(plan: Plan, artifact: Maps, evaluator: RunEvaluator) -> list[MappedPair]:
    """The pairs of the figure, with runs of the first seed; empty unless all are finished."""
    runs = {row.name: plan.runs[row.members[0]][0] for row in artifact.rows}
    confused = plan.runs[artifact.confused][0]
    if any(run.state != "finished" for run in (*runs.values(), confused)):
        return []
    models = {name: load_model(run.folder, run.config.train.device) for name, run in runs.items()}
    split = evaluator.split_of(confused)
    size = confused.config.evaluation.batch_size
    scored = score_split(load_model(confused.folder, confused.config.train.device), split, size)
    pairs = []
    for caption, own, wrong in choose_pairs(split, scored, artifact.captions):
        pairs.append(_mapped(models, split, caption, own, own=True))
        if wrong is not None:
            pairs.append(_mapped(models, split, caption, wrong, own=False))
    return pairs


def choose_pairs(
    split: Split, scored: SplitScores, count: int
) -> list[tuple[int, int, int | None]]:
    """(caption, own image, wrong image or None), as indices into the split."""
    scores = scored.scores.float().numpy()
    confused: list[tuple[int, int, int | None]] = []
    others: list[tuple[int, int, int | None]] = []
    for column in sorted(range(len(scored.texts)), key=lambda t: _key(split, scored.texts[t])):
        if len(confused) == count:
            break
        caption, own = scored.texts[column], int(scored.image_of[column])
        row = _find_highest_wrong(split, scored, scores[:, column], caption, own)
        wrong = None if row is None else scored.images[row]
        mistaken = row is not None and scores[row, column] > scores[own, column]
        (confused if mistaken else others).append((caption, scored.images[own], wrong))
    return [*confused, *others][:count]


def _find_highest_wrong(
    split: Split, scored: SplitScores, scores: NDArray[np.float32], caption: int, own: int
) -> int | None:
    """The row of the highest-scoring image for which a caption is false."""
    for row in np.argsort(-scores, kind="stable").tolist():
        if row != own and not _may_be_true(split, caption, scored.images[row]):
            return int(row)
    return None


def _key(split: Split, caption: int) -> str:
    image = split.ids[int(split.image_of[caption])]
    return hashlib.sha256(f"{image}\n{split.texts[caption]}".encode()).hexdigest()


def _may_be_true(split: Split, caption: int, image: int) -> bool:
    """Whether an image also has the caption, or is a drawn scene of which it could be true."""
    if split.texts[caption] in split.captions[image]:
        return True
    scene = _find_scene(split, image)
    if scene is None or split.extras is None:
        return False
    [(owner, index)] = caption_positions(split, [caption])
    written = captions_of(split.extras[owner], split.captions[owner])[index]
    return could_be_true(scene, statement_of(written))


def _find_scene(split: Split, image: int) -> Scene | None:
    extras = split.extras[image] if split.extras is not None else {}
    return scene_of(extras) if "scene" in extras else None


def _mapped(
    models: dict[str, Model], split: Split, caption: int, image: int, *, own: bool
) -> MappedPair:
    if split.fragments is None:
        raise DataError(f"split '{split.name}' has no regions to map words to")
    text, fragments = split.texts[caption], split.fragments.read(image)
    words: list[str] = []
    maps = []
    for name, model in models.items():
        words, values, score = word_map(model, fragments, text)
        naaf = isinstance(model.matcher, NAAF)
        quantity: Literal["s − t", "attention"] = "s − t" if naaf else "attention"
        rows = [[round(float(value), 5) for value in row] for row in values]
        maps.append(WordMap(row=name, quantity=quantity, score=score, values=rows))
    return MappedPair(
        caption=text,
        image=split.ids[image],
        own=own,
        words=words,
        regions=region_names(len(fragments), fragments.boxes, _find_scene(split, image)),
        maps=maps,
    )


def region_names(
    count: int, boxes: NDArray[np.float32] | None, scene: Scene | None = None
) -> list[str]:
    """Numbers from 1; for a drawn scene, also the object that a region overlaps most.

    >>> region_names(2, None)
    ['1', '2']
    """
    names = [str(number) for number in range(1, count + 1)]
    if scene is None or boxes is None:
        return names
    return [
        f"{name} {object_name}" if (object_name := _find_object(box, scene)) else name
        for name, box in zip(names, boxes.tolist(), strict=True)
    ]


def _find_object(box: Sequence[float], scene: Scene) -> str | None:
    """The object that overlaps a box in 0…1 most, as a whole or by one of its instances."""
    pixels = (box[0] * SIZE, box[1] * SIZE, box[2] * SIZE, box[3] * SIZE)
    best, name = MIN_OVERLAP, None
    for one in scene.objects:
        overlap = max(_overlap(pixels, other) for other in (one.box, *one.boxes))
        if overlap >= best:
            best, name = overlap, f"{one.color} {one.kind}"
    return name


def _overlap(one: Box, other: Box) -> float:
    """Intersection over union."""
    across = min(one[2], other[2]) - max(one[0], other[0])
    down = min(one[3], other[3]) - max(one[1], other[1])
    shared = max(0.0, across) * max(0.0, down)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    return shared / max(sum(areas) - shared, 1e-9)


def pair_sections(result: Reproduction) -> list[str]:
    """Markdown with one table per pair: per word and model, the highest value and its region."""
    lines: list[str] = []
    for number, pair in enumerate(result.pairs, 1):
        kind = "its own image" if pair.own else "a wrong image"
        scores = ", ".join(f"{one.row} {one.score:.3f}" for one in pair.maps)
        lines += [f"**Pair {number}**: “{pair.caption}” with {kind}, {pair.image} ({scores})", ""]
        heads = [head for one in pair.maps for head in (f"{one.row}: {one.quantity}", "region")]
        table = [("word", *heads)]
        for index, word in enumerate(pair.words):
            cells = []
            for one in pair.maps:
                best = int(np.argmax(one.values[index])) if one.values[index] else None
                if best is None:
                    cells += ["", ""]
                    continue
                sign = "+" if one.quantity == "s − t" else ""
                cells += [f"{one.values[index][best]:{sign}.3f}", pair.regions[best]]
            table.append((word.replace("|", "\\|"), *cells))
        lines += [*markdown_table(table), ""]
    return lines
