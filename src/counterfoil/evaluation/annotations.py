"""Positives beyond a data set's own pairs: Crisscrossed Captions and ECCV Caption.

CxC (Parekh et al. 2021, arXiv:2004.15020): ``sits_{val,test}.csv``, as released, has a header and
four columns: caption (``…:sentid:732091``), image (``COCO_…_000000365325.jpg``), ``agg_score`` (0
to 5) and ``sampling_method``. vse_infty's ``cxc_it.json`` maps the id of a query to ``[id of a
target, score]`` lists, under ``i2t`` and ``t2i``; every pair listed there is a positive. ECCV
Caption (Chun et al. 2022, arXiv:2204.03359) comes in its own package.

Ids are compared by their trailing number, so ``391895``, ``"391895"`` and
``COCO_val2014_000000391895.jpg`` are the same image.
"""

from __future__ import annotations

import csv
import importlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from counterfoil.core.errors import DataError, MissingExtraError
from counterfoil.core.storage.reading import LINES_BYTES, open_text, read_text
from counterfoil.data.pairs import Split
from counterfoil.evaluation.extended import ExtendedPositives
from counterfoil.evaluation.ranks import Positives

if TYPE_CHECKING:  # imports torch
    from counterfoil.scoring.encode import SplitScores

TEXT_THRESHOLD = 3.0

Id = str | int

CAPTION_ID_KEYS = ("sentids", "annotation_ids", "caption_ids")
IMAGE_ID_KEYS = ("cocoid", "image_id")


def read_cxc_pairs(
    path: Path | str,
    image_ids: Sequence[Id],
    text_ids: Sequence[Id],
    *,
    threshold: float = TEXT_THRESHOLD,
) -> ExtendedPositives:
    """Image-caption positives from a ``sits`` CSV file or from ``cxc_it.json``.

    The threshold applies to the CSV file, which also lists wrong pairs. Pairs with an image or a
    caption outside the split are ignored. CxC did not judge all of the data set's own pairs: join
    them with `ExtendedPositives.union`.
    """
    path = Path(path)
    images, texts = _positions(image_ids), _positions(text_ids)
    if path.suffix == ".json":
        table = _load_json(path)
        for side in ("i2t", "t2i"):
            if not isinstance(table.get(side), Mapping):
                raise DataError(f"{path}: expected a map under '{side}', as in cxc_it.json")
        i2t = _index_pairs(_json_pairs(table["i2t"], path), images, texts)
        t2i = _index_pairs(_json_pairs(table["t2i"], path), texts, images)
        return ExtendedPositives(
            Positives.from_pairs(i2t, len(images), len(texts)),
            Positives.from_pairs(t2i, len(texts), len(images)),
            source="CxC",
        )
    rows = ((image, text) for text, image, score in _read_csv(path) if score >= threshold)
    pairs = _index_pairs(rows, images, texts)
    return ExtendedPositives.from_pairs(pairs, len(images), len(texts), source="CxC")


def trailing_number(identifier: Id) -> int:
    """The number at the end of a COCO id, before a file extension.

    >>> trailing_number("COCO_val2014_000000391895.jpg"), trailing_number("x:sentid:77")
    (391895, 77)
    """
    match = re.search(r"(\d+)(?:\.[A-Za-z]\w*)?$", str(identifier).strip())
    if match is None:
        raise DataError(f"id {identifier!r} does not end with a number, as COCO's ids do")
    return int(match.group(1))


def _positions(ids: Sequence[Id]) -> dict[int, int]:
    positions = {trailing_number(identifier): position for position, identifier in enumerate(ids)}
    if len(positions) != len(ids):
        raise DataError(f"{len(ids)} ids given, but only {len(positions)} of them are different")
    return positions


def _index_pairs(
    pairs: Iterable[tuple[Id, Id]], queries: Mapping[int, int], targets: Mapping[int, int]
) -> list[tuple[int, int]]:
    numbered = ((trailing_number(query), trailing_number(target)) for query, target in pairs)
    return [(queries[q], targets[t]) for q, t in numbered if q in queries and t in targets]


def _json_pairs(table: Mapping[str, Any], path: Path) -> Iterator[tuple[Id, Id]]:
    for query, items in table.items():
        for item in items:
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


def eccv_positives(image_ids: Sequence[Id], text_ids: Sequence[Id]) -> ExtendedPositives:
    """The positives of ECCV Caption, for `extended_metrics`; its queries are a subset of the 5K."""
    metrics = _eccv_metrics()
    images, texts = _positions(image_ids), _positions(text_ids)

    def positives(
        direction: str, queries: Mapping[int, int], targets: Mapping[int, int]
    ) -> Positives:
        listed = metrics.eccv_gts[direction].items()
        ids = ((query, target) for query, answers in listed for target in answers)
        pairs = _index_pairs(ids, queries, targets)
        return Positives.from_pairs(pairs, len(queries), len(targets))

    return ExtendedPositives(
        positives("i2t", images, texts), positives("t2i", texts, images), source="ECCV Caption"
    )


def _eccv_metrics() -> Any:
    try:
        package = importlib.import_module("eccv_caption")
    except ImportError as error:
        raise MissingExtraError("eccv_caption", "eccv", "ECCV Caption evaluation") from error
    return package.Metrics()


def image_ids(split: Split, images: list[int]) -> list[str]:
    """COCO's image ids if the source has them, else the split's own ids."""
    extras = split.extras or [{} for _ in split.ids]
    return [
        str(next((extras[i][key] for key in IMAGE_ID_KEYS if key in extras[i]), split.ids[i]))
        for i in images
    ]


def caption_ids(split: Split, texts: list[int]) -> list[str]:
    """The source's ids of captions, given as indices into ``split.texts``."""
    ids: list[str] = []
    for image, captions in enumerate(split.captions):
        extras = split.extras[image] if split.extras is not None else {}
        own = next((extras[key] for key in CAPTION_ID_KEYS if key in extras), None)
        if not isinstance(own, list) or len(own) != len(captions):
            raise DataError(
                f"image {split.ids[image]}: its captions have no ids (looked for "
                f"{', '.join(CAPTION_ID_KEYS)}); load the split from Karpathy's or COCO's JSON"
            )
        ids += [str(one) for one in own]
    return [ids[t] for t in texts]


def extended_positives(
    split: Split, scores: SplitScores, *, cxc: Path | None = None, eccv: bool = False
) -> ExtendedPositives | None:
    """Positives from additional annotations, or None if neither source is requested.

    Crisscrossed Captions did not judge every pair of the split, so its pairs are joined with the
    split's own. ECCV Caption lists all positives of its queries and is used unchanged.
    """
    if cxc is None and not eccv:
        return None
    images, texts = image_ids(split, scores.images), caption_ids(split, scores.texts)
    if cxc is None:
        return eccv_positives(images, texts)
    own = ExtendedPositives.from_image_of(scores.image_of, len(scores.images))
    return own.union(read_cxc_pairs(cxc, images, texts))
