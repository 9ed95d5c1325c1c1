"""Batches that travel: what arrives is what was sent, in as few pieces as can be."""

from __future__ import annotations

from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from counterfoil.core.tensors import transfer as moving
from counterfoil.core.tensors.host_mirror import host_mask
from counterfoil.core.tensors.transfer import (
    ALIGNMENT_BYTES,
    TensorBundle,
    moved,
    pack,
    packs,
    unpack,
)
from counterfoil.data.batches.collate import TextBatch, pad_texts

TYPES = [torch.int64, torch.int32, torch.bool, torch.float32, torch.float16, torch.uint8]


@dataclass(frozen=True)
class Parcel(TensorBundle):
    texts: TextBatch
    numbers: Tensor
    large: Tensor
    absent: Tensor | None = None
    said: tuple[str, ...] = ()
    more: dict[str, Tensor | TextBatch] = field(default_factory=dict)


def parcel() -> Parcel:
    numbers, large = torch.arange(5), torch.rand(300, 300)
    more = {"half": torch.rand(3, 1).half(), "words": pad_texts([[4], [5, 6]], 0)}
    return Parcel(pad_texts([[1, 2, 3], [4]], 0), numbers, large, None, ("one",), more)


def assert_same(mine: Parcel, other: Parcel) -> None:
    assert mine.said == other.said
    assert mine.absent is None
    assert mine.more.keys() == other.more.keys()
    for a, b in zip(moving.tree_flatten(mine)[1], moving.tree_flatten(other)[1], strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


tensors = st.lists(
    st.tuples(st.sampled_from(TYPES), st.lists(st.integers(0, 9), max_size=3)), max_size=8
)


@given(wanted=tensors, seed=st.integers(0, 99))
def test_tensors_side_by_side_are_found_again(wanted, seed) -> None:
    draws = torch.Generator().manual_seed(seed)
    sent = [torch.randint(0, 99, shape, generator=draws).to(dtype) for dtype, shape in wanted]
    packed, places = pack(sent)
    memory = torch.frombuffer(packed, dtype=torch.uint8) if packed else torch.empty(0).byte()
    result = unpack(memory, places)
    assert len(result) == len(sent)
    for mine, theirs in zip(sent, result, strict=True):
        assert theirs.dtype == mine.dtype
        assert theirs.is_contiguous()
        assert torch.equal(theirs, mine)
        assert theirs.storage_offset() * theirs.dtype.itemsize % ALIGNMENT_BYTES == 0
    for number, theirs in enumerate(result):  # none lies over another
        theirs.fill_(1)
        for mine, later in zip(sent[number + 1 :], result[number + 1 :], strict=True):
            assert torch.equal(later, mine)


def test_a_parcel_comes_out_of_a_message_as_it_went_in() -> None:
    sent = parcel()
    result = ForkingPickler.loads(bytes(ForkingPickler.dumps(sent)))
    assert_same(result, sent)
    assert result.large.is_shared()
    assert not result.numbers.is_shared()
    result.numbers[0] = 7  # its own memory, writable


def test_what_is_small_goes_to_a_device_as_one(monkeypatch) -> None:
    sent, plain = parcel(), Tensor.to
    sizes: list[int] = []

    def counted(tensor: Tensor, *args: object, **options: object) -> Tensor:
        sizes.extend([tensor.nbytes] if tensor.is_cpu else [])
        return plain(tensor, *args, **options)

    monkeypatch.setattr(Tensor, "to", counted)
    result = sent.to("meta")
    assert len(sizes) == 2
    assert max(sizes) == sent.large.nbytes
    assert result.numbers.dtype == torch.int64
    assert result.texts.ids.shape == sent.texts.ids.shape
    assert result.more["half"].dtype == torch.float32
    assert result.numbers.is_contiguous()
    assert host_mask(result.texts.mask).tolist() == sent.texts.mask.tolist()
    assert host_mask(result.more["words"].mask).tolist() == [[True, False], [True, True]]


def test_on_the_host_nothing_is_copied() -> None:
    sent = parcel()
    result = sent.to("cpu")
    assert result.numbers is sent.numbers
    assert result.texts.mask is sent.texts.mask
    assert_same(result, parcel_like(sent))


def parcel_like(sent: Parcel) -> Parcel:
    more = {"half": sent.more["half"].float(), "words": sent.more["words"]}
    return Parcel(sent.texts, sent.numbers, sent.large, None, sent.said, more)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1 << 18, dtype=torch.int64),
        torch.zeros(3, 4).T,
        torch.zeros(3, dtype=torch.bfloat16),
        torch.zeros(3, requires_grad=True),
        torch.zeros(3, device="meta"),
    ],
)
def test_what_cannot_lie_beside_others_goes_by_itself(tensor) -> None:
    assert not packs(tensor)
    arrived, other = moved([tensor, torch.ones(2)], torch.device("meta"))
    assert (arrived.shape, arrived.dtype) == (tensor.shape, tensor.dtype)
    assert other.shape == (2,)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_gets_the_same_numbers_though_it_is_busy() -> None:
    busy = torch.rand(4000, 4000, device="cuda")
    for _ in range(20):
        busy = busy @ busy / busy.norm()
    sent = [parcel() for _ in range(50)]
    result = [each.to("cuda") for each in sent]
    for mine, theirs in zip(sent, result, strict=True):
        assert_same(theirs.to("cpu"), parcel_like(mine))
