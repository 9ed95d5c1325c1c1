"""Features in parts: each process or machine extracts its share of the images, one merges them.

A part is a folder with features in the layout of the cache. It continues after an interruption.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from counterfoil.core.errors import DataError
from counterfoil.core.parts import (
    FinishedPart,
    Part,
    begun_part,
    digest_of_values,
    finish_part,
    finished_parts,
    part_of_item,
)
from counterfoil.core.progress import Progress, Silent
from counterfoil.data.pairs import Pairs, Split
from counterfoil.features.cache import CachedRow, CacheUse, FeatureCache
from counterfoil.features.extract import Job, extract_splits
from counterfoil.features.extractors import Extractor, extractors

KIND = "features"


@dataclass(frozen=True)
class PartReport:
    """A finished part: its folder, its images, the unreadable ones among them, cache use."""

    part: Part
    folder: Path
    images: int
    failed: int
    use: CacheUse

    def as_dict(self) -> dict[str, Any]:
        return {
            "part": self.part.number,
            "parts": self.part.total,
            "folder": str(self.folder),
            "images": self.images,
            "failed": self.failed,
            "extracted": self.use.extracted,
        }


def extract_part(
    pairs: Pairs,
    target: str | Path,
    part: Part,
    backbone: str,
    options: Mapping[str, Any] | None = None,
    *,
    device: str = "auto",
    workers: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> PartReport:
    """Extract the features of one part of a data set's images into `part.folder(target)`.

    `build_features` with ``merge`` writes the data set when all parts are complete.
    """
    tool: Extractor = extractors.create(backbone, dict(options or {}), where="features")
    job = Job(backbone, dict(options or {}), tool, progress or Silent(), workers, device)
    bare = without_fragments(pairs)
    target = Path(target)
    with begun_part(part, target, KIND, _identity(bare, job), overwrite=overwrite) as folder:
        shares = _share(list(bare), part)
        work = extract_splits(shares, folder, job)
        if work.scratch is not None:
            raise DataError(f"{folder}: the features of {part} could not be written there")
        unreadable = sum(isinstance(one, str) for many in work.digests.values() for one in many)
        finish_part(folder, {"failed": {key.hex(): text for key, text in work.bad.items()}})
    images = sum(map(len, shares))
    return PartReport(part, folder, images, len(work.bad) + unreadable, work.use)


def without_fragments(pairs: Pairs) -> Pairs:
    """The data set without its features; `DataError` if a split has no images."""
    lacking = [split.name for split in pairs if split.pixels is None]
    if lacking:
        raise DataError(
            f"data set '{pairs.name}': no images to take features from in split "
            f"{', '.join(lacking)}; name the folder of images (see: counterfoil data inspect)"
        )
    return replace(pairs, splits={split.name: replace(split, fragments=None) for split in pairs})


def _identity(pairs: Pairs, job: Job) -> dict[str, str]:
    images = digest_of_values([[split.name, list(split.ids)] for split in pairs])
    return {"data set": images, "extractor": job.tool.fingerprint()}


def _share(splits: Sequence[Split], part: Part) -> list[Split]:
    """The images of a part: consecutive ones, counted through all splits."""
    mine = part.share(sum(map(len, splits)))
    shares, start = [], 0
    for split in splits:
        chosen = range(max(mine.start - start, 0), min(mine.stop - start, len(split)))
        if len(chosen):
            shares.append(split.select(chosen))
        start += len(split)
    return shares


def merged_parts(target: Path, pairs: Pairs, job: Job) -> MergedParts:
    """All parts of a target, checked against the data set and the extractor."""
    return MergedParts(finished_parts(target, KIND, _identity(pairs, job)), job)


@dataclass(frozen=True)
class MergedParts:
    """The features of all parts, as `extract_pairs` reads them."""

    parts: Sequence[FinishedPart]
    job: Job

    def find(
        self, splits: Sequence[Split], digests: Mapping[str, Sequence[bytes | str]]
    ) -> tuple[dict[bytes, CachedRow], dict[bytes, str]]:
        images = {one for many in digests.values() for one in many if isinstance(one, bytes)}
        rows: dict[bytes, CachedRow] = {}
        bad: dict[bytes, str] = {}
        tool = self.job.tool
        for one in self.parts:
            cache = FeatureCache.of(one.folder, tool.name, tool.fingerprint())
            rows.update(cache.find(images))
            bad.update(_failed(one))
        starts = [0, *accumulate(map(len, splits))]
        for start, split in zip(starts, splits, strict=False):
            for row, digest in enumerate(digests[split.name]):
                if isinstance(digest, bytes) and digest not in rows and digest not in bad:
                    part = part_of_item(start + row, starts[-1], len(self.parts))
                    folder = self.parts[part.number - 1].folder
                    raise DataError(
                        f"{folder}: {part} has no features of image '{split.ids[row]}' (split "
                        f"'{split.name}'); the image was changed, or the part is damaged: make it "
                        f"again with --part {part.number}/{part.total}"
                    )
        return rows, bad


def _failed(part: FinishedPart) -> dict[bytes, str]:
    """Error messages of unreadable images by their digest."""
    try:
        return {bytes.fromhex(key): str(text) for key, text in part.notes["failed"].items()}
    except (KeyError, AttributeError, ValueError):
        raise DataError(
            f"{part.folder}: damaged (no list of unreadable images); delete it, and make it again"
        ) from None
