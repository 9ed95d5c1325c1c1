"""A dev split for data without one: a part of the training images, chosen by a hash of their ids.

Training selects its checkpoint on dev. The part depends on the ids alone, so it is the same after
the rows were reordered, and an image keeps its side when others are added.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from counterfoil.data.pairs import Pairs
from counterfoil.data.problems import Problem, Severity
from counterfoil.data.sources.split_names import hash_of, least_images
from counterfoil.errors import DataError
from counterfoil.files import write_atomically
from counterfoil.reading import read_text

SHARE = 0.05
KIND = "dev-set-aside"
FILE = "dev_split.json"
"""Of a run: which images were set aside, and by which share."""


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
