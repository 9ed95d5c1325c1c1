"""Several encoders or matchers of one kind side by side: the score is the mean of theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from counterfoil.encoders.encoded import Encoded
from counterfoil.kernels.spec import ScoringJob
from counterfoil.matchers.base import Matcher, Observation, paired_scores


class EnsembleEncoder(nn.Module):
    """Every member encodes the same batch; their vectors stand one after another."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, batch: Any) -> Encoded:
        parts: list[Encoded] = [member(batch) for member in self.members]
        return replace(
            parts[0],
            fragments=_side_by_side([part.fragments for part in parts]),
            pooled=_side_by_side([part.pooled for part in parts]),
            residuals=_side_by_side([part.residuals for part in parts]),
        )


def _side_by_side(tensors: Sequence[Tensor | None]) -> Tensor | None:
    there = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(there, dim=-1) if len(there) == len(tensors) else None


def split_members(encoded: Encoded, count: int) -> list[Encoded]:
    """What each of ``count`` members encoded."""
    fragments = _apart(encoded.fragments, count)
    pooled = _apart(encoded.pooled, count)
    residuals = _apart(encoded.residuals, count)
    return [
        replace(encoded, fragments=fragments[k], pooled=pooled[k], residuals=residuals[k])
        for k in range(count)
    ]


def _apart(tensor: Tensor | None, count: int) -> Sequence[Tensor | None]:
    return [None] * count if tensor is None else tensor.chunk(count, dim=-1)


class EnsembleMatcher(Matcher):
    """An ensemble that is one matcher: what it scores, each member scores on its own vectors."""

    def __init__(self, members: Sequence[Matcher]) -> None:
        super().__init__()  # members check the width of their own vectors
        self.members = nn.ModuleList(members)
        first = members[0]
        self.needs, self.parser = first.needs, first.parser
        self.needs_boxes, self.needs_graph = first.needs_boxes, first.needs_graph

    def score_block(self, images: Encoded, texts: Encoded, job: ScoringJob) -> Tensor:
        count = len(self.members)
        sides = zip(
            self.members, split_members(images, count), split_members(texts, count), strict=True
        )
        scores = []
        for member, of_images, of_texts in sides:
            assert isinstance(member, Matcher)  # noqa: S101 - nn.ModuleList forgets the type
            scores.append(member.score_block(of_images, of_texts, job))
        return torch.stack(scores).mean(0)

    def each(self, images: Encoded, texts: Encoded) -> tuple[Tensor, ...]:
        """Scores of each member."""
        count = len(self.members)
        pairs = zip(split_members(images, count), split_members(texts, count), strict=True)
        return tuple(member(*pair) for member, pair in zip(self.members, pairs, strict=True))

    def paired(self, images: Encoded, texts: Encoded) -> Tensor:
        count = len(self.members)
        sides = zip(
            self.members, split_members(images, count), split_members(texts, count), strict=True
        )
        scores = []
        for member, of_images, of_texts in sides:
            assert isinstance(member, Matcher)  # noqa: S101 - nn.ModuleList forgets the type
            scores.append(paired_scores(member, of_images, of_texts))
        return torch.stack(scores).mean(0)

    def observe(self, seen: Observation) -> None:
        count = len(self.members)
        images, texts = split_members(seen.images, count), split_members(seen.texts, count)
        for k, member in enumerate(self.members):
            assert isinstance(member, Matcher)  # noqa: S101 - nn.ModuleList forgets the type
            member.observe(replace(seen, images=images[k], texts=texts[k]))

    def diagnostics(self) -> dict[str, float]:
        return self._first.diagnostics()

    def close_epoch(self, epoch: int) -> dict[str, Any]:
        closed: list[dict[str, Any]] = []
        for member in self.members:
            assert isinstance(member, Matcher)  # noqa: S101 - nn.ModuleList forgets the type
            closed.append(member.close_epoch(epoch))
        return closed[0]

    def notes(self, epochs: int) -> list[str]:
        return self._first.notes(epochs)

    @property
    def _first(self) -> Matcher:
        first = self.members[0]
        assert isinstance(first, Matcher)  # noqa: S101
        return first
