"""The `Matcher` base class: scores of every image with every text, or of given pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from counterfoil.core.errors import ArgumentError, ConfigError
from counterfoil.core.registry import Registry, options_repr
from counterfoil.encoders.encoded import HALVES, Encoded, Needs
from counterfoil.kernels.spec import ScoringJob

matchers: Registry[type[Matcher]] = Registry("matcher")

PAIRED_BLOCK = 16
"""Pairs per block: scoring the unneeded off-diagonal pairs costs less than one call per pair."""


@dataclass(frozen=True)
class Observation:
    """A scored training batch, for matchers that learn from it without gradients.

    ``images`` are those of this process, ``texts`` those of all processes. Text ``k`` of the global
    batch belongs to row ``k`` of ``scores``, and this process's first image is row ``first_row``.
    If images have several texts each, ``own_texts`` are those of this process's images.
    ``protected`` pairs count neither as matches nor as mismatches.
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
    def not_mismatched(self) -> Tensor:
        """Positive and protected pairs [n_images, n_texts]."""
        return self.positives if self.protected is None else self.positives | self.protected


class Matcher(nn.Module):
    """Scores [n_images, n_texts] of every image with every text, from tensors or `Encoded`.

    >>> import counterfoil as cf
    >>> regions, words = torch.eye(4)[None], torch.eye(4)[None, :2]  # one image, one text
    >>> padding = torch.tensor([[True, False]])  # the second word is padding
    >>> cf.matchers.SCANT2I()(regions, words, text_mask=padding).shape
    torch.Size([1, 1])

    Batch sizes and lengths are arbitrary; padding never changes a score. ``needs`` names the parts
    of an `Encoded` that the matcher reads; the others are neither stored nor gathered.
    ``needs_boxes``: it reads the boxes of regions. ``needs_graph``: it reads the word graph that
    ``parser`` makes. ``embed_size`` is the width of the vectors; None accepts any width, if the
    matcher has no weights of that size. A subclass implements `score_block`.
    """

    needs: Needs = "fragments"
    needs_boxes: bool = False
    needs_graph: bool = False
    parser: str = "rules"

    embed_size: int | None

    def __init__(self, embed_size: int | None = None) -> None:
        super().__init__()
        if embed_size is not None and (type(embed_size) is not int or embed_size < 1):
            raise ArgumentError(
                f"{type(self).__name__}(embed_size={embed_size!r}): expected the width of the "
                "vectors, an integer of at least 1, or None for any width"
            )
        self.embed_size = embed_size

    def __repr__(self) -> str:
        """The options and the number of weights, without the layers."""
        weights = sum(one.numel() for one in self.parameters())
        return options_repr(self, *([f"{weights:,} weights"] if weights else []))

    def forward(
        self,
        images: Encoded | Tensor,
        texts: Encoded | Tensor,
        image_mask: Tensor | None = None,
        text_mask: Tensor | None = None,
    ) -> Tensor:
        """Scores [n_images, n_texts].

        Tensors are unit-length fragments [n, length, D], or vectors [n, D] if the matcher compares
        pooled vectors. Masks [n, length] are True for real fragments (default: all); other
        fragments may hold anything. Pass an `Encoded` to give boxes of regions or a graph of words.
        """
        images = self._as_encoded(images, image_mask, "image")
        texts = self._as_encoded(texts, text_mask, "text")
        self._check_comparable(images, texts)
        images, texts = self._in_weights_dtype(images), self._in_weights_dtype(texts)
        return self.score_block(images, texts, ScoringJob())

    def score_block(self, images: Encoded, texts: Encoded, job: ScoringJob) -> Tensor:
        """Scores of a block of a larger job; the job's size may decide how they are computed."""
        raise NotImplementedError

    def _as_encoded(self, batch: Encoded | Tensor, mask: Tensor | None, side: str) -> Encoded:
        """One side's argument as `Encoded`, with its width checked."""
        name, width = type(self).__name__, self.embed_size
        if not isinstance(batch, Encoded):
            self._require_no_extras(side)
            encoded = encode_tensor(batch, mask, side, self.needs)
        elif mask is not None:
            raise ArgumentError(f"{side}_mask: an Encoded has a mask of its own; leave it out")
        else:
            encoded = batch
            if self.needs != "pooled" and batch.fragments is not None:
                _check_fragments(batch.fragments, batch.mask, side)
        vectors = self._vectors(encoded)
        if vectors is not None and width is not None and vectors.shape[-1] != width:
            raise ArgumentError(
                f"{name}(embed_size={width}): expected {side} vectors of {width} numbers, "
                f"got shape {list(vectors.shape)}"
            )
        return encoded

    def _vectors(self, encoded: Encoded) -> Tensor | None:
        return encoded.pooled if self.needs == "pooled" else encoded.fragments

    def _check_comparable(self, images: Encoded, texts: Encoded) -> None:
        """Raise unless both sides have the same width and dtype; reads no values.

        Fragments in half and in single precision are compared in single precision.
        """
        x, y = self._vectors(images), self._vectors(texts)
        if x is None or y is None:  # `score_block` names the encoder to configure
            return
        if x.shape[-1] != y.shape[-1]:
            raise ArgumentError(
                f"{type(self).__name__}: expected image and text vectors of the same width, got "
                f"shapes {list(x.shape)} and {list(y.shape)}"
            )
        strict = self.needs == "pooled" or torch.float64 in (x.dtype, y.dtype)
        if strict and x.dtype != y.dtype and not torch.is_autocast_enabled(x.device.type):
            raise ArgumentError(
                f"{type(self).__name__}: expected image and text vectors of the same dtype, got "
                f"{x.dtype} and {y.dtype}; convert one side with .to(dtype)"
            )

    def _in_weights_dtype(self, encoded: Encoded) -> Encoded:
        """Vectors in half precision as single if the weights are; raise for other differences."""
        weight, x = next(self.parameters(), None), self._vectors(encoded)
        if weight is None or x is None or torch.is_autocast_enabled(x.device.type):
            return encoded
        if x.dtype in HALVES and weight.dtype == torch.float32:
            return encoded.map(lambda tensor: tensor.float() if tensor.dtype in HALVES else tensor)
        if x.dtype != weight.dtype:
            raise ArgumentError(
                f"{type(self).__name__}: expected vectors of the dtype of its weights, "
                f"{weight.dtype}, got {x.dtype}; convert the vectors or the matcher with .to(dtype)"
            )
        return encoded

    def _require_no_extras(self, side: str) -> None:
        """Raise if the matcher reads more of a side than vectors."""
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
        """Scores [n] of image ``k`` with text ``k``; None: the caller scores blocks of pairs."""
        return None

    def observe(self, observation: Observation) -> None:
        """Learn from a scored training batch without gradients; nothing by default."""

    def diagnostics(self) -> dict[str, float]:
        """State learned by `observe`, for the training log."""
        return {}

    def close_epoch(self, epoch: int) -> dict[str, Any]:
        """Statistics of the epoch for the run's record; resets them."""
        return {}

    def notes(self, epochs: int) -> list[str]:
        """Warnings to print before a run of ``epochs`` starts."""
        return []


