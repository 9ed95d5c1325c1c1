"""Agreement of scores with human judgements: Kendall's τ on the annotations of Flickr8k.

As reported for CLIPScore (Hessel et al. 2021, appendix A, after SPICE). Experts gave each pair
three ratings from 1 to 4: τ-c with one item per rating, without the image's own captions. Crowd
workers answered yes or no: τ-b with the share of yes, one item per pair.
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

from counterfoil.core.errors import ConfigError, DataError, MissingExtraError
from counterfoil.core.progress import Progress, Silent
from counterfoil.core.storage.reading import read_text
from counterfoil.core.tensors.modes import eval_mode
from counterfoil.data.batches.collate import pad_fragments
from counterfoil.data.fragments import Fragments
from counterfoil.data.pairs import Pairs, Split
from counterfoil.data.text.tokenizers import known_text
from counterfoil.evaluation.evaluate import average
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
    """Ratings of an image with a caption, given by the caption's own image and its number there."""

    image: str
    caption_of: str
    number: int
    ratings: tuple[float, ...]


class JudgementReport(Report):
    """Kendall's τ × 100 of scores with human ratings, and how many pairs it is based on."""

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
        """A header, one row for the model, and one per published metric."""
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
    """Read judgements in the format of ExpertAnnotations.txt or CrowdFlowerAnnotations.txt.

    The numbers of a line show its kind: three ratings from 1 to 4, or the share of yes and the
    counts of yes and no. All lines of a file must be of one kind.
    """
    try:
        lines = read_text(path).splitlines()
    except UnicodeDecodeError:
        raise DataError(f"{path}: not a text file") from None
    except FileNotFoundError:
        raise DataError(f"{path}: no such file of judgements") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    judgements: list[Judgement] = []
    kinds: set[Kind] = set()
    for number, line in enumerate(lines, 1):
        if line.strip():
            kind, judgement = _parse(line, f"{path}:{number}")
            if kinds and kind not in kinds:
                raise DataError(f"{path}:{number}: expert and crowd judgements in one file")
            kinds.add(kind)
            judgements.append(judgement)
    if not judgements:
        raise DataError(f"{path}: no judgements in this file")
    return kinds.pop(), judgements


def _parse(line: str, where: str) -> tuple[Kind, Judgement]:
    cells = line.rstrip("\r\n").split("\t")
    expected = "expected image<TAB>image#number<TAB>three numbers"
    if len(cells) != 5:
        raise DataError(f"{where}: {len(cells)} columns; {expected}")
    owner, mark, number = cells[1].rpartition("#")
    try:
        values = tuple(float(cell) for cell in cells[2:])
        position = int(number)
    except ValueError:
        raise DataError(f"{where}: '{line[:80]}'; {expected}") from None
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
    model: Model | Sequence[Model],
    pairs: Pairs,
    path: Path,
    progress: Progress | None = None,
    *,
    standardize: bool = False,
) -> JudgementReport:
    """Kendall's τ of a model's scores with the judgements of a file, over all splits of the data.

    Several models are an ensemble with averaged scores; ``standardize`` first divides those of each
    by their standard deviation. Images are looked up by name, with or without a file extension.
    Words unknown to a model are removed from its captions; a pair without a known word is counted
    as ``unknown`` and ignored.
    """
    models = list(model) if isinstance(model, Sequence) else [model]
    if not models:
        raise ConfigError("nothing to evaluate: no model given")
    kind, judgements = read_judgements(path)
    images = _images_by_name(pairs)
    usable: list[tuple[Judgement, _Image, list[str]]] = []
    own = missing = unknown = 0
    for judgement in judgements:
        image, owner = images.get(_stem(judgement.image)), images.get(_stem(judgement.caption_of))
        if image is None or owner is None or not 0 <= judgement.number < len(owner.captions):
            missing += 1
        elif kind == "expert" and owner.captions[judgement.number] in image.captions:
            own += 1
        else:
            reads = [known_text(one.text, owner.captions[judgement.number]) for one in models]
            readable_by_all = all(read.is_readable for read in reads)
            unknown += not readable_by_all
            if readable_by_all:
                usable.append((judgement, image, [read.text for read in reads]))
    if not usable:
        raise DataError(
            f"{path}: none of its {len(judgements)} pairs can be used: {missing} are not in the "
            f"data set '{pairs.name}', {own} have an own caption, {unknown} have no word that the "
            "model knows"
        )
    by_model = np.stack(
        [
            _scores(one, [(image, texts[k]) for _, image, texts in usable], progress or Silent())
            for k, one in enumerate(models)
        ]
    )
    readable = np.asarray(~np.isnan(by_model).any(axis=0))
    if not readable.any():
        raise DataError(f"{path}: no image of its {len(usable)} pairs can be read")
    scores = average([row[None, readable] for row in by_model], standardize=standardize)[0]
    scored = [entry for entry, good in zip(usable, readable, strict=True) if good]
    rated = [judgement.ratings for judgement, _, _ in scored]
    x = np.repeat(scores, [len(ratings) for ratings in rated])
    y = [value for ratings in rated for value in ratings]
    variant: Literal["b", "c"] = "c" if kind == "expert" else "b"
    return JudgementReport(
        kind=kind,
        variant=variant,
        tau=100.0 * kendall_tau(x, y, variant),
        pairs=len(scored),
        ratings=len(y),
        images=len({image.key for _, image, _ in scored}),
        own_left_out=own,
        not_found=missing,
        unreadable=int((~readable).sum()),
        unknown=unknown,
        published=PUBLISHED[kind],
    )


