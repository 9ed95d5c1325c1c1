"""Extra negatives of the pairs of a batch: mined hard negatives, and foil captions."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from counterfoil.core.config import model_folder
from counterfoil.core.distributed import on_first_process
from counterfoil.core.errors import ConfigError, DataError, TrainingError
from counterfoil.core.printable import plural
from counterfoil.core.progress import Progress, Silent
from counterfoil.core.storage.locks import locked_in_turn
from counterfoil.core.tensors.modes import eval_mode
from counterfoil.data.batches.dataset import ExtraItems, ExtraNegativeSource, Once
from counterfoil.data.pairs import Split
from counterfoil.foils import DEFAULT_KINDS, rule_foils
from counterfoil.foils.files import drawn_foils, foils_by_caption, sites_beside
from counterfoil.foils.rules import CaptionSites
from counterfoil.models.foil_files import write_model_foils
from counterfoil.models.model import Model
from counterfoil.objectives.positives import Twins
from counterfoil.objectives.services import GeneratorOptions
from counterfoil.scoring.encode import encode_images, encode_texts
from counterfoil.scoring.engine import scored_tiles
from counterfoil.scoring.plan import plan_scores
from counterfoil.training.guides.manifest import weights_digest

Indices = NDArray[np.int64]

Block = tuple[slice, Tensor, Tensor]
"""Rows of images, indices of texts, and their scores [images, texts]."""

NO_CANDIDATE = -1
"""Padding of rows with fewer candidates than requested."""

MAX_RANKED_PAIRS = 1 << 22
"""Pairs per tile: ranking takes several times the memory of the scores."""

_LOW = (1 << 32) - 1
_EMPTY = -(1 << 63)

MOST_SITES = 1 << 15
"""Captions whose sites for foils are kept, by each process that loads batches."""

RULES = "rules"
WRITTEN_MASKS, WRITTEN_SAMPLES = 5, 5
"""Masks per caption and fillings per mask, of foils that a run writes for another one."""


# A score and the index of its candidate are packed into one integer, ordered by score and then by
# lower index, so the result does not depend on the tiles.
class TopKBothWays:
    """The best ``k`` texts per image and images per text over all tiles so far.

    Scores are compared in float32 and must not be NaN.
    """

    def __init__(self, images: int, texts: int, k: int, device: torch.device) -> None:
        self._of_image = torch.full((images, k), _EMPTY, dtype=torch.long, device=device)
        self._of_text = torch.full((texts, k), _EMPTY, dtype=torch.long, device=device)
        self._ids = torch.arange(images, device=device)

    def update(self, rows: slice, columns: Tensor, scores: Tensor, left_out: Tensor) -> None:
        """Add scores of images ``rows`` with texts ``columns``, except pairs ``left_out``."""
        columns = columns.to(self._ids.device)
        by_image = _packed(scores, columns[None, :])
        by_text = _packed(scores, self._ids[rows, None])
        by_image.masked_fill_(left_out, _EMPTY)
        by_text.masked_fill_(left_out, _EMPTY)
        self._of_image[rows] = _merged(self._of_image[rows], by_image)
        self._of_text[columns] = _merged(self._of_text[columns], by_text.T)

    def images(self) -> Tensor:
        """Texts [I, k] per image, best first, padded with `NO_CANDIDATE`."""
        return _unpacked(self._of_image)

    def texts(self) -> Tensor:
        """Images [T, k] per text, best first, padded with `NO_CANDIDATE`."""
        return _unpacked(self._of_text)


def _merged(best: Tensor, new: Tensor) -> Tensor:
    k = best.shape[1]
    return torch.cat([best, new.topk(min(k, new.shape[1]), 1).values], 1).topk(k, 1).values


def _packed(scores: Tensor, candidates: Tensor) -> Tensor:
    """One integer per score: its rank order in the high bits, reversed index in the low bits."""
    bits = (scores.float() + 0.0).contiguous().view(torch.int32)  # + 0.0: no negative zero
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    return (ordered.long() << 32) + (_LOW - candidates)


def _unpacked(best: Tensor) -> Tensor:
    return torch.where(best == _EMPTY, NO_CANDIDATE, _LOW - (best & _LOW))


def best_wrong(
    blocks: Iterable[Block],
    image_of: Tensor,
    images: int,
    count: int,
    protected: Callable[[slice, Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The hardest negatives: texts [images, count] and images [texts, count], best first.

    ``blocks`` cover every pair once, in any order. ``image_of`` [texts] is the image of each text.
    Own pairs and ``protected`` pairs are excluded. Of equal scores the lower index comes first.
    Rows with fewer candidates are padded with `NO_CANDIDATE`.
    """
    best = TopKBothWays(images, len(image_of), count, image_of.device)
    owners = torch.arange(images, device=image_of.device)
    for rows, columns, scores in blocks:
        if scores.isnan().any():
            raise TrainingError("mining hard negatives: the other run gives scores that are nan")
        left_out = image_of[columns] == owners[rows, None]
        if protected is not None:
            left_out = left_out | protected(rows, columns)
        best.update(rows, columns, scores, left_out)
    return best.images(), best.texts()


