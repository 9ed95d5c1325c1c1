"""Whether "5 % false alarms" means 5 %: nominal and actual rates of an audit, on right captions.

    python benchmarks/false_alarms.py scenes-naaf --data scenes --option images=[0,200,200]

Thresholds come from one split whose captions are all right (--trusted), false alarms are counted in
another one (--split). If the scenes are drawn, it also reports how many planted errors are found.

A second table says how far the rate of captions varies by chance: the images of both splits are
dealt into two halves at random, one of which is trusted. Beside the audit's way, which compares
both halves with what is usual in the trusted one, each half is compared with itself.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from counterfoil.audit import alarm_curve, audit_split, calibrate
from counterfoil.audit.audit import Audit
from counterfoil.audit.false_alarms import conformal_threshold
from counterfoil.audit.planted_errors import Corrupted, corrupt
from counterfoil.audit.suspicion import (
    SIGNS,
    WEIGHTS,
    WORDS,
    Scale,
    Scales,
    Values,
    caption_doubts,
    sign_deviations,
    sign_scales,
)
from counterfoil.core.progress import Silent
from counterfoil.core.zoo import resolve
from counterfoil.evaluation.foils.truth import has_truth
from counterfoil.evaluation.report import markdown_table
from counterfoil.evaluation.words.doubts import NO_DOUBT
from counterfoil.training.run_data import data_for_run
from counterfoil.training.run_folder import load_model

RATES = (0.01, 0.02, 0.05, 0.1, 0.2)

Row = tuple[str, ...]


@dataclass(frozen=True)
class Signs:
    """Values [captions, signs] of captions in the order of their images.

    ``reference`` [captions]: whether a caption was drawn at random, so that its words count as
    usual.
    """

    values: Values
    image: np.ndarray
    reference: np.ndarray

    @classmethod
    def of(cls, audit: Audit) -> Signs:
        captions = audit.survey.captions
        reference = np.isin(captions, audit.reference)
        return cls(audit.values[captions], audit.survey.image_of[captions], reference)

    @classmethod
    def join(cls, parts: Sequence[Signs]) -> Signs:
        starts = np.cumsum([0, *(part.image.max() + 1 for part in parts)])
        return cls(
            np.concatenate([part.values for part in parts]),
            np.concatenate([part.image + k for part, k in zip(parts, starts, strict=False)]),
            np.concatenate([part.reference for part in parts]),
        )

    def select(self, rows: np.ndarray) -> Signs:
        return Signs(self.values[rows], self.image[rows], self.reference[rows])

    def scales(self) -> Scales:
        words = sign_scales(self.values[self.reference])[SIGNS[WORDS]]
        signs = {**sign_scales(self.values), SIGNS[WORDS]: words}
        doubts = caption_doubts(sign_deviations(self.values, signs))
        return Scales(signs, Scale.of_usual(doubts), dict(WEIGHTS))


def listed(trusted: Signs, clean: Signs) -> Values:
    """Shares [ways, rates] of clean captions listed: by the scales of the trusted, by their own."""
    usual = trusted.scales()
    limits = [conformal_threshold(usual.suspicion(trusted.values), rate) for rate in RATES]
    ways = (usual.suspicion(clean.values), clean.scales().suspicion(clean.values))
    return np.array([[(suspicion > limit).mean() for limit in limits] for suspicion in ways])


def random_halves(signs: Signs, draws: int, seed: int = 0) -> Values:
    """`listed` [draws, ways, rates] of halves of the images, drawn at random."""
    rng = np.random.default_rng(seed)
    images = np.unique(signs.image)
    result = []
    for _ in range(draws):
        mine = np.isin(signs.image, rng.permutation(images)[: len(images) // 2])
        result.append(listed(signs.select(mine), signs.select(~mine)))
    return np.array(result)


def chance_rows(trusted: Signs, clean: Signs, draws: int) -> list[Row]:
    """Rates of captions by both ways: of the two splits, and the middle 95 % of random halves."""
    splits = listed(trusted, clean)
    low, high = np.quantile(random_halves(Signs.join([trusted, clean]), draws), (0.025, 0.975), 0)
    rows: list[Row] = [
        ("nominal", "trusted scales", "in random halves", "own scales", "in random halves")
    ]
    for k, rate in enumerate(RATES):
        cells = [f"{100 * rate:.1f}"]
        for way in range(2):
            cells.append(f"{100 * splits[way, k]:.1f}")
            cells.append(f"{100 * low[way, k]:.1f} to {100 * high[way, k]:.1f}")
        rows.append(tuple(cells))
    return rows


def planted(trusted: Audit, audit: Audit, truth: Corrupted, rate: float) -> tuple[float, ...]:
    """Shares of the right captions listed, by trusted scales and by own ones; of wrong items found.

    These are the wrong captions listed and the wrong words named. A word of a caption that was not
    examined is not named.
    """
    limits = calibrate(trusted, rate)
    above = audit.suspicion > limits.caption_threshold
    signs = Signs.of(audit)
    compared_with_itself = signs.scales().suspicion(signs.values)
    right = ~truth.labels[audit.survey.captions]
    own = (compared_with_itself[right] > limits.caption_threshold).mean()
    named = []
    for number, kinds in truth.wrong.items():
        doubts = audit.word_doubts.get(number, np.full(len(kinds), NO_DOUBT))
        named += [doubts[k] > limits.word_threshold for k, kind in enumerate(kinds) if kind]
    return above[~truth.labels].mean(), own, above[truth.labels].mean(), float(np.mean(named))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("run")
    parser.add_argument("--data", default=None)
    parser.add_argument("--option", action="append", default=[], help="key=JSON, of the data")
    parser.add_argument("--trusted", default="dev")
    parser.add_argument("--split", default="test")
    parser.add_argument("--swapped", type=float, default=0.05)
    parser.add_argument("--words", type=float, default=0.10)
    parser.add_argument("--examine", type=int, default=5000, help="captions examined by word")
    parser.add_argument("--draws", type=int, default=200, help="random halves")
    parser.add_argument("--chance", type=Path, help="also write the second table, as JSON")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "counterfoil")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    given = (pair.partition("=") for pair in options.option)
    settings = {name: json.loads(value) for name, _, value in given}
    folder = resolve(options.run, cache=options.cache)
    model = load_model(folder, options.device)
    names = [options.trusted, options.split]
    data = data_for_run(folder, options.data, None, settings, options.cache, Silent(), names)
    trusted = audit_split(model, data[options.trusted], examined=options.examine)
    limits = calibrate(trusted, RATES[0])  # its scales are those of all rates
    clean = audit_split(model, data[options.split], examined=options.examine, false_alarms=limits)
    curve = alarm_curve(trusted, clean, RATES)
    rows = [("nominal", "right captions listed", "right words named")]
    rows += [tuple(f"{100 * x:.1f}" for x in (c.nominal, c.captions, c.words)) for c in curve]
    if has_truth(data[options.split]):
        truth = corrupt(data[options.split], options.swapped, options.words)
        audit = audit_split(model, truth.split, examined=options.examine, false_alarms=limits)
        rows[0] += ("right beside wrong listed", "the same, own scales")
        rows[0] += ("wrong captions listed", "wrong words named")
        for number, one in enumerate(curve, start=1):
            shares = planted(trusted, audit, truth, one.nominal)
            rows[number] += tuple(f"{100 * share:.1f}" for share in shares)
    chance = chance_rows(Signs.of(trusted), Signs.of(clean), options.draws)
    if options.chance is not None:
        options.chance.write_text(json.dumps(chance), encoding="utf-8")
    if options.json:
        print(json.dumps(rows))
        return 0
    print(
        f"{options.run}: thresholds from {len(trusted.suspicion):,} captions of "
        f"'{options.trusted}', false alarms among {len(clean.suspicion):,} of '{options.split}', "
        "in percent\n"
    )
    print("\n".join(markdown_table(rows)))
    print(f"\nright captions listed, and the middle 95 % of {options.draws} random halves\n")
    print("\n".join(markdown_table(chance)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
