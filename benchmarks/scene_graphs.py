"""Scene graphs of captions: precision and recall on drawn scenes, agreement on real captions.

    python benchmarks/scene_graphs.py
    python benchmarks/scene_graphs.py --extractor spacy
    python benchmarks/scene_graphs.py --captions captions.txt.gz --count 1000 --against spacy

The scenes know the truth of their words. Of real captions nothing is known, so there one extractor
is held against another; a caption a line, plain or gzipped.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from _graph_metrics import GraphReport, compare_graphs, true_graph

from counterfoil.core.errors import CounterfoilError
from counterfoil.data.scenes import SceneCaption, describe, make_scene
from counterfoil.foils.scene_graph import GraphExtractor
from counterfoil.foils.spacy_graph import create_extractor

PER_SCENE = 5


def scene_captions(count: int, seed: int) -> Iterator[SceneCaption]:
    """Captions of scenes that are never drawn, of which only the plan is made."""
    for number in range(-(-count // PER_SCENE)):
        rng = random.Random(f"{seed}/{number}")
        scene = make_scene((seed, 0, number, 0))
        yield from describe(scene, rng, min(PER_SCENE, count - number * PER_SCENE))


def real_captions(path: Path, count: int, seed: int) -> list[str]:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        captions = [line.strip() for line in file if line.strip()]
    return random.Random(seed).sample(captions, min(count, len(captions)))


def on_scenes(extractor: GraphExtractor, count: int, seed: int) -> GraphReport:
    captions = scene_captions(count, seed)
    return compare_graphs((extractor.extract(c.text), true_graph(c)) for c in captions)


def on_captions(one: GraphExtractor, other: GraphExtractor, captions: list[str]) -> GraphReport:
    return compare_graphs((one.extract(text), other.extract(text)) for text in captions)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--extractor", default="rules", help="rules, spacy or spacy:PIPELINE")
    parser.add_argument("--captions", type=Path, help="real captions, one a line, .gz or not")
    parser.add_argument("--against", default="spacy", help="the other extractor, for --captions")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    try:
        extractor = create_extractor(options.extractor)
        if options.captions is None:
            title = f"{options.extractor} against the truth of drawn scenes"
            report = on_scenes(extractor, options.count, options.seed)
        else:
            title = f"{options.extractor} against {options.against}, {options.captions.name}"
            other = create_extractor(options.against)
            captions = real_captions(options.captions, options.count, options.seed)
            report = on_captions(extractor, other, captions)
    except CounterfoilError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    print(json.dumps(report.as_dict()) if options.json else f"{title}\n\n{report.to_markdown()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
