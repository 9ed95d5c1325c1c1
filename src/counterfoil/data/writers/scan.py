"""SCAN's layout: `{split}_caps.txt`, `{split}_ids.txt`, `{split}_ims.npy`.

Regular data becomes exactly those files, with every image stored once. What they cannot carry goes
into `{split}_items.jsonl` beside them (see `sources.scan`): differing numbers of captions, captions
with line breaks or outer spaces, ids that are not numbers, extras, and images, which are written
under `images/`. The plain files are then still there: line breaks as spaces, ids as row numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from counterfoil.data.json_lines import json_bytes, merge_extras
from counterfoil.data.pairs import Split
from counterfoil.data.problems import ProblemLog
from counterfoil.data.sources.columns import LABEL
from counterfoil.data.sources.scan import CAPTIONS, IDS, ITEMS
from counterfoil.data.sources.scan_layout import USUAL_CAPTIONS
from counterfoil.data.writers.base import Writer, extras_of, writers
from counterfoil.data.writers.features import FeatureWriter
from counterfoil.data.writers.images import ImageWriter

_RESERVED = frozenset({"id", "captions", "image", LABEL})


@writers.register("scan")
class ScanWriter(Writer):
    """The files that SCAN and its descendants read, and a sidecar for what those cannot carry."""

    def __init__(self, folder: Path, log: ProblemLog) -> None:
        super().__init__(folder, log)
        self._images = ImageWriter(folder, log)

    def write_split(self, split: Split, images: Iterable[int]) -> None:
        if split.fragments is None:
            self.log.note(
                "no-features", f"split '{split.name}'", "there are no features to write as _ims.npy"
            )
        numeric = all(map(_is_number, split.ids))
        sidecar = None if _is_plain(split) else self._open(split, ITEMS)
        with (
            self._open(split, CAPTIONS) as captions,
            self._open(split, IDS) as ids,
            FeatureWriter(self.folder, split.name, split.fragments) as features,
        ):
            try:
                for image in images:
                    ids.write(f"{split.ids[image] if numeric else image}\n".encode())
                    for caption in split.captions[image]:
                        captions.write(_one_line(caption))
                    features.write(image)
                    if sidecar is not None:
                        sidecar.write(self._record(split, image))
            finally:
                if sidecar is not None:
                    sidecar.close()

    def _open(self, split: Split, end: str):  # type: ignore[no-untyped-def]
        return (self.folder / (split.name + end)).open("wb")

    def _record(self, split: Split, image: int) -> bytes:
        record = {
            "id": split.ids[image],
            **self._images.describe(split, image),
            "captions": list(split.captions[image]),
        }
        return json_bytes(merge_extras(record, extras_of(split, image), _RESERVED)) + b"\n"


def _is_plain(split: Split) -> bool:
    """Whether SCAN's own files say everything, and our reader would read them so."""
    counts = {len(captions) for captions in split.captions}
    if split.fragments is None or split.pixels is not None or split.extras is not None:
        return False
    if len(counts) != 1 or 0 in counts or not all(map(_is_number, split.ids)):
        return False
    # As many rows as captions, in fives, could be taken for images stored five times.
    if counts == {1} and len(split) % USUAL_CAPTIONS == 0:
        return False
    return len(set(split.ids)) == len(split) and all(map(_is_plain_caption, split.texts))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and str(int(text)) == text


def _is_plain_caption(text: str) -> bool:
    return bool(text) and text == text.strip().lstrip("\ufeff") and not set(text) & set("\r\n")


def _one_line(caption: str) -> bytes:
    line = caption.replace("\r\n", " ").replace("\n", " ").replace("\r", " ")
    return line.encode(errors="replace") + b"\n"
