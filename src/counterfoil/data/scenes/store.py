"""The data set "scenes": generated into a cache folder once, then read from there."""

from __future__ import annotations

import hashlib
import io
import json
import random
import tarfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import PIL

from counterfoil.core.errors import ConfigError
from counterfoil.core.parallel import ordered_map
from counterfoil.core.progress import Progress, Silent
from counterfoil.core.storage.atomic import atomic_folder
from counterfoil.core.storage.locks import beside, locked_in_turn
from counterfoil.core.storage.reading import open_regular, read_text
from counterfoil.data.images import MemberImage
from counterfoil.data.pairs import Pairs, Split
from counterfoil.data.scenes.captions import describe
from counterfoil.data.scenes.draw import draw
from counterfoil.data.scenes.family import MAX_FAMILY_SIZE, make_scene
from counterfoil.data.scenes.truth import SceneTruths

VERSION = 2
SPLITS = ("train", "dev", "test")
_CHUNK = 50
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the content of a scenes data set."""

    images: tuple[int, int, int]
    seed: int
    captions: tuple[int, int]
    version: int = VERSION
    # Pillow versions may draw edges or compress rows differently.
    pillow: str = PIL.__version__

    @property
    def folder(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return f"scenes-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def load_scenes(
    cache_dir: Path,
    images: int | tuple[int, int, int] = (4000, 500, 500),
    seed: int = 0,
    captions: int | tuple[int, int] = 5,
    progress: Progress | None = None,
    workers: int | None = None,
) -> Pairs:
    """Drawn scenes with captions: generated into ``cache_dir`` the first time, then read.

    ``images`` are the numbers of train, dev and test images, or a total that is divided 80/10/10.
    ``captions`` is the number per image, or its minimum and maximum. ``extras[i]`` of a split is
    the ground truth of image ``i``: its ``scene`` and the ``words`` of each caption.
    """
    recipe = Recipe(_divide(images), seed, _span(captions))
    folder = Path(cache_dir) / recipe.folder
    if not _is_whole(folder, recipe):
        progress = progress or Silent()
        with locked_in_turn(beside(folder), "drawing these scenes", progress):
            if not _is_whole(folder, recipe):  # another process may have drawn them
                _generate(folder, recipe, progress, workers)
    splits = {
        name: _read_split(folder, name)
        for name, count in zip(SPLITS, recipe.images, strict=True)
        if count
    }
    return Pairs("scenes", splits)


def _divide(images: int | tuple[int, int, int]) -> tuple[int, int, int]:
    if isinstance(images, int):
        rest = images // 10
        images = (images - 2 * rest, rest, rest)
    if len(images) != 3 or min(images) < 0 or sum(images) == 0:
        raise ConfigError(f"images: expected a positive number or three of them, got {images}")
    return images[0], images[1], images[2]


def _span(captions: int | tuple[int, int]) -> tuple[int, int]:
    least, most = (captions, captions) if isinstance(captions, int) else captions
    if not 1 <= least <= most:
        raise ConfigError(f"captions: expected at least 1 per image, got {captions}")
    return least, most


def _is_whole(folder: Path, recipe: Recipe) -> bool:
    """Whether the folder has all files of its manifest, for this recipe."""
    try:
        manifest = json.loads(read_text(folder / _MANIFEST))
        return manifest["recipe"] == json.loads(json.dumps(asdict(recipe))) and all(
            (folder / name).stat().st_size == size for name, size in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _generate(folder: Path, recipe: Recipe, progress: Progress, workers: int | None) -> None:
    """Write a temporary folder and replace the final one with it in one step."""
    with atomic_folder(folder) as partial:
        tasks = [task for split in range(len(SPLITS)) for task in _tasks(recipe, split)]
        drawn = (item for chunk in ordered_map(_draw_chunk, tasks, workers) for item in chunk)
        tracked = progress.track(drawn, "drawing scenes", total=sum(recipe.images))
        for name, count in zip(SPLITS, recipe.images, strict=True):
            _write_split(partial, name, count, tracked)
        files = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
        manifest = {"recipe": asdict(recipe), "images": recipe.images, "files": files}
        (partial / _MANIFEST).write_text(json.dumps(manifest, indent=2))


Task = tuple[Recipe, int, list[tuple[int, int, int]]]
Drawn = tuple[str, bytes, dict[str, Any]]


def _tasks(recipe: Recipe, split: int) -> Iterator[Task]:
    """Chunks of (image, family, member); families are cut only by the end of the split."""
    rng = random.Random(f"families {recipe.seed} {split}")
    members: list[tuple[int, int, int]] = []
    image, family = 0, 0
    while image < recipe.images[split]:
        for member in range(rng.randint(2, MAX_FAMILY_SIZE)):
            if image < recipe.images[split]:
                members.append((image, family, member))
                image += 1
        family += 1
        if len(members) >= _CHUNK:
            yield recipe, split, members
            members = []
    if members:
        yield recipe, split, members


def _draw_chunk(task: Task) -> list[Drawn]:
    recipe, split, members = task
    return [_draw_one(recipe, split, *member) for member in members]


def _draw_one(recipe: Recipe, split: int, image: int, family: int, member: int) -> Drawn:
    seed = (recipe.seed, split, family, member)
    scene = make_scene(seed)
    rng = random.Random(f"captions {seed}")
    captions = describe(scene, rng, rng.randint(*recipe.captions))
    buffer = io.BytesIO()
    draw(scene).save(buffer, format="PNG", compress_level=1)
    truth = {
        "captions": [caption.text for caption in captions],
        "scene": scene.as_dict(),
        "words": [[word.as_list() for word in caption.words] for caption in captions],
    }
    return f"scene-{SPLITS[split]}-{image:06d}", buffer.getvalue(), truth


def _write_split(folder: Path, name: str, count: int, drawn: Iterator[Drawn]) -> None:
    """Images into an uncompressed tar, everything else into one line of JSON per image."""
    with (
        tarfile.open(folder / f"{name}.tar", "w", format=tarfile.USTAR_FORMAT) as archive,
        (folder / f"{name}.jsonl").open("w", encoding="utf-8") as lines,
    ):
        for _ in range(count):
            key, data, truth = next(drawn)
            member = tarfile.TarInfo(f"{key}.png")
            member.size = len(data)
            span = {"offset": archive.offset + tarfile.BLOCKSIZE, "size": len(data)}
            archive.addfile(member, io.BytesIO(data))
            lines.write(json.dumps({"id": key, **span, **truth}, separators=(",", ":")) + "\n")


def _read_split(folder: Path, name: str) -> Split:
    path, archive = folder / f"{name}.jsonl", folder / f"{name}.tar"
    ids, captions, pixels, starts = [], [], [], []
    with open_regular(path) as lines:
        start = 0
        for line in lines:
            item = json.loads(line)
            ids.append(item["id"])
            captions.append(item["captions"])
            pixels.append(MemberImage(archive, f"{item['id']}.png", item["offset"], item["size"]))
            starts.append(start)
            start += len(line)
    return Split(name, ids, captions, pixels=pixels, extras=SceneTruths(path, starts))
