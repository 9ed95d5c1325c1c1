"""Build a data set with features on disk, from one with images or from a folder of photos."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from counterfoil.core.progress import Progress, Silent
from counterfoil.core.storage.atomic import check_folder_target, replacing, write_atomically
from counterfoil.data.convert import DATA_SET_FILES, ConversionReport, convert, refuse_loss
from counterfoil.data.formats import writers
from counterfoil.data.pairs import Pairs, Problem, Severity, count_kinds
from counterfoil.features.cache import CacheUse
from counterfoil.features.efficientnet import has_weights
from counterfoil.features.extract import Job, extract_pairs
from counterfoil.features.extractors import Extractor, extractors, full_name, split_full_name
from counterfoil.features.parts import merged_parts, without_fragments

MANIFEST = "features.json"
BEST, FALLBACK = "efficientnet-lite", "segments"


def default_backbone() -> str:
    """The best extractor whose weights are installed."""
    return BEST if has_weights() else FALLBACK


@dataclass(frozen=True)
class FeatureReport:
    """The result of `build_features`; ``failed`` lists unreadable images.

    ``left_out`` lists unusable items of the data set: empty captions, missing files.
    """

    manifest: dict[str, Any]
    written: ConversionReport
    failed: list[Problem]
    seconds: float
    left_out: list[Problem]
    cache: CacheUse

    def as_dict(self) -> dict[str, Any]:
        return {
            "target": str(self.written.target),
            "format": self.written.format,
            "bytes": self.written.bytes,
            "seconds": round(self.seconds, 3),
            "cache": self.cache.as_dict(),
            **self.manifest,
        }


def check_choices(backbone: str, options: Mapping[str, Any], format: str) -> None:
    """Refuse unknown names and options before any image is read."""
    name, _ = split_full_name(backbone)
    extractors.check(name, options, where="features")
    writers.check(format, {}, where="features")


def build_features(
    pairs: Pairs,
    target: str | Path,
    backbone: str | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    format: str = "scan",
    images: bool = True,
    overwrite: bool = False,
    cache_dir: str | Path | None,
    device: str = "auto",
    workers: int | None = None,
    progress: Progress | None = None,
    merge: bool = False,
) -> FeatureReport:
    """Extract fragments of every split with images, and write the data set with them.

    Existing features are replaced. Features are cached in ``cache_dir`` per image, so interrupted
    work resumes from there; None: no cache. `features.json` in ``target`` describes the features.
    With ``merge`` they are those of the parts of ``target`` (`extract_part`), and the result is
    byte for byte that of one process.
    """
    target, name, chosen = Path(target), backbone or default_backbone(), dict(options or {})
    check_choices(name, chosen, format)
    with replacing(target, "writing features there", "wait for it, or name another folder"):
        check_folder_target(target, overwrite=overwrite, replaceable=DATA_SET_FILES)
        refuse_loss(pairs, target, images)
        tool: Extractor = extractors.create(name, chosen, where="features")
        bare = without_fragments(pairs)
        started = time.perf_counter()
        # features without a cache go to the target's disk, which must have space for them anyway
        job = Job(name, chosen, tool, progress or Silent(), workers, device, target.parent)
        cache = None if cache_dir is None else Path(cache_dir)
        parts = merged_parts(target, bare, job) if merge else None
        extraction = extract_pairs(bare, cache, job, parts)
        made = extraction.pairs
        seconds = time.perf_counter() - started
        named = _with_name(made, full_name(name, chosen), images)
        written = convert(named, target, format, overwrite=overwrite, progress=progress)
        if extraction.scratch is not None:
            extraction.scratch.close()
        failed = made.problems[len(pairs.problems) :]
        left_out = [one for one in pairs.problems if one.severity is Severity.SKIP]
        manifest = {
            **_description(job, pairs, made),
            "problems": count_kinds([*made.problems, *written.problems]),
            "failed": [problem.as_dict() for problem in failed],
            "left_out": [problem.as_dict() for problem in left_out],
        }
        text = json.dumps(manifest, indent=2, ensure_ascii=False)
        write_atomically(target / MANIFEST, f"{text}\n")
    return FeatureReport(manifest, written, failed, seconds, left_out, extraction.cache)


def _description(job: Job, pairs: Pairs, made: Pairs) -> dict[str, Any]:
    """The extractor, and the number of images and captions per split."""
    tool = job.tool
    return {
        "extractor": {"name": job.name, "options": job.options, "fingerprint": tool.fingerprint()},
        "features": {"fragments": tool.max_fragments, "dim": tool.dim, "dtype": "float16"},
        "splits": {
            split.name: {
                "images": len(split),
                "captions": len(split.texts),
                "failed": len(pairs.splits[split.name]) - len(split),
            }
            for split in made
        },
    }


def _with_name(pairs: Pairs, name: str, images: bool) -> Pairs:
    splits = {}
    for split in pairs:
        table = replace(split.fragments, made_by=name) if split.fragments is not None else None
        pixels = split.pixels if images else None
        splits[split.name] = replace(split, fragments=table, pixels=pixels)
    return replace(pairs, splits=splits)
