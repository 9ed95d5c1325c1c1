"""JSON Lines: `captions.jsonl`, one image a line, with `images/` and the fragment files beside it.

A line holds ``id``, ``split``, ``image`` (path from the folder), ``original_name`` (the image's
name, where the file has another), ``captions``, and the extras: beside those, or under ``extras``
where one of their names would be mistaken for a column.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from counterfoil.data.json_lines import json_bytes, merge_extras
from counterfoil.data.pairs import Split
from counterfoil.data.problems import ProblemLog
from counterfoil.data.sources.columns import RESERVED
from counterfoil.data.writers.base import Writer, extras_of, writers
from counterfoil.data.writers.features import FeatureWriter
from counterfoil.data.writers.images import ImageWriter


@writers.register("jsonl")
class JsonlWriter(Writer):
    """One JSON object an image, for people and for other programs."""

    def __init__(self, folder: Path, log: ProblemLog) -> None:
        super().__init__(folder, log)
        self._images = ImageWriter(folder, log)

    def write_split(self, split: Split, images: Iterable[int]) -> None:
        with (
            (self.folder / "captions.jsonl").open("ab") as file,
            FeatureWriter(self.folder, split.name, split.fragments) as features,
        ):
            for image in images:
                record = {
                    "id": split.ids[image],
                    "split": split.name,
                    **self._images.describe(split, image),
                    "captions": list(split.captions[image]),
                }
                record = merge_extras(record, extras_of(split, image), RESERVED)
                file.write(json_bytes(record) + b"\n")
                features.write(image)
