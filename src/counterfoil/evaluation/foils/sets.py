"""Foils that a model is judged by: made by rule, read from a file, or written by a model."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from counterfoil.core.errors import ConfigError, DataError
from counterfoil.core.progress import Progress, Silent
from counterfoil.core.tensors.modes import eval_mode
from counterfoil.data.fragments import Fragments
from counterfoil.data.pairs import Split
from counterfoil.data.text.words import words
from counterfoil.foils import DEFAULT_KINDS, rule_foils
from counterfoil.foils.files import foils_by_caption
from counterfoil.models.foil_files import FoilAuthor
from counterfoil.models.model import Model
from counterfoil.objectives.services import GeneratorOptions, MaskUnit

CAPTION_BATCH = 64
RULES = "rules"


@dataclass(frozen=True)
class FoilPair:
    """A caption, by its index into the split's texts, and the same made false."""

    caption: int
    foil: str


@dataclass(frozen=True)
class FoilSet:
    """Foils of some captions of a split, in the order of these.

    ``captions`` were asked for; ``left_out`` of them have no foil.
    """

    name: str
    pairs: tuple[FoilPair, ...]
    captions: int
    left_out: int

    @classmethod
    def of(cls, name: str, pairs: Sequence[FoilPair], captions: int) -> FoilSet:
        if not pairs:
            raise DataError(f"{name}: there is no foil of any of {captions} captions")
        ordered = tuple(sorted(pairs, key=lambda pair: pair.caption))
        return cls(name, ordered, captions, captions - len({pair.caption for pair in pairs}))


def choose_captions(split: Split, most: int | None, seed: int) -> list[int]:
    """Indices of all captions, or of ``most`` of them drawn at random."""
    count = len(split.texts)
    if most is not None and most < 1:
        raise ConfigError(f"foils: expected at least 1 caption, got {most}")
    if most is None or most >= count:
        return list(range(count))
    return sorted(random.Random(f"{seed}/captions").sample(range(count), most))


def rule_set(
    split: Split,
    *,
    kinds: Sequence[str] = DEFAULT_KINDS,
    per_caption: int = 1,
    most: int | None = None,
    seed: int = 0,
) -> FoilSet:
    """VSE-C's foils; none brings in a word of the image's own captions."""
    chosen = choose_captions(split, most, seed)
    pairs: list[FoilPair] = []
    for index in chosen:
        own = split.captions[int(split.image_of[index])]
        avoid = frozenset(word for text in own for word in words(text))
        rng = random.Random(f"{seed}/{index}/{split.texts[index]}")
        found = rule_foils(split.texts[index], rng, kinds, per_caption, avoid)
        pairs += [FoilPair(index, foil.text) for foil in found]
    return FoilSet.of("rules", pairs, len(chosen))


def stored_set(path: Path, split: Split, *, most: int | None = None, seed: int = 0) -> FoilSet:
    """The foils of a file that belong to a split, by the image's id and the caption."""
    by_caption = foils_by_caption(path, split)
    chosen = choose_captions(split, most, seed)
    pairs = [FoilPair(index, foil) for index in chosen for foil in by_caption.get(index, ())]
    return FoilSet.of(path.name, pairs, len(chosen))


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
    starts = range(0, len(chosen), CAPTION_BATCH)
    pairs: list[FoilPair] = []
    with eval_mode(model):
        author = FoilAuthor(model, options)
        for start in (progress or Silent()).track(starts, f"writing foils ({name})", len(starts)):
            block = chosen[start : start + CAPTION_BATCH]
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


@dataclass(frozen=True)
class FoilChoice:
    """How many foils of how many captions, and how a model writes them.

    A model that writes ``blind`` gets blank images: it goes by the language alone.
    The seed is another one than that of training, whose foils the model may have learned from.
    """

    per_caption: int = 1
    captions: int | None = None
    seed: int = 1
    masks: int = 5
    samples: int = 5
    temperature: float = 1.5
    unit: MaskUnit = "graph"
    extractor: str = "rules"
    blind: bool = False

    def __post_init__(self) -> None:
        if min(self.per_caption, self.masks, self.samples) < 1:
            raise ConfigError("foils: per caption, masks and samples must all be at least 1")

    @property
    def generation(self) -> GeneratorOptions:
        return GeneratorOptions(
            masks=self.masks,
            samples=self.samples,
            kept=self.per_caption,
            temperature=self.temperature,
            unit=self.unit,
            extractor=self.extractor,
        )


def is_rules(source: str) -> bool:
    """Whether foils are made by rule: that is a name even where a folder is called so."""
    return source.partition(":")[0] == RULES


def foils_by(
    source: str,
    split: Split,
    choice: FoilChoice,
    load: Callable[[Path], Model],
    progress: Progress | None = None,
) -> FoilSet:
    """Foils by ``rules`` (or ``rules:noun,swap``), of a JSONL file, or by the model of a folder."""
    if is_rules(source):
        kinds = source.partition(":")[2]
        return rule_set(
            split,
            kinds=tuple(kinds.split(",")) if kinds else DEFAULT_KINDS,
            per_caption=choice.per_caption,
            most=choice.captions,
            seed=choice.seed,
        )
    path = Path(source)
    if path.is_file():
        return stored_set(path, split, most=choice.captions, seed=choice.seed)
    if not path.is_dir():
        raise ConfigError(
            f"foils: '{source}' is neither '{RULES}' nor a JSONL file of foils nor the folder of a "
            "run that writes them"
        )
    return foils_of_model(load(path), path.resolve().name, split, choice, progress)


def foils_of_model(
    model: Model, name: str, split: Split, choice: FoilChoice, progress: Progress | None = None
) -> FoilSet:
    """What a model itself writes and holds to match best."""
    return written_set(
        model,
        split,
        choice.generation,
        name=name,
        most=choice.captions,
        seed=choice.seed,
        blind=choice.blind,
        progress=progress,
    )
