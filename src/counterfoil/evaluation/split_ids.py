"""Ids by which other people's annotations speak of a split's images and captions."""

from __future__ import annotations

from pathlib import Path

from counterfoil.data.pairs import Split
from counterfoil.errors import DataError
from counterfoil.evaluation.cxc import read_cxc_pairs
from counterfoil.evaluation.extended import ExtendedPositives
from counterfoil.evaluation.scoring import SplitScores

CAPTION_ID_KEYS = ("sentids", "annotation_ids", "caption_ids")
IMAGE_ID_KEYS = ("cocoid", "image_id")


def image_ids(split: Split, images: list[int]) -> list[str]:
    """COCO's number where the source gave one, else the split's own id."""
    extras = split.extras or [{} for _ in split.ids]
    return [
        str(next((extras[i][key] for key in IMAGE_ID_KEYS if key in extras[i]), split.ids[i]))
        for i in images
    ]


def caption_ids(split: Split, texts: list[int]) -> list[str]:
    """Ids of captions (indices into ``split.texts``) as the source gave them."""
    ids: list[str] = []
    for image, captions in enumerate(split.captions):
        extras = split.extras[image] if split.extras is not None else {}
        found = next((extras[key] for key in CAPTION_ID_KEYS if key in extras), None)
        if not isinstance(found, list) or len(found) != len(captions):
            raise DataError(
                f"image {split.ids[image]}: its captions have no ids (looked for "
                f"{', '.join(CAPTION_ID_KEYS)}); load the split from Karpathy's or COCO's JSON"
            )
        ids += [str(one) for one in found]
    return [ids[t] for t in texts]


def cxc_positives(path: Path, split: Split, found: SplitScores) -> ExtendedPositives:
    """The split's own pairs and those that Crisscrossed Captions adds."""
    extra = read_cxc_pairs(path, image_ids(split, found.images), caption_ids(split, found.texts))
    own = ExtendedPositives.from_image_of(found.image_of, len(found.images))
    return own.union(extra)
