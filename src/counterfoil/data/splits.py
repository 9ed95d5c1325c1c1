"""Splits: a dev split set aside from train, caption noise, and leakage between splits.

Training selects its checkpoint on dev. If there is none, a hash of the image ids chooses part of
train. So the choice does not depend on row order, and added images do not move others.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from counterfoil.core.errors import ConfigError, DataError
from counterfoil.core.printable import plural
from counterfoil.core.storage.atomic import write_atomically
from counterfoil.core.storage.reading import read_text
from counterfoil.data.duplicates import Looks, find_look_alikes, spoken
from counterfoil.data.formats.base import HASHED, ORDER, hash_of, least_images
from counterfoil.data.pairs import Pairs, Problem, ProblemLog, Severity, Split

DEFAULT_DEV_SHARE = 0.05
KIND = "dev-set-aside"
FILE = "dev_split.json"
"""File in a run folder: which images were set aside, and with which share."""

TRAIN = "train"
_NESTED = (
    {"test", "testall"},
    {"dev", "devall"},
    {"val", "valall"},
)  # COCO: 1K within 5K


WHOLE = "all"
"""Name of the split of `undivided`."""


def undivided(pairs: Pairs) -> Pairs:
    """All images as one split, if the data state no splits and have no features; else the same."""
    splits = list(pairs)
    hashed = any(problem.kind == HASHED for problem in pairs.problems)
    if not hashed or any(split.pixels is None for split in splits):
        return pairs
    extras = [
        split.extras if split.extras is not None else [{} for _ in split.ids] for split in splits
    ]
    whole = Split(
        WHOLE,
        ids=[image for split in splits for image in split.ids],
        captions=[texts for split in splits for texts in split.captions],
        pixels=[image for split in splits for image in split.pixels or ()],
        extras=[own for part in extras for own in part],
    )
    notes = [problem for problem in pairs.problems if problem.kind != HASHED]
    return replace(pairs, splits={WHOLE: whole}, problems=notes)


def lacks_dev(pairs: Pairs) -> bool:
    """Whether a data set has a training split but no dev split."""
    return "train" in pairs and "dev" not in pairs


def choose_dev(ids: Sequence[str], share: float) -> list[int]:
    """Indices of the images to set aside, in order: those with a hash below ``share``.

    Small sets set aside the images with the smallest hashes: ten, but at most a fifth of all (or
    ``share``, if that is more), and at least one. At least one image stays in training.
    """
    hashes = [hash_of(image, "dev") for image in ids]
    below = sum(value < share for value in hashes)
    least = max(least_images(len(ids)), min(10, round(share * len(ids))))
    count = min(max(below, least), len(ids) - 1)
    order = sorted(range(len(ids)), key=lambda index: (hashes[index], ids[index]))
    return sorted(order[:count])


def evenly_spaced(split: Split, most: int | None) -> Split:
    """At most ``most`` images of a split, evenly spaced; None: all of them."""
    if most is None or most >= len(split):
        return split
    return split.select([step * len(split) // most for step in range(most)])


def with_dev_split(pairs: Pairs, share: float, saved: Collection[str] | None = None) -> Pairs:
    """The data set with part of ``train`` as ``dev``; unchanged if it has a dev split.

    ``saved`` are the image ids that a run set aside before. They are reused if most of them are in
    the training split. With a ``share`` of 0, nothing else is set aside.
    """
    if not (isinstance(share, int | float) and 0.0 <= share < 1.0):
        raise ConfigError(f"dev_share: expected a number from 0 to below 1, got {share!r}")
    if not lacks_dev(pairs):
        return pairs
    train, aside = pairs.train, find_saved(pairs, saved)
    if not aside and not share:
        return pairs
    if len(train) < 2:
        raise DataError(
            f"data set '{pairs.name}': no split 'dev', and 'train' has "
            f"{plural(len(train), 'image')}; at least two are needed, one to train on "
            "and one to select the checkpoint with"
        )
    aside = aside or choose_dev(train.ids, share)
    chosen = set(aside)
    rest = [index for index in range(len(train)) if index not in chosen]
    splits = {}
    for name, split in pairs.splits.items():
        if name == train.name:
            splits[name] = train.select(rest)
            splits["dev"] = train.select(aside, name="dev")
        else:
            splits[name] = split
    note = Problem(KIND, Severity.NOTE, pairs.name, describe(len(aside), len(train)))
    return replace(pairs, splits=splits, problems=[*pairs.problems, note])


def find_saved(pairs: Pairs, saved: Collection[str] | None) -> list[int]:
    """Indices of the saved images in ``train``; empty if most are missing (other data)."""
    known = set(saved or ())
    indices = [index for index, image in enumerate(pairs.train.ids) if image in known]
    return indices if 2 * len(indices) >= len(known) and len(indices) < len(pairs.train) else []


def describe(count: int, images: int) -> str:
    return (
        f"no split 'dev': {count:,} of {images:,} training images (with all their captions) are "
        "set aside as 'dev', chosen by a hash of their ids (data.dev_share)"
    )


def dev_note(pairs: Pairs) -> str | None:
    """The note about the images set aside; None if there are none."""
    return next((one.message for one in pairs.problems if one.kind == KIND), None)


def likely_typos(pairs: Pairs) -> list[str]:
    """Notes on split names that are nearly usual ones: commands use these only if given them."""
    notes = []
    for name in pairs.splits:
        given = name.lower()
        close = difflib.get_close_matches(given, ORDER, n=1, cutoff=0.75)
        if close and not any(usual in given for usual in ORDER):  # as in test1k or trainval
            notes.append(f"split '{name}' is not a usual name; did you mean '{close[0]}'?")
    return notes


def save_dev_split(folder: Path, pairs: Pairs, share: float) -> None:
    """Write the ids of the images that a run has set aside, if any."""
    if dev_note(pairs) is not None:
        record = {"split": "dev", "of": "train", "share": share, "ids": list(pairs.dev.ids)}
        write_atomically(folder / FILE, json.dumps(record, indent=1) + "\n")


def read_dev_split(folder: Path) -> list[str] | None:
    """The image ids that a run has set aside; None if it has set none aside."""
    try:
        ids = json.loads(read_text(folder / FILE))["ids"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder / FILE}: not readable as a list of images ({error})") from None
    if not isinstance(ids, list) or not all(isinstance(one, str) for one in ids):
        raise DataError(f"{folder / FILE}: expected a list of image ids under 'ids'")
    return ids


# Caption noise: NCR's protocol moves a share of the training captions to other images.


def shuffled_captions(split: Split, ratio: float, seed: int) -> tuple[Split, NDArray[np.int64]]:
    """The split with round(ratio · n) captions moved to other images, and the index of the moves.

    Caption ``index[k]`` is now ``split.texts[k]``. Save the index with ``np.save`` and apply it
    again with `with_noise_index`, since results depend on it. Every image keeps its number of
    captions. No drawn caption stays with its image, unless more than half of the drawn ones belong
    to that image (or only one was drawn): then as few as possible stay.
    """
    if not 0.0 <= ratio <= 1.0:
        raise ConfigError(f"caption noise: expected a ratio from 0 to 1, got {ratio}")
    rng = np.random.default_rng(seed)
    owner = split.image_of
    index = np.arange(len(owner), dtype=np.int64)
    drawn = np.sort(rng.choice(len(owner), size=round(ratio * len(owner)), replace=False))
    index[drawn] = rng.permutation(drawn)
    _swap_unmoved(index, drawn, owner, rng)
    return with_noise_index(split, index), index


def with_noise_index(split: Split, index: ArrayLike) -> Split:
    """The split with caption ``index[k]`` as its caption ``k``.

    ``extras`` are left out, since those of captions would belong to the wrong ones.
    """
    texts = [split.texts[number] for number in _permutation(split, np.asarray(index))]
    counts = [len(captions) for captions in split.captions]
    ends = accumulate(counts)
    captions = [texts[end - count : end] for count, end in zip(counts, ends, strict=True)]
    return replace(split, captions=captions, extras=None)


def _swap_unmoved(
    index: NDArray[np.int64],
    drawn: NDArray[np.int64],
    owner: NDArray[np.int64],
    rng: np.random.Generator,
) -> None:
    """Swap captions that stayed with their image, in place, until no swap helps.

    A partner neither belongs to that image nor is assigned to it. There is one while the image has
    at most half of the drawn captions, or more unmoved ones than necessary; so one pass is enough.
    """
    for slot in drawn[owner[index[drawn]] == owner[drawn]]:
        image = owner[slot]
        partners = drawn[(owner[drawn] != image) & (owner[index[drawn]] != image)]
        # An earlier swap may have moved this caption as a partner.
        if owner[index[slot]] == image and len(partners):
            partner = rng.choice(partners)
            index[slot], index[partner] = index[partner], index[slot]


def _permutation(split: Split, index: NDArray[np.generic]) -> NDArray[np.int64]:
    count = len(split.texts)
    if index.ndim != 1 or len(index) != count:
        raise DataError(
            f"caption noise: split '{split.name}' has {count} captions but the index has shape "
            f"{list(index.shape)}; it was made for other data"
        )
    if not np.issubdtype(index.dtype, np.integer):
        raise DataError(f"caption noise: expected an index of integers, found {index.dtype}")
    numbers: NDArray[np.int64] = index.astype(np.int64)
    if not np.array_equal(np.sort(numbers), np.arange(count)):
        raise DataError(
            f"caption noise: the index must name each caption from 0 to {count - 1} exactly once"
        )
    return numbers


# Leakage: image ids, captions and look-alike images that two splits share.


@dataclass(frozen=True)
class Leakage:
    """Counts of what two splits share.

    ``captions`` of the second split are word for word in the first. ``images`` look alike under
    different ids (None: not compared).
    """

    splits: tuple[str, str]
    ids: int
    captions: int
    images: int | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def are_nested(one: str, other: str) -> bool:
    """Whether one split is part of the other by design, as COCO's `test` is of `testall`."""
    return {one, other} in _NESTED


