"""Reads the image-caption pairs of Crisscrossed Captions (Parekh et al. 2021, arXiv:2004.15020).

``sits_{val,test}.csv``, as released, has a header and four columns: caption (``…:sentid:732091``),
image (``COCO_…_000000365325.jpg``), ``agg_score`` (0 to 5) and ``sampling_method``. vse_infty's
``cxc_it.json`` maps the id of a query to ``[id of a target, score]`` lists, under ``i2t`` and
``t2i``; every pair listed there is a positive.

Ids are compared by their trailing number, so ``391895``, ``"391895"`` and
``COCO_val2014_000000391895.jpg`` are the same image.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from counterfoil.errors import DataError
from counterfoil.evaluation.extended import ExtendedPositives
from counterfoil.evaluation.positives import Positives
from counterfoil.reading import LINES_BYTES, open_text, read_text

TEXT_THRESHOLD = 3.0

Id = str | int


def read_cxc_pairs(
    path: Path | str,
    image_ids: Sequence[Id],
    text_ids: Sequence[Id],
    *,
    threshold: float = TEXT_THRESHOLD,
) -> ExtendedPositives:
    """Image-caption positives from a ``sits`` CSV file or from ``cxc_it.json``.

    The threshold applies to the CSV file, which lists wrong pairs as well. Pairs with an image or
    caption that is not in the split are passed over. Join with the data set's own pairs with
    `ExtendedPositives.union`: CxC did not judge all of them.
    """
    path = Path(path)
    images, texts = _positions(image_ids), _positions(text_ids)
    if path.suffix == ".json":
        table = _load_json(path)
        for side in ("i2t", "t2i"):
            if not isinstance(table.get(side), Mapping):
                raise DataError(f"{path}: expected a map under '{side}', as in cxc_it.json")
        i2t = _located(_listed(table["i2t"], path), images, texts)
        t2i = _located(_listed(table["t2i"], path), texts, images)
        return ExtendedPositives(
            Positives.from_pairs(i2t, len(images), len(texts)),
            Positives.from_pairs(t2i, len(texts), len(images)),
            source="CxC",
        )
    rows = ((image, text) for text, image, score in _read_csv(path) if score >= threshold)
    found = _located(rows, images, texts)
    return ExtendedPositives.from_pairs(found, len(images), len(texts), source="CxC")


def trailing_number(identifier: Id) -> int:
    """The number that COCO's ids end with, their file extension aside.

    >>> trailing_number("COCO_val2014_000000391895.jpg"), trailing_number("x:sentid:77")
    (391895, 77)
    """
    match = re.search(r"(\d+)(?:\.[A-Za-z]\w*)?$", str(identifier).strip())
    if match is None:
        raise DataError(f"id {identifier!r} does not end with a number, as COCO's ids do")
    return int(match.group(1))


def _positions(ids: Sequence[Id]) -> dict[int, int]:
    places = {trailing_number(identifier): place for place, identifier in enumerate(ids)}
    if len(places) != len(ids):
        raise DataError(f"{len(ids)} ids given, but only {len(places)} of them are different")
    return places


def _located(
    pairs: Iterable[tuple[Id, Id]], queries: Mapping[int, int], targets: Mapping[int, int]
) -> list[tuple[int, int]]:
    numbered = ((trailing_number(query), trailing_number(target)) for query, target in pairs)
    return [(queries[q], targets[t]) for q, t in numbered if q in queries and t in targets]


def _listed(table: Mapping[str, Any], path: Path) -> Iterator[tuple[Id, Id]]:
    for query, judged in table.items():
        for item in judged:
            if not isinstance(item, Sequence) or isinstance(item, str) or len(item) < 2:
                raise DataError(f"{path}: '{query}' lists {item!r}, expected [id, score]")
            yield query, item[0]


def _load_json(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(table, dict):
        raise DataError(f"{path}: expected a map of query ids, got {type(table).__name__}")
    return table


def _read_csv(path: Path) -> Iterator[tuple[str, str, float]]:
    try:
        with open_text(path, LINES_BYTES) as lines:
            reader = csv.reader(lines)
            header = next(reader, [])
            if len(header) < 3 or header[2] != "agg_score":
                raise DataError(
                    f"{path}, line 1: expected a header with agg_score third, got {header}"
                )
            for row in reader:
                try:
                    yield row[0], row[1], float(row[2])
                except (IndexError, ValueError) as error:
                    raise DataError(
                        f"{path}, line {reader.line_num}: expected two ids and a score, got {row}"
                    ) from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
