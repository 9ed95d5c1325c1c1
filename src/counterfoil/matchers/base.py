"""`Matcher`: two encoded batches to a score matrix, or each image with its own text alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from counterfoil.core.errors import ConfigError
from counterfoil.core.registry import Registry
from counterfoil.encoders.encoded import Encoded, Needs
from counterfoil.kernels.spec import ScoringJob

matchers: Registry[type[Matcher]] = Registry("matcher")

PAIRED_BLOCK = 16
"""Pairs scored together: a few that nobody asked for cost less than a call for each."""


@dataclass(frozen=True)
class Observation:
    """A training batch after it was scored, for matchers that learn by watching.

    ``images`` are those of this process, ``texts`` those of all; text ``k`` of the global batch
    belongs to row ``k`` of ``scores``, and this process's first image is row ``first_row``. If
    images have several texts each, ``own_texts`` are those of this process's images. ``protected``
    pairs are neither right nor wrong.
    """

    images: Encoded
    texts: Encoded
    scores: Tensor
    positives: Tensor
    first_row: int
    epoch: int
    own_texts: slice = field(default_factory=lambda: slice(None))
    protected: Tensor | None = None

    @property
    def not_wrong(self) -> Tensor:
        """Pairs that are no mismatch."""
        return self.positives if self.protected is None else self.positives | self.protected


class Matcher(nn.Module):
    """Scores [n_images, n_texts] of every image with every text.

    Any two batch sizes, any lengths; padding never changes a score. ``needs`` says what it reads of
    an `Encoded`, so that nothing else is kept or sent; ``needs_boxes`` and ``needs_graph``, that
    it reads where regions are and which words are linked, the latter as ``parser`` sees it.
    """

    needs: Needs = "fragments"
    needs_boxes: bool = False
    needs_graph: bool = False
    parser: str = "rules"

    def __init__(self, embed_size: int) -> None:
        super().__init__()
        self.embed_size = embed_size

    def forward(self, images: Encoded, texts: Encoded) -> Tensor:
        raise NotImplementedError

    def score_block(self, images: Encoded, texts: Encoded, job: ScoringJob) -> Tensor:
        """`forward` for a block of a larger job, by whose size a matcher may choose its way."""
        scores: Tensor = self(images, texts)
        return scores

    def paired(self, images: Encoded, texts: Encoded) -> Tensor | None:
        """Scores [n] of image ``k`` with text ``k``; None where blocks of all pairs do as well."""
        return None

    def observe(self, seen: Observation) -> None:
        """Learn from a scored training batch what gradients do not teach; nothing, as a rule."""

    def diagnostics(self) -> dict[str, float]:
        """What was learned that way, for the log of the run."""
        return {}

    def close_epoch(self, epoch: int) -> dict[str, Any]:
        """What an epoch's batches came to, for its record; the next epoch starts anew."""
        return {}

    def notes(self, epochs: int) -> list[str]:
        """What a run of ``epochs`` should be told before it starts; nothing, as a rule."""
        return []


def pooled(encoded: Encoded, side: str) -> Tensor:
    if encoded.pooled is None:
        raise ConfigError(
            f"this matcher compares whole vectors, but the {side} encoder does not pool: "
            f"set model.{side}.pooling (mean, max, kmax, attention, gpo)"
        )
    return encoded.pooled


def paired_scores(matcher: Matcher, images: Encoded, texts: Encoded) -> Tensor:
    """Scores [n] of image ``k`` with text ``k``: the matcher's own, or diagonals of blocks."""
    own = matcher.paired(images, texts)
    if own is not None:
        return own
    if matcher.needs == "pooled":
        return matcher(images, texts).diagonal()
    return block_diagonals(matcher, images, texts)


def block_diagonals(
    score: Callable[[Encoded, Encoded], Tensor], images: Encoded, texts: Encoded
) -> Tensor:
    """Scores [n] of image ``k`` with text ``k``, as diagonals of small blocks of all pairs."""
    places = torch.arange(len(images), device=images.mask.device).split(PAIRED_BLOCK)
    return torch.cat([score(images[at], texts[at]).diagonal() for at in places])
