"""Files of foils (JSON lines), written by rule or by a model, read as extra negatives."""

from __future__ import annotations

import json
import math
import os
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from counterfoil.core.errors import ConfigError, DataError
from counterfoil.core.progress import Progress, Silent
from counterfoil.core.storage.atomic import put_in_place
from counterfoil.core.storage.locks import locked_target
from counterfoil.core.storage.reading import LINES_BYTES, open_regular, read_lines
from counterfoil.data.duplicates import spoken
from counterfoil.data.formats.text_files import json_bytes
from counterfoil.data.pairs import Split
from counterfoil.data.text.words import words
from counterfoil.foils.rules import DEFAULT_KINDS, REORDERING, CaptionSites, Foil, rule_foils

PARTIAL = ".partial"

NEEDED: dict[str, tuple[type, ...]] = {"image": (str, int), "caption": (str, int), "foil": (str,)}
"""Required keys and their types; other programs may omit the rest."""


@dataclass(frozen=True)
class StoredFoil:
    """A false caption of an image with its origin.

    ``caption`` is the true text, or its number among the captions of the image, from 0.
    ``positions`` are the indices, among the `words` of both, at which the foil differs from it.
    ``kind`` says what was falsified. ``score`` is the generator's matching score. ``caption_id``
    names the true caption, as ``IMAGE#0``.
    """

    image: str
    caption: str | int
    foil: str
    positions: tuple[int, ...] = ()
    kind: str = ""
    score: float | None = None
    caption_id: str = ""

    def as_dict(self) -> dict[str, Any]:
        if self.score is not None and not math.isfinite(self.score):
            raise DataError(f"image '{self.image}': the score of a foil is {self.score}")
        if not self.foil.strip():
            raise DataError(f"image '{self.image}': a foil is empty")
        return {
            "image": self.image,
            **({"caption_id": self.caption_id} if self.caption_id else {}),
            "caption": self.caption,
            "foil": self.foil,
            "positions": list(self.positions),
            "kind": self.kind,
            "score": self.score,
        }


def read_foils(path: Path) -> Iterator[StoredFoil]:
    """The foils of a file, in order; optional keys that are missing are empty."""
    try:
        with open_regular(path, LINES_BYTES) as file:
            for number, line in enumerate(read_lines(file, path), start=1):
                if line.strip():
                    yield _parsed(line, f"{path}, line {number}")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file of foils") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None


def _refuse_surrogates(text: str, where: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"{where}: has half a character (a lone surrogate); save it anew") from None


def _parsed(line: bytes, where: str) -> StoredFoil:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        raise DataError(f"{where}: not JSON ({error})") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected an object, got {type(record).__name__}")
    for key, kinds in NEEDED.items():
        if type(record.get(key)) not in kinds:
            wanted = " or ".join({str: "text", int: "a whole number"}[kind] for kind in kinds)
            raise DataError(f"{where}: expected '{key}' as {wanted}, got {record.get(key)!r}")
    image, caption, foil = str(record["image"]), record["caption"], record["foil"]
    if isinstance(caption, int) and caption < 0:
        raise DataError(f"{where}: 'caption' counts from 0, got {caption}")
    if not foil.strip():
        raise DataError(f"{where}: the foil is empty")
    if not (image + foil + str(caption)).isprintable():
        _refuse_surrogates(image + foil + str(caption), where)
    kind, score = str(record.get("kind", "")), record.get("score")
    try:
        positions = tuple(int(index) for index in record.get("positions", ()))
        score = None if score is None else float(score)
    except (ValueError, TypeError, OverflowError):
        raise DataError(
            f"{where}: expected whole numbers as 'positions' and a number as 'score', if given"
        ) from None
    return StoredFoil(
        image, caption, foil, positions, kind, score, str(record.get("caption_id", ""))
    )


