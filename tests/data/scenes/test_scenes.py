"""Drawn scenes: reproducible, truly described, and hard to tell from their family."""

from __future__ import annotations

import io
import json
import os
import random
import tarfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from counterfoil.core.errors import ConfigError
from counterfoil.data.images import open_image
from counterfoil.data.scenes import (
    Scene,
    SceneCaption,
    alternatives,
    captions_of,
    could_be_true,
    describe,
    draw,
    falsify,
    is_true,
    load_scenes,
    make_scene,
    scene_of,
    statement_of,
    store,
    tokens,
)
from counterfoil.data.scenes.draw import SPRITES
from counterfoil.data.scenes.vocabulary import COLOR_WORDS, KINDS
from tests.unprivileged import open_folder, run_without_write_permission

seeds = st.tuples(st.integers(0, 99), st.integers(0, 2), st.integers(0, 10**6), st.integers(0, 3))


@given(seeds)
def test_every_word_of_every_caption_is_aligned_and_true(seed: tuple[int, ...]) -> None:
    scene = make_scene(seed)
    captions = describe(scene, random.Random(str(seed)), 5)
    assert len({caption.text for caption in captions}) == 5
    for caption in captions:
        assert [word.text for word in caption.words] == tokens(caption.text)
        assert 4 <= len(caption.words) <= 20
        statement = statement_of(caption)
        assert is_true(scene, statement)
        assert could_be_true(scene, statement)
        for place, word in enumerate(caption.words):
            assert word.phrase[0] <= place < word.phrase[1]
            assert all(0 <= index < len(scene.objects) for index in word.objects)
            if word.kind == "attribute" and word.text in COLOR_WORDS:
                assert scene.objects[word.objects[0]].color == COLOR_WORDS[word.text]


@given(seeds, st.integers(1, 3))
def test_foils_are_false_of_their_scene_and_differ_only_where_they_say(
    seed: tuple[int, ...], n_words: int
) -> None:
    scene, rng = make_scene(seed), random.Random(str(seed))
    for caption in describe(scene, rng, 5):
        foil = falsify(scene, caption, rng, n_words)
        assert foil is not None
        assert 1 <= len(foil.words) <= n_words
        before, after = tokens(caption.text), tokens(foil.text)
        changed = [
            i for i, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]
        ]
        assert tuple(changed) == foil.positions
        assert tuple(after[i] for i in changed) == foil.words
        assert tuple(caption.words[i].kind for i in changed) == foil.kinds
        rewritten = caption
        for position, word in zip(foil.positions, foil.words, strict=True):
            rewritten = rewritten.with_word(position, word)
            alone = statement_of(caption.with_word(position, word))
            assert not could_be_true(scene, alone)
        assert rewritten.text == foil.text
        assert not could_be_true(scene, statement_of(rewritten))


def test_alternatives_leave_out_words_that_would_still_be_true() -> None:
    base = make_scene((0, 0, 0, 0))
    man = replace(base.objects[0], kind="man", color="red", pattern="plain", count=1, size="medium")
    scene = replace(base, objects=(man,), relations=())
    options = alternatives(scene, _caption([("the", ""), ("man", "noun:0")]), 1)
    assert {"woman", "boy", "girl", "child"} <= set(options)
    assert not {"man", "guy", "person"} & set(options)


def test_the_generous_reading_grants_hypernyms_details_and_joint_counts() -> None:
    base = make_scene((0, 0, 0, 0))
    man = replace(base.objects[0], kind="man", color="red", pattern="plain", count=1, size="medium")
    objects = (
        replace(man, boxes=((10.0, 120.0, 40.0, 200.0),)),
        replace(man, kind="girl", color="blue", boxes=((180.0, 140.0, 210.0, 200.0),)),
    )
    scene = replace(base, objects=objects, relations=())
    told = _caption([("two", "count:0"), ("people", "noun:0")])
    assert could_be_true(scene, statement_of(told))
    assert not could_be_true(scene, statement_of(told.with_word(0, "three")))
    assert not could_be_true(scene, statement_of(_caption([("a", ""), ("boy", "noun:0")])))
    assert could_be_true(scene, statement_of(_caption([("a", ""), ("child", "noun:0")])))


