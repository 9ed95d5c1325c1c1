"""Readers of the public files of compositional benchmarks: every format becomes `Item`s.

The files are read as they are published. An error names the file, the item and the field.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from counterfoil.core.errors import ConfigError, DataError, nearest
from counterfoil.data.images import ImageRef
from counterfoil.data.text.words import words
from counterfoil.evaluation.compositional.records import BytesImage, Record, read_records
from counterfoil.foils.grammar import tag

Form = Literal["choice", "square", "words"]
Span = tuple[int, int]

ENDINGS = (".json", ".jsonl", ".csv", ".csv.gz", ".json.gz", ".jsonl.gz", ".parquet")
MIN_VOTES = 2
"""VALSE: annotators, of three, who must have chosen the caption for an item to be valid."""

MIN_CLASS_ITEMS = 25
"""ARO's attribution: pairs of attributes with fewer items are left out of the macro mean."""

RESULT_FIELDS = ("text_score_i0", "text_score_i1", "image_score_c0", "image_score_c1")
"""BiVLC's per-item results: is the right caption first for image k, the right image for caption k?
"""


@dataclass(frozen=True)
class Item:
    """One item: images, ``captions`` that are true of them, and ``foils`` that are false.

    With two images, caption ``k`` is true of image ``k`` only. ``label`` is the class for macro
    means. ``wrong`` are the spans of the caption's wrong words, None if words are not marked.
    ``box`` is the part of the image to look at: left, top, right, bottom in pixels.
    """

    key: str
    images: tuple[str, ...]
    captions: tuple[str, ...]
    foils: tuple[str, ...] = ()
    label: str = ""
    wrong: tuple[Span, ...] | None = None
    box: tuple[float, float, float, float] | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        return self.captions + self.foils


@dataclass(frozen=True)
class Subset:
    """The items of one file, all of one form.

    ``excluded`` items are in the file, but the benchmark does not count them. ``pixels`` are images
    that come with the items. ``results`` are stored outcomes of each item (`RESULT_FIELDS`).
    """

    name: str
    form: Form
    items: tuple[Item, ...]
    excluded: int = 0
    pixels: Mapping[str, ImageRef] = field(default_factory=dict)
    results: tuple[tuple[bool, ...], ...] | None = None


@dataclass(frozen=True)
class Benchmark:
    """A benchmark by name, and its subsets."""

    name: str
    subsets: tuple[Subset, ...]


def read_benchmark(name: str, paths: Sequence[Path]) -> Benchmark:
    """Read files, or all files of folders, of the benchmark ``name``."""
    if name not in READERS:
        known = ", ".join(READERS)
        raise ConfigError(f"unknown benchmark '{name}'{nearest(name, READERS)} (known: {known})")
    files = [file for path in paths for file in _files(path)]
    if not files:
        raise ConfigError(f"{name}: name the files of the benchmark, or their folder")
    refuse_twice(files)
    subsets = [_read_subset(name, file) for file in files]
    forms = {subset.form for subset in subsets}
    if len(forms) > 1:
        raise DataError(f"{name}: the files have items of different forms: {', '.join(forms)}")
    return Benchmark(name, tuple(_with_unique_names(subsets, files)))


def refuse_twice(paths: Sequence[Path]) -> None:
    """Refuse a file or folder that is given twice."""
    seen: set[Path] = set()
    for path in paths:
        if path.resolve() in seen:
            raise ConfigError(f"{path} is given twice; leave one out")
        seen.add(path.resolve())


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(one for one in path.iterdir() if one.name.lower().endswith(ENDINGS))
    if not files:
        raise DataError(f"{path}: the folder has no file of a benchmark ({', '.join(ENDINGS)})")
    return files


def _read_subset(name: str, path: Path) -> Subset:
    subset = READERS[name](path, read_records(path))
    if not subset.items:
        raise DataError(f"{path}: no item that counts ({subset.excluded} are excluded)")
    return subset


