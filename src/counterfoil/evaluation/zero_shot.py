"""Zero-shot classification by prompts: which class name, in a sentence, fits an image best?

Classes of drawn scenes are known by construction. For other data they are given in a file, or are
the things that captions name.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from counterfoil.core.errors import DataError
from counterfoil.core.storage.reading import read_text
from counterfoil.data.pairs import Split
from counterfoil.data.scenes.vocabulary import KINDS, PALETTE
from counterfoil.data.text.words import words
from counterfoil.foils.grammar import is_noun
from counterfoil.foils.lexicon import NOUN_FORMS

if TYPE_CHECKING:
    from torch import Tensor

TEMPLATES = ("a photo of a {}.", "a {}.", "there is a {} in the picture.")
COLOR_TEMPLATES = ("something {}.", "a {} thing.")
MIN_IMAGES, MAX_CLASSES = 5, 40
"""Images that must show a thing that captions name, and the number of such classes."""
MAX_NAMES = 5
"""Unknown image ids that a note names."""


@dataclass(frozen=True)
class ClassSet:
    """Classes with the prompts that name them, and the classes of each image.

    ``labels[i]`` are indices of the classes that image ``i`` of a split shows; images without one
    are left out. ``unknown`` are ids of labeled images that the split does not have.
    """

    name: str
    classes: tuple[str, ...]
    labels: tuple[frozenset[int], ...]
    templates: tuple[str, ...] = TEMPLATES
    unknown: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.classes) < 2:
            raise DataError(f"{self.name}: expected at least 2 classes, got {len(self.classes)}")
        if not any(self.labels):
            raise DataError(f"{self.name}: no image of the split has one of the classes")

    @property
    def prompts(self) -> list[str]:
        """The sentences of the first class, then of the second, …"""
        return [
            template.replace("{}", name) for name in self.classes for template in self.templates
        ]

    @property
    def chance(self) -> float:
        """Share of images that a random choice gets right."""
        sizes = [len(own) for own in self.labels if own]
        return float(np.mean(sizes)) / len(self.classes)

    def note(self) -> str:
        """Chance, and the labels that were not used."""
        line = f"{self.name}: chance {100 * self.chance:.1f}%"
        if not self.unknown:
            return line
        names = ", ".join(self.unknown[:MAX_NAMES])
        more = ", …" if len(self.unknown) > MAX_NAMES else ""
        count = len(self.unknown)
        return (
            f"{line}, {count:,} labels are of images that the split does not have ({names}{more})"
        )


def correct_classes(
    scores: NDArray[Any] | Tensor, classes: ClassSet, images: Sequence[int]
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Whether the best class of each labeled image is one of its own, and these images.

    ``scores`` [n_images, n_prompts] are those of ``images`` (indices into the split) with the
    prompts. The score of a class is the mean over its prompts. A tie with a wrong class counts
    against the model.
    """
    table = np.asarray(scores, dtype=np.float64)
    table = table.reshape(len(table), len(classes.classes), -1).mean(2)
    right, labeled = [], []
    for row, image in zip(table, images, strict=True):
        own = sorted(classes.labels[image])
        if not own:
            continue
        others = np.delete(row, own)
        right.append(bool(row[own].max() > others.max(initial=-np.inf)))
        labeled.append(image)
    return np.array(right, dtype=np.bool_), np.array(labeled, dtype=np.int64)


def scene_classes(split: Split) -> list[ClassSet]:
    """Kinds of things and colors of drawn scenes; an image has those of all its objects."""
    extras = split.extras or ()
    kinds, colors = list(KINDS), list(PALETTE)
    objects = [[(o["kind"], o["colour"]) for o in one["scene"]["objects"]] for one in extras]
    of_kind = tuple(frozenset(kinds.index(kind) for kind, _ in own) for own in objects)
    of_color = tuple(frozenset(colors.index(color) for _, color in own) for own in objects)
    return [
        ClassSet("things", tuple(kinds), of_kind),
        ClassSet("colors", tuple(colors), of_color, COLOR_TEMPLATES),
    ]


def caption_classes(split: Split) -> list[ClassSet]:
    """The things that captions name most often; an image has those that its captions name."""
    named: list[set[str]] = []
    for texts in split.captions:
        tokens = [words(text) for text in texts]
        named.append(
            {NOUN_FORMS[t[i]].thing for t in tokens for i in range(len(t)) if is_noun(t, i)}
        )
    counts = Counter(thing for own in named for thing in sorted(own))
    chosen = [thing for thing, count in counts.most_common(MAX_CLASSES) if count >= MIN_IMAGES]
    if len(chosen) < 2:
        return []
    labels = tuple(frozenset(chosen.index(thing) for thing in own & set(chosen)) for own in named)
    return [ClassSet("things", tuple(chosen), labels)]


