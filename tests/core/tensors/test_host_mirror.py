"""What a mask says is known on the host until the mask changes."""

from __future__ import annotations

import torch

from counterfoil.core.tensors.host_mirror import (
    attach_host_copy,
    host_mask,
    known_unpadded,
    rows_of,
)
from counterfoil.data.batches.collate import pad_texts


def test_a_moved_mask_is_not_read_back() -> None:
    here = torch.tensor([[True, False], [True, True]])
    there = attach_host_copy(here.clone(), here)
    assert host_mask(there) is not host_mask(there.clone())
    here[0, 1] = True  # nobody does that; it shows which one is read
    assert host_mask(there).tolist() == [[True, True], [True, True]]


def test_a_mask_that_has_changed_is_read_again() -> None:
    here = torch.tensor([True, True, False])
    there = attach_host_copy(here.clone(), here)
    there[0] = False
    assert host_mask(there).tolist() == [False, True, False]
    assert host_mask(there[1:]).tolist() == [True, False]


def test_in_inference_mode_masks_are_read() -> None:
    with torch.inference_mode():
        mask = attach_host_copy(torch.tensor([True, False]), torch.tensor([True, True]))
        assert host_mask(mask).tolist() == [True, False]


def test_batches_remember_their_masks_when_they_move() -> None:
    moved = pad_texts([[1, 2], [3]], pad=0).to("meta")
    assert host_mask(moved.mask).tolist() == [[True, True], [True, False]]


def test_what_is_surely_whole_is_asked_without_waiting() -> None:
    whole, part = pad_texts([[1, 2], [3, 4]], pad=0), pad_texts([[1, 2], [3]], pad=0)
    assert known_unpadded(whole.mask)
    assert not known_unpadded(part.mask)
    assert known_unpadded(whole.to("meta").mask)
    assert not known_unpadded(part.to("meta").mask)
    assert not known_unpadded(whole.to("meta").mask[:1])  # nobody knows, and meta could not be read


def test_rows_of_a_mask_that_is_known_are_known() -> None:
    mask = pad_texts([[1, 2], [3], [4, 5]], pad=0).to("meta").mask
    assert host_mask(rows_of(mask, slice(1, 3))).tolist() == [[True, False], [True, True]]
    here = torch.tensor([True, False, True])
    assert host_mask(rows_of(here, slice(1, 3))).tolist() == [False, True]
