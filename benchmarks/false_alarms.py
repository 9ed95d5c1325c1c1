"""Whether "5 % false alarms" means 5 %: nominal and actual rates of an audit, on right captions.

    python benchmarks/false_alarms.py scenes-naaf --data scenes --option images=[0,200,200]

Thresholds come from one split whose captions are all right (--trusted), false alarms are counted in
another one (--split). If the scenes are drawn, it also reports how many planted errors are found.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from counterfoil.audit import alarm_curve, audit_split, calibrate
from counterfoil.audit.audit import Audit
from counterfoil.audit.benchmark import Corrupted, corrupt
from counterfoil.core.progress import Silent
from counterfoil.core.zoo import resolve
from counterfoil.evaluation.foils.truth import has_truth
from counterfoil.evaluation.report import markdown_table
from counterfoil.training.run_data import evaluation_split
from counterfoil.training.run_folder import load_model

RATES = (0.01, 0.02, 0.05, 0.1, 0.2)


def found(trusted: Audit, audit: Audit, truth: Corrupted, rate: float) -> tuple[float, float]:
    """Shares of the wrong captions listed, and of the wrong words of exchanged captions named."""
    limits = calibrate(trusted, rate)
    listed = audit.suspicion > limits.caption_threshold
    doubts = [audit.word_doubts[number] for number in truth.wrong]
    wrong = [np.array([bool(kind) for kind in kinds]) for kinds in truth.wrong.values()]
    named = np.concatenate(doubts)[np.concatenate(wrong)] > limits.word_threshold
    return float(listed[truth.labels].mean()), float(named.mean())


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
    parser.add_argument("--device", default="auto")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "counterfoil")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    given = (pair.partition("=") for pair in options.option)
    settings = {name: json.loads(value) for name, _, value in given}
    folder = resolve(options.run, cache=options.cache)
    model = load_model(folder, options.device)
    data = evaluation_split(folder, options.data, None, settings, options.cache, Silent())
    trusted = audit_split(model, data[options.trusted], examined=options.examine)
    clean = audit_split(model, data[options.split], examined=options.examine)
    curve = alarm_curve(trusted, clean, RATES)
    rows = [("nominal", "right captions listed", "right words named")]
    rows += [tuple(f"{100 * x:.1f}" for x in (c.nominal, c.captions, c.words)) for c in curve]
    if has_truth(data[options.split]):
        truth = corrupt(data[options.split], options.swapped, options.words)
        audit = audit_split(model, truth.split, examined=len(truth.labels))
        rows[0] += ("wrong captions listed", "wrong words named")
        for number, one in enumerate(curve, start=1):
            shares = found(trusted, audit, truth, one.nominal)
            rows[number] += tuple(f"{100 * share:.1f}" for share in shares)
    if options.json:
        print(json.dumps(rows))
        return 0
    print(
        f"{options.run}: thresholds from {len(trusted.suspicion):,} captions of "
        f"'{options.trusted}', false alarms among {len(clean.suspicion):,} of '{options.split}', "
        "in percent\n"
    )
    print("\n".join(markdown_table(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