def classes_of(split: Split, path: Path | None = None) -> list[ClassSet]:
    """The classes of a file; without one, those of drawn scenes or the things captions name."""
    if path is not None:
        return [read_classes(path, split)]
    if split.extras is not None and len(split) and "scene" in split.extras[0]:
        return scene_classes(split)
    return caption_classes(split)


def read_classes(path: Path, split: Split) -> ClassSet:
    """Classes of a file: class names, one per line, or JSON.

    JSON is an object with ``classes`` (a list of names) and, optionally, ``templates`` (sentences
    with {} for the name) and ``labels`` (an object from image ids to a class or a list of classes).
    Without labels, an image has the classes whose words one of its captions contains.
    """
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as text ({error})") from None
    tree = _parsed(path, text)
    names = _names(path, tree.get("classes"), "classes")
    templates = _names(path, tree.get("templates", list(TEMPLATES)), "templates")
    if any(template.count("{}") != 1 for template in templates):
        raise DataError(f"{path}: a template has {{}} once, for the class; got {list(templates)}")
    if "labels" not in tree:
        return ClassSet(path.stem, names, _labels_by_captions(names, split), templates)
    labels = _given_labels(path, tree["labels"], names)
    if labels.keys().isdisjoint(split.ids):
        raise DataError(
            f"{path}: none of the {len(labels):,} image ids of 'labels' is in the split "
            f"'{split.name}', whose ids are like '{split.ids[0] if len(split) else ''}'"
        )
    known = frozenset(split.ids)
    return ClassSet(
        path.stem,
        names,
        tuple(labels.get(image, frozenset()) for image in split.ids),
        templates,
        tuple(image for image in labels if image not in known),
    )


def _parsed(path: Path, text: str) -> dict[str, Any]:
    if not text.lstrip().startswith(("{", "[")):
        return {"classes": [line.strip() for line in text.splitlines() if line.strip()]}
    try:
        tree = json.loads(text, object_pairs_hook=lambda pairs: _unique(path, pairs))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON ({error})") from None
    if isinstance(tree, list):
        return {"classes": tree}
    unknown = sorted(set(tree) - {"classes", "templates", "labels"})
    if unknown:
        raise DataError(
            f"{path}: unknown key '{unknown[0]}' (known: classes, templates and labels)"
        )
    return dict(tree)


def _unique(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; a key that it has twice is refused, since one value would be lost."""
    tree: dict[str, Any] = {}
    for key, value in pairs:
        if key in tree:
            raise DataError(f"{path}: the key '{key}' stands twice in one object; delete one")
        tree[key] = value
    return tree


def _names(path: Path, given: Any, key: str) -> tuple[str, ...]:
    if not isinstance(given, list) or not all(isinstance(x, str) and x.strip() for x in given):
        raise DataError(f"{path}: expected '{key}' as a list of texts that are not empty")
    if len(set(given)) < len(given) or not given:
        raise DataError(f"{path}: '{key}' is empty or has an entry twice")
    return tuple(given)


def _given_labels(path: Path, given: Any, names: Sequence[str]) -> dict[str, frozenset[int]]:
    if not isinstance(given, dict):
        raise DataError(f"{path}: expected 'labels' as an object from image ids to classes")
    number = {name: index for index, name in enumerate(names)}
    labels: dict[str, frozenset[int]] = {}
    for image, own in given.items():
        chosen = own if isinstance(own, list) else [own]
        wrong = [name for name in chosen if not isinstance(name, str) or name not in number]
        if wrong:
            raise DataError(f"{path}: image '{image}': {wrong[0]!r} is not one of the classes")
        labels[image] = frozenset(number[name] for name in chosen)
    return labels


def _labels_by_captions(names: Sequence[str], split: Split) -> tuple[frozenset[int], ...]:
    wanted = [words(name) for name in names]
    labels = []
    for texts in split.captions:
        tokens = [words(text) for text in texts]
        labels.append(
            frozenset(
                index for index, name in enumerate(wanted) if any(_has(t, name) for t in tokens)
            )
        )
    return tuple(labels)


def _has(tokens: Sequence[str], name: Sequence[str]) -> bool:
    """Whether consecutive words are the name; its last word may be plural."""
    size = len(name)
    ends = {name[-1], f"{name[-1]}s", f"{name[-1]}es"} if name else set()
    return any(
        list(tokens[i : i + size - 1]) == list(name[:-1]) and tokens[i + size - 1] in ends
        for i in range(len(tokens) - size + 1)
    )
