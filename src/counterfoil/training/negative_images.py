"""Images that show foils: scenes drawn for them, or training images retrieved with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from counterfoil.core.distributed import on_first_process
from counterfoil.core.errors import ConfigError, DataError
from counterfoil.core.progress import Progress, Silent
from counterfoil.data.batches.dataset import ExtraItems, ExtraNegativeSource
from counterfoil.data.fragments import FragmentTable
from counterfoil.data.pairs import Pairs, Split
from counterfoil.data.scenes.draw import DrawnImage
from counterfoil.data.scenes.falsify import false_scene
from counterfoil.data.scenes.truth import captions_of, scene_of
from counterfoil.features import with_fragments
from counterfoil.objectives.services import TrainSplitScores

Foils = Mapping[int, tuple[str, ...]]
"""Foils of captions, by their indices into the texts of a split."""

Retriever = Callable[[Sequence[str], NDArray[np.int64]], NDArray[np.int64]]
"""From texts and the images they belong to, to the image that matches each text best."""


def fixed_foils(source: ExtraNegativeSource, split: Split, seed: int) -> dict[int, tuple[str, ...]]:
    """The foils of every caption, drawn once; captions without foils are left out."""
    foils = {}
    for caption in range(len(split.texts)):
        texts = source.of(caption, np.random.default_rng([seed, caption])).texts
        if texts:
            foils[caption] = texts
    if not foils:
        raise DataError(f"foils: no caption of split '{split.name}' has one; use another source")
    return foils


@dataclass
class RetrievedImages:
    """Foils with the training images that a model retrieves for them."""

    foils: Foils
    owners: NDArray[np.int64]
    """Image of the caption of each foil, all foils in the order of ``foils``."""
    by_training_model: bool
    images: NDArray[np.int64] | None = None
    first: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of_split(cls, foils: Foils, split: Split, retrieve: Retriever | None) -> RetrievedImages:
        owners = np.array(
            [split.image_of[caption] for caption, texts in foils.items() for _ in texts]
        )
        made = cls(foils, owners, retrieve is None)
        position = 0
        for caption, texts in foils.items():
            made.first[caption] = position
            position += len(texts)
        made.images = (
            np.full(len(owners), -1, dtype=np.int64)
            if retrieve is None
            else retrieve(made.texts, owners)
        )
        return made

    @property
    def changes(self) -> bool:
        """Whether the model in training retrieves the images anew."""
        return self.by_training_model

    @property
    def texts(self) -> list[str]:
        return [text for texts in self.foils.values() for text in texts]

    def refresh(self, survey: TrainSplitScores) -> None:
        if self.by_training_model:
            self.images = survey.nearest_images(self.texts, self.owners)

    def of(self, caption: int, rng: np.random.Generator) -> ExtraItems:
        texts = self.foils.get(caption, ())
        if not texts or self.images is None:
            return ExtraItems(texts=texts)
        first = self.first[caption]
        images = self.images[first : first + len(texts)].tolist()
        pairs = [(text, image) for text, image in zip(texts, images, strict=True) if image >= 0]
        rest = [text for text, image in zip(texts, images, strict=True) if image < 0]
        return ExtraItems(tuple(image for _, image in pairs), (*(text for text, _ in pairs), *rest))


@dataclass
class DrawnImages:
    """Foils with the scenes that they describe, drawn; texts without a scene come last."""

    foils: Foils
    table: FragmentTable
    rows: Mapping[int, range]
    images: NDArray[np.int64] | None = None
    changes: ClassVar = False

    def refresh(self, survey: TrainSplitScores) -> None:
        """Nothing: drawn images stay the same."""

    def of(self, caption: int, rng: np.random.Generator) -> ExtraItems:
        rows = self.rows.get(caption, range(0))
        fragments = tuple(self.table.compact(row) for row in rows)
        return ExtraItems(texts=self.foils.get(caption, ()), fragments=fragments)


def is_drawn(split: Split) -> bool:
    """Whether a split has the ground truth of drawn scenes."""
    return bool(split.extras is not None and len(split) and "scene" in split.extras[0])


def draw_false_scenes(
    foils: Foils,
    split: Split,
    extractor: str,
    options: Mapping[str, Any],
    cache: Path | None,
    progress: Progress,
) -> DrawnImages:
    """Draw the scenes that foils describe, with features cached like those of other images."""
    if not is_drawn(split):
        raise ConfigError(
            "objective.triplet-clip.images=drawn: these data are not drawn scenes; use 'retrieved'"
        )
    ordered: dict[int, tuple[str, ...]] = {}
    rows: dict[int, range] = {}
    drawn: list[DrawnImage] = []
    tracked = progress.track(list(foils.items()), "changing scenes", len(foils))
    for caption, texts in tracked:
        scenes = _scenes_of(split, caption, texts)
        ordered[caption] = tuple(sorted(texts, key=lambda text: text not in scenes))
        rows[caption] = range(len(drawn), len(drawn) + len(scenes))
        drawn += [DrawnImage(scenes[text]) for text in ordered[caption] if text in scenes]
    if not drawn:
        raise DataError("objective.triplet-clip: none of the foils can be drawn; use 'retrieved'")
    progress.say(
        f"{len(drawn):,} of {sum(map(len, foils.values())):,} foils are shown by a drawn scene"
    )
    drawings = Split("false scenes", [one.name for one in drawn], [[]] * len(drawn), drawn)
    bare = Pairs("false scenes", {drawings.name: drawings})

    def extract(bars: Progress) -> Pairs:
        return with_fragments(bare, cache, extractor, dict(options), bars)

    made = on_first_process(lambda: extract(progress))
    table = (extract(Silent()) if made is None else made)[drawings.name].require_fragments()
    return DrawnImages(ordered, table, rows)


def _scenes_of(split: Split, caption: int, texts: Sequence[str]) -> dict[str, Any]:
    """The scene of each foil that can be drawn."""
    image = int(split.image_of[caption])
    first = int(np.searchsorted(split.image_of, image))
    truth = (split.extras or ())[image]
    scene, captions = scene_of(truth), captions_of(truth, split.captions[image])
    made = {text: false_scene(scene, captions[caption - first], text) for text in texts}
    return {text: one for text, one in made.items() if one is not None}