def shared_with_train(pairs: Pairs, *names: str) -> dict[str, int]:
    """Number of images per split whose id is also in the training split; zeros are left out."""
    if TRAIN not in pairs:
        return {}
    train = pairs.train
    known = set(train.ids)
    counts = {}
    for name in dict.fromkeys(names):
        if name in pairs and pairs[name].name != train.name:
            counts[name] = sum(identifier in known for identifier in pairs[name].ids)
    return {name: count for name, count in counts.items() if count}


def shared_by(pairs: Pairs, one: str, other: str) -> int:
    """Number of image ids two splits share, if both exist and neither is part of the other."""
    if one not in pairs or other not in pairs:
        return 0
    first, second = pairs[one], pairs[other]
    if first.name == second.name or are_nested(first.name, second.name):
        return 0
    return len(set(first.ids) & set(second.ids))


def leakage_warning(shared: Mapping[str, int], judges: tuple[str, str, int] | None = None) -> str:
    """One line about `shared_with_train`; empty if nothing is shared.

    ``judges`` are the split that selects the checkpoint, the one that tests it, and their
    `shared_by`.
    """
    faults = []
    if shared:
        counts = ", ".join(
            f"{plural(count, 'image id')} of '{name}'" for name, count in shared.items()
        )
        verb = "is" if sum(shared.values()) == 1 else "are"
        faults.append(f"{counts} {verb} also in the training split: results on them are too good")
    if judges is not None and judges[2]:
        one, other, count = judges
        faults.append(
            f"{plural(count, 'image id is', 'image ids are')} in both '{one}' and '{other}': the "
            "checkpoint is selected on images that test it"
        )
    return f"warning: {'; '.join(faults)} (see: counterfoil data inspect)" if faults else ""


