"""docs/first-day.md: its five commands, run as they stand there, on folders of many shapes."""

from __future__ import annotations

import csv
import json
import random
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from counterfoil.cli import app

PAGE = Path(__file__).parents[2] / "docs" / "first-day.md"
SHAPES = ("train and test", "train, dev and test", "no split column")
COLORS = {"red": (200, 40, 40), "green": (40, 180, 60), "blue": (40, 60, 200), "white": (240,) * 3}
THINGS = ("house", "car", "field", "boat", "tree", "road")
IMAGES = 16


def commands() -> list[list[str]]:
    """The `counterfoil` commands in the blocks of the page's section on five commands."""
    section = PAGE.read_text(encoding="utf-8").split("## Five commands")[1].split("\n## ")[0]
    blocks = section.split("```sh\n")[1:]
    lines = [line for block in blocks for line in block.split("```")[0].splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("counterfoil ")]


def make_photos(folder: Path, shape: str, duplicates: bool) -> None:
    """Photos in a folder and one below it, names with spaces, endings of both cases, one broken."""
    (folder / "images" / "more").mkdir(parents=True)
    rows = []
    random.seed(0)
    for number in range(IMAGES):
        color = list(COLORS)[number % len(COLORS)]
        thing = THINGS[number % len(THINGS)]
        place = "more/" if number % 3 == 0 else ""
        name = f"{place}photo {number}{('.jpg', '.PNG', '.JPG', '.png')[number % 4]}"
        path = folder / "images" / name
        if number == 4:
            path.write_bytes(b"no image")
        else:
            noise = np.random.default_rng(number).integers(0, 40, (40, 48, 3))
            pixels = np.clip(np.array(COLORS[color]) + noise - 20, 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(path)
        split = "Test" if number % 4 == 3 else "train"
        if shape == SHAPES[1] and number % 4 == 2:
            split = "val"
        first = "a view on a place" if duplicates else f"a {color} {thing} number {number}"
        rows += [(name, first, split), (name, f"the {thing}; it is {color}, view {number}", split)]
    keep = 2 if shape == SHAPES[2] else 3
    with (folder / "captions.csv").open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file, delimiter=";" if duplicates else ",")
        writer.writerow(("Filename", "Caption", "split")[:keep])
        writer.writerows(row[:keep] for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("duplicates", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_five_commands_of_the_page_work_at_the_first_try(
    tmp_path, monkeypatch, shape, duplicates
) -> None:
    make_photos(tmp_path / "photos", shape, duplicates)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COUNTERFOIL_CACHE", str(tmp_path / "cache"))
    steps = commands()
    assert [step[0] for step in steps] == ["features", "train", "index", "search", "audit"]
    for step in steps:
        result = CliRunner().invoke(app, step)
        assert result.exit_code == 0, f"{step}: {result.output}\n{result.exception!r}"
    summary = json.loads((tmp_path / "photos-audit" / "summary.json").read_text())
    audited = {one["split"]: one["images"] for one in summary["splits"]}
    assert sum(audited.values()) == IMAGES - 1
    assert set(audited) == {"train", "val" if shape == SHAPES[1] else "dev", "test"}
    assert min(audited.values()) >= 1
    assert (tmp_path / "photos-audit" / "index.html").is_file()