def kendall_tau(x: ArrayLike, y: ArrayLike, variant: Literal["b", "c"]) -> float:
    """Kendall's rank correlation with ties; NaN if all values of one side are equal."""
    try:
        stats = importlib.import_module("scipy.stats")
    except ImportError as error:
        raise MissingExtraError("scipy", "judge", "Kendall's rank correlation") from error
    return float(stats.kendalltau(x, y, variant=variant).statistic)


@dataclass(frozen=True)
class _Image:
    """An image of one of the splits."""

    split: Split
    index: int

    @property
    def captions(self) -> Sequence[str]:
        return self.split.captions[self.index]

    @property
    def key(self) -> tuple[str, int]:
        return self.split.name, self.index


def _images_by_name(pairs: Pairs) -> dict[str, _Image]:
    return {
        _stem(name): _Image(split, index) for split in pairs for index, name in enumerate(split.ids)
    }


def _stem(name: str) -> str:
    base, dot, ending = Path(name).name.rpartition(".")
    return base if dot and ending.lower() in ("jpg", "jpeg", "png") else Path(name).name


@torch.inference_mode()
def _scores(
    model: Model, pairs: Sequence[tuple[_Image, str]], progress: Progress
) -> NDArray[np.float64]:
    """The score [n] of each image with its caption; NaN if the image cannot be read."""
    by_image: dict[tuple[str, int], list[int]] = defaultdict(list)
    for number, (image, _) in enumerate(pairs):
        by_image[image.key].append(number)
    groups = list(by_image.values())
    scores = np.full(len(pairs), np.nan)
    with eval_mode(model):
        starts = range(0, len(groups), IMAGE_BATCH)
        for start in progress.track(starts, "scoring judged pairs", len(starts)):
            items: list[Fragments] = []
            members: list[list[int]] = []
            for numbers in groups[start : start + IMAGE_BATCH]:
                image = pairs[numbers[0]][0]
                table = model.fragments_of(image.split)
                try:
                    items.append(table.read(image.index))
                except DataError:
                    continue
                members.append(numbers)
            if items:
                _score_group(model, items, members, [text for _, text in pairs], scores)
    return scores


def _score_group(
    model: Model,
    items: Sequence[Fragments],
    members: Sequence[Sequence[int]],
    texts: Sequence[str],
    scores: NDArray[np.float64],
) -> None:
    """Fill in the scores of a few images; ``members`` are each image's entries in ``texts``."""
    images = model.encode_images(pad_fragments(items).to(model.device))
    unique = list(dict.fromkeys(texts[number] for numbers in members for number in numbers))
    column = {text: index for index, text in enumerate(unique)}
    encoded = encode_texts(model, unique)
    for row, numbers in enumerate(members):
        columns = torch.tensor([column[texts[number]] for number in numbers], device=model.device)
        row_scores = model.matcher(images[row : row + 1], encoded[columns])[0]
        scores[list(numbers)] = row_scores.double().cpu().numpy()
