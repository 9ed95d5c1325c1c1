"""A model that is asked goes back to what it was doing."""

from __future__ import annotations

import pytest
from torch import nn

from counterfoil.core.tensors.modes import eval_mode


@pytest.mark.parametrize("training", [True, False])
def test_a_model_is_evaluated_inside_and_as_before_outside_even_after_an_error(training) -> None:
    model = nn.Sequential(nn.Dropout()).train(training)
    with eval_mode(model):
        assert not any(part.training for part in model.modules())
    assert all(part.training == training for part in model.modules())
    with pytest.raises(ValueError, match="no"), eval_mode(model):
        raise ValueError("no")
    assert all(part.training == training for part in model.modules())
