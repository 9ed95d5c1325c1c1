"""How many words of a caption masking chooses, by units of its scene graph and word by word.

    python benchmarks/masking_share.py
    python benchmarks/masking_share.py --captions captions.txt.gz --count 1000

Shares are expectations in closed form, averaged over captions, of all words of the sentence. Two
effects move them away from 15 %: words that are in no unit are never masked, and one unit always
is, even if none was chosen.
"""

from __future__ import annotations

import argparse
import gzip
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from counterfoil.core.errors import CounterfoilError
from counterfoil.data.scenes import describe, make_scene
from counterfoil.data.text.words import caption_words
from counterfoil.foils.generation import (
    RATE,
    Positions,
    expected_share,
    graph_units,
    sentence_rate,
    token_units,
    unit_chances,
)
from counterfoil.foils.scene_graph import GraphExtractor
from counterfoil.foils.spacy_graph import create_extractor

PER_SCENE = 5


def scene_captions(count: int, seed: int) -> list[str]:
    captions: list[str] = []
    while len(captions) < count:
        number = len(captions) // PER_SCENE
        scene = make_scene((seed, 0, number, 0))
        captions += [c.text for c in describe(scene, random.Random(f"{seed}/{number}"), PER_SCENE)]
    return captions[:count]


def real_captions(path: Path, count: int, seed: int) -> list[str]:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        captions = [line.strip() for line in file if line.strip()]
    return random.Random(seed).sample(captions, min(count, len(captions)))


def units_of(extractor: GraphExtractor, caption: str) -> tuple[list[Positions], int]:
    """Units of a caption by its words, and how many words it has."""
    words = list(range(len(caption_words(caption))))
    return graph_units(extractor.extract(caption), words), len(words)


def covered(units: Sequence[Positions]) -> int:
    return len({place for unit in units for place in unit})


def chosen_only(units: Sequence[Positions], words: int) -> float:
    """The share of words chosen by chance alone, without the unit that is always masked."""
    spared: dict[int, float] = {}
    for unit, chance in zip(units, unit_chances(units), strict=True):
        for place in unit:
            spared[place] = spared.get(place, 1.0) * (1 - chance)
    return sum(1 - chance for chance in spared.values()) / words


def report(captions: Sequence[str], extractor: GraphExtractor) -> dict[str, float]:
    rows: dict[str, list[float]] = {}
    for caption in captions:
        units, words = units_of(extractor, caption)
        if not words:
            continue
        single = token_units(range(words))
        for name, value in (
            ("words in any unit", covered(units) / words),
            ("graph: chosen by chance", chosen_only(units, words)),
            ("graph: and one unit at least (mask_share=units)", expected_share(units, words)),
            (
                "graph: mask_share=sentence",
                expected_share(units, words, sentence_rate(units, words)),
            ),
            ("word by word", expected_share(single, words)),
        ):
            rows.setdefault(name, []).append(value)
    return {name: statistics.fmean(values) for name, values in rows.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--extractor", default="rules", help="rules, spacy or spacy:PIPELINE")
    parser.add_argument("--captions", type=Path, help="real captions, one a line, .gz or not")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        captions = (
            real_captions(options.captions, options.count, options.seed)
            if options.captions
            else scene_captions(options.count, options.seed)
        )
        found = report(captions, create_extractor(options.extractor))
    except (CounterfoilError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{len(captions)} captions, rate {RATE:.0%}; mean share of all words:")
    for name, share in found.items():
        print(f"{share:7.1%}  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
