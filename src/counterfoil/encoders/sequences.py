"""A recurrent network over sequences of unlike lengths, without a loop over their steps."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from counterfoil.encoders.recorded import replayed

Indices = NDArray[np.int64]


def run_gru(rnn: nn.GRU, inputs: Tensor, lengths: Indices) -> Tensor:
    """States [B, W, directions·H] over the first ``lengths`` [B] of inputs [B, W, D]; zero beyond.

    A length of 0 counts as 1. Lengths are the host's, which has to know them. PyTorch's own packing
    copies step by step, both ways, which on a GPU is some hundred launches a batch; here rows are
    picked and put back by one index. In training on a GPU the whole of it is `replayed`.

    With autocast to bfloat16 on a GPU, this is in single precision: cuDNN has no recurrent networks
    in bfloat16, and PyTorch's autocast takes float16 for them, in which a gradient of more than
    65,504 is infinite. Losses that are summed over pairs come to such gradients. What is replayed
    is in float16 all the same, with gradients that are scaled into its range (`HalfRange`).
    """
    mixed = inputs.is_cuda and torch.is_autocast_enabled("cuda")
    if mixed and torch.get_autocast_dtype("cuda") == torch.bfloat16:
        with torch.autocast("cuda", enabled=False):
            return _run_gru(rnn, inputs.float(), lengths, half=True)
    return _run_gru(rnn, inputs, lengths, half=False)


def _run_gru(rnn: nn.GRU, inputs: Tensor, lengths: Indices, half: bool) -> Tensor:
    lengths = np.maximum(lengths, 1)
    found = replayed(rnn, inputs, lengths, half)
    if found is not None:
        return found
    rows, counts = _packed_rows(lengths, inputs.shape[1])
    at = torch.from_numpy(rows).to(inputs.device, non_blocking=True)
    flat = inputs.flatten(0, 1)
    packed = PackedSequence(flat.index_select(0, at), torch.from_numpy(counts))
    states: Tensor = rnn(packed)[0].data
    out = states.new_zeros(len(flat), states.shape[1]).index_copy(0, at, states)
    return out.view(*inputs.shape[:2], -1)


def _packed_rows(sizes: Indices, width: int) -> tuple[Indices, Indices]:
    """Rows of [B·W, D] step by step, the longest sequence first, and how many go on at each step.

    >>> rows, counts = _packed_rows(np.array([1, 3]), 3)
    >>> rows.tolist(), counts.tolist()
    ([3, 0, 4, 5], [2, 1, 1])
    """
    order = np.argsort(-sizes, kind="stable")
    steps = np.arange(sizes.max(initial=0))[:, None]
    going = steps < sizes[order]
    return (order * width + steps)[going], going.sum(1)
