"""An audit that was stopped goes on, to the same result; of anything else it starts anew."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import counterfoil as cf
from counterfoil.audit import survey as blocks
from counterfoil.audit import survey as keeping
from counterfoil.audit.survey import ARRAYS, SurveyCheckpoint, survey_split
from counterfoil.core.progress import Silent
from tests.audit.conftest import with_unreadable
from tests.audit.test_survey import SMALL
from tests.conftest import thinned

FIELDS = ("own", "rank", "other", "other_score", "pool", "pool_score")


class Stopped(Exception):
    pass


class StopsAfter(Silent):
    """Progress that ends the work after some steps, as Ctrl-C would."""

    def __init__(self, steps: int | None = None) -> None:
        self.steps, self.done, self.begun = steps, 0, []

    def track(self, items, description, total=None, done=0):
        self.begun.append((description, done))
        for item in items:
            yield item
            self.done += description.startswith("scoring")
            if self.done == self.steps:
                raise Stopped


@pytest.fixture
def often(monkeypatch):
    monkeypatch.setattr(blocks, "BATCH", 3)
    monkeypatch.setattr(keeping, "SAVE_SECONDS", 0.0)


@pytest.mark.parametrize("block", [None, 5])
@pytest.mark.parametrize("steps", thinned([1, 3, 5], 3))
def test_a_stopped_survey_goes_on_to_the_same_result(
    concepts, tmp_path, often, steps, block
) -> None:
    split = with_unreadable(concepts.test.select(range(16)), [5, 6, 7, 8, 9, 12], tmp_path)
    model = cf.create("naaf", concepts, **SMALL)
    whole = survey_split(model, split, block_size=block)
    file = tmp_path / "kept"
    with pytest.raises(Stopped):
        survey_split(
            model,
            split,
            StopsAfter(steps),
            block,
            checkpoint=SurveyCheckpoint.of(file, model, split),
        )
    rest = StopsAfter()
    result = survey_split(
        model, split, rest, block, checkpoint=SurveyCheckpoint.of(file, model, split)
    )
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(result, name), getattr(whole, name))
    assert (result.compared, result.skipped) == (whole.compared, whole.skipped)
    ((label, done),) = rest.begun  # own scores were not needed again
    assert label.startswith("scoring")
    assert done >= steps
    again = StopsAfter()
    survey_split(model, split, again, block, checkpoint=SurveyCheckpoint.of(file, model, split))
    assert again.done == 0


def test_another_model_or_split_starts_anew(concepts, tmp_path, often) -> None:
    split = concepts.test.select(range(8))
    model = cf.create("rvse-mlp", concepts, **SMALL)
    file = tmp_path / "kept"
    survey_split(model, split, checkpoint=SurveyCheckpoint.of(file, model, split))
    assert SurveyCheckpoint.of(file, model, split).load() is not None
    said = [["a dog", *texts[1:]] for texts in split.captions]
    assert SurveyCheckpoint.of(file, model, replace(split, captions=said)).load() is None
    assert SurveyCheckpoint.of(file, model, split.select([1, 0, *range(2, 8)])).load() is None
    unread = with_unreadable(split, [0], tmp_path)
    assert SurveyCheckpoint.of(file, model, unread).load() is None
    with torch.no_grad():
        next(model.parameters()).add_(0.1)
    assert SurveyCheckpoint.of(file, model, split).load() is None


def test_an_image_that_was_mended_is_looked_at(concepts, tmp_path, often, monkeypatch) -> None:
    monkeypatch.setattr(keeping, "FINGERPRINT_IMAGES", 2)
    split = concepts.test.select(range(8))
    broken = with_unreadable(split, [4], tmp_path)  # not one of those in the split's mark
    model = cf.create("rvse-mlp", concepts, **SMALL)
    file = tmp_path / "kept"
    result = survey_split(model, broken, checkpoint=SurveyCheckpoint.of(file, model, broken))
    assert len(result.skipped) == 1
    assert SurveyCheckpoint.of(file, model, split).load() is not None
    again = survey_split(model, split, checkpoint=SurveyCheckpoint.of(file, model, split))
    assert (again.skipped, again.compared) == ([], 8)
    assert not np.isnan(again.own).any()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_file_of_something_else_is_as_good_as_none(tmp_path) -> None:
    file = tmp_path / "kept"
    for start in (b"", b"\x80\x02", b"PK\x03\x04"):
        for code in range(256):
            file.write_bytes(start + bytes([code]) + b".")
            assert SurveyCheckpoint(file, "mark").load() is None


@pytest.mark.parametrize("cut", [0, 40, -10])
def test_a_damaged_file_is_as_good_as_none(concepts, tmp_path, often, cut) -> None:
    split = concepts.test.select(range(8))
    model = cf.create("rvse-mlp", concepts, **SMALL)
    file = tmp_path / "kept"
    checkpoint = SurveyCheckpoint.of(file, model, split)
    survey_split(model, split, checkpoint=checkpoint)
    file.write_bytes(file.read_bytes()[:cut])
    assert checkpoint.load() is None


def test_saving_waits_between_two_times(tmp_path) -> None:
    now = [0.0]
    checkpoint = SurveyCheckpoint(tmp_path / "kept", "mark", clock=lambda: now[0])
    checkpoint.save_if_due(lambda: dict.fromkeys(ARRAYS, 1))
    assert checkpoint.load() is None
    now[0] = keeping.SAVE_SECONDS
    checkpoint.save_if_due(lambda: {"done": 1})
    checkpoint.save_if_due(lambda: {"done": 2})
    assert checkpoint.load() == {"done": 1}
    checkpoint.save_if_due(lambda: {"done": 3}, last=True)
    assert checkpoint.load() == {"done": 3}


def test_a_disk_that_takes_no_more_does_not_stop_an_audit(tmp_path, monkeypatch) -> None:
    def full(path, data):
        raise OSError(28, "No space left on device")

    checkpoint = SurveyCheckpoint(tmp_path / "kept", "mark")
    checkpoint.save_if_due(lambda: {"n": torch.ones(1)}, last=True)
    monkeypatch.setattr(keeping, "write_atomically", full)
    checkpoint.save_if_due(lambda: {"n": torch.zeros(1)}, last=True)
    held = checkpoint.load()
    assert held is not None
    assert held["n"] == 1  # what was kept before
