"""Scores of a model on benchmark items, with images from folders, shards or the items' own file."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from counterfoil.core.errors import ConfigError, DataError
from counterfoil.core.progress import Progress, Silent
from counterfoil.core.tensors.modes import eval_mode
from counterfoil.data.batches.collate import pad_fragments
from counterfoil.data.formats.image_files import ImageFolder
from counterfoil.data.formats.tar_files import read_members
from counterfoil.data.fragments import Fragments
from counterfoil.data.images import ImageRef, MemberImage, MissingImage, open_image
from counterfoil.data.pairs import ProblemLog
from counterfoil.evaluation.compositional.accuracy import Scored
from counterfoil.evaluation.compositional.blind import shuffled
from counterfoil.evaluation.compositional.readers import Item, Subset
from counterfoil.evaluation.foils.scores import encode_sentences
from counterfoil.matchers.base import paired_scores
from counterfoil.models.explain import explain
from counterfoil.models.model import Model

ITEM_BATCH = 32
CACHED_IMAGES = 256
USUAL_ENDINGS = (".jpg", ".png", ".jpeg", ".webp")

Box = tuple[float, float, float, float]
ImageKey = tuple[str, Box | None]
Both = tuple[Scored | None, Scored | None]
"""Scores of an item as it is, and with the words of its texts shuffled; None without images."""


class ImageStore:
    """Finds images by name in folders (with subfolders) and in tar shards."""

    def __init__(self, sources: Sequence[Path] = ()) -> None:
        log = ProblemLog()
        folders = [path for path in sources if path.is_dir()]
        shards = [path for path in sources if not path.is_dir()]
        shards += [path for folder in folders for path in sorted(folder.glob("*.tar"))]
        self.folder = ImageFolder(folders, deep=True) if folders else None
        self.members: dict[str, MemberImage] = {}
        for shard in shards:
            if not shard.is_file():
                raise ConfigError(f"--images {shard}: no such folder or tar file")
            for one in read_members(shard, log):
                image = MemberImage(one.archive, one.name, one.offset, one.size)
                name = PurePosixPath(one.name).name.lower()
                for key in (name, name.rpartition(".")[0]):
                    self.members.setdefault(key, image)
        log.refuse_fatal()

    def find(self, name: str) -> ImageRef | None:
        """The image of that name, also with another ending; None if there is none.

        Raises `DataError` if the name is unsafe, or if several subfolders have it.
        """
        log, hint = ProblemLog(), ""
        if self.folder is not None:
            stem = re.sub(r"\.(jpe?g|png|webp)$", "", name, flags=re.IGNORECASE)
            names = [name, *(stem + ending for ending in USUAL_ENDINGS)]
            image = self.folder.find(names, f"image '{name}'", log)
            log.refuse_fatal()
            if not isinstance(image, MissingImage):
                return image
            hint = image.hint
        base = PurePosixPath(name.replace("\\", "/")).name.lower()
        member = self.members.get(base) or self.members.get(base.rpartition(".")[0] or base)
        if member is None and hint:
            raise DataError(hint)
        return member


@dataclass
class ModelScorer:
    """A model's scores of items, as they are and with the words of each text shuffled.

    ``missing`` collects the images that were not found or could not be read, with the reason.
    """

    name: str
    model: Model
    images: ImageStore
    progress: Progress = field(default_factory=Silent)
    missing: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.model.fragments_from is None:
            raise ConfigError(
                f"{self.name}: this model was trained on precomputed features, so it cannot read "
                "image files; train on images"
            )
        self._cache: OrderedDict[ImageKey, Fragments] = OrderedDict()
        self._unreadable: set[ImageKey] = set()

    def score(self, subset: Subset) -> dict[str, list[Scored | None]]:
        """By name, the scores of all items; None if an image of the item is missing."""
        # another subset may have other images of the same names
        self._cache.clear()
        self._unreadable.clear()
        plain: list[Scored | None] = [None] * len(subset.items)
        mixed = list(plain)
        order = sorted(range(len(subset.items)), key=lambda n: subset.items[n].images)
        starts = range(0, len(order), ITEM_BATCH)
        with eval_mode(self.model):
            for start in self.progress.track(starts, f"{self.name}: {subset.name}", len(starts)):
                batch = order[start : start + ITEM_BATCH]
                for number, results in zip(batch, self._batch(subset, batch), strict=True):
                    plain[number], mixed[number] = results
        return {self.name: plain, f"{self.name}, words shuffled": mixed}

    def _batch(self, subset: Subset, numbers: Sequence[int]) -> list[Both]:
        items = [subset.items[number] for number in numbers]
        fragments: dict[ImageKey, Fragments] = {}
        for item in items:
            for name in item.images:
                one = self._read(name, item.box, subset.pixels)
                if one is not None:
                    fragments[name, item.box] = one
        readable = [all((name, item.box) in fragments for name in item.images) for item in items]
        chosen = [item for item, able in zip(items, readable, strict=True) if able]
        scored = iter(self._score(chosen, fragments)) if chosen else iter(())
        return [next(scored) if able else (None, None) for able in readable]

    @torch.inference_mode()
    def _score(
        self, items: Sequence[Item], fragments: Mapping[ImageKey, Fragments]
    ) -> Iterator[Both]:
        model = self.model
        table = _PairTable(model, {key: row for row, key in enumerate(fragments)})
        plain = [table.add(item, item.texts) for item in items]
        mixed = [table.add(item, list(map(shuffled, item.texts))) for item in items]
        images = model.encode_images(pad_fragments(list(fragments.values())).to(model.device))
        texts = model.encode_texts(encode_sentences(model, list(table.sentences.values())))
        index = torch.tensor(list(table.pairs), device=model.device)
        scores = paired_scores(model.matcher, images[index[:, 0]], texts[index[:, 1]])
        values = scores.double().cpu().numpy()
        for item, own, other in zip(items, plain, mixed, strict=True):
            columns = [table.column(text) for text in item.texts]
            similarity = _similarity(texts.pooled, columns) if len(item.captions) > 1 else None
            effects = None
            if item.wrong is not None:
                effects = self._effects(fragments[item.images[0], item.box], item.captions[0])
            yield Scored(values[own], similarity, effects), Scored(values[other])

    def _effects(self, fragments: Fragments, caption: str) -> list[tuple[int, int, float]]:
        """Effects of the words that the model knows; none if it knows no word."""
        try:
            match = explain(self.model, fragments, caption)
        except DataError:
            return []
        return [
            (*word.span, word.effect)
            for word in match.words
            if word.span is not None and word.known and not word.is_punctuation
        ]

    def _read(self, name: str, box: Box | None, pixels: Mapping[str, ImageRef]) -> Fragments | None:
        """Fragments of an image, or of a part of it; an image that has none is noted once."""
        key = name, box
        if key in self._unreadable:
            return None
        if key not in self._cache:
            try:
                image = pixels.get(name) or self.images.find(name)
                if image is None:
                    raise DataError("not found")
                picture = open_image(image)
                part = picture if box is None else _cropped(picture, box)
                self._cache[key] = self.model.reader.extractor.extract(part)
            except DataError as error:
                self.missing[name] = str(error)
                self._unreadable.add(key)
                return None
            if len(self._cache) > CACHED_IMAGES:
                self._cache.popitem(last=False)
        self._cache.move_to_end(key)
        return self._cache[key]


class _PairTable:
    """Distinct pairs (image row, text column); texts with the same token ids share a column.

    So texts that differ only in unknown words have exactly the same score.
    """

    def __init__(self, model: Model, rows: Mapping[ImageKey, int]) -> None:
        self.model, self.rows = model, rows
        self.sentences: dict[tuple[int, ...], str] = {}
        self.columns: dict[tuple[int, ...], int] = {}
        self.pairs: dict[tuple[int, int], int] = {}

    def column(self, text: str) -> int:
        ids = tuple(self.model.text.encode(text))
        self.sentences.setdefault(ids, text)
        return self.columns.setdefault(ids, len(self.columns))

    def add(self, item: Item, texts: Sequence[str]) -> NDArray[np.int64]:
        """Numbers of the pairs of an item [images, texts]."""
        columns = [self.column(text) for text in texts]
        rows = [self.rows[name, item.box] for name in item.images]
        numbers = [
            [self.pairs.setdefault((row, column), len(self.pairs)) for column in columns]
            for row in rows
        ]
        return np.array(numbers, dtype=np.int64)


def _similarity(pooled: Tensor | None, columns: Sequence[int]) -> NDArray[np.float64] | None:
    """Cosines [texts, texts] of text vectors; None for a model that has none."""
    if pooled is None:
        return None
    vectors = F.normalize(pooled[list(columns)].double(), dim=-1)
    return (vectors @ vectors.T).cpu().numpy()


def _cropped(picture: Image.Image, box: Box) -> Image.Image:
    """The part of a picture that lies in the box; `DataError` if nothing does."""
    left, top = max(0, int(box[0])), max(0, int(box[1]))
    right, bottom = min(picture.width, int(box[2])), min(picture.height, int(box[3]))
    if left >= right or top >= bottom:
        raise DataError(f"the box {box} lies outside of the image ({picture.size})")
    return picture.crop((left, top, right, bottom))
