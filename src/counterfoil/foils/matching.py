"""Which captions of a split the foils of a file belong to."""

from __future__ import annotations

from pathlib import Path

from counterfoil.data.duplicates import spoken
from counterfoil.data.pairs import Split
from counterfoil.errors import DataError
from counterfoil.foils.store import read_foils


def foils_by_caption(path: Path, split: Split) -> dict[int, tuple[str, ...]]:
    """The foils of each caption, by its index into the split's texts; each foil once.

    Lines about other images and captions are passed over, and so is a foil that is a caption of its
    image (without case and punctuation). A text that an image has twice has its foils twice.
    """
    captions: dict[tuple[str, str], list[int]] = {}
    for index, (text, image) in enumerate(zip(split.texts, split.image_of, strict=True)):
        captions.setdefault((split.ids[int(image)], text), []).append(index)
    own = dict(zip(split.ids, split.captions, strict=True))
    true: dict[str, frozenset[str]] = {}
    found: dict[int, dict[str, None]] = {}
    for stored in read_foils(path):
        texts, caption = own.get(stored.image, ()), stored.caption
        if isinstance(caption, int):
            caption = texts[caption] if caption < len(texts) else ""
        if stored.image not in true:
            true[stored.image] = frozenset(map(spoken, texts))
        if spoken(stored.foil) not in true[stored.image]:
            for index in captions.get((stored.image, caption), ()):
                found.setdefault(index, {})[stored.foil] = None
    if not found:
        raise DataError(
            f"{path}: no line matches a caption of split '{split.name}' by image id and caption "
            f"(the first image of the split is '{split.ids[0] if len(split) else ''}'): was it "
            "made for another split or data set?"
        )
    return {index: tuple(foils) for index, foils in found.items()}