def _with_unique_names(subsets: list[Subset], files: Sequence[Path]) -> Iterator[Subset]:
    """Subsets of equally named files are named after their folder, too."""
    names = [subset.name for subset in subsets]
    for subset, file in zip(subsets, files, strict=True):
        twice = names.count(subset.name) > 1
        folder = file.resolve().parent.name
        yield replace(subset, name=f"{folder}/{subset.name}") if twice else subset


def stem(path: Path) -> str:
    """A file's name without its known ending."""
    ending = next((end for end in ENDINGS if path.name.lower().endswith(end)), "")
    return path.name[: len(path.name) - len(ending)]


def _sugarcrepe(path: Path, records: list[Record]) -> Subset:
    return Subset(stem(path), "choice", tuple(map(_one_foil, records)))


def _one_foil(record: Record) -> Item:
    captions = (record.text("caption"),)
    return Item(
        record.key, (record.text("filename"),), captions, (record.text("negative_caption"),)
    )


def _sugarcrepe_pp(path: Path, records: list[Record]) -> Subset:
    items = [
        Item(
            record.key,
            (record.text("filename"),),
            (record.text("caption"), record.text("caption2")),
            (record.text("negative_caption"),),
        )
        for record in records
    ]
    return Subset(stem(path), "choice", tuple(items))


def _valse(path: Path, records: list[Record]) -> Subset:
    items, excluded = [], 0
    for record in records:
        votes = record.inner("mturk").number("caption")
        item = Item(
            record.key,
            (record.text("image_file"),),
            (record.text("caption"),),
            (record.text("foil"),),
        )
        if votes >= MIN_VOTES:
            items.append(item)
        else:
            excluded += 1
    return Subset(stem(path), "choice", tuple(items), excluded)


def _cola(path: Path, records: list[Record]) -> Subset:
    items = []
    for record in records:
        first, one, second, other = record.row(("image 1", "caption 1", "image 2", "caption 2"))
        names = tuple(re.split(r"[/\\]", url.partition("?")[0])[-1] for url in (first, second))
        if not all(names):
            record.fail("image 2" if names[0] else "image 1", "expected an address of an image")
        items.append(Item(record.key, names, (one, other)))
    return Subset(stem(path), "square", tuple(items))


def _winoground(path: Path, records: list[Record]) -> Subset:
    items = [
        Item(
            record.key,
            (record.text("image_0"), record.text("image_1")),
            (record.text("caption_0"), record.text("caption_1")),
            label=record.optional_text("collapsed_tag"),
        )
        for record in records
    ]
    return Subset(stem(path), "square", tuple(items))


def _bivlc(path: Path, records: list[Record]) -> Subset:
    """The data set with its images or their names, or the per-item results of a model."""
    has_results = any(record.has(name) for record in records for name in RESULT_FIELDS)
    items, results = list[Item](), list[tuple[bool, ...]]()
    pixels: dict[str, ImageRef] = {}
    for record in records:
        names = []
        for name in ("image", "negative_image"):
            value = record.value(name)
            if isinstance(value, dict | bytes):  # Parquet files have the images inside
                key = f"{record.key}-{name}"
                pixels[key] = BytesImage(key, record.image_bytes(name))
                names.append(key)
            else:
                text = record.text(name)
                # results have the images as Python printed them, which names no file
                names.append(f"{record.key}-{name}" if text.startswith("<") else text)
        kind = "_".join(filter(None, map(record.optional_text, ("type", "subtype"))))
        captions = record.text("caption"), record.text("negative_caption")
        items.append(Item(record.key, (names[0], names[1]), captions, label=kind))
        if has_results:
            results.append(_stored_results(record))
    stored = tuple(results) if has_results else None
    return Subset(stem(path), "square", tuple(items), pixels=pixels, results=stored)


