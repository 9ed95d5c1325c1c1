"""How well an audit finds captions that were made wrong at a known rate, on the drawn scenes.

    python benchmarks/audit_scenes.py scenes-naaf --images 500 --swapped 0.05 --words 0.10
    python benchmarks/audit_scenes.py runs/scenes-naaf --split test

A share of the captions is given to other images (data/splits.py), of others one to three words are
exchanged so that they are false for sure (evaluation/words/cases.py); the audit is told nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from counterfoil.audit.audit import Audit, audit_split
from counterfoil.audit.planted_errors import Corrupted, corrupt, measure_audit
from counterfoil.audit.suspicion import SIGNS
from counterfoil.core.progress import Silent
from counterfoil.core.zoo import resolve
from counterfoil.evaluation.report import markdown_table
from counterfoil.training.run_data import data_for_run
from counterfoil.training.run_folder import load_model

THRESHOLDS = (0.3, 0.5, 0.7, 0.9)


def by_threshold(audit: Audit, clean: Audit, truth: Corrupted) -> list[tuple[str, ...]]:
    """What other thresholds would have listed."""
    rows: list[tuple[str, ...]] = [("threshold", "listed", "precision", "recall", "clean listed")]
    for threshold in THRESHOLDS:
        listed = audit.suspicion >= threshold
        hits = int((listed & truth.labels).sum())
        shares = (hits / max(1, listed.sum()), hits / truth.labels.sum())
        alarms = float((clean.suspicion >= threshold).mean())
        cells = (f"{100 * share:.1f}" for share in (*shares, alarms))
        rows.append((f"{threshold:g}", str(int(listed.sum())), *cells))
    return rows


def _drawn(options: argparse.Namespace) -> dict[str, list[int]]:
    return {
        "images": [options.images * (options.split == name) for name in ("train", "dev", "test")]
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--split", default="test")
    parser.add_argument("--images", type=int, help="newly drawn scenes, not the run's own data")
    parser.add_argument("--swapped", type=float, default=0.05)
    parser.add_argument("--words", type=float, default=0.10)
    parser.add_argument("--threshold", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "counterfoil")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    run = resolve(options.run, cache=options.cache)
    model = load_model(run, options.device)
    data, settings = (None, {}) if options.images is None else ("scenes", _drawn(options))
    pairs = data_for_run(run, data, None, settings, options.cache, Silent())
    split = pairs[options.split]
    print("auditing the split as it is …", file=sys.stderr)
    clean = audit_split(model, split, threshold=options.threshold)
    truth = corrupt(split, options.swapped, options.words, options.seed)
    print("auditing it corrupted …", file=sys.stderr)
    audit = audit_split(model, truth.split, threshold=options.threshold)
    found = measure_audit(audit, truth, SIGNS, clean)
    if options.json:
        print(json.dumps(found.as_dict()))
        return 0
    print(
        f"{options.run.name} ({model.spec.name}), {options.split}: {100 * options.swapped:g} % of "
        f"the captions swapped, {100 * options.words:g} % with words exchanged, seed "
        f"{options.seed}; listed from suspicion {options.threshold:g}\n"
    )
    print("\n".join(markdown_table(found.rows())))
    print("\n" + "\n".join(markdown_table(by_threshold(audit, clean, truth))))
    print(f"\nlisted where nothing was corrupted: {found.clean_listed:.1f} % of the captions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
