"""The scores of every named model on a fixed batch, written down: a change of code keeps them.

``python -m pytest tests/models/test_same_scores.py --write-scores`` writes them down anew, for a
change that is meant to alter them; the commit says why.
"""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path

import pytest
import torch

from counterfoil.models import models
from tests.models.test_models import FEATURE_MODELS, make, tiny_bert  # noqa: F401

FILE = Path(__file__).with_name("same_scores.json")
TOLERANCE = 2e-5
"""Of the scores on another kind of processor, whose sums are of another order."""
GSMN_TOLERANCE = 2e-4
"""GSMN's thresholds turn differences of rounding into larger steps."""


def this_machine() -> str:
    """What decides the last bit: the version of torch and the processor."""
    names = [line for line in cpu_info() if line.startswith("model name")]
    parts = [torch.__version__, torch.backends.cpu.get_cpu_capability(), platform.machine()]
    return hashlib.sha256("|".join([*parts, *names[:1]]).encode()).hexdigest()[:16]


def cpu_info() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


def scores_of(name: str, pairs, bert) -> torch.Tensor:
    model = make(name, pairs, bert).eval()
    images = [pairs.test.fragments.read(i) for i in range(4)]
    return model.score(images, pairs.test.texts[:5])


def digest(scores: torch.Tensor) -> str:
    return hashlib.sha256(scores.contiguous().numpy().tobytes()).hexdigest()


@pytest.fixture(scope="session")
def written(request) -> dict:
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}


@pytest.mark.parametrize("name", FEATURE_MODELS)
def test_a_model_scores_as_it_did(name, concepts, tiny_bert, written, request) -> None:  # noqa: F811
    scores = scores_of(name, concepts, tiny_bert)
    if request.config.getoption("--write-scores"):
        write_down(name, scores)
        return
    stored = written["scores"][name]
    expected = torch.tensor(stored["values"])
    scale = max(1.0, float(expected.abs().max()))
    assert scores.shape == expected.shape
    assert (
        float((scores - expected).abs().max())
        <= (GSMN_TOLERANCE if name.startswith("gsmn") else TOLERANCE) * scale
    )
    if written["machine"] == this_machine():
        assert digest(scores) == stored["sha256"]


def write_down(name: str, scores: torch.Tensor) -> None:
    stored = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {"scores": {}}
    stored["machine"] = this_machine()
    stored["scores"][name] = {"sha256": digest(scores), "values": scores.tolist()}
    FILE.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


def test_every_model_of_the_registry_is_written_down(written) -> None:
    assert set(written["scores"]) == set(FEATURE_MODELS)
    assert set(FEATURE_MODELS) <= set(models)
