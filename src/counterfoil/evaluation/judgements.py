"""Do scores agree with people? Kendall's τ with the human judgements of Flickr8k.

As CLIPScore reports it (Hessel et al. 2021, appendix A, after SPICE). Experts: three ratings from 1
to 4 of a pair, each rating an item of its own, τ-c; pairs whose caption is one of the image's own
are left out. Crowd: the share of people who said yes, one item a pair, τ-b, nothing left out.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from counterfoil.core.errors import DataError, MissingExtraError
from counterfoil.core.progress import Progress, Silent
from counterfoil.core.storage.reading import read_text
from counterfoil.core.tensors.modes import eval_mode
from counterfoil.data.batches.collate import pad_fragments
from counterfoil.data.fragments import Fragments
from counterfoil.data.pairs import Pairs, Split
from counterfoil.data.text.tokenizers import known_text
from counterfoil.evaluation.report import Report
from counterfoil.models.model import Model
from counterfoil.scoring.encode import encode_texts

Kind = Literal["expert", "crowd"]
PUBLISHED: dict[Kind, dict[str, float]] = {
    "expert": {"CLIPScore": 51.2, "RefCLIPScore": 53.0},
    "crowd": {"CLIPScore": 34.4, "RefCLIPScore": 36.4},
}
"""τ × 100 with CLIP ViT-B/32, from the paper."""

IMAGE_BATCH = 32


@dataclass(frozen=True)
class Judgement:
    """An image, a caption by the image it was written for and its number, and its ratings."""

    image: str
    caption_of: str
    number: int
    ratings: tuple[float, ...]


class JudgementReport(Report):
    """How scores agree with people; ``tau`` × 100, as such numbers are printed."""

    kind: Kind
    variant: Literal["c", "b"]
    tau: float
    pairs: int
    ratings: int
    images: int
    own_left_out: int
    not_found: int
    unreadable: int
    unknown: int
    published: dict[str, float]

    def rows(self) -> list[tuple[str, ...]]:
        """A header, our number, and those of the paper."""
        name = f"Kendall τ-{self.variant} × 100"
        return [
            ("", name),
            ("this model", f"{self.tau:.1f}"),
            *((metric, f"{value:.1f}") for metric, value in self.published.items()),
        ]

    def headline(self) -> str:
        return (
            f"{self.kind} judgements: {self.ratings} ratings of {self.pairs} pairs, {self.images} "
            f"images (left out: {self.own_left_out} with an own caption, {self.not_found} not in "
            f"the data, {self.unreadable} unreadable, {self.unknown} without a known word)"
        )


def read_judgements(path: Path) -> tuple[Kind, list[Judgement]]:
    """Judgements in the form of ExpertAnnotations.txt or CrowdFlowerAnnotations.txt.

    Which of them a line is, its numbers say: three ratings from 1 to 4, or a share of yes with the
    yes and no it comes from. A file must have lines of one kind only.
    """
    try:
        lines = read_text(path).splitlines()
    except UnicodeDecodeError:
        raise DataError(f"{path}: not a text file") from None
    found: list[Judgement] = []
    kinds: set[Kind] = set()
    for place, line in enumerate(lines, 1):
        if line.strip():
            kind, judgement = _parse(line, f"{path}:{place}")
            if kinds and kind not in kinds:
                raise DataError(f"{path}:{place}: expert and crowd judgements in one file")
            kinds.add(kind)
            found.append(judgement)
    if not found:
        raise DataError(f"{path}: no judgements in it")
    return kinds.pop(), found


def _parse(line: str, where: str) -> tuple[Kind, Judgement]:
    cells = line.rstrip("\r\n").split("\t")
    wanted = "expected image<TAB>image#number<TAB>three numbers"
    if len(cells) != 5:
        raise DataError(f"{where}: {len(cells)} columns; {wanted}")
    owner, mark, number = cells[1].rpartition("#")
    try:
        values = tuple(float(cell) for cell in cells[2:])
        position = int(number)
    except ValueError:
        raise DataError(f"{where}: '{line[:80]}'; {wanted}") from None
    kind = _kind(values)
    if not mark or kind is None:
        raise DataError(
            f"{where}: neither three ratings from 1 to 4 nor a share with its yes and no: "
            f"{', '.join(cells[2:])}"
        )
    ratings = values if kind == "expert" else values[:1]
    return kind, Judgement(cells[0], owner, position, ratings)


def _kind(values: tuple[float, ...]) -> Kind | None:
    if all(value in (1.0, 2.0, 3.0, 4.0) for value in values):
        return "expert"
    share, yes, no = values
    counted = yes >= 0 and no >= 0 and yes + no > 0
    return "crowd" if counted and abs(share - yes / (yes + no)) < 1e-4 else None


def evaluate_judgements(
    model: Model, pairs: Pairs, path: Path, progress: Progress | None = None
) -> JudgementReport:
    """Kendall's τ of a model's scores with the judgements of a file, over all splits of the data.

    Images are found by name, with or without the ending of their file. Words that the model does
    not know are left out of a caption; a pair without a known word is left out and counted.
    """
    kind, every = read_judgements(path)
    places = _places(pairs)
    kept: list[tuple[Judgement, _Place, str]] = []
    own = lost = unknown = 0
    for one in every:
        image, writer = places.get(_stem(one.image)), places.get(_stem(one.caption_of))
        if image is None or writer is None or not 0 <= one.number < len(writer.captions):
            lost += 1
        elif kind == "expert" and writer.captions[one.number] in image.captions:
            own += 1
        else:
            read = known_text(model.text, writer.captions[one.number])
            unknown += not read.is_readable
            if read.is_readable:
                kept.append((one, image, read.text))
    if not kept:
        raise DataError(
            f"{path}: none of its {len(every)} pairs can be used: {lost} are not in the data set "
            f"'{pairs.name}', {own} have an own caption, {unknown} no word that the model knows"
        )
    scores = _scores(model, [(place, text) for _, place, text in kept], progress or Silent())
    readable = ~np.isnan(scores)
    if not readable.any():
        raise DataError(f"{path}: no image of its {len(kept)} pairs can be read")
    rated = [one.ratings for (one, _, _), good in zip(kept, readable, strict=True) if good]
    x = np.repeat(scores[readable], [len(ratings) for ratings in rated])
    y = [value for ratings in rated for value in ratings]
    variant: Literal["b", "c"] = "c" if kind == "expert" else "b"
    return JudgementReport(
        kind=kind,
        variant=variant,
        tau=100.0 * kendall_tau(x, y, variant),
        pairs=int(readable.sum()),
        ratings=len(y),
        images=len({place.key for (_, place, _), good in zip(kept, readable, strict=True) if good}),
        own_left_out=own,
        not_found=lost,
        unreadable=int((~readable).sum()),
        unknown=unknown,
        published=PUBLISHED[kind],
    )


def kendall_tau(x: ArrayLike, y: ArrayLike, variant: Literal["b", "c"]) -> float:
    """Kendall's rank correlation with ties; not a number if all values of one side are equal."""
    try:
        stats = importlib.import_module("scipy.stats")
    except ImportError as error:
        raise MissingExtraError("scipy", "judge", "Kendall's rank correlation") from error
    return float(stats.kendalltau(x, y, variant=variant).statistic)


