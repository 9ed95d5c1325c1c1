"""Two processes that encode in chunks do what one process does with the whole batch."""

from __future__ import annotations

import pytest

from tests.training.test_trainer_distributed import check_alike, losses_and_gradients


@pytest.mark.parametrize("model", ["rvse-mlp", "naaf"])
def test_two_processes_in_chunks_give_the_gradients_of_one_whole(
    tmp_path, in_two_processes, model
) -> None:
    one = losses_and_gradients(tmp_path, model, "hardest")
    check_alike(one, in_two_processes(losses_and_gradients, tmp_path, model, "hardest", 3)[0])
