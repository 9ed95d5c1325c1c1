"""Words × regions of some test pairs, model beside model (NAAF, figure 4).

Which pairs, is a rule: captions in the order of the SHA-256 of image id and caption, first those
for which one model (``confused``) ranks a wrong image above their own. Each is shown with its own
image and with the wrong image that this model ranks highest. An image that has the same caption, or
a drawn scene of which it is true, is not wrong.
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
"""Intersection over union from which on a region is called like an object."""


def map_pairs(plan: Plan, artifact: Maps, evaluator: RunEvaluator) -> list[MappedPair]:
    """The pairs of the figure by the runs of the first seed; nothing before all are finished."""
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
    """Captions, each with its own and with a wrong image, as indices into the split."""
    scores = scored.scores.float().numpy()
    confused: list[tuple[int, int, int | None]] = []
    others: list[tuple[int, int, int | None]] = []
    for column in sorted(range(len(scored.texts)), key=lambda t: _key(split, scored.texts[t])):
        if len(confused) == count:
            break
        caption, own = scored.texts[column], int(scored.image_of[column])
        row = _highest_wrong(split, scored, scores[:, column], caption, own)
        wrong = None if row is None else scored.images[row]
        mistaken = row is not None and scores[row, column] > scores[own, column]
        (confused if mistaken else others).append((caption, scored.images[own], wrong))
    return [*confused, *others][:count]


def _highest_wrong(
    split: Split, scored: SplitScores, scores: NDArray[np.float32], caption: int, own: int
) -> int | None:
    """The row of the image that scores highest of those that a caption is false of."""
    for row in np.argsort(-scores, kind="stable").tolist():
        if row != own and not _may_be_true(split, caption, scored.images[row]):
            return int(row)
    return None


def _key(split: Split, caption: int) -> str:
    image = split.ids[int(split.image_of[caption])]
    return hashlib.sha256(f"{image}\n{split.texts[caption]}".encode()).hexdigest()


def _may_be_true(split: Split, caption: int, image: int) -> bool:
    """Whether another image has the caption, too, or the drawn scenes know that it could be so."""
    if split.texts[caption] in split.captions[image]:
        return True
    scene = _scene(split, image)
    if scene is None or split.extras is None:
        return False
    [(owner, place)] = caption_positions(split, [caption])
    written = captions_of(split.extras[owner], split.captions[owner])[place]
    return could_be_true(scene, statement_of(written))


def _scene(split: Split, image: int) -> Scene | None:
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
        regions=region_names(len(fragments), fragments.boxes, _scene(split, image)),
        maps=maps,
    )


def region_names(
    count: int, boxes: NDArray[np.float32] | None, scene: Scene | None = None
) -> list[str]:
    """Numbers from 1; of a drawn scene also the object that a region shows most of.

    >>> region_names(2, None)
    ['1', '2']
    """
    names = [str(number) for number in range(1, count + 1)]
    if scene is None or boxes is None:
        return names
    return [
        f"{name} {shown}" if (shown := _object_at(box, scene)) else name
        for name, box in zip(names, boxes.tolist(), strict=True)
    ]


def _object_at(box: Sequence[float], scene: Scene) -> str | None:
    """The object, all of it or one of several alike, that overlaps a box in 0…1 the most."""
    place = (box[0] * SIZE, box[1] * SIZE, box[2] * SIZE, box[3] * SIZE)
    best, name = MIN_OVERLAP, None
    for one in scene.objects:
        overlap = max(_overlap(place, other) for other in (one.box, *one.boxes))
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


def pair_sections(found: Reproduction) -> list[str]:
    """Markdown: of each pair the highest number of every word, and the region that has it."""
    lines: list[str] = []
    for number, pair in enumerate(found.pairs, 1):
        kind = "its own image" if pair.own else "a wrong image"
        scores = ", ".join(f"{one.row} {one.score:.3f}" for one in pair.maps)
        lines += [f"**Pair {number}**: “{pair.caption}” with {kind}, {pair.image} ({scores})", ""]
        heads = [head for one in pair.maps for head in (f"{one.row}: {one.quantity}", "region")]
        table = [("word", *heads)]
        for place, word in enumerate(pair.words):
            cells = []
            for one in pair.maps:
                best = int(np.argmax(one.values[place])) if one.values[place] else None
                if best is None:
                    cells += ["", ""]
                    continue
                sign = "+" if one.quantity == "s − t" else ""
                cells += [f"{one.values[place][best]:{sign}.3f}", pair.regions[best]]
            table.append((word.replace("|", "\\|"), *cells))
        lines += [*markdown_table(table), ""]
    return lines