class FoilWriter:
    """Writes foils caption by caption; the file appears when the block ends without an error.

    Until then they are in ``FILE.partial``, one line per caption, also for captions without foils.
    A later writer with the same ``settings`` continues after the last complete line.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any] | None = None) -> None:
        self.path, self.partial = path, path.with_name(path.name + PARTIAL)
        self.settings: dict[str, Any] = json.loads(json_bytes(dict(settings or {})))
        self._done: dict[tuple[str, str], int] = {}
        self._file: BinaryIO | None = None
        self._lock = ExitStack()

    def __enter__(self) -> FoilWriter:
        advice = "wait for it, or write to another file"
        with ExitStack() as stack:
            stack.enter_context(locked_target(self.path, "writing foils to it", advice))
            self._begin()
            self._lock = stack.pop_all()
        return self

    def _begin(self) -> None:
        good = self._resume() if self.partial.exists() else 0
        self._file = self.partial.open("r+b" if good else "wb")
        self._file.truncate(good)
        self._file.seek(good)
        if not good:
            self._write({"settings": self.settings})

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None
            if kind is None:
                self._finish()

    def is_done(self, image: str, caption: str) -> bool:
        return (image, caption) in self._done

    def counts(self) -> list[int]:
        """Number of foils of each finished caption, including those of earlier writers."""
        return list(self._done.values())

    def add(self, image: str, caption: str, foils: Iterable[StoredFoil]) -> None:
        """Write all foils of a caption, possibly none; a finished caption is ignored."""
        if self.is_done(image, caption):
            return
        records = [foil.as_dict() for foil in foils]
        if any((r["image"], r["caption"]) != (image, caption) for r in records):
            raise ValueError("add: a foil is of another caption than the given image and caption")
        self._write({"image": image, "caption": caption, "foils": records})
        self._done[image, caption] = len(records)

    def _write(self, value: dict[str, Any]) -> None:
        if self._file is None:
            raise ValueError("write foils inside the writer's with block")
        self._file.write(json_bytes(value) + b"\n")
        self._file.flush()

    def _resume(self) -> int:
        """Read the lines of an earlier writer; returns the bytes up to the last complete one."""
        good = 0
        for line, value in _whole_lines(self.partial):
            if not good and value.get("settings") != self.settings:
                raise DataError(
                    f"{self.partial}: started with other settings ({value.get('settings')}, now "
                    f"{self.settings}); delete it to start again, or write to another file"
                )
            if good:
                self._done[value["image"], value["caption"]] = len(value["foils"])
            good += len(line)
        return good

    def _finish(self) -> None:
        temporary = self.path.with_name(f".{self.path.name}.new")
        with temporary.open("wb") as file:
            for _, value in _whole_lines(self.partial):
                for record in value.get("foils", ()):
                    file.write(json_bytes(record) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        put_in_place(temporary, self.path)
        self.partial.unlink()


def _whole_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The lines of a partial file up to the first truncated one (a kill, a full disk)."""
    with open_regular(path) as file:
        for line in read_lines(file, path):
            try:
                value = json.loads(line)
            except ValueError:
                return
            if not line.endswith(b"\n"):
                return
            yield line, value


@dataclass(frozen=True)
class Caption:
    """A caption of a split: row and id of its image, its own id ``IMAGE#0``, its text."""

    row: int
    image: str
    id: str
    text: str


@dataclass(frozen=True)
class FoilCounts:
    """Counts of a writing of foils.

    ``captions`` were processed, of which ``without`` have no foil; ``unreadable`` images were
    skipped. ``unspelt`` foils were dropped because no text has their tokens; they are counted since
    the last start.
    """

    captions: int
    foils: int
    without: int
    unreadable: tuple[str, ...] = ()
    unspelt: int = 0

    @classmethod
    def of(cls, writer: FoilWriter, unreadable: Sequence[str] = (), unspelt: int = 0) -> FoilCounts:
        counts = writer.counts()
        return cls(len(counts), sum(counts), counts.count(0), tuple(unreadable), unspelt)

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "unreadable": list(self.unreadable)}


def captions_of(split: Split) -> list[Caption]:
    """All captions of a split, without duplicates of the same image."""
    captions: dict[tuple[int, str], Caption] = {}
    for row, (image, texts) in enumerate(zip(split.ids, split.captions, strict=True)):
        for number, text in enumerate(texts):
            captions.setdefault((row, text), Caption(row, image, f"{image}#{number}", text))
    return list(captions.values())


def write_rule_foils(
    split: Split,
    path: Path,
    *,
    kinds: Sequence[str] = DEFAULT_KINDS,
    count: int = 5,
    seed: int = 0,
    progress: Progress | None = None,
) -> FoilCounts:
    """Write up to ``count`` rule-made foils per caption; the same call resumes after a kill.

    The draws for a caption depend only on the seed, its image's id and its text. No foil adds a
    word of any caption of the image, because it would often be true.
    """
    rule_foils("", random.Random(0), kinds, count)  # refuses unknown kinds
    settings = {
        "maker": "rules",
        "kinds": list(kinds),
        "count": count,
        "seed": seed,
        "captions": split.digest,
    }
    captions = captions_of(split)
    progress = progress or Silent()
    with FoilWriter(path, settings) as writer:
        done = len(writer.counts())
        left = [one for one in captions if not writer.is_done(one.image, one.text)]
        for one in progress.track(left, f"writing foils ({split.name})", len(captions), done):
            writer.add(one.image, one.text, _by_rule(one, split, kinds, count, seed))
        return FoilCounts.of(writer)


def _by_rule(
    one: Caption, split: Split, kinds: Sequence[str], count: int, seed: int
) -> list[StoredFoil]:
    draws = random.Random(f"{seed} {one.image} {one.text}")
    return [
        StoredFoil(one.image, one.text, foil.text, foil.positions, foil.kind, None, one.id)
        for foil in foils_of_image(one.text, split.captions[one.row], draws, kinds, count)
    ]