def encode_tensor(x: Tensor, mask: Tensor | None, side: str, needs: Needs) -> Encoded:
    """Plain vectors or fragments as `Encoded`, for a matcher that reads them."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ArgumentError(f"{side}s: expected an Encoded or a tensor of floats, got {kind}")
    if needs == "pooled":
        if x.ndim != 2:
            raise ArgumentError(
                f"{side}s: this matcher compares one vector per {side}, expected shape [n, D], got "
                f"{list(x.shape)}; pool the fragments first"
            )
        if mask is not None:
            raise ArgumentError(f"{side}_mask: vectors [n, D] have no padding; leave it out")
        return Encoded(None, x.new_zeros(len(x), 0, dtype=torch.bool), x)
    if x.ndim != 3:
        raise ArgumentError(
            f"{side}s: this matcher compares fragments, expected shape [n, length, D], got "
            f"{list(x.shape)}"
        )
    real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
    _check_fragments(x, real, side)
    if mask is not None:  # dividing zeros by their length gives NaN, which no weight of 0 removes
        x = x.masked_fill(~mask[..., None], 0.0)
    return Encoded(x, real)


def _check_fragments(x: Tensor, mask: Tensor, side: str) -> None:
    """Raise unless fragments [n, length, D] and their mask fit; reads shapes only."""
    if x.shape[1] == 0:
        raise ArgumentError(
            f"{side}s: expected fragments [n, length, D] of length 1 or more, got {list(x.shape)}"
        )
    is_tensor = isinstance(mask, Tensor)
    if not is_tensor or mask.dtype != torch.bool or mask.shape != x.shape[:2]:
        given = f"{mask.dtype} {list(mask.shape)}" if is_tensor else type(mask).__name__
        raise ArgumentError(
            f"{side}_mask: expected a tensor of booleans {list(x.shape[:2])}, True for real "
            f"fragments, got {given}"
        )


def pooled(encoded: Encoded, side: str) -> Tensor:
    """The pooled vectors [n, D] of one side; an error if its encoder does not pool."""
    if encoded.pooled is None:
        raise ConfigError(
            f"this matcher compares whole vectors, but the {side} encoder does not pool: set "
            f"model.{side}.pooling (mean, max, kmax, attention, gpo) or, if it has no such option, "
            "choose another encoder"
        )
    return encoded.pooled


def paired_scores(matcher: Matcher, images: Encoded, texts: Encoded) -> Tensor:
    """Scores [n] of image ``k`` with text ``k``: by `Matcher.paired`, or diagonals of blocks."""
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
    blocks = torch.arange(len(images), device=images.mask.device).split(PAIRED_BLOCK)
    return torch.cat([score(images[index], texts[index]).diagonal() for index in blocks])
