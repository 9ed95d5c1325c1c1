"""Small files in the format of each benchmark, written by hand; a.png and b.png are their images.

All words are words of the drawn scenes' captions, so that a small model knows them.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

from counterfoil.data.scenes import draw, make_scene

RED, BLUE = "a red ball on a table", "a blue ball on a table"
DOG, BOTH = "a dog under a tree", "a dog and a cat under a tree"
UNDER = "a tree above a dog"

SUGARCREPE = {
    "0": {"filename": "a.png", "caption": RED, "negative_caption": BLUE},
    "1": {"filename": "b.png", "caption": BOTH, "negative_caption": DOG},
}
SUGARCREPE_PP = [
    {
        "id": 0,
        "filename": "a.png",
        "caption": DOG,
        "caption2": UNDER,
        "negative_caption": BOTH,
    },
    {"id": 1, "filename": "b.png", "caption": RED, "caption2": BOTH, "negative_caption": BLUE},
]
VALSE = {
    "one": {
        "image_file": "a.png",
        "caption": RED,
        "foil": BLUE,
        "classes": "red",
        "classes_foil": "blue",
        "mturk": {"foil": 0, "caption": 3, "other": 0},
    },
    "two": {
        "image_file": "b.png",
        "caption": DOG,
        "foil": BOTH,
        "classes": 1,
        "classes_foil": [2],
        "mturk": {"foil": 0, "caption": 2, "other": 1},
    },
    "unsure": {
        "image_file": "b.png",
        "caption": BLUE,
        "foil": RED,
        "classes": "blue",
        "classes_foil": "red",
        "mturk": {"foil": 2, "caption": 1, "other": 0},
    },
}
COLA = [["https://example.org/images/a.png", RED, "https://example.org/images/b.png?size=1", DOG]]
WINOGROUND = [
    {
        "id": 0,
        "image_0": "a",
        "image_1": "b",
        "caption_0": "a red ball and a blue dog",
        "caption_1": "a blue ball and a red dog",
        "collapsed_tag": "Object",
    }
]
BIVLC = [
    {
        "image": "a.png",
        "caption": RED,
        "negative_caption": BLUE,
        "negative_image": "b.png",
        "type": "replace",
        "subtype": "att",
    }
]
BOX = {"bbox_x": 0, "bbox_y": 0, "bbox_w": 112, "bbox_h": 112}
RELATION = [
    {
        "image_path": "a.png",
        **BOX,
        "relation_name": "under",
        "true_caption": DOG,
        "false_caption": "a tree under a dog",
    },
    {
        "image_path": "b.png",
        **BOX,
        "relation_name": "on",
        "true_caption": RED,
        "false_caption": "a table on a red ball",
    },
]
ATTRIBUTION = [
    {
        "image_path": "a.png",
        "attributes": ["red", "blue"],
        "true_caption": "a red ball and a blue dog",
        "false_caption": "a blue ball and a red dog",
    }
]
ORDER = [{"image": "a.png", "caption": ["a red ball on a small table.", DOG]}]
HAT = [
    {
        "image_path": "a.png",
        "caption": "A red ball on a table.",
        "grounding": [
            ["A", False], ["red", True], ["ball", False], ["on", False], ["a", False],
            ["table.", False],
        ],
        "references": [BLUE],
    },
    {
        "image_path": "b.png",
        "caption": DOG,
        "grounding": [[word, False] for word in DOG.split()],
        "references": [DOG],
    },
]  # fmt: skip
NOCAPS = [
    {
        "image_path": "a.png",
        "references": [RED],
        "baseline": "a red ball on a table",
        "foil": "a red dog on a table",
        "replacement": ["ball", "dog"],
        "domain": "in-domain",
    }
]
FOIL = {
    "info": {"version": "1"},
    "type": "captions",
    "images": [{"id": 7, "file_name": "a.png"}, {"id": 8, "file_name": "b.png"}],
    "annotations": [
        {
            "id": 1, "image_id": 7, "caption": BLUE, "foil": True, "target_word": "red",
            "foil_word": "blue",
        },
        {
            "id": 2, "image_id": 8, "caption": DOG, "foil": False, "target_word": "ORIG",
            "foil_word": "ORIG",
        },
    ],
}  # fmt: skip

TREES: dict[str, tuple[str, Any]] = {
    "swap_obj.json": ("sugarcrepe", SUGARCREPE),
    "swap_obj_pp.json": ("sugarcrepe++", SUGARCREPE_PP),
    "existence.json": ("valse", VALSE),
    "cola.json": ("cola", COLA),
    "examples.jsonl": ("winoground", WINOGROUND),
    "bivlc.jsonl": ("bivlc", BIVLC),
    "visual_genome_relation.json": ("aro", RELATION),
    "visual_genome_attribution.json": ("aro", ATTRIBUTION),
    "coco_karpathy_test.json": ("aro", ORDER),
    "hat.json": ("foil", HAT),
    "nocaps-val-foil.json": ("foil", NOCAPS),
    "foilv1.0_test_2017.json": ("foil", FOIL),
}
"""File name → benchmark and content."""

RESULTS = [
    # text 0, text 1, image 0, image 1
    (True, True, True, True),
    (True, True, True, False),
    (True, False, True, True),
    (False, False, False, False),
]


def write(folder: Path, name: str, tree: Any | None = None) -> Path:
    """Write a file of `TREES`, or another content under its name."""
    content = TREES[name][1] if tree is None else tree
    lines = [json.dumps(item) for item in content] if name.endswith(".jsonl") else []
    path = folder / name
    path.write_text("\n".join(lines) if lines else json.dumps(content), encoding="utf-8")
    return path


def write_results(folder: Path, results=RESULTS, packed: bool = True, **changes: str) -> Path:
    """Per-item results on BiVLC as its authors publish them."""
    rows = []
    for number, (text_0, text_1, image_0, image_1) in enumerate(results):
        row = {
            "image": f"<PIL.JpegImagePlugin.JpegImageFile image mode=RGB at 0x{number:X}>",
            "caption": RED,
            "negative_caption": BLUE,
            "negative_image": "<PIL.JpegImagePlugin.JpegImageFile image mode=RGB at 0x0>",
            "type": "add",
            "subtype": "obj",
            "text_score_i0": text_0,
            "text_score_i1": text_1,
            "image_score_c0": image_0,
            "image_score_c1": image_1,
            "text_score": text_0 and text_1,
            "image_score": image_0 and image_1,
            "group_score": text_0 and text_1 and image_0 and image_1,
        }
        rows.append({**row, **changes} if number == 0 else row)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), quoting=csv.QUOTE_ALL)
    writer.writeheader()
    writer.writerows(rows)
    data = text.getvalue().encode()
    path = folder / ("results.csv.gz" if packed else "results.csv")
    path.write_bytes(gzip.compress(data) if packed else data)
    return path


def draw_images(folder: Path) -> Path:
    """Two drawn scenes as a.png and b.png."""
    folder.mkdir(exist_ok=True)
    for family, name in enumerate("ab"):
        draw(make_scene((0, 9, family, 0))).save(folder / f"{name}.png")
    return folder
