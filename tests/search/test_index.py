"""An index holds what was put into it, says so after any change, and refuses what is damaged."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import counterfoil as cf
from counterfoil.core.errors import BusyError, CheckpointError, ConfigError, DataError
from counterfoil.core.storage import segments
from counterfoil.core.storage.arrays import ArrayFile
from counterfoil.core.storage.locks import LOCK, beside, locked_folder
from counterfoil.data.fragments import FragmentTable
from counterfoil.data.images import FileImage
from counterfoil.search import SearchIndex, update
from counterfoil.search.items import Items
from tests.holding import content, held
from tests.search.conftest import SMALL, with_captions


def contents(index: SearchIndex) -> dict[str, list]:
    """Everything an index says of itself, in a form to compare."""
    found = {}
    for side, items in index.items.items():
        names = sorted(items.names)
        keys = np.array([items.names[name] for name in names], dtype=np.int64)
        assert index.vectors[side].ids().tolist() == sorted(keys.tolist())
        found[side] = items.about(keys)
    return found


def test_an_index_holds_images_and_captions_with_their_names(indexes, concepts) -> None:
    index, split = indexes["naaf"], concepts.test
    found = contents(index)
    assert [item["id"] for item in found["images"]] == sorted(split.ids)
    by_id = {item["id"]: item for item in found["captions"]}
    for name, texts in zip(split.ids, split.captions, strict=True):
        for number, text in enumerate(texts):
            assert by_id[f"{name}#{number}"] == {
                "id": f"{name}#{number}",
                "image": name,
                "text": text,
            }
    info = index.info()
    assert (info["images"], info["captions"]) == (32, 64)
    assert info["model"]["name"] == "naaf"
    assert index.check() == []


def test_what_is_stored_scores_as_the_model_does(indexes, models, concepts) -> None:
    from counterfoil.scoring.encode import score_split

    split = concepts.test
    for name, index in indexes.items():
        images = np.array([index.items["images"].names[i] for i in split.ids])
        order = [f"{i}#{n}" for i in split.ids for n in range(2)]
        captions = np.array([index.items["captions"].names[i] for i in order])
        with torch.inference_mode():
            found = models[name].matcher(
                index.items["images"].encoded(images), index.items["captions"].encoded(captions)
            )
        torch.testing.assert_close(found, score_split(models[name], split).scores)


def test_items_come_in_the_order_asked_for_across_segments(fresh, concepts) -> None:
    fresh.add(concepts.test.select(range(12, 20)))
    fresh.add(concepts.test.select(range(20, 32)))
    items = fresh.items["images"]
    assert len(items.table.mark.segments) == 3
    keys = np.random.default_rng(0).permutation(items.table.live_ids)
    together = items.encoded(keys)
    for row, key in enumerate(keys):
        alone = items.encoded(np.array([key]))
        count = int(alone.mask.sum())
        assert int(together.mask[row].sum()) == count
        assert torch.equal(together.fragments[row, :count], alone.fragments[0])
        assert torch.equal(together.boxes[row, :count], alone.boxes[0])
    assert items.about(keys) == [items.about(np.array([key]))[0] for key in keys]


def test_adding_in_parts_and_reopening_is_adding_at_once(fresh, concepts, indexes) -> None:
    fresh.add(concepts.test.select(range(12, 32)))
    again = SearchIndex.open(fresh.folder, device="cpu")
    assert contents(again) == contents(indexes["naaf"])
    one, other = (
        i.search("a dog and a cat", k=32, shortlist_size=32) for i in (again, indexes["naaf"])
    )
    assert [(h.id, h.first_rank) for h in one.hits] == [(h.id, h.first_rank) for h in other.hits]


def test_removing_an_image_takes_its_captions_along(fresh) -> None:
    assert fresh.remove(["test-3", "test-5#1"]) == 4
    found = contents(fresh)
    assert "test-3" not in {item["id"] for item in found["images"]}
    names = {item["id"] for item in found["captions"]}
    assert {"test-3#0", "test-3#1", "test-5#1"}.isdisjoint(names)
    assert "test-5#0" in names
    assert all(h.id != "test-3" for h in fresh.search("a dog", k=99).hits)
    assert contents(SearchIndex.open(fresh.folder)) == found


def test_an_id_of_an_image_and_of_another_ones_caption_removes_the_image_alone(
    fresh, concepts
) -> None:
    image = replace(concepts.test.select([20]), ids=["test-5#0"])
    fresh.add(with_captions(image, ["a kite behind a kite"]))
    captions = {hit.id: list(hit.captions) for hit in fresh.search("a dog", k=99).hits}
    assert fresh.remove(["test-5#0"]) == 2
    left = {hit.id: list(hit.captions) for hit in fresh.search("a dog", k=99).hits}
    assert left == {name: own for name, own in captions.items() if name != "test-5#0"}


def test_a_caption_that_is_removed_is_no_longer_stored_with_its_image(fresh) -> None:
    before = {hit.id: hit for hit in fresh.search("a dog", k=12).hits}
    _, stays = before["test-5"].captions
    assert fresh.remove(["test-5#0"]) == 1
    after = {hit.id: hit for hit in fresh.search("a dog", k=12).hits}
    assert list(after["test-5"].captions) == [stays]
    assert {name: hit.score for name, hit in after.items()} == pytest.approx(
        {name: hit.score for name, hit in before.items()}
    )
    assert after["test-5"].first_rank == before["test-5"].first_rank
    assert fresh.remove(["test-5#1"]) == 1
    again = SearchIndex.open(fresh.folder)
    assert [list(h.captions) for h in again.search("a dog", k=12).hits if h.id == "test-5"] == [[]]
    assert fresh.remove(["test-5"]) == 1


def test_a_removed_caption_is_in_no_file_of_a_compact_index(fresh, concepts) -> None:
    fresh.add(with_captions(concepts.test.select([20]), ["a kite behind a kite", "a boat"]))
    fresh.remove(["test-20#0"])
    fresh.compact()
    files = [file.read_bytes() for file in fresh.folder.rglob("*") if file.is_file()]
    assert not any(b"a kite behind a kite" in file for file in files)
    assert any(b"a boat" in file for file in files)


def test_what_is_not_there_is_not_removed(fresh) -> None:
    before = contents(fresh)
    with pytest.raises(DataError, match=r"test-33: no such id.*did you mean 'test-3'"):
        fresh.remove(["test-3", "test-33"])
    assert contents(fresh) == before


def test_images_that_are_there_are_refused_skipped_or_updated(fresh, concepts) -> None:
    some = with_captions(concepts.test.select(range(10, 14)), ["a kite", "a boat", "a lamp"])
    with pytest.raises(DataError, match=r"2 images .* \(the first: test-10\)"):
        fresh.add(some)
    with pytest.raises(DataError, match="test-30 stands twice"):
        fresh.add([concepts.test.select([29, 30]), concepts.test.select([30])])
    assert len(fresh) == 12
    added = fresh.add(some, existing="skip")
    assert (added.images, added.captions, added.skipped) == (2, 6, 2)
    added = fresh.add(some, existing="update")
    assert (added.images, added.captions, added.updated) == (4, 12, 4)
    found = contents(fresh)
    assert len(found["images"]) == 14
    assert len(found["captions"]) == 10 * 2 + 4 * 3
    texts = {item["id"]: item["text"] for item in found["captions"]}
    assert texts["test-10#2"] == "a lamp"


def test_a_commit_reads_the_names_of_new_images_alone(fresh, concepts, monkeypatch) -> None:
    monkeypatch.setattr(update, "IMAGES_PER_COMMIT", 2)
    read: list[int] = []
    about = Items.about

    def noted(items: Items, keys: np.ndarray) -> list[dict]:
        read.extend(keys.tolist() if items.side == "images" else [])
        return about(items, keys)

    monkeypatch.setattr(Items, "about", noted)
    fresh.add(concepts.test.select(range(12, 32)))
    assert len(read) == len(set(read)) == 30  # those of the last commit are not needed yet


def test_names_follow_every_change(fresh, concepts, monkeypatch) -> None:
    monkeypatch.setattr(update, "IMAGES_PER_COMMIT", 2)
    monkeypatch.setattr(segments, "MAX_SEGMENTS", 3)  # some commits merge
    images, captions = concepts.test, fresh.items["captions"].names
    assert len(captions) == 24
    fresh.add(images.select(range(12, 32)))
    fresh.remove([images.ids[3], images.ids[20], f"{images.ids[6]}#1"])
    fresh.add(images.select([5, 30]), existing="update")
    opened = SearchIndex.open(fresh.folder, model=fresh.model)
    for side in ("images", "captions"):
        assert fresh.items[side].names == opened.items[side].names
    assert len(fresh.items["captions"].names) == 2 * 30 - 1


def test_compacting_changes_nothing_but_the_room(fresh, concepts) -> None:
    fresh.add(concepts.test.select(range(12, 20)))
    fresh.remove([f"test-{i}" for i in range(10)])
    before, hits = contents(fresh), fresh.search("a dog", k=99).hits
    size = fresh.info()["bytes"]
    fresh.compact()
    assert fresh.info()["bytes"] < size
    assert contents(fresh) == before
    for new, old in zip(fresh.search("a dog", k=99).hits, hits, strict=True):
        assert (new.id, new.first_rank, new.captions) == (old.id, old.first_rank, old.captions)
        assert new.score == pytest.approx(old.score, abs=1e-6)
    assert fresh.check() == []
    assert contents(SearchIndex.open(fresh.folder)) == before


def test_an_image_that_cannot_be_read_is_left_out_with_its_captions(
    models, concepts, tmp_path
) -> None:
    split = concepts.test.select(range(5))
    features = np.stack([split.fragments.features.row(i) for i in range(5)])
    features[2, 0, 0] = np.nan
    np.save(tmp_path / "bad.npy", features)
    table = FragmentTable(ArrayFile(tmp_path / "bad.npy"), np.arange(5))
    index = SearchIndex.build(tmp_path / "index", models["vse-fc"])
    added = index.add(replace(split, fragments=table))
    assert (added.images, added.captions) == (4, 8)
    assert "test-2" in added.left_out[0]
    assert "test-2#0" not in index.items["captions"].names


def test_a_model_that_encodes_nonsense_is_refused(concepts, tmp_path) -> None:
    torch.manual_seed(0)
    model = cf.create("vse-fc", concepts, **SMALL).eval()
    index = SearchIndex.build(tmp_path / "index", model)
    with torch.no_grad():
        for weight in model.image_encoder.parameters():
            weight.fill_(float("nan"))
    with pytest.raises(DataError, match=r"test-0: .*not finite"):
        index.add(concepts.test)
    assert len(SearchIndex.open(tmp_path / "index")) == 0


def test_another_model_is_refused(fresh, models, concepts) -> None:
    assert len(SearchIndex.open(fresh.folder, model=models["naaf"])) == 12
    with pytest.raises(CheckpointError, match="made with another model"):
        SearchIndex.open(fresh.folder, model=models["chan"])
    with pytest.raises(CheckpointError, match="made with another model"):
        SearchIndex.open(fresh.folder, model=cf.create("naaf", concepts, seed=5, **SMALL))
    weights = fresh.folder / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match="not the model that this index was made with"):
        SearchIndex.open(fresh.folder)


def damage_missing_manifest(folder) -> None:
    (folder / "index.json").unlink()


def damage_broken_manifest(folder) -> None:
    (folder / "index.json").write_text('{"kind": "search index", "gener')


def damage_other_format(folder) -> None:
    tree = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps(tree | {"format": 99}))


def damage_truncated_items(folder) -> None:
    path = next((folder / "segments").glob("images-*/fragments.bin"))
    path.write_bytes(path.read_bytes()[:-7])


def damage_missing_items(folder) -> None:
    next((folder / "segments").glob("captions-*/about.bin")).unlink()


def damage_truncated_vectors(folder) -> None:
    path = next((folder / "vectors" / "images" / "segments").glob("*/rows.bin"))
    path.write_bytes(path.read_bytes()[:-2])


def damage_missing_vectors(folder) -> None:
    (folder / "vectors" / "images" / "manifest.json").unlink()


def damage_missing_model(folder) -> None:
    (folder / "model" / "config.json").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_missing_manifest, "not a search index"),
        (damage_broken_manifest, r"index\.json: damaged"),
        (damage_other_format, "format 99"),
        (damage_truncated_items, r"fragments\.bin: \d+ bytes, but \d+ were written"),
        (damage_missing_items, r"about\.bin: cannot be read"),
        (damage_truncated_vectors, r"rows\.bin: \d+ bytes, but \d+ were written"),
        (damage_missing_vectors, "not a vector index"),
        (damage_missing_model, "model of the index is missing"),
    ],
)
def test_a_damaged_index_says_what_is_wrong(fresh, damage, message) -> None:
    damage(fresh.folder)
    with pytest.raises((DataError, CheckpointError), match=message):
        SearchIndex.open(fresh.folder)


def test_a_changed_byte_is_found_by_checking(fresh) -> None:
    path = next((fresh.folder / "segments").glob("images-*/fragments.bin"))
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(bytes(data))
    assert SearchIndex.open(fresh.folder).check() == [f"{path}: damaged"]


def test_building_over_something_needs_permission(fresh, models, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"index is there already.*--overwrite"):
        SearchIndex.build(fresh.folder, models["naaf"])
    assert len(SearchIndex.build(fresh.folder, models["naaf"], overwrite=True)) == 0
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("important")
    with pytest.raises(ConfigError, match="not empty and not an index"):
        SearchIndex.build(tmp_path / "mine", models["naaf"], overwrite=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int4"}, "int8, binary are possible, got int4"),
        ({"first_stage": "magic"}, "fde, maxsim are possible"),
        ({"first_stage_options": {"dim": 8}}, "only 'fde' has options, not 'pooled'"),
        (
            {"first_stage": "fde", "first_stage_options": {"bits": 9}},
            r"first_stage_options.bits: .*less than or equal to 8, got 9",
        ),
        (
            {"first_stage": "fde", "first_stage_options": {"buckets": 16}},
            r"options of fde: bits, repetitions, width, dim",
        ),
        ({"shortlist_size": 0}, "at least 1"),
        ({"backend": "exakt"}, "did you mean 'exact'"),
        ({"backend_options": {"url": ""}}, "no option 'url'"),
    ],
)
def test_settings_that_cannot_be_are_refused(models, tmp_path, options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        SearchIndex.build(tmp_path / "index", models["naaf"], **options)
    assert not (tmp_path / "index").exists()


def test_a_secret_is_never_written(models, tmp_path) -> None:
    pytest.importorskip("qdrant_client")
    options = {"api_key": "geheim"}
    index = SearchIndex.build(
        tmp_path / "index", models["vse-fc"], backend="qdrant", backend_options=options
    )
    index.close()
    for path in (tmp_path / "index").rglob("*"):
        assert not path.is_file() or b"geheim" not in path.read_bytes()


def test_a_reader_is_not_disturbed_by_a_writer(fresh, concepts) -> None:
    reader = SearchIndex.open(fresh.folder, device="cpu")
    before = [hit.id for hit in reader.search("a dog", k=12).hits]
    fresh.add(concepts.test.select(range(12, 32)))
    fresh.remove([f"test-{i}" for i in range(6)])
    fresh.compact()
    assert [hit.id for hit in reader.search("a dog", k=12).hits] == before
    with pytest.raises(DataError, match="changed it meanwhile"):
        reader.remove(["test-1"])


def test_pictures_are_found_again(models, concepts, tmp_path) -> None:
    Image.new("RGB", (4, 3), "red").save(tmp_path / "one.png")
    split = replace(concepts.test.select([0]), pixels=[FileImage(tmp_path / "one.png")])
    index = SearchIndex.build(tmp_path / "index", models["vse-fc"], split)
    assert index.picture("test-0").getpixel((1, 1)) == (255, 0, 0)
    assert index.search("a dog").hits[0].pixels == {
        "file": str(tmp_path / "one.png"),
        "name": "one.png",
    }
    with pytest.raises(DataError, match="no such id"):
        index.picture("test-1")


def test_two_processes_do_not_write_at_once(fresh, concepts) -> None:
    import os

    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        with locked_folder(fresh.folder, "changing this index"):
            os.write(ready[1], b"x")
            os.read(go[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    try:
        with pytest.raises(
            BusyError, match=f"another process is changing this index .process {child} "
        ):
            fresh.add(concepts.test.select([20]))
        (fresh.folder / "vectors" / "images.json").unlink()
        assert len(SearchIndex.open(fresh.folder)) == 12  # reading goes on
    finally:
        os.write(go[1], b"x")
        os.waitpid(child, 0)


def test_an_index_that_is_being_changed_is_not_built_over(fresh, concepts) -> None:
    before = content(fresh.folder)
    for lock in (fresh.folder / LOCK, beside(fresh.folder)):
        with held(lock), pytest.raises(BusyError, match=r"another process is (changing|building)"):
            SearchIndex.build(fresh.folder, fresh.model, concepts.test, overwrite=True)
        assert content(fresh.folder) == before
