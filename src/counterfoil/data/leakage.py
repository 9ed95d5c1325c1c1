"""What two splits share that they should not: image ids, captions, images that look alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from counterfoil.data.duplicates import spoken
from counterfoil.data.look_alikes import Looks, find_look_alikes
from counterfoil.data.pairs import Pairs, Split
from counterfoil.data.problems import ProblemLog

TRAIN = "train"
_NESTED = ({"test", "testall"}, {"dev", "devall"}, {"val", "valall"})  # the first of 1K, all of 5K


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
