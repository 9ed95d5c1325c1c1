"""Fragments for every image of a data set, extracted once and kept on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from counterfoil.data.arrays import ArrayFile
from counterfoil.data.fragments import FragmentTable
from counterfoil.data.pairs import Pairs, Split
from counterfoil.data.pixels import PixelTable
from counterfoil.data.problems import ProblemLog
from counterfoil.data.sources.assemble import may_lack
from counterfoil.errors import DataError
from counterfoil.features.backbone import Backbone, choose_device
from counterfoil.features.chunks import Chunk, chunks
from counterfoil.features.extractors import Extractor, extractors
from counterfoil.features.pixels import Pixels
from counterfoil.features.rows import RowWriter
from counterfoil.features.stamps import fingerprint_of
from counterfoil.files import replace_folder, replacing, write_atomically
from counterfoil.progress import Progress, Silent
from counterfoil.reading import read_text

_CHUNK = 64
_MANIFEST = "manifest.json"


def with_fragments(
    pairs: Pairs,
    cache_dir: Path,
    extractor: str = "segments",
    options: dict[str, Any] | None = None,
    progress: Progress | None = None,
    workers: int | None = None,
    device: str = "auto",
) -> Pairs:
    """The data set with fragments for every split that has pixels but no fragments yet.

    They are kept under ``cache_dir`` by what they were made from and with. Work that was
    interrupted is taken up where it stopped. An image that cannot be decoded is left out with its
    captions, and recorded in the problems of the result. ``device`` is where a `Backbone` runs.
    Pixels are not extracted: images stay where they are, whatever features came with them.
    """
    tool: Extractor = extractors.create(extractor, options or {}, where="features")
    if isinstance(tool, Pixels):
        return with_pixels(pairs, tool)
    job = Job(extractor, options or {}, tool, progress or Silent(), workers, device)
    return extract_pairs(pairs, Path(cache_dir), job)


def with_pixels(pairs: Pairs, tool: Pixels) -> Pairs:
    """The data set with the patches of its images for fragments, decoded when they are read."""
    splits = {split.name: _pixels_of(pairs.name, split, tool) for split in pairs}
    return replace(pairs, splits=splits)


def _pixels_of(name: str, split: Split, tool: Pixels) -> Split:
    if split.pixels is not None:
        return replace(split, fragments=PixelTable.of(split.pixels, tool, tool.described()))
    table = split.fragments
    if table is not None and (table.max_fragments, table.dim) == (tool.max_fragments, tool.dim):
        return split  # patches that were written before: counterfoil features -b pixels
    raise DataError(
        f"data set '{name}': the model reads pixels, but split '{split.name}' has no images, only "
        "features that were made before; name the folder of images (see: counterfoil data inspect)"
    )


@dataclass(frozen=True)
class Job:
    """How to extract: an extractor by its name and options, and made of them."""

    name: str
    options: dict[str, Any]
    tool: Extractor
    progress: Progress
    workers: int | None = None
    device: str = "auto"


def extract_pairs(pairs: Pairs, cache_dir: Path, job: Job) -> Pairs:
    """`with_fragments` with an extractor that is already made."""
    tool = job.tool
    todo = [s for s in pairs if s.fragments is None and s.pixels is not None and len(s)]
    if not todo:
        return pairs
    stamps = {split.name: fingerprint_of(split) for split in todo}
    sources = {"extractor": tool.fingerprint(), "data": stamps}
    key = hashlib.sha256(json.dumps(sources, sort_keys=True).encode()).hexdigest()[:12]
    folder = cache_dir / f"{pairs.name}-{tool.name}-{key}"
    manifest = _read_manifest(folder)
    if manifest is None:
        if isinstance(tool, Backbone):
            tool.to(choose_device(job.device))
        manifest = _extract_all(folder, todo, sources, job)
    log = ProblemLog(list(pairs.problems))
    splits = dict(pairs.splits)
    for split in todo:
        attached = _attach(split, folder, manifest, job.name, log)
        if len(attached):
            splits[split.name] = attached
        else:
            del splits[split.name]
    return replace(pairs, splits=splits, problems=log.problems)


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    """What a finished extraction says of itself, or None where it is absent or damaged."""
    try:
        manifest: dict[str, Any] = json.loads(read_text(folder / _MANIFEST))
        whole = all(
            (folder / name).stat().st_size == size for name, size in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, AttributeError):
        return None
    return manifest if whole else None


def _extract_all(
    folder: Path, splits: list[Split], sources: dict[str, Any], job: Job
) -> dict[str, Any]:
    partial = folder.with_name(f".{folder.name}.partial")
    with replacing(folder, "extracting these features"):
        finished = _read_manifest(folder)
        if finished is not None:
            return finished
        partial.mkdir(parents=True, exist_ok=True)
        dropped = {split.name: _extract_split(partial, split, job) for split in splits}
        files = {path.name: path.stat().st_size for path in sorted(partial.glob("*.npy"))}
        manifest = {**sources, "dropped": dropped, "files": files}
        write_atomically(partial / _MANIFEST, json.dumps(manifest, indent=2))
        for finished_log in partial.glob("*_done.jsonl"):
            finished_log.unlink()
        replace_folder(partial, folder)
    return manifest


def _extract_split(folder: Path, split: Split, job: Job) -> dict[str, str]:
    """Fill the arrays of one split; returns {row: message} of what could not be read."""
    rows, most = len(split), job.tool.max_fragments
    done_path = folder / f"{split.name}_done.jsonl"
    with (
        RowWriter(folder / f"{split.name}_ims.npy", (rows, most, job.tool.dim), "<f2") as features,
        RowWriter(folder / f"{split.name}_bbx.npy", (rows, most, 4), "<f4") as boxes,
        RowWriter(folder / f"{split.name}_lens.npy", (rows,), "<i8") as lengths,
    ):
        continued = features.continued and boxes.continued and lengths.continued
        bad = _read_done(done_path) if continued else {}
        if not continued:
            done_path.unlink(missing_ok=True)
        starts = [start for start in range(0, rows, _CHUNK) if start not in bad]
        for start, chunk in _work(split, starts, job):
            features.write(start, chunk.features)
            boxes.write(start, chunk.boxes)
            lengths.write(start, chunk.lengths)
            bad[start] = {str(start + row): message for row, message in chunk.bad.items()}
            with done_path.open("a", encoding="utf-8") as log:
                log.write(json.dumps({"start": start, "bad": bad[start]}) + "\n")
    return {row: message for start in sorted(bad) for row, message in bad[start].items()}


def _read_done(path: Path) -> dict[int, dict[str, str]]:
    """Chunks finished before, by their first row; a last line cut short does not count."""
    done: dict[int, dict[str, str]] = {}
    if path.exists():
        for line in read_text(path).splitlines():
            try:
                item = json.loads(line)
                done[int(item["start"])] = item["bad"]
            except (ValueError, KeyError):
                break
        text = "".join(
            json.dumps({"start": start, "bad": bad}) + "\n" for start, bad in done.items()
        )
        write_atomically(path, text)
    return done


def _work(split: Split, starts: list[int], job: Job) -> Iterator[tuple[int, Chunk]]:
    pixels = split.pixels or ()
    parts = [list(pixels[start : start + _CHUNK]) for start in starts]
    todo = sum(map(len, parts))

    def steps() -> Iterator[tuple[int, Chunk] | None]:
        # One step an image, so that the bar counts images; the last of a chunk carries it.
        made = chunks(job.tool, job.name, job.options, parts, job.workers)
        for start, chunk in zip(starts, made, strict=True):
            yield from [None] * (len(chunk.lengths) - 1)
            yield start, chunk

    title = f"extracting features ({split.name})"
    for step in job.progress.track(steps(), title, total=len(split), done=len(split) - todo):
        if step is not None:
            yield step


def _attach(
    split: Split, folder: Path, manifest: dict[str, Any], extractor: str, log: ProblemLog
) -> Split:
    """The split with its fragments, less the images that could not be read."""
    dropped = {int(row): message for row, message in manifest["dropped"][split.name].items()}
    for row, message in dropped.items():
        log.skip("unreadable-image", f"{split.name}/{split.ids[row]}", message)
    kept = [row for row in range(len(split)) if row not in dropped]
    if not kept:
        message = (
            f"none of its {len(split)} images can be read "
            f"(the first: {next(iter(dropped.values()))})"
        )
        if not may_lack(split.name, log.problems):
            raise DataError(f"split '{split.name}': {message}")
        log.skip("no-images", f"split '{split.name}'", f"{message}; the split is left out")
        return split.select([])
    table = FragmentTable(
        ArrayFile(folder / f"{split.name}_ims.npy"),
        np.array(kept, dtype=np.int64),
        ArrayFile(folder / f"{split.name}_lens.npy").whole(),
        ArrayFile(folder / f"{split.name}_bbx.npy"),
        made_by=extractor,
    )
    return replace(split.select(kept) if dropped else split, fragments=table)