def foils_of_image(
    caption: str, own: Sequence[str], draws: random.Random, kinds: Sequence[str], count: int
) -> list[Foil]:
    """Rule-made foils of a caption that none of its image's ``own`` captions makes true.

    No foil adds a word of these captions, and none equals one of them.
    """
    return drawn_foils(sites_beside(caption, own, kinds), own, draws, count)


def sites_beside(caption: str, own: Sequence[str], kinds: Sequence[str]) -> CaptionSites:
    """Where a caption can be changed, without words of its image's ``own`` captions."""
    return CaptionSites.of(caption, kinds, _words_of(tuple(own)))


def drawn_foils(
    sites: CaptionSites, own: Sequence[str], draws: random.Random, count: int
) -> list[Foil]:
    """Foils from the sites of `sites_beside` that equal none of the image's ``own`` captions."""
    # other kinds add a word that no caption of the image has
    true = frozenset() if REORDERING.isdisjoint(sites.sites) else _sentences_of(tuple(own))
    return sites.foils(draws, count, true)


# Captions of one image follow each other when foils are written, and in grouped batches. In
# shuffled batches they are far apart: the caches hold all images of a small data set, as Flickr8k.
@lru_cache(maxsize=2**13)
def _words_of(own: tuple[str, ...]) -> frozenset[str]:
    """The words of an image's captions."""
    return frozenset(word for text in own for word in words(text))


@lru_cache(maxsize=2**13)
def _sentences_of(own: tuple[str, ...]) -> frozenset[str]:
    """An image's captions, as `spoken`."""
    return frozenset(map(spoken, own))


def batches_of(captions: Sequence[Caption], size: int) -> list[Sequence[Caption]]:
    """Captions in fixed batches, so that the draws for a caption do not change on resume."""
    if size < 1:
        raise ConfigError(f"foils: expected a batch size of at least 1, got {size}")
    return [captions[start : start + size] for start in range(0, len(captions), size)]


def batch_generator(seed: int, number: int) -> np.random.Generator:
    """The random generator of one batch."""
    return np.random.default_rng([seed, number])


NO_SUCH_CAPTION, EQUALS_CAPTION = (
    "of captions that their image does not have",
    "equal to a caption of the image",
)
"""Why a foil of a file is ignored, although the split has its image."""


def foils_by_caption(
    path: Path, split: Split, progress: Progress | None = None
) -> dict[int, tuple[str, ...]]:
    """Distinct foils of each caption, by its index into the split's texts.

    Lines of other images are ignored. So are, with a count, those of captions that their image does
    not have, and foils equal to a caption of their image (up to case and punctuation). A text that
    an image has twice gets its foils twice.
    """
    captions: dict[tuple[str, str], list[int]] = {}
    for index, (text, image) in enumerate(zip(split.texts, split.image_of, strict=True)):
        captions.setdefault((split.ids[int(image)], text), []).append(index)
    own = dict(zip(split.ids, split.captions, strict=True))
    true: dict[str, frozenset[str]] = {}
    foils: dict[int, dict[str, None]] = {}
    ignored: Counter[str] = Counter()
    first: dict[str, str] = {}
    for stored in read_foils(path):
        if stored.image not in own:
            continue
        texts, caption = own[stored.image], stored.caption
        if isinstance(caption, int):
            caption = texts[caption] if caption < len(texts) else ""
        if stored.image not in true:
            true[stored.image] = frozenset(map(spoken, texts))
        indices = captions.get((stored.image, caption), ())
        if not indices:
            ignored[NO_SUCH_CAPTION] += 1
            first.setdefault(NO_SUCH_CAPTION, f"image '{stored.image}', caption {stored.caption!r}")
        elif spoken(stored.foil) in true[stored.image]:
            ignored[EQUALS_CAPTION] += 1
            first.setdefault(EQUALS_CAPTION, f"image '{stored.image}', {stored.foil!r}")
        else:
            for index in indices:
                foils.setdefault(index, {})[stored.foil] = None
    notes = [
        f"{count:,} foil{'s' * (count > 1)} {why} (first: {first[why]})"
        for why, count in ignored.items()
    ]
    if not foils and ignored[EQUALS_CAPTION]:
        raise DataError(f"{path}: no foil can be used: {', '.join(notes)}")
    if not foils:
        raise DataError(
            f"{path}: no line matches a caption of split '{split.name}' by image id and caption "
            f"(the first image of the split is '{split.ids[0] if len(split) else ''}'): was it "
            "made for another split or data set?"
        )
    for note in notes:
        (progress or Silent()).say(f"{path.name}: ignored {note}")
    return {index: tuple(texts) for index, texts in foils.items()}