def _stored_results(record: Record) -> tuple[bool, ...]:
    """The four outcomes; what follows from them must agree with them."""
    outcomes = tuple(map(record.flag, RESULT_FIELDS))
    derived = {
        "text_score": all(outcomes[:2]),
        "image_score": all(outcomes[2:]),
        "group_score": all(outcomes),
    }
    for name, value in derived.items():
        if record.has(name) and record.flag(name) != value:
            record.fail(name, f"expected {value}, as follows from {', '.join(RESULT_FIELDS)}")
    return outcomes


def _aro(path: Path, records: list[Record]) -> Subset:
    """Attribution and relation (two captions), and order (shuffled captions)."""
    items: list[Item] = []
    for record in records:
        if record.has("caption_options"):
            true, *foils = record.texts("caption_options")
            if not foils:
                record.fail("caption_options", "expected the caption and at least one other")
            items.append(Item(record.key, (record.text("image"),), (true,), tuple(foils)))
        elif record.has("true_caption"):
            items.append(_aro_pair(record))
        else:
            items += _shuffled_items(record)
    if any(record.has("attributes") for record in records):
        sizes = Counter(item.label for item in items)
        counted = [item for item in items if sizes[item.label] >= MIN_CLASS_ITEMS]
        # A small file of one's own has no class of that size: then every class counts.
        return Subset(
            stem(path), "choice", tuple(counted or items), len(items) - len(counted or items)
        )
    return Subset(stem(path), "choice", tuple(items))


def _aro_pair(record: Record) -> Item:
    label = record.optional_text("relation_name")
    if not label and record.has("attributes"):
        label = "_".join(record.texts("attributes"))
    box = None
    if any(record.has(f"bbox_{name}") for name in "xywh"):
        left, top, width, height = (record.number(f"bbox_{name}") for name in "xywh")
        if min(width, height) <= 0:
            record.fail("bbox_w" if width <= 0 else "bbox_h", "expected a size above 0")
        box = left, top, left + width, top + height
    captions = (record.text("true_caption"),)
    images = (record.text("image_path"),)
    return Item(record.key, images, captions, (record.text("false_caption"),), label, box=box)


def _shuffled_items(record: Record) -> Iterator[Item]:
    """Captions of an image (Karpathy's layout of COCO and Flickr30K), each with its shuffles."""
    for number, caption in enumerate(record.texts("caption")):
        foils = tuple(shuffles(caption, random.Random(f"{record.key}/{number}")))
        if foils:
            key = f"{record.key}/{number}"
            yield Item(key, (record.text("image"),), (" ".join(_plain_words(caption)),), foils)


def shuffles(caption: str, rng: random.Random) -> list[str]:
    """ARO's four changes of word order, without those that change nothing.

    Nouns and adjectives among themselves, all other words among themselves, the words within
    each group of three, and the groups of three.
    """
    tokens = _plain_words(caption)
    is_content = [one in ("noun", "adjective") for one in tag(tokens)]
    triples = [tokens[start : start + 3] for start in range(0, len(tokens), 3)]
    changed = [
        _shuffled_at([n for n, flag in enumerate(is_content) if flag], tokens, rng),
        _shuffled_at([n for n, flag in enumerate(is_content) if not flag], tokens, rng),
        [word for triple in triples for word in rng.sample(triple, len(triple))],
        [word for triple in rng.sample(triples, len(triples)) for word in triple],
    ]
    texts = dict.fromkeys(" ".join(order) for order in changed if order != tokens)
    return list(texts)


def _plain_words(caption: str) -> list[str]:
    """Lower-case words without punctuation, as ARO compares captions."""
    return [word for word in words(caption) if any(letter.isalnum() for letter in word)]


def _shuffled_at(places: list[int], tokens: list[str], rng: random.Random) -> list[str]:
    order = list(tokens)
    for target, source in zip(places, rng.sample(places, len(places)), strict=True):
        order[target] = tokens[source]
    return order


