"""How far rates of false alarms vary by chance: random halves of images."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.false_alarms import RATES, Signs, chance_rows, listed, random_halves

from counterfoil.audit.suspicion import MEASURED_SIGNS

CAPTIONS = 5


def drawn_signs(images: int, seed: int) -> Signs:
    """Captions of one image are alike."""
    rng = np.random.default_rng(seed)
    shape = (images, CAPTIONS, len(MEASURED_SIGNS))
    values = rng.gamma(4.0, size=shape) + rng.normal(size=(images, 1, len(MEASURED_SIGNS)))
    image = np.repeat(np.arange(images), CAPTIONS)
    return Signs(values.reshape(-1, len(MEASURED_SIGNS)), image, rng.random(len(image)) < 0.5)


def test_halves_never_share_an_image(monkeypatch) -> None:
    halves = []

    def count(trusted: Signs, clean: Signs) -> np.ndarray:
        halves.append((set(trusted.image.tolist()), set(clean.image.tolist())))
        return np.zeros((2, len(RATES)))

    monkeypatch.setattr("benchmarks.false_alarms.listed", count)
    random_halves(Signs.join([drawn_signs(10, 0), drawn_signs(10, 1)]), draws=3)
    for mine, others in halves:
        assert len(mine) == len(others) == 10
        assert not mine & others
    assert len({tuple(sorted(mine)) for mine, _ in halves}) == 3


def test_random_halves_are_listed_at_the_nominal_rate_and_vary_less_by_trusted_scales() -> None:
    draws = 40
    shares = random_halves(drawn_signs(400, 0), draws)
    trusted, own = shares.std(0)
    assert (np.abs(shares[:, 0].mean(0) - RATES) < 3 * trusted / np.sqrt(draws)).all()
    assert (trusted < own).all()


def test_the_rows_have_the_splits_and_the_range_of_halves() -> None:
    one, two = drawn_signs(60, 0), drawn_signs(60, 1)
    head, *rows = chance_rows(one, two, draws=5)
    assert len(head) == 5
    assert [float(row[0]) / 100 for row in rows] == pytest.approx(RATES)
    shares = 100 * listed(one, two)
    for k, row in enumerate(rows):
        assert [row[1], row[3]] == [f"{share:.1f}" for share in shares[:, k]]
        for cell in (row[2], row[4]):
            low, high = map(float, cell.split(" to "))
            assert 0 <= low <= high <= 100