def find_leakage(pairs: Pairs, looks: Mapping[str, Looks], log: ProblemLog) -> list[Leakage]:
    """What every two splits share; logs captions and look-alikes (`assemble` logs ids)."""
    return [
        _between(one, other, looks, pairs.name, log)
        for one, other in combinations(pairs, 2)
        if not are_nested(one.name, other.name)
    ]


def _between(
    one: Split, other: Split, looks: Mapping[str, Looks], where: str, log: ProblemLog
) -> Leakage:
    both = f"both '{one.name}' and '{other.name}'"
    known = {spoken(text) for text in one.texts}
    repeated = [text for text in other.texts if spoken(text) in known]
    if repeated:
        log.note(
            "shared-captions",
            where,
            f"{plural(len(repeated), 'caption')} of '{other.name}' "
            f"{'stands' if len(repeated) == 1 else 'stand'} word for word in '{one.name}' "
            f"(such as '{repeated[0][:80]}')",
        )
    images = None
    if one.name in looks and other.name in looks:
        matches = find_look_alikes(looks[one.name], looks[other.name])
        pairs = [(a, b) for a, b in matches.pairs if one.ids[a] != other.ids[b]]
        images = len({b for _, b in pairs})
        if images:
            first, second = pairs[0]
            log.note(
                "similar-images",
                where,
                f"{'' if matches.complete else 'at least '}{plural(images, 'image')} of "
                f"'{other.name}' {'looks' if images == 1 else 'look'} like one of '{one.name}' "
                f"(such as '{other.ids[second]}' like '{one.ids[first]}'); {both} should not "
                f"have {'it' if images == 1 else 'them'}",
            )
    ids = len(set(one.ids) & set(other.ids))
    return Leakage((one.name, other.name), ids, len(repeated), images)