def _foil(path: Path, records: list[Record]) -> Subset:
    """FOIL (annotations and images), nocaps-FOIL (``replacement``) or HAT (``grounding``)."""
    if {record.key for record in records} >= {"annotations", "images"}:
        return Subset(stem(path), "words", tuple(_foil_items(records)))
    items: list[Item] = []
    for record in records:
        items += _nocaps_items(record) if record.has("replacement") else [_hat_item(record)]
    return Subset(stem(path), "words", tuple(items))


def _foil_items(records: list[Record]) -> Iterator[Item]:
    parts = {record.key: record for record in records}
    files: dict[float, str] = {}
    for image in parts["images"].entries():
        if files.setdefault(image.number("id"), image.text("file_name")) != image.text("file_name"):
            image.fail("id", "another image of the file has this id")
    for record in parts["annotations"].entries():
        name = files.get(record.number("image_id"))
        if name is None:
            record.fail("image_id", "no image of the file has this id")
        caption, spans = record.text("caption"), list[Span]()
        if record.flag("foil"):
            spans = [_span_of(record, "foil_word", record.text("foil_word"), caption, 0)]
        yield Item(record.key, (name,), (caption,), wrong=tuple(spans))


def _nocaps_items(record: Record) -> list[Item]:
    """The true caption and the foil, as two captions of the same image."""
    images = (record.text("image_path"),)
    pair = record.texts("replacement")
    if len(pair) != 2:
        record.fail("replacement", f"expected the old and the new words, got {len(pair)} texts")
    true, foil = record.text("baseline"), record.text("foil")
    letters = zip(true, foil, strict=False)
    start = next((n for n, (one, other) in enumerate(letters) if one != other), len(true))
    spans = () if pair[0] == pair[1] else (_span_of(record, "replacement", pair[1], foil, start),)
    return [
        Item(f"{record.key}/baseline", images, (true,), wrong=()),
        Item(f"{record.key}/foil", images, (foil,), wrong=spans),
    ]


def _hat_item(record: Record) -> Item:
    caption, cursor, spans = record.text("caption"), 0, list[Span]()
    marks = record.value("grounding")
    if not isinstance(marks, list):
        record.fail("grounding", "expected a list of [word, wrong]")
    for number, mark in enumerate(marks):
        is_mark = isinstance(mark, list) and len(mark) == 2 and isinstance(mark[0], str)
        if not is_mark or not isinstance(mark[1], bool) or (mark[1] and not mark[0].strip()):
            record.fail(f"grounding[{number}]", "expected [word, true or false]")
        start = caption.find(mark[0], cursor)
        if start < 0:
            record.fail(f"grounding[{number}]", f"the word '{mark[0]}' is not in the caption here")
        cursor = start + len(mark[0])
        if mark[1]:
            spans.append((start, cursor))
    return Item(record.key, (record.text("image_path"),), (caption,), wrong=tuple(spans))


def _span_of(record: Record, name: str, word: str, caption: str, near: int) -> Span:
    """Where a word stands in a caption: whole words first, and the nearest one to ``near``."""
    pattern = re.escape(word.strip())
    matches = list(re.finditer(rf"(?<!\w){pattern}(?!\w)", caption, re.IGNORECASE))
    matches = matches or list(re.finditer(pattern, caption, re.IGNORECASE))
    if not matches:
        record.fail(name, f"'{word}' is not in the foil '{caption}'")
    return min((match.span() for match in matches), key=lambda span: abs(span[0] - near))


READERS: dict[str, Callable[[Path, list[Record]], Subset]] = {
    "sugarcrepe": _sugarcrepe,
    "sugarcrepe++": _sugarcrepe_pp,
    "valse": _valse,
    "bivlc": _bivlc,
    "cola": _cola,
    "winoground": _winoground,
    "aro": _aro,
    "foil": _foil,
}
"""Benchmarks by name; `foil` reads FOIL, nocaps-FOIL and HAT."""
