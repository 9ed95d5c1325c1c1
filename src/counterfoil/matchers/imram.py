"""IMRAM: iterative matching with recurrent attention memory (Chen et al. 2020)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from counterfoil.core.errors import ConfigError
from counterfoil.encoders.encoded import Encoded, l2_normalize
from counterfoil.kernels.attention import attended_cosine, gram, masked_softmax, similarities
from counterfoil.kernels.gated_update import gated_update
from counterfoil.matchers.base import matchers
from counterfoil.matchers.fragment_matcher import (
    FragmentMatcher,
    aligned,
    fragments,
    single,
    single_precision,
)
from counterfoil.matchers.scan import aggregate, normalize_raw


class MemoryDistillation(nn.Module):
    """Queries for the next step, refined by their contexts: q ← g q + (1 − g) o.

    g = sigmoid(W_g [q; c] + b_g) and o = tanh(W_o [q; c] + b_o) with the context c = Σ_k w_k v_k.
    As W c = Σ_k w_k (W v_k), fragments are mapped once per item instead of contexts once per pair,
    and c is never built. Both layers are one product.
    """

    def __init__(self, embed_size: int, normalize: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(2 * embed_size, embed_size)
        self.update = nn.Linear(2 * embed_size, embed_size)
        self.normalize = normalize

    def forward(self, queries: Tensor, weights: Tensor, contexts: Tensor) -> Tensor:
        """New queries [C, Q, N, D] from old ones, their weights [C, Q, N, K] and v [C, K, D]."""
        weight = torch.cat([self.gate.weight, self.update.weight])
        of_query, of_context = weight.chunk(2, dim=1)
        bias = torch.cat([self.gate.bias, self.update.bias])
        from_context = weights.flatten(1, 2) @ F.linear(contexts, of_context)  # [C, Q·N, 2D]
        from_query = F.linear(queries, of_query, bias)
        refined = gated_update(queries, from_query, from_context.unflatten(1, weights.shape[1:3]))
        return l2_normalize(refined) if self.normalize else refined


class RecurrentAttention(nn.Module):
    """One direction: in each step every query fragment attends to the keys and is refined."""

    def __init__(self, embed_size: int, steps: int, lambda_softmax: float, normalize: bool) -> None:
        super().__init__()
        self.steps, self.lambda_softmax = steps, lambda_softmax
        # a single step has no next one to refine queries for
        self.memory = MemoryDistillation(embed_size, normalize) if steps > 1 else None

    def forward(self, query: Encoded, key: Encoded) -> Tensor:
        """Scores [steps, C, Q]: mean cosine of the original fragments with their contexts."""
        u, v = fragments(query), fragments(key)
        query_mask, key_mask = query.mask[None, :, :, None], key.mask[:, None, None, :]
        original = sims = similarities(v, u)  # [C, Q, N, K]
        queries, gram_CKK, norms = u[None], gram(v), u.norm(dim=-1)
        scores = []
        for step in range(self.steps):
            attention = normalize_raw(sims, query_mask, 2, "clipped_l2norm")
            weights = masked_softmax(self.lambda_softmax * attention, key_mask)
            with single_precision(u.device):
                relevance = attended_cosine(  # [C, Q, N]
                    single(original), single(weights), single(gram_CKK), single(norms)
                )
            mask = query.mask[None].expand_as(relevance)
            scores.append(aggregate(relevance, mask, "mean", lambda_lse=1.0))
            if self.memory is not None and step + 1 < self.steps:
                queries = self.memory(queries, weights, v)  # [C, Q, N, D]
                sims = (queries.flatten(1, 2) @ v.transpose(1, 2)).view_as(original)
        return torch.stack(scores)


@matchers.register("imram")
class IMRAM(FragmentMatcher):
    """IMRAM: K steps of attention with a gated memory; the score is the sum over steps and sides.

    ``mode``: in "text" words are the queries, in "image" regions; "full" has both directions, with
    separate weights. ``normalize`` scales refined queries to unit length; published runs do not.
    """

    compiles = True

    embed_size: int

    def __init__(
        self,
        embed_size: int,
        *,
        steps: int = 3,
        mode: Literal["full", "text", "image"] = "full",
        lambda_softmax: float = 9.0,
        normalize: bool = False,
    ) -> None:
        super().__init__(embed_size)
        if steps < 1:
            raise ConfigError(f"model.matcher.steps: expected at least 1, got {steps}")
        self.steps = steps
        self.text = self.image = None
        if mode != "image":
            self.text = RecurrentAttention(embed_size, steps, lambda_softmax, normalize)
        if mode != "text":
            self.image = RecurrentAttention(embed_size, steps, lambda_softmax, normalize)

    def cells_per_pair(self, words: int, regions: int) -> int:
        # what a training step keeps: after all steps but the last, every query fragment of a pair
        # has logits of its context and a new query, and from the second step on logits of its own
        queries = words * (self.text is not None) + regions * (self.image is not None)
        numbers = queries * self.embed_size * max(0, 5 * (self.steps - 1) - 2)
        if numbers and torch.is_autocast_enabled(next(self.parameters()).device.type):
            numbers //= 2  # of half the size
        return words * regions + numbers // self.floats_per_cell

    def tile(self, images: Encoded, texts: Encoded) -> Tensor:
        scores = []
        if self.text is not None:
            scores.append(self.text(texts, aligned(images)).sum(0))
        if self.image is not None:
            scores.append(self.image(images, aligned(texts)).sum(0).T)
        return torch.stack(scores).sum(0)