@torch.inference_mode()
def mine(
    model: Model,
    split: Split,
    count: int,
    progress: Progress | None = None,
    twins: Twins | None = None,
) -> tuple[Indices, Indices]:
    """Mine the best-scoring wrong captions per image and wrong images per caption.

    Indices [n_images, count] and [n_captions, count] into the split, as in `best_wrong`. Images
    that are unreadable or have no caption are never candidates, nor are their captions; their own
    rows are all `NO_CANDIDATE`. With ``twins``, identical captions do not count as wrong.
    """
    progress = progress or Silent()
    encoded, readable, skipped = encode_images(model, split, progress=progress)
    if skipped:
        progress.say(f"no hard negatives among {plural(len(skipped), 'image')} that cannot be read")
    rows = [row for row, image in enumerate(readable) if split.captions[image]]
    images = np.array([readable[row] for row in rows], dtype=np.int64)
    texts = np.flatnonzero(np.isin(split.image_of, images))
    if not len(texts):
        raise DataError(f"split '{split.name}' has no image that can be read and has a caption")
    encoded = encoded[torch.tensor(rows, device=model.device)]
    captions = encode_texts(model, [split.texts[t] for t in texts], progress=progress)
    image_of = torch.from_numpy(np.searchsorted(images, split.image_of[texts])).to(model.device)
    plan = plan_scores(encoded, captions, pairs=MAX_RANKED_PAIRS)
    tiles = scored_tiles(model.matcher, encoded, captions, plan)
    blocks = (
        (tile.rows, plan.columns(tile), scores)
        for tile, scores in progress.track(tiles, "looking for hard negatives", len(plan.tiles))
    )
    protected = _protected(twins, images, texts, model.device) if twins is not None else None
    of_image, of_text = best_wrong(blocks, image_of, len(images), count, protected)
    return (
        _in_split(of_image, images, texts, len(split)),
        _in_split(of_text, texts, images, len(split.texts)),
    )


@torch.inference_mode()
def nearest_images(
    model: Model,
    split: Split,
    texts: Sequence[str],
    owners: Indices,
    progress: Progress | None = None,
) -> Indices:
    """The best-scoring readable image of a split for each text, except its owner; -1: none."""
    progress = progress or Silent()
    with eval_mode(model):
        encoded, readable, _ = encode_images(model, split, progress=progress)
        captions = encode_texts(model, texts, progress=progress)
        row_of = np.full(len(split), NO_CANDIDATE, dtype=np.int64)
        row_of[readable] = np.arange(len(readable))
        own = torch.from_numpy(row_of[owners]).to(model.device)
        plan = plan_scores(encoded, captions, pairs=MAX_RANKED_PAIRS)
        tiles = scored_tiles(model.matcher, encoded, captions, plan)
        blocks = (
            (tile.rows, plan.columns(tile), scores)
            for tile, scores in progress.track(tiles, "retrieving images", len(plan.tiles))
        )
        best = best_wrong(blocks, own, len(readable), 1)[1]
    return _in_split(best, np.arange(len(texts)), np.array(readable), len(texts))[:, 0]


def _protected(
    twins: Twins, images: Indices, texts: Indices, device: torch.device
) -> Callable[[slice, Tensor], Tensor]:
    """A function of rows and columns of scores that says which pairs are twins."""
    image_ids, caption_ids = (torch.from_numpy(ids).to(device) for ids in (images, texts))
    twins = twins.to(device)
    return lambda rows, columns: twins(image_ids[rows], caption_ids[columns])


