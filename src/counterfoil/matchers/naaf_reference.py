"""The public NAAF code's state machine: kept to score and train as its authors did.

Within one batch the captions are taken one after the other: each is scored with the boundary its
predecessors left, and moves it if its own image ranks first. That is a sequence by nature, so this
is the one place that goes caption by caption. The paper's form does not.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from counterfoil.collectives import world_size
from counterfoil.encoders.encoded import Encoded
from counterfoil.errors import ConfigError
from counterfoil.matchers.boundary import BINS, close_histogram, histogram
from counterfoil.matchers.precision import single_fragments, single_precision

if TYPE_CHECKING:
    from counterfoil.matchers.naaf import NAAF

KEPT = 0.3
"""Share of the old boundary in a new one."""


class ReferenceBoundary(nn.Module):
    """thres, thres_safe, mean_pos, mean_neg, stnd_pos, stnd_neg of the public code, as a buffer."""

    state: Tensor
    histogram: Tensor

    def __init__(self, alpha: float, min_words: int) -> None:
        super().__init__()
        self.alpha, self.min_words = alpha, min_words
        self.register_buffer("state", torch.zeros(6, dtype=torch.float64))
        self.register_buffer("histogram", torch.zeros(2, BINS, dtype=torch.float64))

    @property
    def thres(self) -> float:
        return float(self.state[0])

    @property
    def thres_safe(self) -> float:
        return float(self.state[1])

    def diagnostics(self) -> dict[str, float]:
        names = ("boundary", "safe", "mean_pos", "mean_neg", "std_pos", "std_neg")
        return {f"mismatch/{n}": float(x) for n, x in zip(names, self.state, strict=True)}

    def close_epoch(self) -> dict[str, Any]:
        """The histogram of the epoch's samples with its boundary; the next epoch starts anew."""
        return close_histogram(self.histogram, self.thres, self.alpha)

    def update(self, matched: Tensor, mismatched: Tensor) -> None:
        """Boundaries from all samples of the batch so far, mixed with the ones before."""
        mean_pos, std_pos = float(matched.mean()), float(matched.std())
        mean_neg, std_neg = float(mismatched.mean()), float(mismatched.std())
        self.state[2:] = self.state.new_tensor([mean_pos, mean_neg, std_pos, std_neg])
        a = std_pos**2 - std_neg**2
        b = 2 * (mean_pos * std_neg**2 - mean_neg * std_pos**2)
        c = (mean_neg * std_pos) ** 2 - (mean_pos * std_neg) ** 2
        c += 2 * (std_pos * std_neg) ** 2 * math.log(std_neg / (self.alpha * std_pos) + 1e-8)
        inside = b**2 - 4 * a * c
        if inside <= 0:
            return
        new = (-b + math.sqrt(inside)) / (2 * a + 1e-10), mean_pos - 3 * std_pos
        for place, value in enumerate(new):
            inside_unit = value if 0 <= value <= 1 else 0.0  # above 1 becomes 0 there, not 1
            self.state[place] = (1 - KEPT) * inside_unit + KEPT * self.state[place]


def score_with_mining(matcher: NAAF, images: Encoded, texts: Encoded) -> Tensor:
    """Scores of a batch of pairs in training, the boundary moving from caption to caption."""
    if len(images) != len(texts) or world_size() > 1:
        raise ConfigError(
            f"model.matcher.form=reference trains on batches of pairs in one process, got "
            f"{len(images)} images with {len(texts)} texts in {world_size()} processes: use "
            "form=paper, or data.captions=all in one process"
        )
    with single_precision(images.mask.device) as was_mixed:
        if was_mixed:
            images, texts = single_fragments(images), single_fragments(texts)
        return _score_by_caption(matcher, images, texts)


def _score_by_caption(matcher: NAAF, images: Encoded, texts: Encoded) -> Tensor:
    learned = matcher.reference
    matched: list[Tensor] = []
    mismatched: list[Tensor] = []
    sampled = 0
    columns: list[Tensor] = []
    for i in range(len(texts)):
        text = texts[i : i + 1]
        column = matcher.scores(images, text)[:, 0]
        columns.append(column)
        with torch.no_grad():
            if int(column.argmax()) == i:
                matched.append(_word_maxima(images[i : i + 1], text))
                easiest = int(column.argmin())
                mismatched.append(_word_maxima(images[easiest : easiest + 1], text))
                sampled += int(text.mask.sum())
                if sampled > learned.min_words:
                    learned.update(torch.cat(matched), torch.cat(mismatched))
            if sampled < learned.min_words:
                learned.state[:2] = 0.0
    for row, kind in zip(learned.histogram, (matched, mismatched), strict=True):
        if kind:
            row += histogram(torch.cat(kind).view(1, 1, -1))[0]
    return torch.stack(columns, dim=1)


def _word_maxima(image: Encoded, text: Encoded) -> Tensor:
    assert image.fragments is not None  # noqa: S101 - a local matcher's input
    assert text.fragments is not None  # noqa: S101
    sims = text.fragments[0, text.mask[0]] @ image.fragments[0, image.mask[0]].T
    return sims.amax(-1).double()
