"""What a mask says is known on the host until the mask changes."""

from __future__ import annotations

import torch

from counterfoil.core.tensors.host_mirror import on_host, remember, rows_of, surely_whole
from counterfoil.data.batches.collate import pad_texts


def test_a_moved_mask_is_not_read_back() -> None:
    here = torch.tensor([[True, False], [True, True]])
    there = remember(here.clone(), here)
    assert on_host(there) is not on_host(there.clone())
    here[0, 1] = True  # nobody does that; it shows which one is read
    assert on_host(there).tolist() == [[True, True], [True, True]]


def test_a_mask_that_has_changed_is_read_again() -> None:
    here = torch.tensor([True, True, False])
    there = remember(here.clone(), here)
    there[0] = False
    assert on_host(there).tolist() == [False, True, False]
    assert on_host(there[1:]).tolist() == [True, False]


def test_in_inference_mode_masks_are_read() -> None:
    with torch.inference_mode():
        mask = remember(torch.tensor([True, False]), torch.tensor([True, True]))
        assert on_host(mask).tolist() == [True, False]


def test_batches_remember_their_masks_when_they_move() -> None:
    moved = pad_texts([[1, 2], [3]], pad=0).to("meta")
    assert on_host(moved.mask).tolist() == [[True, True], [True, False]]


def test_what_is_surely_whole_is_asked_without_waiting() -> None:
    whole, part = pad_texts([[1, 2], [3, 4]], pad=0), pad_texts([[1, 2], [3]], pad=0)
    assert surely_whole(whole.mask)
    assert not surely_whole(part.mask)
    assert surely_whole(whole.to("meta").mask)
    assert not surely_whole(part.to("meta").mask)
    assert not surely_whole(whole.to("meta").mask[:1])  # nobody knows, and meta could not be read


def test_rows_of_a_mask_that_is_known_are_known() -> None:
    mask = pad_texts([[1, 2], [3], [4, 5]], pad=0).to("meta").mask
    assert on_host(rows_of(mask, slice(1, 3))).tolist() == [[True, False], [True, True]]
    here = torch.tensor([True, False, True])
    assert on_host(rows_of(here, slice(1, 3))).tolist() == [False, True]