def _in_split(best: Tensor, queries: Indices, candidates: Indices, size: int) -> Indices:
    """Candidates as indices into the split, with one row for each of its queries."""
    local = best.cpu().numpy()
    table = np.full((size, local.shape[1]), NO_CANDIDATE, dtype=np.int64)
    table[queries] = np.where(local == NO_CANDIDATE, NO_CANDIDATE, candidates[local])
    return table


class RuleFoils:
    """Rule-made foils, drawn again each time a caption is in a batch.

    No foil adds a word of any caption of the image, because it would often be true.
    """

    changes = False

    def __init__(self, split: Split, kinds: Sequence[str], count: int) -> None:
        self.split, self.kinds, self.count = split, tuple(kinds), count
        self._sites = Once(self._sites_of, MOST_SITES)

    def of(self, caption: int, rng: np.random.Generator) -> ExtraItems:
        draws = random.Random(int(rng.integers(1 << 62)))
        foils = drawn_foils(self._sites(caption), self._own(caption), draws, self.count)
        return ExtraItems(texts=tuple(foil.text for foil in foils))

    def _sites_of(self, caption: int) -> CaptionSites:
        return sites_beside(self.split.texts[caption], self._own(caption), self.kinds)

    def _own(self, caption: int) -> Sequence[str]:
        return self.split.captions[int(self.split.image_of[caption])]


@dataclass(frozen=True)
class ListedFoils:
    """Foils from a file; a random ``count`` of them if a caption has more."""

    foils: Mapping[int, tuple[str, ...]]
    count: int
    changes: ClassVar = False

    def of(self, caption: int, rng: np.random.Generator) -> ExtraItems:
        foils = self.foils.get(caption, ())
        if len(foils) <= self.count:
            return ExtraItems(texts=foils)
        drawn = rng.choice(len(foils), self.count, replace=False)
        return ExtraItems(texts=tuple(foils[index] for index in drawn))


def foils_by_run(
    run: Path,
    count: int,
    split: Split,
    load: Callable[[str], Model],
    cache: Path | None,
    progress: Progress,
) -> ListedFoils:
    """Foils of a split that a run trained with TAGS writes; once, into ``cache`` or beside the run.

    The file is named after the weights, the split and the options, so later runs read it.
    """
    options = GeneratorOptions(WRITTEN_MASKS, WRITTEN_SAMPLES, count, 1.5, "graph", "rules")
    weights = weights_digest(model_folder(run))
    key = hashlib.sha256(f"{split.digest} {weights} {options}".encode()).hexdigest()[:12]
    path = (cache or run.parent) / "model-foils" / f"{run.name}-{split.name}-{key}.jsonl"

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        turn = path.with_name(f".{path.name}.turn")  # runs that train side by side share the file
        with locked_in_turn(turn, f"writing {path.name}", progress):
            if not path.is_file():
                model = load(str(run))
                write_model_foils(model, split, path, options, weights=weights, progress=progress)

    on_first_process(write)
    foils = foils_by_caption(path, split, progress)
    progress.say(f"{path}: foils for {len(foils)} of {len(split.texts)} captions")
    return ListedFoils(foils, count)


def foil_negatives(
    source: str, count: int, split: Split, progress: Progress
) -> ExtraNegativeSource:
    """Foils of a split by ``rules``, by named rules (``rules:noun,swap``), or from a JSONL file.

    A line of the file is an object with ``image`` (its id), ``caption`` (its text, or its number
    among the image's captions, from 0) and ``foil``. Lines of other images and captions are
    ignored.
    """
    if count < 1:
        raise ConfigError(f"foils: expected a count of at least 1, got {count}")
    name, _, kinds = source.partition(":")
    if name == RULES:
        chosen = tuple(kinds.split(",")) if kinds else DEFAULT_KINDS
        rule_foils("", random.Random(0), chosen)  # refuses unknown kinds
        return RuleFoils(split, chosen, count)
    path = Path(source)
    if not path.is_file():
        raise ConfigError(
            f"foils: '{source}' is neither '{RULES}' nor a file, a run or a pretrained model; give "
            'a JSONL file with lines such as {"image": "12", "caption": "a dog runs", '
            '"foil": "a cat runs"}'
        )
    foils = foils_by_caption(path, split, progress)
    progress.say(f"{path.name}: foils for {len(foils)} of {len(split.texts)} captions")
    return ListedFoils(foils, count)
