"""Sets of foils for evaluation: made by rule, read from a file, or written by a model."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from counterfoil.core.errors import ConfigError, DataError, nearest
from counterfoil.core.progress import Progress, Silent
from counterfoil.core.tensors.modes import eval_mode
from counterfoil.data.fragments import Fragments
from counterfoil.data.pairs import Split
from counterfoil.foils import DEFAULT_KINDS
from counterfoil.foils.files import foils_by_caption, foils_of_image
from counterfoil.foils.rules import Foil
from counterfoil.models.foil_files import FoilAuthor
from counterfoil.models.model import Model
from counterfoil.objectives.services import GeneratorOptions, MaskUnit

CAPTION_BATCH = 64
RULES = "rules"


@dataclass(frozen=True)
class FoilPair:
    """A caption, as an index into the split's texts, and its foil."""

    caption: int
    foil: str


@dataclass(frozen=True)
class FoilSet:
    """Foils of captions of a split, sorted by caption.

    ``captions`` is the number of captions requested; ``left_out`` of them have no foil.
    """

    name: str
    pairs: tuple[FoilPair, ...]
    captions: int
    left_out: int

    @classmethod
    def of(cls, name: str, pairs: Sequence[FoilPair], captions: int) -> FoilSet:
        if not pairs:
            raise DataError(f"{name}: none of the {captions} captions has a foil")
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
    """VSE-C's foils; see `foils_by_rule`."""
    foils = foils_by_rule(split, kinds, per_caption, most, seed)
    pairs = [FoilPair(caption, foil.text) for caption, made in foils.items() for foil in made]
    return FoilSet.of("rules", pairs, len(foils))


def foils_by_rule(
    split: Split, kinds: Sequence[str], per_caption: int, most: int | None, seed: int
) -> dict[int, list[Foil]]:
    """Rule-made foils of each chosen caption, without words of its image's own captions."""
    foils: dict[int, list[Foil]] = {}
    for caption in choose_captions(split, most, seed):
        own = split.captions[int(split.image_of[caption])]
        rng = random.Random(f"{seed}/{caption}/{split.texts[caption]}")
        foils[caption] = foils_of_image(split.texts[caption], own, rng, kinds, per_caption)
    return foils


def stored_set(
    path: Path,
    split: Split,
    *,
    most: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> FoilSet:
    """The foils of a file for a split, matched by image id and caption."""
    by_caption = foils_by_caption(path, split, progress)
    chosen = choose_captions(split, most, seed)
    pairs = [FoilPair(index, foil) for index in chosen for foil in by_caption.get(index, ())]
    return FoilSet.of(path.name, pairs, len(chosen))


def foils_of_model(
    model: Model, name: str, split: Split, choice: FoilChoice, progress: Progress | None = None
) -> FoilSet:
    """Foils that a model writes: for each caption the ``per_caption`` best matches by its scores.

    Captions of unreadable images have none. The same seed gives the same foils on the same kind of
    device.
    """
    chosen = choose_captions(split, choice.captions, choice.seed)
    starts = range(0, len(chosen), CAPTION_BATCH)
    pairs: list[FoilPair] = []
    with eval_mode(model):
        author = FoilAuthor(model, choice.generation)
        for start in (progress or Silent()).track(starts, f"writing foils ({name})", len(starts)):
            block = chosen[start : start + CAPTION_BATCH]
            rng = np.random.default_rng([choice.seed, block[0]])
            pairs += _write_block(author, split, block, rng, choice.blind)
    return FoilSet.of(name, pairs, len(chosen))


def _write_block(
    author: FoilAuthor,
    split: Split,
    block: Sequence[int],
    rng: np.random.Generator,
    blind: bool,
) -> list[FoilPair]:
    image_of = {index: int(split.image_of[index]) for index in block}
    images = readable_images(split, list(image_of.values()))
    if blind:
        images = {image: _zero_features(fragments) for image, fragments in images.items()}
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


def _zero_features(image: Fragments) -> Fragments:
    """An image with the same number of fragments and all features zero."""
    return replace(image, features=np.zeros_like(image.features))


def readable_images(split: Split, wanted: Sequence[int]) -> dict[int, Fragments]:
    """The fragments of images, each read once; unreadable images are omitted."""
    table = split.require_fragments()
    fragments: dict[int, Fragments] = {}
    for image in dict.fromkeys(wanted):
        try:
            fragments[image] = table.read(image)
        except DataError:
            continue
    return fragments


@dataclass(frozen=True)
class FoilChoice:
    """How many foils of how many captions, and how a model writes them.

    With ``blind``, all image features are zero, so that the model sees only the text. The default
    seed differs from that of training, whose foils the model may have learned from.
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
    """Whether foils are made by rule; the name wins over a folder of that name."""
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
        return stored_set(path, split, most=choice.captions, seed=choice.seed, progress=progress)
    if not path.is_dir():
        raise ConfigError(
            f"foils: there is no file or folder '{source}'{nearest(source, [RULES])}; expected "
            f"'{RULES}', a JSONL file of foils, or the folder of a run that writes them"
        )
    return foils_of_model(load(path), path.resolve().name, split, choice, progress)
