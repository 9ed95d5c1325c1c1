"""`Matcher`: two encoded batches to a score matrix, or each image with its own text alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from counterfoil.core.errors import ArgumentError, ConfigError
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
    """Scores [n_images, n_texts] of every image with every text, from tensors or `Encoded`.

    >>> import counterfoil as cf
    >>> regions, words = torch.eye(4)[None], torch.eye(4)[None, :2]  # one image, one text
    >>> padding = torch.tensor([[True, False]])  # the second word is padding
    >>> cf.matchers.SCANT2I()(regions, words, text_mask=padding).shape
    torch.Size([1, 1])

    Any two batch sizes, any lengths; padding never changes a score. ``needs`` says what it reads of
    an `Encoded`, so that nothing else is kept or sent; ``needs_boxes`` and ``needs_graph``, that
    it reads where regions are and which words are linked, the latter as ``parser`` sees it.
    ``embed_size`` is the width of the vectors it reads; a matcher without weights of that size
    reads any if it is not given. A subclass implements `score_block`.
    """

    needs: Needs = "fragments"
    needs_boxes: bool = False
    needs_graph: bool = False
    parser: str = "rules"

    embed_size: int | None

    def __init__(self, embed_size: int | None = None) -> None:
        super().__init__()
        self.embed_size = embed_size

    def forward(
        self,
        images: Encoded | Tensor,
        texts: Encoded | Tensor,
        image_mask: Tensor | None = None,
        text_mask: Tensor | None = None,
    ) -> Tensor:
        """Scores [n_images, n_texts].

        Tensors are fragments [n, length, D], or [n, D] for matchers of whole vectors, at unit
        length as encoders make them. Masks [n, length] are True for real fragments; by default all
        are. Boxes of regions and links of words are given in an `Encoded`.
        """
        images = self._read(images, image_mask, "image")
        texts = self._read(texts, text_mask, "text")
        return self.score_block(images, texts, ScoringJob())

    def score_block(self, images: Encoded, texts: Encoded, job: ScoringJob) -> Tensor:
        """Scores of a block of a larger job, by whose size a matcher may choose its way."""
        raise NotImplementedError

    def _read(self, given: Encoded | Tensor, mask: Tensor | None, side: str) -> Encoded:
        """What was given for a side, as `Encoded`, with the width checked."""
        name, width = type(self).__name__, self.embed_size
        if not isinstance(given, Encoded):
            self._refuse_plain(side)
            encoded = encode_tensor(given, mask, side, self.needs)
        elif mask is not None:
            raise ArgumentError(f"{side}_mask: an Encoded has a mask of its own; leave it out")
        else:
            encoded = given
        vectors = encoded.pooled if self.needs == "pooled" else encoded.fragments
        if vectors is not None and width is not None and vectors.shape[-1] != width:
            raise ArgumentError(
                f"{name}(embed_size={width}): expected {side} vectors of {width} numbers, "
                f"got shape {list(vectors.shape)}"
            )
        return encoded

    def _refuse_plain(self, side: str) -> None:
        """Raise if plain vectors of a side are not enough."""
        name = type(self).__name__
        if side == "image" and self.needs_boxes:
            raise ArgumentError(
                f"{name} reads where regions are: pass Encoded(regions, mask, boxes=…) with boxes "
                "[n, length, 4] in 0…1"
            )
        if side == "text" and self.needs_graph:
            raise ArgumentError(
                f"{name} reads which words are linked: pass Encoded(words, mask, graph=…) with a "
                "boolean graph [n, length, length]"
            )

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


def encode_tensor(given: Tensor, mask: Tensor | None, side: str, needs: Needs) -> Encoded:
    """Plain vectors or fragments as `Encoded`, for a matcher that reads them."""
    if not isinstance(given, Tensor) or not given.is_floating_point():
        kind = given.dtype if isinstance(given, Tensor) else type(given).__name__
        raise ArgumentError(f"{side}s: expected an Encoded or a tensor of floats, got {kind}")
    if needs == "pooled":
        if given.ndim != 2:
            raise ArgumentError(
                f"{side}s: this matcher compares one vector per {side}, expected shape [n, D], got "
                f"{list(given.shape)}; pool the fragments first"
            )
        if mask is not None:
            raise ArgumentError(f"{side}_mask: vectors [n, D] have no padding; leave it out")
        return Encoded(None, given.new_zeros(len(given), 0, dtype=torch.bool), given)
    if given.ndim != 3:
        raise ArgumentError(
            f"{side}s: this matcher compares fragments, expected shape [n, length, D], got "
            f"{list(given.shape)}"
        )
    if mask is None:
        mask = torch.ones(given.shape[:2], dtype=torch.bool, device=given.device)
    if mask.dtype != torch.bool or mask.shape != given.shape[:2]:
        raise ArgumentError(
            f"{side}_mask: expected booleans {list(given.shape[:2])}, True for real fragments, got "
            f"{mask.dtype} {list(mask.shape)}"
        )
    return Encoded(given, mask)


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
