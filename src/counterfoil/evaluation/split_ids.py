"""Ids by which other people's annotations speak of a split's images and captions."""

from __future__ import annotations

from pathlib import Path

from counterfoil.data.pairs import Split
from counterfoil.errors import DataError
from counterfoil.evaluation.cxc import read_cxc_pairs
from counterfoil.evaluation.eccv import eccv_positives
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


def extended_positives(
    split: Split, found: SplitScores, *, cxc: Path | None = None, eccv: bool = False
) -> ExtendedPositives | None:
    """Positives from other people's annotations; None if none are asked for.

    Crisscrossed Captions did not judge every pair of the split: its pairs are joined with the
    split's own. ECCV Caption lists all positives of its queries, and is taken as it is.
    """
    if cxc is None and not eccv:
        return None
    images, texts = image_ids(split, found.images), caption_ids(split, found.texts)
    if cxc is None:
        return eccv_positives(images, texts)
    own = ExtendedPositives.from_image_of(found.image_of, len(found.images))
    return own.union(read_cxc_pairs(cxc, images, texts))
