"""Ensembles of encoders or matchers: the score is the mean of the members' scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from counterfoil.encoders.encoded import Encoded
from counterfoil.kernels.spec import ScoringJob
from counterfoil.matchers.base import Matcher, Observation, paired_scores


class EnsembleEncoder(nn.Module):
    """Every member encodes the same batch; their vectors are concatenated."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, batch: Any) -> Encoded:
        parts: list[Encoded] = [member(batch) for member in self.members]
        return replace(
            parts[0],
            fragments=_concatenate([part.fragments for part in parts]),
            pooled=_concatenate([part.pooled for part in parts]),
            residuals=_concatenate([part.residuals for part in parts]),
        )


def _concatenate(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """Along the last axis; None if a member has no such tensor."""
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(present, dim=-1) if len(present) == len(tensors) else None


def split_members(encoded: Encoded, count: int) -> list[Encoded]:
    """The inverse of `EnsembleEncoder`: the encoded batch of each of ``count`` members."""

    def split(tensor: Tensor | None) -> Sequence[Tensor | None]:
        return [None] * count if tensor is None else tensor.chunk(count, dim=-1)

    parts = zip(*map(split, (encoded.fragments, encoded.pooled, encoded.residuals)), strict=True)
    return [replace(encoded, fragments=f, pooled=p, residuals=r) for f, p, r in parts]


class EnsembleMatcher(Matcher):
    """An ensemble as one matcher: each member scores its own vectors."""

    def __init__(self, members: Sequence[Matcher]) -> None:
        super().__init__()  # members check the width of their own vectors
        self.members = nn.ModuleList(members)
        first = members[0]
        self.needs, self.parser = first.needs, first.parser
        self.needs_boxes, self.needs_graph = first.needs_boxes, first.needs_graph

    def score_block(self, images: Encoded, texts: Encoded, job: ScoringJob) -> Tensor:
        scores = [member.score_block(i, t, job) for member, i, t in self._split(images, texts)]
        return torch.stack(scores).mean(0)

    def each(self, images: Encoded, texts: Encoded) -> tuple[Tensor, ...]:
        """Scores of each member."""
        return tuple(member(*pair) for member, *pair in self._split(images, texts))

    def paired(self, images: Encoded, texts: Encoded) -> Tensor:
        parts = self._split(images, texts)
        return torch.stack([paired_scores(member, *pair) for member, *pair in parts]).mean(0)

    def observe(self, observation: Observation) -> None:
        for member, images, texts in self._split(observation.images, observation.texts):
            member.observe(replace(observation, images=images, texts=texts))

    def diagnostics(self) -> dict[str, float]:
        return next(self._matchers()).diagnostics()

    def close_epoch(self, epoch: int) -> dict[str, Any]:
        first, *_ = [member.close_epoch(epoch) for member in self._matchers()]
        return first

    def notes(self, epochs: int) -> list[str]:
        return next(self._matchers()).notes(epochs)

    def _split(self, images: Encoded, texts: Encoded) -> Iterator[tuple[Matcher, Encoded, Encoded]]:
        """Each member with its part of both sides."""
        count = len(self.members)
        sides = split_members(images, count), split_members(texts, count)
        return zip(self._matchers(), *sides, strict=True)

    def _matchers(self) -> Iterator[Matcher]:
        for member in self.members:
            assert isinstance(member, Matcher)  # noqa: S101 - nn.ModuleList erases the type
            yield member
