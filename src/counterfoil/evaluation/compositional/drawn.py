"""The benchmark `scenes`: minimal pairs and crossed pairs of drawn scenes, made from a seed."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from counterfoil.core.errors import DataError
from counterfoil.core.progress import Progress, Silent
from counterfoil.data.images import ImageRef
from counterfoil.data.scenes import Scene, describe, draw, make_scene
from counterfoil.data.scenes.family import MAX_FAMILY_SIZE
from counterfoil.data.scenes.minimal_pairs import CHANGES, crossed_captions, minimal_foil
from counterfoil.evaluation.compositional.readers import Benchmark, Item, Subset

CROSSED = "crossed"
"""Two scenes × two captions, as in BiVLC."""

CAPTIONS = 5
MAX_FAMILIES_PER_ITEM = 100
# The splits of the data set "scenes" have the numbers 0 to 2, so these scenes are in none of them.
_BENCHMARK, _OTHER = 3, 4
_OTHER_FAMILIES = 500


@dataclass(frozen=True)
class DrawnImage:
    """A scene, drawn when it is read."""

    seed: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"scene-{'-'.join(map(str, self.seed))}.png"

    def read(self) -> bytes:
        buffer = io.BytesIO()
        draw(make_scene(self.seed)).save(buffer, format="PNG", compress_level=1)
        return buffer.getvalue()


def scene_benchmark(items: int = 200, seed: int = 0, progress: Progress | None = None) -> Benchmark:
    """``items`` of each of SugarCrepe's seven kinds, and as many crossed pairs.

    Every caption is true of its scene and every foil false by construction; the same seed gives
    the same items.
    """
    made: dict[str, list[Item]] = {kind: [] for kind in (*CHANGES, CROSSED)}
    pixels: dict[str, dict[str, ImageRef]] = {kind: {} for kind in made}
    families = range(MAX_FAMILIES_PER_ITEM * items)
    bars = progress or Silent()
    for kind in bars.track(made, "making minimal pairs", len(made)):
        for family in families:
            if len(made[kind]) == items:
                break
            for item, images in _try_item(kind, (seed, _BENCHMARK, family)):
                made[kind].append(item)
                pixels[kind].update({image.name: image for image in images})
        else:
            raise DataError(f"scenes: {len(families)} scenes gave too few items of kind {kind}")
    subsets = [
        Subset(kind, "square" if kind == CROSSED else "choice", tuple(own), pixels=pixels[kind])
        for kind, own in made.items()
    ]
    return Benchmark("scenes", tuple(subsets))


def _try_item(
    kind: str, family: tuple[int, int, int]
) -> Iterator[tuple[Item, tuple[DrawnImage, ...]]]:
    """At most one item of a family of scenes."""
    rng = random.Random(f"benchmark {kind} {family}")
    if kind == CROSSED:
        yield from _crossed_item(family, rng)
        return
    seed = (*family, rng.randrange(MAX_FAMILY_SIZE))
    scene = make_scene(seed)
    image = DrawnImage(seed)
    for caption in describe(scene, rng, CAPTIONS):
        foil = minimal_foil(scene, caption, kind, rng)
        if foil is not None:
            yield Item(image.name, (image.name,), (caption.text,), (foil.text,)), (image,)
            return


def _crossed_item(
    family: tuple[int, int, int], rng: random.Random
) -> Iterator[tuple[Item, tuple[DrawnImage, ...]]]:
    for member in rng.sample(range(1, MAX_FAMILY_SIZE), MAX_FAMILY_SIZE - 1):
        images = DrawnImage((*family, 0)), DrawnImage((*family, member))
        base, edited = (make_scene(image.seed) for image in images)
        # captions about what differs
        for caption in describe(replace(base, focus=edited.focus), rng, CAPTIONS):
            other = crossed_captions(base, edited, caption, rng)
            if other is not None:
                names = images[0].name, images[1].name
                label = edited.edit.what if edited.edit is not None else ""
                texts = (caption.text, other.text)
                yield Item(images[1].name, names, texts, label=label), images
                return


def other_captions(seed: int = 0, progress: Progress | None = None) -> list[str]:
    """Captions of scenes that the benchmark does not have, for a language model."""
    captions = []
    bars = progress or Silent()
    for family in bars.track(range(_OTHER_FAMILIES), "captions of other scenes", _OTHER_FAMILIES):
        for member in range(MAX_FAMILY_SIZE):
            scene: Scene = make_scene((seed, _OTHER, family, member))
            rng = random.Random(f"captions {scene.seed}")
            captions += [caption.text for caption in describe(scene, rng, CAPTIONS)]
    return captions
