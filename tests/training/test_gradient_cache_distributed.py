"""Two processes that encode in chunks do what one process does with the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.training.test_trainer_distributed import check_alike, losses_and_gradients


@pytest.mark.parametrize("model", ["rvse-mlp", "naaf"])
def test_two_processes_in_chunks_give_the_gradients_of_one_whole(
    tmp_path, in_two_processes, model
) -> None:
    one = losses_and_gradients(tmp_path, model, "hardest")
    check_alike(one, in_two_processes(losses_and_gradients, tmp_path, model, "hardest", 3)[0])


def attention_to_padding(folder: Path, chunk: int = 0) -> dict[str, Any]:
    image = {"name": "self-attention", "form": "reference"}
    return losses_and_gradients(folder, "chan", "hardest", chunk, image=image)


def test_processes_with_unequal_numbers_of_chunks_pad_as_one(tmp_path, in_two_processes) -> None:
    """Of 15 pairs, one process has eight, two chunks of seven, and the other seven, one chunk."""
    one = attention_to_padding(tmp_path)
    check_alike(one, in_two_processes(attention_to_padding, tmp_path, 7)[0])
