"""Findings of `counterfoil audit` on disk, and their images, as the page shows them."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from counterfoil.audit.details import writable
from counterfoil.audit.findings import SIGN_NAMES, Finding
from counterfoil.audit.page import grouped
from counterfoil.audit.report import IMAGES, LINES, SUMMARY
from counterfoil.data.images import open_image
from counterfoil.errors import DataError
from counterfoil.reading import LINES_BYTES, open_regular, read_lines, read_text
from counterfoil.search.references import as_image

MOST = 50_000
"""Findings that are read; they come most suspicious first."""

SAME_SHOWN = 12
"""Images with the same caption that are named in one entry."""

AUDITED = "audit:"
Section = Literal["suspicious", "near-duplicates"]


@dataclass(frozen=True)
class AuditedImage:
    """An image of the audited data: its id there, its captions, and where its pixels are.

    ``captions`` is None if the report does not say.
    """

    id: str
    captions: list[str] | None = None
    pixels: dict[str, Any] | None = None

    def open(self) -> Image.Image:
        return open_image(as_image(self.pixels))


def audited_name(split: str, image: str) -> str:
    """The name by which clients ask for an image of the audit; it is looked up, never parsed."""
    return f"{AUDITED}{split}:{image}"


class Audit:
    """The findings of a folder, read once; ``images`` are those they name, by `audited_name`."""

    def __init__(self, folder: Path) -> None:
        path = folder / LINES
        if not path.is_file():
            raise DataError(
                f"{folder}: no {LINES} there; write one with: counterfoil audit RUN PAIRS "
                f"--out {folder}"
            )
        findings = list(islice(_read(path), MOST))
        self.notes = _notes(folder / SUMMARY)
        named = (key for found in findings for key in found.images)
        self.images = {audited_name(*key): AuditedImage(key[1]) for key in named}
        for name, image in _read_images(folder / IMAGES):
            if name in self.images:  # what no finding names is not served
                self.images[name] = image
        wrong = [[found] for found in findings if found.kind == "mismatch"]
        near = grouped([found for found in findings if found.near_duplicate is not None])
        self._sections: dict[Section, list[list[Finding]]] = {
            "suspicious": wrong,
            "near-duplicates": near,
        }
        self._by_reason: dict[str, list[list[Finding]]] = defaultdict(list)
        for group in wrong:
            for sign in dict.fromkeys(group[0].signs):
                self._by_reason[sign].append(group)
        counts = Counter({sign: len(found) for sign, found in self._by_reason.items()})
        self.reasons = [
            {"sign": sign, "name": SIGN_NAMES.get(sign, sign), "count": count}
            for sign, count in counts.most_common()
            if sign != "near-duplicate"
        ]

    def page(
        self, offset: int, limit: int, reason: str | None, section: Section = "suspicious"
    ) -> dict[str, Any]:
        """Entries of a section, those with one reason where it is given."""
        groups = self._sections[section]
        if reason is not None and section == "suspicious":
            groups = self._by_reason.get(reason, [])
        return {
            "section": section,
            "total": len(groups),
            "offset": offset,
            "counts": {name: sum(map(len, found)) for name, found in self._sections.items()},
            "reasons": self.reasons,
            "notes": self.notes,
            "findings": [_entry(group) for group in groups[offset : offset + limit]],
        }


def _entry(group: Sequence[Finding]) -> dict[str, Any]:
    """A finding, and the images of those with the same caption, under the names to ask by."""
    first = group[0]
    images = list(dict.fromkeys(audited_name(one.split, one.image) for one in group))
    return {
        **first.as_dict(),
        "shown": {name: audited_name(split, name) for split, name in first.images},
        "same": len(group),
        "same_images": images[:SAME_SHOWN],
        "more_images": max(0, len(images) - SAME_SHOWN),
    }


def _notes(path: Path) -> list[str]:
    """What the audit says of itself as a whole; nothing if there is no summary to read."""
    try:
        notes = json.loads(read_text(path))["notes"]
    except (OSError, ValueError, KeyError, TypeError, DataError):
        return []
    return [str(note) for note in notes] if isinstance(notes, list) else []


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of a file that are not blank, with their numbers."""
    try:
        with open_regular(path, LINES_BYTES) as file:
            for number, line in enumerate(read_lines(file, path), start=1):
                if text := line.decode("utf-8", "replace").strip():
                    yield number, text
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None


def _read(path: Path) -> Iterator[Finding]:
    for number, line in _lines(path):
        try:
            found = Finding.from_json(line)
        except DataError as error:
            raise DataError(f"{path}: line {number}: {error}") from None
        if not _is_finite(found.as_dict()):
            raise DataError(f"{path}: line {number}: damaged (a number is not finite)")
        yield found


def _is_finite(tree: object) -> bool:
    """Whether all numbers of a tree can be sent; reports write others as words."""
    if isinstance(tree, dict):
        return all(map(_is_finite, tree.values()))
    if isinstance(tree, (list, tuple)):
        return all(map(_is_finite, tree))
    return not isinstance(tree, float) or math.isfinite(tree)


def _read_images(path: Path) -> Iterator[tuple[str, AuditedImage]]:
    """The images of a report; none if it has no such file."""
    if not path.is_file():
        return
    for number, line in _lines(path):
        try:
            about = json.loads(line)
            split, image, texts, pixels = (about[k] for k in ("split", "id", "captions", "pixels"))
            if not all(isinstance(text, str) for text in (split, image, *texts)):
                raise TypeError("names and captions are text")
            if not isinstance(texts, list) or not isinstance(pixels, (dict, type(None))):
                raise TypeError("captions are a list, pixels an object")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"{path}: line {number}: damaged ({error!r})") from None
        captions = [writable(text) for text in texts]
        yield audited_name(split, image), AuditedImage(image, captions, pixels)
