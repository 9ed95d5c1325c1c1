"""Counts the operations that a cross-encoder's transformer needs, while it is at work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from counterfoil.encoders.transformer import Packing
from counterfoil.matchers.cross_encoder import CrossEncoder

BACKWARD = 3
"""A pass with gradients, in passes without: twice the products again on the way back."""


@dataclass
class Calls:
    """What went through, by kind: real tokens and the squares of the sequences' lengths."""

    sequences: int = 0
    tokens: int = 0
    squares: list[Tensor | int] = field(default_factory=list)
    written: int = 0

    def add(self, tokens: Tensor, packing: Packing) -> None:
        self.sequences += packing.count
        self.tokens += len(tokens)
        if packing.rows is None:
            self.squares.append(packing.count * packing.longest**2)
        else:
            ends = torch.cat([packing.starts[1:], packing.starts.new_tensor([len(tokens)])])
            self.squares.append((ends - packing.starts).square().sum())


class Work:
    """Operations of the products of a cross-encoder, padding and recomputation not counted.

    A token takes 2 · (weights of a layer's products) and 4 · L · D for attention in every layer.
    Where only the first token's state is read, the last layer owes keys and values of all tokens
    and the rest for one of each sequence: `needed` counts it so, `whole` as the other layers.
    """

    def __init__(self, matcher: CrossEncoder) -> None:
        self.matcher = matcher
        self.calls: dict[tuple[bool, bool], Calls] = {}  # by: with gradients, first tokens only
        self.going_back = False

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Inside, what goes through the transformer and the heads that write words counts."""
        self.calls = {}
        hooks = [self.matcher.transformer.register_forward_pre_hook(self._see, with_kwargs=True)]
        for name in ("mlm", "correction"):
            if name in self.matcher.heads:
                hooks.append(self.matcher.heads[name].register_forward_pre_hook(self._see_words))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Inside, nothing counts: what is computed there again is no work of the model's."""
        self.going_back = True
        try:
            yield
        finally:
            self.going_back = False

    def sequences(self, with_gradients: bool | None = None) -> int:
        kinds = self.calls.items()
        wanted = (None, with_gradients) if with_gradients is not None else (None, True, False)
        return sum(calls.sequences for (grad, _), calls in kinds if grad in wanted)

    def tokens(self) -> int:
        return sum(calls.tokens for calls in self.calls.values())

    @property
    def needed(self) -> float:
        return self._total(spare=True)

    @property
    def whole(self) -> float:
        return self._total(spare=False)

    def _total(self, spare: bool) -> float:
        return sum(
            (BACKWARD if gradients else 1) * self._operations(calls, spare and first_only)
            for (gradients, first_only), calls in self.calls.items()
        )

    def _operations(self, calls: Calls, spare: bool) -> float:
        width, ffn = self.matcher.embed_size, self.matcher.transformer.ffn
        depth = len(self.matcher.transformer.layers) - spare
        weights = 4 * width * width + 2 * width * ffn
        squares = sum(int(some) for some in calls.squares)
        total = depth * (2 * weights * calls.tokens + 4 * width * squares)
        if spare:
            keys_and_values = 2 * width * width
            total += 2 * keys_and_values * calls.tokens + 4 * width * calls.tokens
            total += 2 * (weights - keys_and_values) * calls.sequences
        total += 2 * width * width * calls.sequences  # the pooler
        return total + 2 * calls.written * width * (width + self._vocabulary())

    def _vocabulary(self) -> int:
        heads = self.matcher.heads
        return len(heads["mlm"].bias) if "mlm" in heads else 0  # type: ignore[arg-type]

    def _kind(self, first_only: bool) -> Calls:
        return self.calls.setdefault((torch.is_grad_enabled(), first_only), Calls())

    def _see(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.going_back:
            tokens, packing, *rest = args
            first_only = bool(rest[0] if rest else kwargs.get("first_only", False))
            self._kind(first_only).add(tokens, packing)

    def _see_words(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not self.going_back:
            self._kind(False).written += args[0].shape[:-1].numel()