@dataclass(frozen=True)
class _Place:
    """An image of some split."""

    split: Split
    index: int

    @property
    def captions(self) -> Sequence[str]:
        return self.split.captions[self.index]

    @property
    def key(self) -> tuple[str, int]:
        return self.split.name, self.index


def _places(pairs: Pairs) -> dict[str, _Place]:
    return {
        _stem(name): _Place(split, index) for split in pairs for index, name in enumerate(split.ids)
    }


def _stem(name: str) -> str:
    base, dot, ending = Path(name).name.rpartition(".")
    return base if dot and ending.lower() in ("jpg", "jpeg", "png") else Path(name).name


@torch.inference_mode()
def _scores(
    model: Model, wanted: Sequence[tuple[_Place, str]], progress: Progress
) -> NDArray[np.float64]:
    """The score of each image with its caption; NaN where the image cannot be read."""
    by_image: dict[tuple[str, int], list[int]] = defaultdict(list)
    for number, (place, _) in enumerate(wanted):
        by_image[place.key].append(number)
    groups = list(by_image.values())
    scores = np.full(len(wanted), np.nan)
    with eval_mode(model):
        starts = range(0, len(groups), IMAGE_BATCH)
        for start in progress.track(starts, "scoring judged pairs", len(starts)):
            items: list[Fragments] = []
            rows: list[list[int]] = []
            for numbers in groups[start : start + IMAGE_BATCH]:
                place = wanted[numbers[0]][0]
                if place.split.fragments is None:
                    raise DataError(f"split '{place.split.name}' has no fragments")
                try:
                    items.append(place.split.fragments.read(place.index))
                except DataError:
                    continue
                rows.append(numbers)
            if items:
                _score_group(model, items, rows, [text for _, text in wanted], scores)
    return scores


def _score_group(
    model: Model,
    items: Sequence[Fragments],
    rows: Sequence[Sequence[int]],
    texts: Sequence[str],
    scores: NDArray[np.float64],
) -> None:
    """Fill in the scores of a few images, each with its own captions only."""
    images = model.encode_images(pad_fragments(items).to(model.device))
    used = list(dict.fromkeys(texts[number] for numbers in rows for number in numbers))
    column = {text: place for place, text in enumerate(used)}
    encoded = encode_texts(model, used)
    for row, numbers in enumerate(rows):
        columns = torch.tensor([column[texts[number]] for number in numbers], device=model.device)
        found = model.matcher(images[row : row + 1], encoded[columns])[0]
        scores[list(numbers)] = found.double().cpu().numpy()
