"""Extraction: cached, resumed, the same however it is done, and honest about what failed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from counterfoil.core.errors import ConfigError, DataError
from counterfoil.data.images import FileImage, open_image
from counterfoil.data.pairs import Pairs, Severity, Split
from counterfoil.data.scenes import draw, load_scenes, make_scene
from counterfoil.features import Segments, extract, with_fragments
from tests.conftest import thinned

T = TypeVar("T")
OPTIONS = {"side": 64, "max_fragments": 8}


class Recorder:
    """Counts the images tracked; stops after ``stop`` of them, as a keyboard does."""

    def __init__(self, stop: int | None = None) -> None:
        self.seen, self.said, self.stop = 0, [], stop

    def track(
        self, items: Iterable[T], description: str, total: int | None = None, done: int = 0
    ) -> Iterator[T]:
        for item in items:
            if self.stop is not None and self.seen >= self.stop:
                raise KeyboardInterrupt
            self.seen += 1
            yield item

    def note(self, text: str) -> None: ...

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    return load_scenes(tmp_path_factory.mktemp("scenes"), images=(30, 6, 6), workers=1)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extract, "_CHUNK", 8)


def arrays(made: Pairs) -> dict[str, bytes]:
    """The fragments of a data set as bytes."""
    arrays = {}
    for split in made:
        table = split.fragments
        assert table is not None
        assert table.lengths is not None
        assert table.boxes is not None
        arrays[f"{split.name}_ims"] = table.features.rows(table.rows).tobytes()
        arrays[f"{split.name}_bbx"] = table.boxes.rows(table.rows).tobytes()
        arrays[f"{split.name}_lens"] = table.lengths[table.rows].tobytes()
    return arrays


def test_fragments_are_those_of_the_extractor(pairs: Pairs, tmp_path: Path) -> None:
    made = with_fragments(pairs, tmp_path, options=OPTIONS, workers=1)
    table = made.train.fragments
    assert table is not None
    assert made.train.pixels is not None
    assert (table.dim, table.max_fragments, len(table)) == (Segments().dim, 8, 30)
    expected = Segments(**OPTIONS).extract(open_image(made.train.pixels[17]))
    result = table.read(17)
    np.testing.assert_allclose(result.features, expected.features, atol=2e-3)
    assert result.boxes is not None
    np.testing.assert_array_equal(result.boxes, expected.boxes)
    assert made.problems == []


def test_a_second_time_reads_the_cache(pairs: Pairs, tmp_path: Path) -> None:
    first, second = Recorder(), Recorder()
    with_fragments(pairs, tmp_path, options=OPTIONS, workers=1, progress=first)
    with_fragments(pairs, tmp_path, options=OPTIONS, workers=1, progress=second)
    assert (first.seen, second.seen) == (42, 0)
    other = Recorder()
    with_fragments(pairs, tmp_path, options={**OPTIONS, "side": 48}, workers=1, progress=other)
    assert other.seen == 42


def test_the_number_of_workers_does_not_change_a_byte(pairs: Pairs, tmp_path: Path) -> None:
    one = with_fragments(pairs, tmp_path / "one", options=OPTIONS, workers=1)
    two = with_fragments(pairs, tmp_path / "two", options=OPTIONS, workers=2)
    assert arrays(one) == arrays(two)


@pytest.mark.parametrize("stop", thinned([1, 8, 19, 33], 19))
def test_interrupted_work_resumes_to_the_same_bytes(
    pairs: Pairs, tmp_path: Path, stop: int
) -> None:
    whole = with_fragments(pairs, tmp_path / "whole", options=OPTIONS, workers=1)
    with pytest.raises(KeyboardInterrupt):
        with_fragments(pairs, tmp_path, options=OPTIONS, workers=1, progress=Recorder(stop))
    rest = Recorder()
    made = with_fragments(pairs, tmp_path, options=OPTIONS, workers=1, progress=rest)
    assert arrays(made) == arrays(whole)
    assert rest.seen == 42 - stop // 8 * 8


def _photos(folder: Path, count: int) -> Split:
    folder.mkdir()
    for i in range(count):
        draw(make_scene((0, 0, i, 0))).save(folder / f"{i}.png")
    refs = [FileImage(folder / f"{i}.png") for i in range(count)]
    ids = [str(i) for i in range(count)]
    return Split("train", ids, [[f"caption {i}", "x"] for i in range(count)], pixels=refs)


def test_an_unreadable_image_is_left_out_with_its_captions_and_recorded(tmp_path: Path) -> None:
    split = _photos(tmp_path / "photos", 12)
    (tmp_path / "photos" / "3.png").write_bytes(b"not a picture")
    whole = (tmp_path / "photos" / "9.png").read_bytes()
    (tmp_path / "photos" / "9.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "photos" / "10.png").unlink()
    mine = Pairs("mine", {"train": split})
    for _ in range(2):
        made = with_fragments(mine, tmp_path / "cache", options=OPTIONS, workers=1)
        assert list(made.train.ids) == ["0", "1", "2", "4", "5", "6", "7", "8", "11"]
        assert made.train.captions[3] == ["caption 4", "x"]
        assert made.train.fragments is not None
        good = Segments(**OPTIONS).extract(open_image(split.pixels[4]))  # type: ignore[index]
        np.testing.assert_allclose(made.train.fragments.read(3).features, good.features, atol=2e-3)
        assert [problem.where for problem in made.problems] == ["train/3", "train/9", "train/10"]
        assert {problem.severity for problem in made.problems} == {Severity.SKIP}
    (tmp_path / "photos" / "3.png").write_bytes(whole)
    assert len(with_fragments(mine, tmp_path / "cache", options=OPTIONS, workers=1).train) == 10


def test_a_split_without_a_readable_image_is_refused(tmp_path: Path) -> None:
    split = _photos(tmp_path / "photos", 2)
    for ref in (tmp_path / "photos").iterdir():
        ref.write_bytes(b"")
    with pytest.raises(DataError, match="none of its 2 images"):
        with_fragments(Pairs("mine", {"train": split}), tmp_path, options=OPTIONS, workers=1)


def test_splits_with_fragments_are_left_alone(pairs: Pairs, tmp_path: Path) -> None:
    made = with_fragments(pairs, tmp_path, options=OPTIONS, workers=1)
    assert with_fragments(made, tmp_path / "other", options=OPTIONS) is made
    assert not (tmp_path / "other").exists()


def test_unknown_extractors_and_options_are_refused(pairs: Pairs, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'segments'"):
        with_fragments(pairs, tmp_path, extractor="segment")
    with pytest.raises(ConfigError, match=r"features\.sides"):
        with_fragments(pairs, tmp_path, options={"sides": 3})