def _caption(pieces: list[tuple[str, str]]) -> SceneCaption:
    data = [
        {"word": word, "objects": [0], "phrase": [0, len(pieces)], "role": role}
        for word, role in pieces
    ]
    return SceneCaption.from_dict({"text": " ".join(word for word, _ in pieces), "words": data})


@given(seeds)
def test_members_of_a_family_differ_from_the_base_by_their_edit_alone(
    seed: tuple[int, ...],
) -> None:
    base, scene = make_scene((*seed[:3], 0)), make_scene((*seed[:3], max(1, seed[3])))
    assert base.edit is None
    assert scene.edit is not None
    assert (scene.family, scene.backdrop) == (base.family, base.backdrop)
    edit = scene.edit
    assert edit.before != edit.after
    differing = [
        (what, index)
        for index, (one, other) in enumerate(zip(base.objects, scene.objects, strict=True))
        for what in ("kind", "color", "size", "pattern", "count")
        if getattr(one, what) != getattr(other, what)
    ]
    drawn = [_couples(s) for s in (base, scene)]
    if edit.what in ("relation", "order", "depth"):
        assert differing == []
    else:
        attribute = "color" if edit.what == "colour" else edit.what
        assert differing == [(attribute, edit.object)]
    assert (drawn[0] == drawn[1]) == (edit.what != "relation")


def _couples(scene: Scene) -> set[tuple[int, str, int]]:
    derived = ("left of", "right of", "above")
    return {(r.subject, r.name, r.object) for r in scene.relations if r.name not in derived}


@given(seeds)
@example((36, 0, 0, 0))  # a large guitar in the hand of a girl at the bottom
def test_objects_stay_inside_the_picture_and_scenes_survive_json(seed: tuple[int, ...]) -> None:
    scene = make_scene(seed)
    assert 2 <= len(scene.objects) <= 4
    for obj in scene.objects:
        assert len(obj.boxes) == obj.count
        for x1, y1, x2, y2 in obj.boxes:
            assert 0 <= x1 < x2 <= 224
            assert 0 <= y1 < y2 <= 224
    again = Scene.from_dict(json.loads(json.dumps(scene.as_dict())))
    assert again == scene
    assert draw(again).tobytes() == draw(scene).tobytes()


def test_every_kind_has_a_sprite() -> None:
    assert set(SPRITES) == set(KINDS)
    assert len(KINDS) >= 26


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scenes")
    load_scenes(path, images=(60, 5, 5), workers=2)
    return path


def _bytes(folder: Path) -> dict[str, bytes]:
    (data,) = folder.glob("scenes-*")
    return {path.name: path.read_bytes() for path in sorted(data.iterdir())}


@pytest.mark.slow
def test_the_number_of_workers_does_not_change_a_byte(folder: Path, tmp_path: Path) -> None:
    load_scenes(tmp_path, images=(60, 5, 5), workers=1)
    assert _bytes(tmp_path) == _bytes(folder)


def test_loading_gives_images_captions_and_their_truth(folder: Path) -> None:
    pairs = load_scenes(folder, images=(60, 5, 5))
    assert {split.name: len(split) for split in pairs} == {"train": 60, "dev": 5, "test": 5}
    split = pairs.train
    assert split.ids[12] == "scene-train-000012"
    assert split.pixels is not None
    assert split.extras is not None
    scene = scene_of(split.extras[12])
    assert open_image(split.pixels[12]).tobytes() == draw(scene).tobytes()
    captions = captions_of(split.extras[12], split.captions[12])
    assert len(captions) == 5
    for caption in captions:
        assert tokens(caption.text) == [word.text for word in caption.words]
        assert is_true(scene, statement_of(caption))
    with tarfile.open(next(folder.glob("*/train.tar"))) as archive:
        member = archive.extractfile("scene-train-000012.png")
        assert member is not None
        assert member.read() == split.pixels[12].read()


