"""Tiny data sets in every layout, and what it means for two of them to be the same."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from counterfoil.data import ArrayFile, FragmentTable, Pairs, RowImage, Split


def png(seed: int = 0, size: tuple[int, int] = (6, 4)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def write_images(folder: Path, names: list[str]) -> None:
    for seed, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(seed))


def write_json(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def write_lines(path: Path, lines: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())
    return path


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def npy_bytes(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def features(images: int, fragments: int = 3, dim: int = 4, dtype: str = "float32") -> np.ndarray:
    rng = np.random.default_rng(images)
    return rng.normal(size=(images, fragments, dim)).astype(dtype)


def write_scan(
    folder: Path, split: str, images: int, each: int = 5, times: int = 1, ids: bool = True
) -> np.ndarray:
    """A regular SCAN split, every image stored ``times`` times; its features, stored once."""
    folder.mkdir(parents=True, exist_ok=True)
    array = features(images)
    np.save(folder / f"{split}_ims.npy", np.repeat(array, times, axis=0))
    captions = [f"caption {k} of image {i}" for i in range(images) for k in range(each)]
    write_lines(folder / f"{split}_caps.txt", captions)
    if ids:
        numbers = [str(100 + i) for i in range(images) for _ in range(times)]
        write_lines(folder / f"{split}_ids.txt", numbers)
    return array


def make_pairs(
    folder: Path,
    captions: dict[str, list[list[str]]],
    *,
    pixels: bool = True,
    fragments: str | None = "ragged",
    dtype: str = "float32",
    extras: bool = True,
    ids: str = "{split}/{i}",
) -> Pairs:
    """Pairs with everything that conversion has to carry."""
    folder.mkdir(parents=True, exist_ok=True)
    splits = {}
    for seed, (name, texts) in enumerate(captions.items()):
        n = len(texts)
        rng = np.random.default_rng(seed)
        np.save(folder / f"{name}_px.npy", rng.integers(0, 255, (n, 5, 7, 3), dtype=np.uint8))
        rows = ArrayFile(folder / f"{name}_px.npy")
        splits[name] = Split(
            name=name,
            ids=[ids.format(split=name, i=i) for i in range(n)],
            captions=texts,
            pixels=[RowImage(rows, i) for i in range(n)] if pixels else None,
            fragments=_table(folder, name, n, fragments, dtype, rng) if fragments else None,
            extras=(
                [{"number": i, "file": f"x{i}", "nested": {"é": [1, None, "\t"]}} for i in range(n)]
                if extras
                else None
            ),
        )
    return Pairs("tiny", splits)


def _table(
    folder: Path, name: str, n: int, kind: str, dtype: str, rng: np.random.Generator
) -> FragmentTable:
    shape = (n, 5) if kind == "single" else (n, 3, 5)
    np.save(folder / f"{name}_f.npy", rng.normal(size=shape).astype(dtype))
    array = ArrayFile(folder / f"{name}_f.npy")
    if kind != "ragged":
        return FragmentTable(array, np.arange(n))
    np.save(folder / f"{name}_b.npy", rng.uniform(0, 90, (n, 3, 4)).astype(np.float32))
    return FragmentTable(
        array,
        # Not in order, as after a selection.
        np.arange(n)[::-1].copy(),
        lengths=rng.integers(1, 4, n),
        boxes=ArrayFile(folder / f"{name}_b.npy"),
        sizes=rng.uniform(90, 100, (n, 2)).astype(np.float32),
        made_by="segments",
    )


def assert_same(one: Pairs, other: Pairs) -> None:
    assert set(one.splits) == set(other.splits)
    for split in one:
        twin = other.splits[split.name]
        assert list(twin.ids) == list(split.ids)
        assert [list(c) for c in twin.captions] == [list(c) for c in split.captions]
        assert (twin.extras or None) == (split.extras or None)
        assert (twin.pixels is None) == (split.pixels is None)
        for mine, theirs in zip(split.pixels or (), twin.pixels or (), strict=True):
            assert theirs.name == mine.name
            assert theirs.read() == mine.read()
        assert (twin.fragments is None) == (split.fragments is None)
        if split.fragments is not None and twin.fragments is not None:
            assert twin.fragments.made_by == split.fragments.made_by
            for image in range(len(split)):
                _assert_same_fragments(split.fragments, twin.fragments, image)


def _assert_same_fragments(one: FragmentTable, other: FragmentTable, image: int) -> None:
    mine, theirs = one.stored(image), other.stored(image)
    assert theirs.features.dtype == mine.features.dtype
    assert theirs.features.shape == mine.features.shape
    assert theirs.features.tobytes() == mine.features.tobytes()
    for a, b in ((mine.boxes, theirs.boxes), (mine.size, theirs.size)):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
    before, after = one.read(image), other.read(image)
    np.testing.assert_array_equal(before.features, after.features)
    assert (before.boxes is None) == (after.boxes is None)


def kinds(problems: list) -> set[str]:
    return {problem.kind for problem in problems}
