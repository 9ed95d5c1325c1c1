"""Score every caption of a split with its own image and with all others, in bounded memory.

A split is encoded one block at a time. The state is saved to disk, so that a stopped audit can
resume.
"""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from counterfoil.core.errors import CheckpointError, DataError
from counterfoil.core.progress import Progress, Silent
from counterfoil.core.storage.atomic import write_atomically
from counterfoil.core.tensors.modes import eval_mode
from counterfoil.data.batches.collate import pad_fragments
from counterfoil.data.fragments import Fragments, FragmentTable
from counterfoil.data.pairs import Split
from counterfoil.data.text.tokenizers import KnownText, known_text
from counterfoil.encoders import Encoded
from counterfoil.models.importers.safe_pickles import read_checkpoint
from counterfoil.models.model import Model
from counterfoil.models.store import model_digest
from counterfoil.scoring.encode import encode_texts
from counterfoil.scoring.engine import for_kernels, on_cpu, scored_tiles
from counterfoil.scoring.plan import plan_scores

IMAGE_BYTES = 1 << 30
"""Memory for the encoded images of one block."""

MAX_BLOCK_IMAGES = 1 << 14
BATCH = 256

FORMAT = 3
"""To increase with every change of the stored state or of the blocks of a split."""

OPERATIONS = 20_000_000
"""Limit of pickle instructions of a checkpoint, which may list every image and caption."""

SAVE_SECONDS = 30.0
"""Seconds between two checkpoints."""

FINGERPRINT_IMAGES = 16
"""Images of a split whose fragments are part of its digest."""

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

POOL_SIZE = 5
"""Captions of other images that are stored per image, best first."""

OWN_PAIR_BATCH = 128
"""Captions scored with their own images per batch."""

RIVALS = 5
"""Other images that are stored per caption, best first."""

NO_IMAGE = -1

ARRAYS = ("has_own", "own", "above", "rivals", "rival_score", "pool", "pool_score")
"""Arrays of `_SurveyState` over captions and images."""


@dataclass(frozen=True)
class ImageBlock:
    """Some encoded images; ``images`` are their indices into the split."""

    encoded: Encoded
    images: list[int]


