"""A dev split for data without one, and what splits share that they should not.

Training selects its checkpoint on dev. That part of the training images is chosen by a hash of
their ids alone, so it is the same after the rows were reordered, and an image keeps its side when
others are added.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from counterfoil.core.errors import DataError
from counterfoil.core.storage.atomic import write_atomically
from counterfoil.core.storage.reading import read_text
from counterfoil.data.duplicates import Looks, find_look_alikes, spoken
from counterfoil.data.formats.base import hash_of, least_images
from counterfoil.data.pairs import Pairs, Problem, ProblemLog, Severity, Split

DEFAULT_DEV_SHARE = 0.05
KIND = "dev-set-aside"
FILE = "dev_split.json"
"""Of a run: which images were set aside, and by which share."""

TRAIN = "train"
_NESTED = ({"test", "testall"}, {"dev", "devall"}, {"val", "valall"})  # the first of 1K, all of 5K


def lacks_dev(pairs: Pairs) -> bool:
    """Whether a data set has a training split but none to select a checkpoint on."""
    return "train" in pairs and "dev" not in pairs


def choose_dev(ids: Sequence[str], share: float) -> list[int]:
    """Indexes of the images to set aside, in their order: those with a hash below ``share``.

    Small sets give the images with the smallest hashes: ten of them, but at most a fifth (or
    ``share``, if that is more), and at least one. One image stays in training.
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
    return split.select([place * len(split) // most for place in range(most)])


def with_dev_split(pairs: Pairs, share: float, saved: Collection[str] | None = None) -> Pairs:
    """The data set with a part of ``train`` as ``dev``, if it has no such split; else unchanged.

    ``saved`` are the images that a run has set aside before; they are taken again if most of them
    are in the training split. With a ``share`` of 0, nothing else is set aside.
    """
    if not lacks_dev(pairs):
        return pairs
    train, aside = pairs.train, find_saved(pairs, saved)
    if not aside and not share:
        return pairs
    if len(train) < 2:
        raise DataError(
            f"data set '{pairs.name}': no split 'dev', and 'train' has {len(train)} images; at "
            "least two are needed, one to train on and one to select the checkpoint with"
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
    """Indexes of the saved images in ``train``; none if most are missing: it is other data."""
    known = set(saved or ())
    found = [index for index, image in enumerate(pairs.train.ids) if image in known]
    return found if 2 * len(found) >= len(known) and len(found) < len(pairs.train) else []


def describe(count: int, images: int) -> str:
    return (
        f"no split 'dev': {count:,} of {images:,} training images (with all their captions) are "
        "set aside as 'dev', chosen by a hash of their ids (data.dev_share)"
    )


def dev_note(pairs: Pairs) -> str | None:
    """The line about the images set aside, if there are any."""
    return next((one.message for one in pairs.problems if one.kind == KIND), None)


def save_dev_split(folder: Path, pairs: Pairs, share: float) -> None:
    """Write which images a run has set aside, if it has."""
    if dev_note(pairs) is not None:
        record = {"split": "dev", "of": "train", "share": share, "ids": list(pairs.dev.ids)}
        write_atomically(folder / FILE, json.dumps(record, indent=1) + "\n")


def read_dev_split(folder: Path) -> list[str] | None:
    """The ids that a run has set aside; None if it has not."""
    try:
        ids = json.loads(read_text(folder / FILE))["ids"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder / FILE}: not readable as a list of images ({error})") from None
    if not isinstance(ids, list) or not all(isinstance(one, str) for one in ids):
        raise DataError(f"{folder / FILE}: expected a list of image ids under 'ids'")
    return ids


# Leakage: image ids, captions and images that look alike in both of two splits.


@dataclass(frozen=True)
class Leakage:
    """How much two splits share; ``images`` look alike under different ids, None if not looked at.

    ``captions`` are those of the second split that stand word for word in the first.
    """

    splits: tuple[str, str]
    ids: int
    captions: int
    images: int | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def are_nested(one: str, other: str) -> bool:
    """Whether a split is meant to be part of another, as COCO's `test` is of `testall`.

    Names that begin alike say nothing of it: `train` and `train_noisy` are compared.
    """
    return {one, other} in _NESTED


def shared_with_train(pairs: Pairs, *names: str) -> dict[str, int]:
    """How many images of these splits have an id that an image of the training split has."""
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
    """How many image ids two splits share, if both exist and neither is part of the other."""
    if one not in pairs or other not in pairs:
        return 0
    first, second = pairs[one], pairs[other]
    if first.name == second.name or are_nested(first.name, second.name):
        return 0
    return len(set(first.ids) & set(second.ids))


def leakage_warning(shared: Mapping[str, int], judges: tuple[str, str, int] | None = None) -> str:
    """One line about `shared_with_train`; an empty string if there is nothing to say.

    ``judges`` are the split that selects a checkpoint, the one that tests it, and `shared_by`.
    """
    faults = []
    if shared:
        counts = ", ".join(f"{count} image ids of '{name}'" for name, count in shared.items())
        faults.append(f"{counts} are also in the training split: results on them are too good")
    if judges is not None and judges[2]:
        one, other, count = judges
        faults.append(
            f"{count} image ids are in both '{one}' and '{other}': the checkpoint is selected on "
            "images that test it"
        )
    return f"warning: {'; '.join(faults)} (see: counterfoil data inspect)" if faults else ""


def find_leakage(pairs: Pairs, looks: Mapping[str, Looks], log: ProblemLog) -> list[Leakage]:
    """What each two splits share; captions and look-alikes are noted, ids were before."""
    return [_between(one, other, looks, pairs.name, log) for one, other in _to_compare(pairs)]


def _to_compare(pairs: Pairs) -> Iterator[tuple[Split, Split]]:
    for one, other in combinations(pairs, 2):
        if not are_nested(one.name, other.name):
            yield one, other


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
            f"{len(repeated)} captions of '{other.name}' stand word for word in '{one.name}' "
            f"(such as '{repeated[0][:80]}')",
        )
    images = None
    if one.name in looks and other.name in looks:
        found = find_look_alikes(looks[one.name], looks[other.name])
        pairs = [(a, b) for a, b in found.pairs if one.ids[a] != other.ids[b]]
        images = len({b for _, b in pairs})
        if images:
            first, second = pairs[0]
            log.note(
                "similar-images",
                where,
                f"{'' if found.complete else 'at least '}{images} images of '{other.name}' look "
                f"like one of '{one.name}' (such as '{other.ids[second]}' like "
                f"'{one.ids[first]}'); {both} should not have them",
            )
    ids = len(set(one.ids) & set(other.ids))
    return Leakage((one.name, other.name), ids, len(repeated), images)