def test_most_images_have_a_relative_in_their_split(folder: Path) -> None:
    extras = load_scenes(folder, images=(60, 5, 5)).train.extras
    assert extras is not None
    families = [item["scene"]["family"] for item in extras]
    assert sum(families.count(family) > 1 for family in families) >= 0.9 * len(families)


@pytest.mark.parametrize("damage", ["truncate", "delete", "manifest"])
def test_a_damaged_cache_is_made_again(tmp_path: Path, damage: str) -> None:
    load_scenes(tmp_path, images=10, workers=1)
    before = _bytes(tmp_path)
    (data,) = tmp_path.glob("scenes-*")
    if damage == "truncate":
        (data / "train.tar").write_bytes(before["train.tar"][:-512])
    elif damage == "delete":
        (data / "dev.jsonl").unlink()
    else:
        (data / "manifest.json").write_text("{")
    load_scenes(tmp_path, images=10, workers=1)
    assert _bytes(tmp_path) == before


def test_an_interrupted_generation_leaves_nothing_behind(tmp_path: Path) -> None:
    class Stop:
        def track(self, items, description, total=None, done=0):  # type: ignore[no-untyped-def]
            for count, item in enumerate(items):
                if count == 3:
                    raise KeyboardInterrupt
                yield item

        def note(self, text: str) -> None: ...

        def say(self, text: str) -> None: ...

    with pytest.raises(KeyboardInterrupt):
        load_scenes(tmp_path, images=10, workers=1, progress=Stop())
    assert list(tmp_path.iterdir()) == []


def test_captions_may_be_ragged_and_seeds_differ(tmp_path: Path) -> None:
    ragged = load_scenes(tmp_path, images=(20, 0, 0), captions=(1, 6), workers=1)
    assert list(ragged.splits) == ["train"]
    assert len({len(texts) for texts in ragged.train.captions}) > 2
    other = load_scenes(tmp_path, images=(20, 0, 0), captions=(1, 6), seed=1, workers=1)
    assert other.train.captions != ragged.train.captions


@pytest.mark.parametrize("bad", [{"images": 0}, {"images": (1, -1, 2)}, {"captions": 0}])
def test_impossible_sizes_are_refused(tmp_path: Path, bad: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        load_scenes(tmp_path, **bad)  # type: ignore[arg-type]


def test_pictures_are_224_pixels_of_rgb() -> None:
    picture = draw(make_scene((0, 0, 3, 0)))
    assert (picture.size, picture.mode) == ((224, 224), "RGB")
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    assert buffer.tell() > 1000


def test_two_that_need_the_same_scenes_at_once_draw_them_once(tmp_path, monkeypatch) -> None:
    """On a cold cache, the second replaced the files that the first was reading already."""
    drawn: list[int] = []
    draw_all = store._generate

    def counted(*args: Any) -> None:
        drawn.append(1)
        time.sleep(0.2)
        draw_all(*args)

    monkeypatch.setattr(store, "_generate", counted)
    result: list[int] = []

    def load() -> None:
        result.append(len(load_scenes(tmp_path, images=10, workers=1).train))

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert result == [8, 8, 8]
    assert drawn == [1]
    assert [path.name[:7] for path in tmp_path.iterdir()] == ["scenes-"]


@pytest.mark.skipif(not hasattr(os, "setuid"), reason="needs users")
def test_a_cache_that_cannot_be_written_is_read_and_what_it_lacks_is_an_error_at_once() -> None:
    body = """
print(len(load_scenes(folder, images=10, workers=1).train))
try:
    load_scenes(folder, images=20, workers=1)
except PermissionError as error:
    print(error)
"""
    with open_folder() as folder:
        load_scenes(folder, images=10, workers=1)
        imports = "from counterfoil.data.scenes import load_scenes"
        number, problem = run_without_write_permission(imports, body, folder).splitlines()
        assert number == "8"
        assert "cannot be written" in problem
        assert str(folder) in problem
