"""Foils on disk: nothing lost by an interruption, readable by any model's training."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterfoil.core.errors import BusyError, DataError
from counterfoil.core.progress import Silent
from counterfoil.core.storage.locks import beside
from counterfoil.data.pairs import Split
from counterfoil.foils.files import FoilWriter, StoredFoil, read_foils
from counterfoil.training.extra_negatives import foil_negatives
from tests.holding import content, held

FOILS = st.builds(
    StoredFoil,
    st.sampled_from(["1", "2", "a/b.jpg"]),
    st.text(max_size=8),
    st.text(min_size=1, max_size=8).filter(str.strip),
    st.lists(st.integers(0, 30), max_size=3).map(tuple),
    st.sampled_from(["object", "relation", "object+attribute"]),
    st.none() | st.floats(-5, 5),
)


def foil(image: str = "7", caption: str = "a dog", text: str = "a cat") -> StoredFoil:
    return StoredFoil(image, caption, text, (1,), "object", 0.25)


def write(path, foils, **settings) -> None:
    with FoilWriter(path, settings) as writer:
        for one in foils:
            writer.add(one.image, one.caption, [one])


@given(st.lists(FOILS, max_size=6, unique_by=lambda one: (one.image, one.caption)))
def test_what_is_written_is_read_again(tmp_path_factory, foils) -> None:
    path = tmp_path_factory.mktemp("foils") / "foils.jsonl"
    write(path, foils)
    assert list(read_foils(path)) == foils
    assert [file.name for file in path.parent.iterdir()] == ["foils.jsonl"]


class Killed(Exception):
    pass


def interrupted(path, foils=(), **settings) -> FoilWriter:
    """A writer that died after these foils."""

    def die() -> None:
        with writer:
            for one in foils:
                writer.add(one.image, one.caption, [one] if one.foil else [])
            raise Killed

    writer = FoilWriter(path, settings)
    with pytest.raises(Killed):
        die()
    return writer


@given(cut=st.integers(0, 400))
def test_an_interrupted_writer_goes_on_where_it_was_cut(tmp_path_factory, cut) -> None:
    path = tmp_path_factory.mktemp("foils") / "foils.jsonl"
    foils = [foil(str(number), f"caption {number}") for number in range(5)]
    writer = interrupted(path, foils[:3], seed=1)
    assert not path.exists()
    left = writer.partial.read_bytes()[:cut]
    writer.partial.write_bytes(left)
    with FoilWriter(path, {"seed": 1}) as writer:
        done = [writer.is_done(one.image, one.caption) for one in foils]
        whole = max(0, left.count(b"\n") - 1)  # the first line tells the settings
        assert done == [number < whole for number in range(5)]
        for one in foils:
            writer.add(one.image, one.caption, [one])
    assert list(read_foils(path)) == foils


def test_a_caption_found_to_have_no_foils_is_done_too(tmp_path) -> None:
    path = tmp_path / "foils.jsonl"
    interrupted(path, [foil("1", "a dog", "")])
    with FoilWriter(path) as writer:
        assert writer.is_done("1", "a dog")
        assert not writer.is_done("1", "a cat")
    assert path.read_bytes() == b""


def test_a_failure_leaves_the_older_file_as_it_was(tmp_path) -> None:
    path = tmp_path / "foils.jsonl"
    write(path, [foil()])
    before = path.read_bytes()
    interrupted(path, [foil("8", "a bus", "a car")])
    assert path.read_bytes() == before


def test_foils_of_other_settings_are_not_mixed_in(tmp_path) -> None:
    path = tmp_path / "foils.jsonl"
    writer = interrupted(path, seed=1)
    with pytest.raises(DataError, match="other settings"), FoilWriter(path, {"seed": 2}):
        pass
    assert writer.partial.exists()


def test_a_caption_is_written_once(tmp_path) -> None:
    path = tmp_path / "foils.jsonl"
    write(path, [foil(), foil()])
    assert list(read_foils(path)) == [foil()]


def test_mistakes_are_refused(tmp_path) -> None:
    with FoilWriter(tmp_path / "foils.jsonl") as writer:
        with pytest.raises(ValueError, match="another caption"):
            writer.add("9", "a dog", [foil()])
        with pytest.raises(DataError, match="a foil is empty"):
            writer.add("7", "a dog", [foil(text=" ")])
        with pytest.raises(DataError, match="is nan"):
            writer.add("7", "a dog", [StoredFoil("7", "a dog", "a cat", score=float("nan"))])
    with pytest.raises(ValueError, match="with block"):
        writer.add("7", "a dog", [foil()])


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"image": "1", "caption": "a"}',
        '{"image": 1, "caption": 2, "foil": 3}',
        '{"image": "1", "caption": "a", "foil": "b", "positions": "first"}',
        '{"image": "1", "caption": "a", "foil": "b", "score": "high"}',
    ],
)
def test_a_bad_line_is_named(tmp_path, line) -> None:
    path = tmp_path / "foils.jsonl"
    path.write_text('{"image": "1", "caption": "a dog", "foil": "a cat"}\n\n' + line + "\n")
    with pytest.raises(DataError, match="line 3"):
        list(read_foils(path))
    with pytest.raises(DataError, match="no such file"):
        list(read_foils(tmp_path / "none.jsonl"))


def test_training_reads_the_file_as_foils_of_its_captions(tmp_path) -> None:
    path = tmp_path / "foils.jsonl"
    write(path, [foil("x", "a dog", "a cat"), foil("y", "a bus", "a car")])
    split = Split(name="train", ids=["x", "y"], captions=[["a dog", "the dog"], ["a bus"]])
    companions = foil_negatives(str(path), 2, split, Silent())
    rng = np.random.default_rng(0)
    assert [companions.of(caption, rng).texts for caption in range(3)] == [
        ("a cat",),
        (),
        ("a car",),
    ]


def test_a_second_writer_does_not_spoil_the_foils_of_the_first(tmp_path) -> None:
    path = tmp_path / "foils.jsonl"
    with held(beside(path)):
        with pytest.raises(BusyError, match="another process is writing foils"), FoilWriter(path):
            pass
        assert content(tmp_path) == {}
    with FoilWriter(path):
        pass
    path.with_name("foils.jsonl.partial").write_text('{"settings": {"seed": 1}}\n')
    with pytest.raises(DataError, match="other settings"), FoilWriter(path):
        pass
    assert not beside(path).exists()  # the lock is free after a refusal, too
