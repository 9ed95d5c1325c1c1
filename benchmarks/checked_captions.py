"""What an audit learns from checked captions: of random images, and from the top of its list.

    python benchmarks/checked_captions.py photos-vse --data lite2-36 --noise noun --rate 0.1

Noise is planted as in `counterfoil audit benchmark`. Both audits are measured on the captions that
were not checked, so the rows of one table differ in what is left to find. Use a dev split.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from counterfoil.audit.audit import audit_split
from counterfoil.audit.neighbors import find_neighbors
from counterfoil.audit.noise import NOISES, plant
from counterfoil.audit.sign_weights import learn_weights, weighed_deviations
from counterfoil.audit.suspicion import sign_deviations
from counterfoil.core.progress import Silent
from counterfoil.core.zoo import resolve
from counterfoil.evaluation.report import markdown_table
from counterfoil.evaluation.words.evaluate import Ranking
from counterfoil.training.run_data import data_for_run
from counterfoil.training.run_folder import load_model

COUNTS = (50, 200, 500)
SAME = 1e-5
"""Distance below which two captions are the same."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--data", required=True)
    parser.add_argument("--split", default="dev")
    parser.add_argument("--noise", choices=NOISES, default="noun")
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=10)
    parser.add_argument(
        "--hide-copies", action="store_true", help="Learn as if no other caption had the same text."
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "counterfoil")
    options = parser.parse_args()
    run = resolve(options.run, cache=options.cache)
    model = load_model(run, options.device)
    pairs = data_for_run(
        run, options.data, None, {}, options.cache, Silent(), splits=[options.split]
    )
    split = pairs[options.split]
    noisy = plant(split, options.noise, options.rate, options.seed)
    audit = audit_split(model, noisy.split, details=0)
    captions = audit.survey.captions
    neighbors = find_neighbors(model, noisy.split, captions, seed=options.seed)
    if options.hide_copies and neighbors.by_caption is not None:
        side = neighbors.by_caption
        near = np.where(side.near < SAME, np.nan, side.near)
        neighbors = replace(neighbors, by_caption=replace(side, near=near))
    signs = sign_deviations(audit.values[captions], audit.scales.signs)
    deviations = weighed_deviations(signs, audit.survey.own[captions].astype(float), neighbors)
    default, wrong, clean = (each[captions] for each in (audit.suspicion, noisy.wrong, noisy.clean))
    # not the seed of the noise, whose first images are the clean ones
    image_order = np.random.default_rng([options.seed, len(NOISES)]).permutation(len(split))
    place = np.argsort(image_order)[split.image_of[captions]]
    orders = {
        "random images": np.argsort(place, kind="stable"),
        "top of the list": np.argsort(-default, kind="stable"),
    }
    rows: list[tuple[str, ...]] = [
        ("checked", "captions", "wrong", "AUROC, default", "learned", "AUPRC, default", "learned")
    ]
    for name, order in orders.items():
        for count in COUNTS:
            checked = np.isin(np.arange(len(captions)), order[:count])
            learned = learn_weights(deviations, wrong, checked)
            rest = ~(checked | clean)
            both = [
                Ranking(scores[rest], wrong[rest])
                for scores in (default, learned.suspicion(deviations))
            ]
            values = [one.auc() for one in both] + [one.average_precision() for one in both]
            cells = [f"{100 * value:.1f}" for value in values]
            rows.append((name, str(count), str(learned.wrong), *cells))
    print("\n".join(markdown_table(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
