"""What is read off a cross-encoder's states: a match, a word, whether a word is right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from counterfoil.encoders.transformer import EPS, initialise
from counterfoil.errors import ConfigError

Head = Literal["itm", "mlm", "discrimination", "correction"]


ORDER: dict[str, str | None] = {
    "itm": None,
    "mlm": None,
    "discrimination": "itm",
    "correction": "mlm",
}
"""Heads in the order they are made, and which of them a new one is a copy of."""


class WordHead(nn.Module):
    """Logits over the vocabulary: a dense layer, GELU and a norm, then the table of word vectors.

    The table is the text encoder's own, given at each call, so that both stay one.
    """

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=EPS)
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, states: Tensor, table: Tensor) -> Tensor:
        return F.linear(self.norm(F.gelu(self.dense(states))), table, self.bias)


class CrossHeads(nn.ModuleDict):
    """The heads by name, ``rank`` always, the others where asked for.

    ``rank`` (a logit) and ``itm`` (no, yes) read the pooled vector of a pair; ``mlm``,
    ``discrimination`` (replaced, original) and ``correction`` the state of each token.
    """

    def __init__(self, width: int, extras: Sequence[Head] = (), vocabulary: int = 0) -> None:
        super().__init__()
        self.width = width
        self["rank"] = nn.Linear(width, 1)
        initialise(self)
        self.add(extras, vocabulary)

    def __getitem__(self, name: str) -> nn.Module:
        if name not in self:
            raise ConfigError(
                f"this cross-encoder has no head '{name}', only {', '.join(self)}: "
                f"name it in model.matcher.extras"
            )
        return super().__getitem__(name)

    def add(self, extras: Sequence[Head], vocabulary: int) -> None:
        """Further heads, started as TAGS starts them where it says how.

        Discrimination begins as ``itm``, correction as ``mlm``, ``itm`` with ``rank`` as its "yes".
        """
        for name in sorted(set(extras) - set(self), key=list(ORDER).index):
            head = self._create(name, vocabulary)
            initialise(head)
            model = ORDER[name]
            if model is not None and model in self:
                head.load_state_dict(self[model].state_dict())
            if name == "itm":
                _set_row(head, 1, self["rank"])
            sample = next(self["rank"].parameters())
            self[name] = head.to(sample.device, sample.dtype)

    def _create(self, name: str, vocabulary: int) -> nn.Module:
        if name in ("itm", "discrimination"):
            return nn.Linear(self.width, 2)
        if vocabulary < 1:
            raise ConfigError(
                f"model.matcher.extras: '{name}' writes words, so model.matcher.vocabulary must "
                "say how many there are"
            )
        return WordHead(self.width, vocabulary)


@torch.no_grad()
def _set_row(head: nn.Module, row: int, source: nn.Module) -> None:
    for mine, theirs in zip(head.parameters(), source.parameters(), strict=True):
        mine[row].copy_(theirs[0])
