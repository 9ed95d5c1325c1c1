"""Foils of a whole split, written by a model's own masked language head (TAGS §2.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from counterfoil.data.fragments import Fragments
from counterfoil.data.pairs import Split
from counterfoil.errors import DataError
from counterfoil.evaluation.foil_sets import FoilPair, FoilSet, choose_captions
from counterfoil.models.asking import asked
from counterfoil.models.foil_files import FoilAuthor
from counterfoil.models.model import Model
from counterfoil.objectives.services import GeneratorOptions
from counterfoil.progress import Progress, Silent

CAPTIONS_AT_ONCE = 64


def written_set(
    model: Model,
    split: Split,
    options: GeneratorOptions,
    *,
    name: str = "written",
    most: int | None = None,
    seed: int = 0,
    blind: bool = False,
    progress: Progress | None = None,
) -> FoilSet:
    """The ``options.kept`` foils of each caption that the model itself holds to match best.

    Captions of images that cannot be read have none. The same seed gives the same foils on the
    same kind of device. ``blind``: all features of the images are zero, for writing and choosing.
    """
    chosen = choose_captions(split, most, seed)
    starts = range(0, len(chosen), CAPTIONS_AT_ONCE)
    pairs: list[FoilPair] = []
    with asked(model):
        author = FoilAuthor(model, options)
        for start in (progress or Silent()).track(starts, f"writing foils ({name})", len(starts)):
            block = chosen[start : start + CAPTIONS_AT_ONCE]
            rng = np.random.default_rng([seed, block[0]])
            pairs += _write(author, split, block, rng, blind)
    return FoilSet.of(name, pairs, len(chosen))


def _write(
    author: FoilAuthor,
    split: Split,
    block: Sequence[int],
    rng: np.random.Generator,
    blind: bool,
) -> list[FoilPair]:
    image_of = {index: int(split.image_of[index]) for index in block}
    images = readable_images(split, list(image_of.values()))
    if blind:
        images = {image: _blank(fragments) for image, fragments in images.items()}
    readable = [index for index in block if image_of[index] in images]
    if not readable:
        return []
    written = author.write(
        [images[image_of[index]] for index in readable],
        [split.texts[index] for index in readable],
        [split.captions[image_of[index]] for index in readable],
        rng,
    )
    return [
        FoilPair(index, foil.text)
        for index, foils in zip(readable, written, strict=True)
        for foil in foils
    ]


def _blank(image: Fragments) -> Fragments:
    """An image of which nothing can be seen: as many fragments, all zero."""
    return replace(image, features=np.zeros_like(image.features))


def readable_images(split: Split, wanted: Sequence[int]) -> dict[int, Fragments]:
    """The fragments of some images, each once; those that cannot be read are left out."""
    table = split.require_fragments()
    found: dict[int, Fragments] = {}
    for image in dict.fromkeys(wanted):
        try:
            found[image] = table.read(image)
        except DataError:
            continue
    return found
