"""Two stages over a whole split: a fast model's shortlists, scored by a slow one.

A cross-encoder that scores all pairs of 5,000 images and 25,000 captions is a matter of days on a
small machine. Re-ranking the best of a fast model is not, and what it loses can be counted: a query
whose answers are not on its list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from counterfoil.core.errors import ConfigError, DataError
from counterfoil.core.progress import Progress, Silent
from counterfoil.core.tensors.modes import eval_mode
from counterfoil.data.duplicates import identical_groups, images_of_groups
from counterfoil.data.pairs import Split
from counterfoil.encoders import Encoded
from counterfoil.evaluation.ranks import Floats, Indices, top_k, transposed
from counterfoil.evaluation.report import Report, RetrievalReport, markdown_table
from counterfoil.evaluation.retrieval import Identical, fold_spans, retrieval
from counterfoil.models.model import Model
from counterfoil.scoring.encode import SplitScores, encode_images, encode_texts

Mask = NDArray[np.bool_]


class ShortlistReport(Report):
    """How good the lists are by themselves, and how much of all scoring they spared.

    Recalls are the share, in percent, of queries with an answer on their list; the ``identical``
    ones also count captions that the image has word for word, and images that have the caption.
    """

    retriever: str
    shortlist_size: int
    i2t_recall: float
    t2i_recall: float
    i2t_recall_identical: float
    t2i_recall_identical: float
    scored: int
    pairs: int

    def rows(self) -> list[tuple[str, ...]]:
        """A header and one row of text per direction."""
        own, identical = self.i2t_recall, self.i2t_recall_identical
        back, identical_back = self.t2i_recall, self.t2i_recall_identical
        first = f"shortlists of {self.retriever}"
        if (own, back) == (identical, identical_back):
            return [
                (first, "answer on the list", "length"),
                ("image → text", f"{own:.1f}", str(self.shortlist_size)),
                ("text → image", f"{back:.1f}", str(self.shortlist_size)),
            ]
        return [
            (first, "answer on the list", "or an identical caption's", "length"),
            ("image → text", f"{own:.1f}", f"{identical:.1f}", str(self.shortlist_size)),
            ("text → image", f"{back:.1f}", f"{identical_back:.1f}", str(self.shortlist_size)),
        ]

    def to_markdown(self) -> str:
        return "\n".join([*markdown_table(self.rows()), "", f"{self.note()}."]) + "\n"

    def note(self) -> str:
        share = 100 * self.scored / max(1, self.pairs)
        return f"{self.scored:,} of {self.pairs:,} pairs scored by the second stage ({share:.1f} %)"


@dataclass(frozen=True, eq=False)
class TwoStages:
    """Scores [n_images, n_texts] of two stages, which differ between the directions."""

    i2t: Floats
    t2i: Floats
    image_of: Indices
    captions: list[str]
    lists: ShortlistReport
    skipped: list[str]

    def report(
        self,
        split: str,
        *,
        folds: int = 0,
        bootstrap: int = 1000,
        identical_captions: Identical = "both",
    ) -> RetrievalReport:
        return retrieval(
            self.i2t,
            self.image_of,
            text_scores=self.t2i,
            split=split,
            protocol="folds" if folds else "full",
            folds=folds or 1,
            bootstrap=bootstrap,
            captions=self.captions,
            identical_captions=identical_captions,
        )


def score_two_stages(
    models: Sequence[Model],
    split: Split,
    first: SplitScores,
    *,
    name: str = "the first stage",
    shortlist_size: int = 50,
    folds: int = 0,
    batch_size: int = 256,
    progress: Progress | None = None,
) -> TwoStages:
    """The best of each query by ``first``, scored again by the mean of some models.

    What is not on a list comes after it, in the order of the first stage. With ``folds``, lists are
    of the images and captions of a fold. ``first`` are scores of the same split, whose images it
    may have read from other features; one that either stage cannot read is left out.
    """
    if shortlist_size < 1:
        raise ConfigError(f"shortlist_size: at least 1 candidate, got {shortlist_size}")
    progress = progress or Silent()
    encoded = [_Encoded.of(model, split, batch_size, progress) for model in models]
    skipped = dict.fromkeys([*first.skipped, *(text for one in encoded for text in one.skipped)])
    images = [i for i in first.images if all(i in one.row_of for one in encoded)]
    first_scores, texts, image_of = _of_images(first, images)
    by_image, by_text = _lists(first_scores, image_of, shortlist_size, folds)
    wanted = by_image | by_text
    slow = np.zeros(wanted.shape, dtype=np.float32)
    for one in encoded:
        found = _scores(one, split, images, texts, wanted, batch_size, progress)
        slow += found / len(encoded)
    captions = [split.texts[text] for text in texts]
    groups = identical_groups(captions)
    lists = ShortlistReport(
        retriever=name,
        shortlist_size=shortlist_size,
        i2t_recall=_found(by_image, image_of)[0],
        t2i_recall=_found(by_text, image_of)[1],
        i2t_recall_identical=_found(by_image, image_of, groups)[0],
        t2i_recall_identical=_found(by_text, image_of, groups)[1],
        scored=int(wanted.sum()),
        pairs=wanted.size,
    )
    i2t = _behind(slow, by_image, first_scores)
    t2i = np.ascontiguousarray(_behind(slow.T, by_text.T, first_scores.T).T)
    return TwoStages(i2t, t2i, image_of, captions, lists, list(skipped))


@dataclass(frozen=True)
class _Encoded:
    """The images of a split as one model encodes them; ``row_of`` finds one by its index."""

    model: Model
    images: Encoded
    row_of: dict[int, int]
    skipped: list[str]

    @classmethod
    def of(cls, model: Model, split: Split, batch_size: int, progress: Progress) -> _Encoded:
        with eval_mode(model):
            images, kept, skipped = encode_images(model, split, batch_size, progress)
        return cls(model, images, {image: row for row, image in enumerate(kept)}, skipped)


def _of_images(first: SplitScores, images: list[int]) -> tuple[Floats, list[int], Indices]:
    """First-stage scores of some images and of their captions, these, and whose they are."""
    if not images:
        raise DataError("no image can be read by both stages")
    rows = {image: row for row, image in enumerate(first.images)}
    place = {rows[image]: number for number, image in enumerate(images)}
    columns = [c for c, row in enumerate(first.image_of) if int(row) in place]
    scores = first.scores[[rows[image] for image in images]][:, columns].float().numpy()
    image_of = np.array([place[int(first.image_of[c])] for c in columns], dtype=np.int64)
    return scores, [first.texts[c] for c in columns], image_of


def _lists(scores: Floats, image_of: Indices, top: int, folds: int) -> tuple[Mask, Mask]:
    """Which captions are on the list of each image, and which images on that of each caption."""
    by_image, by_text = (np.zeros(scores.shape, dtype=np.bool_) for _ in range(2))
    for start, stop in fold_spans(len(scores), folds or 1):
        columns = np.flatnonzero((image_of >= start) & (image_of < stop))
        part = scores[start:stop][:, columns]
        rows = np.arange(start, stop)
        by_image[rows[:, None], columns[top_k(part, top)]] = True
        by_text[rows[top_k(transposed(part), top)], columns[:, None]] = True
    return by_image, by_text


@torch.inference_mode()
def _scores(
    one: _Encoded,
    split: Split,
    images: list[int],
    texts: list[int],
    wanted: Mask,
    batch_size: int,
    progress: Progress,
) -> Floats:
    """Scores of the wanted pairs, image by image with all the captions it is wanted with."""
    model = one.model
    scores = np.zeros(wanted.shape, dtype=np.float32)
    with eval_mode(model):
        encoded = encode_texts(model, [split.texts[t] for t in texts], batch_size, progress)
        for row in progress.track(range(len(images)), "scoring shortlists", len(images)):
            place = one.row_of[images[row]]
            columns = np.flatnonzero(wanted[row])
            if len(columns):
                some = encoded[torch.from_numpy(columns).to(model.device)]
                found = model.matcher(one.images[place : place + 1], some)[0]
                scores[row, columns] = found.float().cpu().numpy()
    return scores


def _behind(scores: Floats, listed: Mask, first: Floats) -> Floats:
    """Scores of what is listed; below the lowest of its row, what is not, as ``first`` has it."""
    lowest = np.where(listed, scores, np.inf).min(axis=1, keepdims=True)
    best, least = first.max(axis=1, keepdims=True), first.min(axis=1, keepdims=True)
    below = lowest - 1 - (best - first) / np.maximum(best - least, 1e-12)
    behind: Floats = np.where(listed, scores, below)
    return behind


def _found(listed: Mask, image_of: Indices, groups: Indices | None = None) -> tuple[float, float]:
    """Share of images with one of their captions listed, and of captions with their image.

    With ``groups``, any caption of the same group as one of the image's is as good.
    """
    groups = np.arange(len(image_of)) if groups is None else groups
    owned, owners = images_of_groups(groups, image_of)
    images = np.zeros(len(listed), dtype=np.bool_)
    texts = np.zeros(len(groups), dtype=np.bool_)
    order = np.argsort(groups, kind="stable")
    edges = np.searchsorted(groups[order], np.arange(groups.max(initial=0) + 2))
    for group, image in zip(owned.tolist(), owners.tolist(), strict=True):
        columns = order[edges[group] : edges[group + 1]]
        hits = listed[image, columns]
        images[image] |= hits.any()
        texts[columns] |= hits
    captioned = np.bincount(image_of, minlength=len(listed)) > 0
    return float(100 * images[captioned].mean()), float(100 * texts.mean())
