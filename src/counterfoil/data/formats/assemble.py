"""Check the items that a source has read and assemble them into `Pairs`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from counterfoil.core.printable import is_encodable, plural
from counterfoil.data.formats.base import (
    HASHED,
    PARTLY_HASHED,
    Draft,
    Item,
    in_order,
)
from counterfoil.data.formats.image_files import is_plain_name
from counterfoil.data.fragments import FragmentTable
from counterfoil.data.images import MissingImage
from counterfoil.data.pairs import Pairs, Problem, ProblemLog, Split
from counterfoil.data.splits import are_nested

MAX_WORDS = 1000
"""Longest usable caption, in words."""

MISSING_WORDS = frozenset({"nan", "null", "none", "n/a", "<na>"})
"""What programs write for a missing value; as a caption, it is unlikely to be meant."""


def assemble(draft: Draft, log: ProblemLog, *, drop: bool) -> Pairs:
    """Check all items and make the splits; ``drop`` leaves out unusable items."""
    by_split: dict[str, list[Item]] = defaultdict(list)
    for item in draft.items:
        by_split[item.split].append(item)
    if not draft.items:
        log.fatal("no-images", draft.name, "no images with captions were found")
    splits = {}
    for name in in_order(by_split):
        if not is_plain_name(name):
            where = by_split[name][0].where
            log.fatal("bad-split-name", where, f"{name!r} cannot be the name of a split")
        split, usable = _make_split(name, by_split[name], draft.tables.get(name), log, drop)
        splits[name] = split
        if not usable:
            message = _all_unusable(by_split[name])
            where = f"{draft.name}, split '{name}'"
            if may_lack(name, log.problems):
                log.skip("no-images", where, f"{message}; the split is left out")
                del splits[name]
            else:
                log.fatal("no-images", where, message)
    _note_shared_ids(by_split, draft.name, log)
    _note_missing_words(draft.items, log)
    return Pairs(draft.name, splits, log.problems)


def may_lack(name: str, problems: Sequence[Problem]) -> bool:
    """Whether a split may be empty: dev or test, if hashing the ids chose its images."""
    hashed = (HASHED, PARTLY_HASHED)
    return name in ("dev", "test") and any(problem.kind in hashed for problem in problems)


def _all_unusable(items: list[Item]) -> str:
    """Message that none of the images of a split can be used, and why."""
    missing = [item.image for item in items if isinstance(item.image, MissingImage)]
    if not missing and not any(item.captions for item in items):
        return f"none of its {len(items)} images can be used: none has a caption"
    if len(missing) < len(items):
        return f"none of its {len(items)} images can be used"
    one = missing[0]
    return (
        f"none of its {len(items)} image files exists (such as '{one.sought or one.name}'; "
        f"{one.looked_in}); name the folder that holds them with the option images=FOLDER"
    )


def caption_fault(caption: str) -> tuple[str, str] | None:
    """Kind and description of the fault of a caption; None if it can be used."""
    if not caption.strip():
        return "empty-caption", "the caption is empty"
    # n words have at least 2n - 1 characters, so most captions need not be split.
    if len(caption) >= 2 * MAX_WORDS and (words := len(caption.split())) > MAX_WORDS:
        return "long-caption", f"the caption has {words} words, more than {MAX_WORDS}"
    if not is_encodable(caption):
        return "bad-text", "the caption holds half a character (a lone surrogate)"
    return None


def _make_split(
    name: str, items: list[Item], table: FragmentTable | None, log: ProblemLog, drop: bool
) -> tuple[Split, int]:
    """The split, and the number of its usable images."""
    seen: dict[str, Item] = {}
    with_pixels = any(item.image is not None for item in items)
    selected = []
    good_images = 0
    for item in items:
        usable = _check_id(item, seen, log)
        usable = _check_image(item, with_pixels, log) and usable
        if table is not None and not _has_fragments(item, table):
            log.skip("missing-features", item.where, "has no features, though others have")
            usable = False
        good = _check_captions(item, log)
        if not good:
            usable = False
        good_images += usable
        if not drop:
            selected.append(item)
        elif usable:
            selected.append(item if len(good) == len(item.captions) else _with_captions(item, good))
    extras = [{**item.extras, **item.caption_extras} for item in selected]
    rows = [item.row or 0 for item in selected if table is not None and _has_row(item, table)]
    split = Split(
        name=name,
        ids=[item.id for item in selected],
        captions=[item.captions for item in selected],
        pixels=[item.image or MissingImage(item.id) for item in selected] if with_pixels else None,
        fragments=(
            table.select(rows) if table is not None and len(rows) == len(selected) else None
        ),
        extras=extras if any(extras) else None,
    )
    return split, good_images


def _check_id(item: Item, seen: dict[str, Item], log: ProblemLog) -> bool:
    if not item.id:
        log.skip("missing-id", item.where, "the image has no id")
        return False
    if not is_encodable(item.id):
        log.skip("bad-text", item.where, "the id holds half a character (a lone surrogate)")
        return False
    first = seen.setdefault(item.id, item)
    if first is not item:
        message = f"the id is taken by the image at {_where_named(first)}"
        log.fatal("duplicate-id", _where_named(item), message)
    return first is item


def _where_named(item: Item) -> str:
    """Where an image is, with its file name, as two images of one id differ in that."""
    return f"{item.where} ({item.name})" if item.name else item.where


def _check_image(item: Item, with_pixels: bool, log: ProblemLog) -> bool:
    if isinstance(item.image, MissingImage):
        name = item.image.sought or item.image.name
        hint = f"; {item.image.hint}" if item.image.hint else ""
        message = f"there is no image file '{name}' ({item.image.looked_in}{hint})"
        log.skip("missing-image", item.where, message)
        return False
    if item.image is None and with_pixels:
        log.skip("missing-image", item.where, "has no image, though others have")
        return False
    return True


def _has_row(item: Item, table: FragmentTable) -> bool:
    return item.row is not None and 0 <= item.row < len(table)


def _has_fragments(item: Item, table: FragmentTable) -> bool:
    if item.row is None or not _has_row(item, table):
        return False
    return table.lengths is None or table.lengths[item.row] > 0


def _check_captions(item: Item, log: ProblemLog) -> list[int]:
    """Numbers of the usable captions."""
    if not item.captions:
        log.skip("no-captions", item.where, "the image has no captions")
    good = []
    for number, caption in enumerate(item.captions):
        fault = caption_fault(caption)
        if fault is None:
            good.append(number)
        else:
            log.skip(fault[0], item.where_caption(number), fault[1])
    if item.captions and not good:
        log.skip("no-captions", item.where, "none of the image's captions can be used")
    return good


def _with_captions(item: Item, numbers: list[int]) -> Item:
    return replace(
        item,
        captions=[item.captions[number] for number in numbers],
        caption_lines=None,  # logged already
        caption_extras={
            key: [values[number] for number in numbers]
            for key, values in item.caption_extras.items()
        },
    )


def _note_missing_words(items: Sequence[Item], log: ProblemLog) -> None:
    """Log how many captions are only a word such as nan; they are used as any other."""
    places = [
        (item, number)
        for item in items
        for number, caption in enumerate(item.captions)
        if len(caption) < 20 and caption.strip().lower() in MISSING_WORDS
    ]
    if places:
        item, number = places[0]
        log.note(
            "missing-value",
            item.where_caption(number),
            f"{plural(len(places), 'caption is', 'captions are')} only a word for a missing "
            f"value, the first '{item.captions[number]}'; used as text: empty the "
            "cell of an image that has no caption",
        )


def _note_shared_ids(by_split: dict[str, list[Item]], name: str, log: ProblemLog) -> None:
    """Log which splits share image ids, unless one is part of the other by design."""
    ids = {split: {item.id for item in items} for split, items in by_split.items()}
    for one, other in combinations(ids, 2):
        shared = ids[one] & ids[other]
        if shared and not are_nested(one, other):
            log.note(
                "shared-ids",
                name,
                f"{plural(len(shared), 'id is', 'ids are')} in both '{one}' and '{other}' (such as "
                f"'{min(shared)}')",
            )
