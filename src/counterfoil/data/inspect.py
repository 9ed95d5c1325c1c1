"""`inspect`: statistics and problems of a data set, with every image decoded if ``deep``."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from counterfoil.core.errors import DataError
from counterfoil.core.printable import plural
from counterfoil.core.progress import Progress, Silent
from counterfoil.core.storage.remote import is_url
from counterfoil.data.duplicates import (
    MANY_TWINS_SHARE,
    DuplicateCounts,
    Look,
    Looks,
    count_duplicates,
    identical_groups,
    look_at,
    with_twin,
)
from counterfoil.data.formats.assemble import caption_fault, may_lack
from counterfoil.data.fragments import FragmentTable
from counterfoil.data.images import ImageRef, MissingImage, open_image
from counterfoil.data.load import is_named, make_named, other_formats, read_path, read_url
from counterfoil.data.pairs import Pairs, Problem, ProblemLog, Severity, Split, count_kinds
from counterfoil.data.splits import (
    DEFAULT_DEV_SHARE,
    Leakage,
    choose_dev,
    find_leakage,
    lacks_dev,
    likely_typos,
)

_THREADS = 4
_AHEAD = 32

_WORD = re.compile(r"\w+(?:['’]\w+)?")
_SAMPLE = 50


@dataclass(frozen=True)
class SplitSummary:
    """Statistics of one split; words are separated by white space, the vocabulary is lower case.

    Captions that are left out, such as empty ones, do not count.
    """

    images: int
    captions: int
    captions_per_image: dict[str, float]
    words_per_caption: dict[str, float]
    vocabulary: int
    duplicate_captions: DuplicateCounts
    has_pixels: bool
    has_fragments: bool
    has_boxes: bool
    fragments: dict[str, Any] | None
    image_sizes: dict[str, Any] | None


@dataclass(frozen=True)
class Inspection:
    """Statistics of every split of a data set, and its problems of every severity."""

    source: str
    splits: dict[str, SplitSummary]
    problems: list[Problem] = field(default_factory=list)
    deep: bool = True
    leakage: list[Leakage] = field(default_factory=list)
    dev_set_aside: tuple[int, int] | None = None
    """Training images that `train` would set aside as dev, and their total; None if dev exists."""

    @property
    def usable(self) -> bool:
        """Whether no problem is fatal."""
        return not any(problem.severity is Severity.FATAL for problem in self.problems)

    def as_dict(self) -> dict[str, Any]:
        """The whole inspection as plain JSON values."""
        return {
            "source": self.source,
            "deep": self.deep,
            "usable": self.usable,
            "splits": {name: asdict(summary) for name, summary in self.splits.items()},
            "dev_set_aside": self.dev_set_aside and self.dev_set_aside[0],
            "leakage": [shared.as_dict() for shared in self.leakage],
            "problem_counts": count_kinds(self.problems),
            "problems": [problem.as_dict() for problem in self.problems],
        }


def inspect(
    source: str | Path | Pairs,
    format: str | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    deep: bool = True,
    cache_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> Inspection:
    """Summarize a data set and list all its problems.

    ``deep`` also decodes every image, reads every row of features (a few at a time) and compares
    the images of different splits. ``leakage`` is what two splits share. A folder with several
    layouts is inspected in each; the splits of those not chosen are named ``layout:split``.
    """
    log = ProblemLog()
    if isinstance(source, Pairs):
        pairs = source
        log.problems += pairs.problems
    elif is_named(source, format):
        pairs = make_named(str(source), options or {}, cache_dir, progress)
        log.problems += pairs.problems
    elif is_url(source):
        pairs = read_url(str(source), format, options, cache_dir, progress, log, drop=False)
    else:
        pairs = read_path(Path(source), format, options or {}, log, drop=False)
    for note in likely_typos(pairs):
        log.note("split-name", pairs.name, note)
    splits, looks, usable, compared = {}, {}, {}, {}
    for split in pairs:
        checked = check_split(split, log, progress or Silent()) if deep else None
        good = compared[split.name] = _with_usable_captions(split)
        duplicates = count_duplicates(good.texts, good.image_of)
        splits[split.name] = _summarize(good, checked, duplicates)
        _note_duplicates(good, duplicates, pairs.name, log)
        usable[split.name] = _usable_ids(split, checked)
        _refuse_unreadable(split, usable[split.name], pairs.name, log)
        if checked is not None and checked.looks:
            looks[split.name] = Looks.of(checked.looks)
    leakage = find_leakage(Pairs(pairs.name, compared), looks, log)
    aside = _dev_set_aside(pairs, usable.get("train", []))
    if isinstance(source, (str, Path)) and format is None and not is_named(source, format):
        for layout in other_formats(Path(source)):
            beside = inspect(source, layout, deep=deep, progress=progress)
            splits |= {f"{layout}:{name}": summary for name, summary in beside.splits.items()}
            log.problems += [p for p in beside.problems if p not in log.problems]
    name = pairs.name if isinstance(source, Pairs) else str(source)
    return Inspection(name, splits, log.problems, deep, leakage, aside)


def _with_usable_captions(split: Split) -> Split:
    """The split without captions that are left out, such as empty ones."""
    usable = [[text for text in texts if caption_fault(text) is None] for texts in split.captions]
    return replace(split, captions=usable)


def _usable_ids(split: Split, checked: DeepCheck | None) -> list[str]:
    """Ids of the images that training would use, as far as they were checked."""
    bad = checked.bad if checked is not None else set()
    pixels = split.pixels
    return [
        image_id
        for index, image_id in enumerate(split.ids)
        if index not in bad
        and (pixels is None or not isinstance(pixels[index], MissingImage))
        and any(caption_fault(text) is None for text in split.captions[index])
    ]


def _refuse_unreadable(split: Split, usable: list[str], name: str, log: ProblemLog) -> None:
    """Log that no image of a split can be used, unless that is logged already."""
    where = f"{name}, split '{split.name}'"
    known = any(one.kind == "no-images" and one.where == where for one in log.problems)
    if len(split) and not usable and not known:
        message = f"none of its {len(split)} images can be used"
        if may_lack(split.name, log.problems):
            log.skip("no-images", where, f"{message}; the split is left out")
        else:
            log.fatal("no-images", where, message)


def _dev_set_aside(pairs: Pairs, images: list[str]) -> tuple[int, int] | None:
    """Number of training images to set aside as dev, and their total; None with a dev split."""
    if not lacks_dev(pairs) or len(images) < 2:
        return None
    return len(choose_dev(images, DEFAULT_DEV_SHARE)), len(images)


def _summarize(
    split: Split, checked: DeepCheck | None, duplicates: DuplicateCounts
) -> SplitSummary:
    words = [len(text.split()) for text in split.texts]
    vocabulary = {word for text in split.texts for word in _WORD.findall(text.lower())}
    table = split.fragments
    return SplitSummary(
        images=len(split),
        captions=len(split.texts),
        captions_per_image=_spread([len(texts) for texts in split.captions], "min", "mean", "max"),
        words_per_caption=_spread(words, "mean", "p95", "max"),
        vocabulary=len(vocabulary),
        duplicate_captions=duplicates,
        has_pixels=split.pixels is not None,
        has_fragments=table is not None,
        has_boxes=table is not None and table.boxes is not None,
        fragments=(
            None
            if table is None
            else {"max": table.max_fragments, "dim": table.dim, "dtype": str(table.features.dtype)}
        ),
        image_sizes=_image_sizes(split, checked),
    )


def _note_duplicates(split: Split, counts: DuplicateCounts, where: str, log: ProblemLog) -> None:
    """Log if many captions are repeated: recall then counts right captions as wrong."""
    if counts.exact <= MANY_TWINS_SHARE * len(split.texts):
        return
    repeated = with_twin(identical_groups(split.texts), split.image_of)
    log.note(
        "identical-captions",
        where,
        f"{counts.exact:,} of {len(split.texts):,} captions of '{split.name}' stand word for word "
        f"at another image, too (such as '{split.texts[int(repeated.argmax())][:80]}'); training "
        "never takes such a pair as a negative, evaluate prints recalls both ways",
    )


def _spread(values: list[int], *which: str) -> dict[str, float]:
    if not values:
        return {}
    numbers = {
        "min": min(values),
        "mean": round(float(np.mean(values)), 2),
        "p95": float(np.percentile(values, 95)),
        "max": max(values),
    }
    return {name: numbers[name] for name in which}


def _image_sizes(split: Split, checked: DeepCheck | None) -> dict[str, Any] | None:
    """Smallest, median and largest width and height, of all images or of the first `_SAMPLE`."""
    if split.pixels is None:
        return None
    sizes = checked.sizes if checked is not None else []
    if checked is None:
        for image in list(split.pixels)[:_SAMPLE]:
            try:
                sizes.append(open_image(image).size)
            except DataError:
                continue
    if not sizes:
        return None
    array = np.array(sizes)
    return {
        "sampled": len(sizes),
        "width": _min_median_max(array[:, 0]),
        "height": _min_median_max(array[:, 1]),
    }


def _min_median_max(values: np.ndarray[Any, Any]) -> dict[str, int]:
    return {"min": int(values.min()), "median": int(np.median(values)), "max": int(values.max())}


@dataclass
class DeepCheck:
    """Results of reading a whole split: unusable images, sizes, and hashes for comparison."""

    bad: set[int] = field(default_factory=set)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    looks: list[Look | None] = field(default_factory=list)


def check_split(split: Split, log: ProblemLog, progress: Progress | None = None) -> DeepCheck:
    """Decode every image and read every row of features of a split, a few at a time."""
    progress = progress or Silent()
    result = DeepCheck()
    if split.pixels is not None:
        decoded = progress.track(
            _decode_all(list(split.pixels)), f"decoding {split.name} images", len(split)
        )
        for index, image in enumerate(decoded):
            result.looks.append(None if isinstance(image, str) else image.look)
            if not isinstance(image, str):
                result.sizes.append(image.size)
            elif not isinstance(split.pixels[index], MissingImage):
                where = f"split '{split.name}', image '{split.ids[index]}'"
                log.skip("unreadable-image", where, image)
                result.bad.add(index)
    if split.fragments is not None:
        tracked = progress.track(range(len(split)), f"reading {split.name} features", len(split))
        for index in tracked:
            fault = _row_fault(split.fragments, index)
            if fault is not None:
                where = f"{split.fragments.features.path}: image '{split.ids[index]}'"
                log.skip(fault[0], where, fault[1])
                result.bad.add(index)
    return result


def drop_unreadable(pairs: Pairs, progress: Progress | None = None) -> Pairs:
    """The pairs without images that do not decode or whose features are not finite."""
    log = ProblemLog(list(pairs.problems))
    splits = {}
    for name, split in pairs.splits.items():
        bad = check_split(split, log, progress).bad
        good = [image for image in range(len(split)) if image not in bad]
        splits[name] = split.select(good) if bad else split
    return Pairs(pairs.name, splits, log.problems)


@dataclass(frozen=True)
class _Decoded:
    size: tuple[int, int]
    look: Look


def _decode_all(images: list[ImageRef]) -> Iterator[_Decoded | str]:
    """Size and look of each image, or why it cannot be read; threads decode ahead."""
    with ThreadPoolExecutor(_THREADS) as pool:
        waiting: deque[Future[_Decoded | str]] = deque()
        try:
            for image in images:
                waiting.append(pool.submit(_decode, image))
                if len(waiting) > _AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _decode(image: ImageRef) -> _Decoded | str:
    try:
        decoded = open_image(image)
        return _Decoded(decoded.size, look_at(decoded))
    except DataError as error:
        return str(error)


def _row_fault(table: FragmentTable, index: int) -> tuple[str, str] | None:
    """Kind and description of what is wrong with the features of an image, if anything."""
    try:
        stored = table.stored(index)
    except DataError as error:
        return "truncated-array", str(error)
    finite = np.isfinite(stored.features)
    if count := int((~finite).sum()):
        row = int(table.rows[index])
        return "non-finite", f"row {row}: {plural(count, 'value is', 'values are')} not finite"
    if stored.boxes is not None and not np.isfinite(stored.boxes).all():
        return "non-finite", f"row {int(table.rows[index])}: a box is not finite numbers"
    return None