class ImageBlocks:
    """The readable images of a split; iterating encodes them, block by block.

    A split that fits into one block is encoded only once. ``skipped`` lists the unreadable images
    after the first iteration.
    """

    def __init__(self, model: Model, split: Split, size: int | None = None) -> None:
        self.model, self.split, self.table = model, split, model.fragments_of(split)
        self.size = size or _block_size(model, self.table)
        self.skipped: dict[int, str] = {}
        self._only: ImageBlock | None = None

    def __len__(self) -> int:
        return -(-len(self.split) // self.size)

    def __iter__(self) -> Iterator[ImageBlock]:
        return (block for _, block in self.numbered())

    def numbered(self, first: int = 0) -> Iterator[tuple[int, ImageBlock]]:
        """Blocks from number ``first`` on, with their numbers; unreadable ones are skipped."""
        for number in range(first, len(self)):
            block = self._only or self._encode(number)
            if len(self) == 1:
                self._only = block
            if block is not None:
                yield number, block

    def readable(self, image: int) -> bool:
        try:
            self.table.read(image)
        except DataError:
            return False
        return True

    @torch.inference_mode()
    def _encode(self, number: int) -> ImageBlock | None:
        images = range(len(self.split))[number * self.size : (number + 1) * self.size]
        parts: list[Encoded] = []
        readable: list[int] = []
        for start in range(0, len(images), BATCH):
            items: list[Fragments] = []
            for image in images[start : start + BATCH]:
                try:
                    items.append(self.table.read(image))
                    readable.append(image)
                except DataError as error:
                    self.skipped[image] = f"image {self.split.ids[image]}: {error}"
            if items:
                batch = pad_fragments(items).to(self.model.device)
                parts.append(self.model.encode_images(batch))
        return ImageBlock(Encoded.cat(parts), readable) if parts else None


def caption_blocks(texts: Sequence[str], captions: Sequence[int]) -> list[list[int]]:
    """Blocks of captions sorted by length, so that there is little padding."""
    by_length = sorted(captions, key=lambda caption: len(texts[caption].split()))
    return [by_length[start : start + BATCH] for start in range(0, len(by_length), BATCH)]


def _block_size(model: Model, table: FragmentTable) -> int:
    vectors = 1 if model.matcher.needs == "pooled" else table.max_fragments + 1
    each = 4 * model.spec.embed_size * vectors * model.spec.ensemble_size
    return max(1, min(MAX_BLOCK_IMAGES, IMAGE_BYTES // each))


class SurveyCheckpoint:
    """One file, valid for one ``fingerprint`` of model and split; others are ignored."""

    def __init__(
        self, path: Path, fingerprint: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.path, self.fingerprint, self.clock = path, fingerprint, clock
        self._last = clock()

    @classmethod
    def of(cls, path: Path, model: Model, split: Split) -> SurveyCheckpoint:
        return cls(path, f"{FORMAT} {model_digest(model)} {_split_digest(split)}")

    def load(self) -> dict[str, Any] | None:
        """The saved state; None if it is missing, damaged, or of another model or split."""
        try:
            state = read_checkpoint(self.path, OPERATIONS)
        except CheckpointError:
            return None
        if not isinstance(state, dict) or state.pop("fingerprint", None) != self.fingerprint:
            return None
        return state

    def save_if_due(self, state: Callable[[], dict[str, Any]], last: bool = False) -> None:
        """Save if `SAVE_SECONDS` have passed, or if this is the ``last`` state.

        A failure, as on a full disk, is ignored: the audit itself does not need the file.
        """
        now = self.clock()
        if not last and now - self._last < SAVE_SECONDS:
            return
        self._last = now
        buffer = io.BytesIO()
        torch.save({"fingerprint": self.fingerprint, **state()}, buffer)
        with suppress(OSError):
            write_atomically(self.path, buffer.getvalue())


def _split_digest(split: Split) -> str:
    """Hash of ids, captions, their order, and the fragments of a sample of images."""
    digest = hashlib.sha256(split.name.encode())
    for key, texts in zip(split.ids, split.captions, strict=True):
        digest.update(repr((key, list(texts))).encode())
    for image in (
        np.linspace(0, len(split) - 1, min(FINGERPRINT_IMAGES, len(split))).astype(int).tolist()
    ):
        digest.update(_fragment_bytes(split, image))
    return digest.hexdigest()


def _fragment_bytes(split: Split, image: int) -> bytes:
    if split.fragments is None:
        return b""
    try:
        fragments = split.fragments.read(image)
    except DataError:
        return b"unreadable"
    boxes = b"" if fragments.boxes is None else fragments.boxes.tobytes()
    return fragments.features.tobytes() + boxes


@dataclass(frozen=True)
class SplitSurvey:
    """Scores and ranks of the captions of a split.

    Arrays [captions]: ``image_of``, the own image; ``own``, the score with it (NaN if it is
    unreadable); ``rank`` of that image among ``compared`` (1 is best, ties count against it).
    Arrays [captions, RIVALS]: ``rivals``, the best other images, best first (−1 if there are no
    more), and their scores. Arrays [images, POOL_SIZE]: ``pool``, the best captions of other
    images, and their scores. ``unknown`` are captions with words unknown to the model, which were
    removed.
    """

    image_of: Ints
    own: Floats
    rank: Ints
    rivals: Ints
    rival_score: Floats
    pool: Ints
    pool_score: Floats
    compared: int
    skipped: list[str]
    unknown: dict[int, KnownText]

    @property
    def other(self) -> Ints:
        """The best other image of each caption [captions]; −1 if there is none."""
        return self.rivals[:, 0]

    @property
    def other_score(self) -> Floats:
        return self.rival_score[:, 0]

    @property
    def captions(self) -> Ints:
        """The captions that were scored."""
        return np.flatnonzero(~np.isnan(self.own)).astype(np.int64)


@torch.inference_mode()
def survey_split(
    model: Model,
    split: Split,
    progress: Progress | None = None,
    block_size: int | None = None,
    checkpoint: SurveyCheckpoint | None = None,
) -> SplitSurvey:
    """Score a split block by block, with at most one block of scores in memory.

    There are two passes over the images, since a rank needs the own score. With a ``checkpoint``,
    the state is saved and an earlier state is resumed.
    """
    progress = progress or Silent()
    with eval_mode(model):
        blocks = ImageBlocks(model, split, block_size)
        state = _SurveyState(split, blocks, [known_text(model.text, text) for text in split.texts])
        if checkpoint is None or not state.restore(checkpoint.load()):
            own = state.own_pairs()
            count = -(-len(split.texts) // OWN_PAIR_BATCH)
            for block, pairs in progress.track(own, f"own scores ({split.name})", count):
                state.add_own(model, block, pairs)
        parts = caption_blocks(state.texts, state.judged())
        label, count = f"scoring ({split.name})", len(blocks) * len(parts)
        steps = state.steps(parts)
        for step, block, part in progress.track(steps, label, count, done=state.done):
            state.add_captions(model, block, part)
            state.done = step
            if checkpoint is not None:
                checkpoint.save_if_due(state.state)
        if checkpoint is not None:
            checkpoint.save_if_due(state.state, last=True)
    return state.survey()


class _SurveyState:
    """The state of a survey: all results so far."""

    def __init__(self, split: Split, blocks: ImageBlocks, read: list[KnownText]) -> None:
        self.split, self.blocks = split, blocks
        self.texts = [each.text for each in read]
        self.unknown = {number: each for number, each in enumerate(read) if each.unknown}
        self.done = 0
        images, captions = len(split), len(split.texts)
        self.owner = torch.from_numpy(split.image_of)
        counts = np.array([len(texts) for texts in split.captions], dtype=np.int64)
        self.ends = np.cumsum(counts)
        self.starts = self.ends - counts
        self.compared = 0
        self.has_own = torch.zeros(captions, dtype=torch.bool)
        self.own = torch.full((captions,), torch.nan)
        self.above = torch.zeros(captions, dtype=torch.long)
        self.rivals = torch.full((captions, RIVALS), NO_IMAGE)
        self.rival_score = torch.full((captions, RIVALS), -torch.inf)
        self.pool = torch.full((images, POOL_SIZE), NO_IMAGE)
        self.pool_score = torch.full((images, POOL_SIZE), -torch.inf)

    def state(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in (*ARRAYS, "done", "compared")}
        return {**values, "skipped": self.blocks.skipped, "size": self.blocks.size}

    def restore(self, state: dict[str, Any] | None) -> bool:
        """Resume from a saved state; False if its blocks or its readable images differ.

        An unreadable image may have become readable meanwhile.
        """
        if state is None or state["size"] != self.blocks.size:
            return False
        if any(map(self.blocks.readable, state["skipped"])):
            return False
        self.blocks.skipped = state["skipped"]
        for name in (*ARRAYS, "done", "compared"):
            setattr(self, name, state[name])
        return True

    def steps(self, parts: list[list[int]]) -> Iterator[tuple[int, ImageBlock, list[int]]]:
        """Remaining pairs of an image block and a caption block, after the steps done with each."""
        first, begun = divmod(self.done, len(parts))
        for number, block in self.blocks.numbered(first):
            for index in range(begun if number == first else 0, len(parts)):
                yield number * len(parts) + index + 1, block, parts[index]

    def own_pairs(self) -> Iterator[tuple[ImageBlock, list[tuple[int, int]]]]:
        """Batches of (row of a block, caption of that image)."""
        for block in self.blocks:
            self.compared += len(block.images)
            pairs = [
                (row, text)
                for row, image in enumerate(block.images)
                for text in range(int(self.starts[image]), int(self.ends[image]))
                if text not in self.unknown or self.unknown[text].is_readable
            ]
            for start in range(0, len(pairs), OWN_PAIR_BATCH):
                yield block, pairs[start : start + OWN_PAIR_BATCH]

    def add_own(self, model: Model, block: ImageBlock, pairs: list[tuple[int, int]]) -> None:
        first, last = pairs[0][0], pairs[-1][0]  # rows are sorted
        texts = [text for _, text in pairs]
        encoded = encode_texts(model, [self.texts[text] for text in texts])
        rows = [row - first for row, _ in pairs]
        scores = _own_scores(model, block.encoded[first : last + 1], encoded, rows)
        self.own[texts] = scores.float().cpu()
        self.has_own[texts] = True

    def judged(self) -> list[int]:
        """The captions of readable images with at least one word known to the model."""
        if not self.has_own.any():
            raise DataError(
                f"split '{self.split.name}' has no readable image with a caption of known words"
            )
        _refuse_not_finite(self.own[self.has_own])
        return self.has_own.nonzero()[:, 0].tolist()

    def add_captions(self, model: Model, block: ImageBlock, captions: list[int]) -> None:
        """Score some captions with a block of images, tile by tile."""
        texts = encode_texts(model, [self.texts[caption] for caption in captions])
        plan = plan_scores(block.encoded, texts)
        for tile, scores in on_cpu(scored_tiles(model.matcher, block.encoded, texts, plan)):
            columns = [captions[column] for column in plan.columns_on_cpu(tile).tolist()]
            self.add_block(scores, block.images[tile.rows], columns)

    def add_block(self, scores: Tensor, images: list[int], texts: list[int]) -> None:
        """Add scores [images, texts]; both are indices into the split."""
        _refuse_not_finite(scores)
        rows, columns = torch.tensor(images), torch.tensor(texts)
        others = scores.masked_fill(rows[:, None] == self.owner[columns][None], -torch.inf)
        self.above[columns] += (others >= self.own[columns]).sum(0)
        _keep_best(self.rivals, self.rival_score, others.T, columns, rows)
        _keep_best(self.pool, self.pool_score, others, rows, columns)

    def survey(self) -> SplitSurvey:
        # Own pairs, masked with −∞, remain if there are too few others.
        self.pool[self.pool_score == -torch.inf] = NO_IMAGE
        self.rivals[self.rival_score == -torch.inf] = NO_IMAGE
        return SplitSurvey(
            image_of=self.split.image_of,
            own=self.own.numpy(),
            rank=(1 + self.above).numpy(),
            rivals=self.rivals.numpy(),
            rival_score=self.rival_score.numpy(),
            pool=self.pool.numpy(),
            pool_score=self.pool_score.numpy(),
            compared=self.compared,
            skipped=[self.blocks.skipped[image] for image in sorted(self.blocks.skipped)],
            unknown=self.unknown,
        )


def _keep_best(
    kept: Tensor, kept_score: Tensor, scores: Tensor, rows: Tensor, columns: Tensor
) -> None:
    """Update the best columns of some rows, in place, with new scores [rows, columns]."""
    count = kept.shape[1]
    here = scores.topk(min(count, len(columns)), dim=1)
    both = torch.cat([kept_score[rows], here.values], 1)
    names = torch.cat([kept[rows], columns[here.indices]], 1)
    best = both.topk(count, dim=1)
    kept_score[rows] = best.values
    kept[rows] = names.gather(1, best.indices)


def _refuse_not_finite(scores: Tensor) -> None:
    if not scores.isfinite().all():
        raise DataError("the model's scores are not finite; train it again")


def _own_scores(model: Model, images: Encoded, texts: Encoded, rows: list[int]) -> Tensor:
    """Scores of text ``k`` with image ``rows[k]``, in the precision of the other scores."""
    images, texts = for_kernels(model.matcher, images), for_kernels(model.matcher, texts)
    chosen = torch.tensor(rows, device=model.device)
    scores = model.matcher.paired(images[chosen], texts)
    if scores is None:
        every = model.matcher(images, texts)
        scores = every[chosen, torch.arange(len(rows), device=model.device)]
    return scores
