"""Two-stage evaluation of a split: a fast model's shortlists, re-ranked by a slow model.

A cross-encoder needs days on a small machine for all pairs of 5,000 images and 25,000 captions.
Re-ranking the shortlists of a fast model is cheap. What it loses is measured: the queries without
an answer on their list.
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
    """Recall of the shortlists, and how many pairs were scored.

    Recalls are the share, in percent, of queries with an answer on their list. The ``identical``
    recalls also accept captions identical to one of the image's own.
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
    """Scores [n_images, n_texts] of two stages, different for each direction."""

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
            folds=folds or None,
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
    """Re-rank the best candidates of each query by ``first`` with the mean score of some models.

    Unlisted candidates follow the list in the order of the first stage. With ``folds``, each list
    covers one fold. ``first`` are scores of the same split, possibly from other features; images
    that either stage cannot read are ignored.
    """
    if shortlist_size < 1:
        raise ConfigError(f"shortlist_size: at least 1 candidate, got {shortlist_size}")
    progress = progress or Silent()
    encoded = [_Encoded.of(model, split, batch_size, progress) for model in models]
    skipped = dict.fromkeys([*first.skipped, *(text for one in encoded for text in one.skipped)])
    images = [i for i in first.images if all(i in one.row_of for one in encoded)]
    first_scores, texts, image_of = _select_images(first, images)
    by_image, by_text = _shortlists(first_scores, image_of, shortlist_size, folds)
    listed = by_image | by_text
    slow = np.zeros(listed.shape, dtype=np.float32)
    for one in encoded:
        scores = _scores(one, split, images, texts, listed, batch_size, progress)
        slow += scores / len(encoded)
    captions = [split.texts[text] for text in texts]
    groups = identical_groups(captions)
    lists = ShortlistReport(
        retriever=name,
        shortlist_size=shortlist_size,
        i2t_recall=_list_recall(by_image, image_of)[0],
        t2i_recall=_list_recall(by_text, image_of)[1],
        i2t_recall_identical=_list_recall(by_image, image_of, groups)[0],
        t2i_recall_identical=_list_recall(by_text, image_of, groups)[1],
        scored=int(listed.sum()),
        pairs=listed.size,
    )
    i2t = _fill_unlisted(slow, by_image, first_scores)
    t2i = np.ascontiguousarray(_fill_unlisted(slow.T, by_text.T, first_scores.T).T)
    return TwoStages(i2t, t2i, image_of, captions, lists, list(skipped))


@dataclass(frozen=True)
class _Encoded:
    """The images of a split encoded by one model; ``row_of`` maps an image to its row."""

    model: Model
    images: Encoded
    row_of: dict[int, int]
    skipped: list[str]

    @classmethod
    def of(cls, model: Model, split: Split, batch_size: int, progress: Progress) -> _Encoded:
        with eval_mode(model):
            images, readable, skipped = encode_images(model, split, batch_size, progress)
        return cls(model, images, {image: row for row, image in enumerate(readable)}, skipped)


def _select_images(first: SplitScores, images: list[int]) -> tuple[Floats, list[int], Indices]:
    """First-stage scores of some images with their captions, the captions, and their images."""
    if not images:
        raise DataError("no image can be read by both stages")
    rows = {image: row for row, image in enumerate(first.images)}
    new_row = {rows[image]: number for number, image in enumerate(images)}
    columns = [c for c, row in enumerate(first.image_of) if int(row) in new_row]
    scores = first.scores[[rows[image] for image in images]][:, columns].float().numpy()
    image_of = np.array([new_row[int(first.image_of[c])] for c in columns], dtype=np.int64)
    return scores, [first.texts[c] for c in columns], image_of


def _shortlists(scores: Floats, image_of: Indices, top: int, folds: int) -> tuple[Mask, Mask]:
    """Masks [n_images, n_texts] of the shortlists of images, and of those of captions."""
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
    listed: Mask,
    batch_size: int,
    progress: Progress,
) -> Floats:
    """Scores of the listed pairs, each image with all of its listed captions at once."""
    model = one.model
    scores = np.zeros(listed.shape, dtype=np.float32)
    with eval_mode(model):
        encoded = encode_texts(model, [split.texts[t] for t in texts], batch_size, progress)
        for row in progress.track(range(len(images)), "scoring shortlists", len(images)):
            image = one.row_of[images[row]]
            columns = np.flatnonzero(listed[row])
            if len(columns):
                columns_encoded = encoded[torch.from_numpy(columns).to(model.device)]
                row_scores = model.matcher(one.images[image : image + 1], columns_encoded)[0]
                scores[row, columns] = row_scores.float().cpu().numpy()
    return scores


def _fill_unlisted(scores: Floats, listed: Mask, first: Floats) -> Floats:
    """Scores of listed pairs; unlisted pairs rank below the lowest of their row as in ``first``."""
    lowest = np.where(listed, scores, np.inf).min(axis=1, keepdims=True)
    best, worst = first.max(axis=1, keepdims=True), first.min(axis=1, keepdims=True)
    below = lowest - 1 - (best - first) / np.maximum(best - worst, 1e-12)
    filled: Floats = np.where(listed, scores, below)
    return filled


def _list_recall(
    listed: Mask, image_of: Indices, groups: Indices | None = None
) -> tuple[float, float]:
    """Percent of images with one of their captions listed, and of captions with their image.

    With ``groups``, every caption in the group of one of the image's captions is an answer.
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
