"""`counterfoil index` and `counterfoil search`, from a run to results."""

from __future__ import annotations

import json
import shlex
from types import SimpleNamespace

import pytest
import torch

import counterfoil as cf
from counterfoil.cli import app
from counterfoil.cli.search import _print_match
from counterfoil.core.config import build_config
from counterfoil.core.errors import CheckpointError, ConfigError, CounterfoilError, DataError
from counterfoil.core.progress import Silent
from counterfoil.data.convert import convert
from counterfoil.data.images import open_image
from counterfoil.models import create_model, save_pretrained
from counterfoil.models.match import Match, WordEffect
from counterfoil.training.run_data import read_data
from tests.cli.test_cli import invoke, runner

SCENES = {"source": "scenes", "options": {"images": [20, 4, 16]}, "min_count": 1}


@pytest.fixture(scope="module")
def pairs(cache):
    return read_data(build_config({"data": SCENES}), cache, Silent())


@pytest.fixture(scope="module")
def run(cache, pairs, tmp_path_factory):
    """An untrained run, complete on disk."""
    folder = tmp_path_factory.mktemp("runs") / "my-naaf"
    section = {"name": "naaf", "embed_size": 16, "text": {"word_dim": 8}}
    config = build_config({"data": SCENES, "model": section})
    torch.manual_seed(0)
    model = create_model(config.model, pairs.train, config.data)
    model.fragments_from = "segments"
    save_pretrained(model, folder / "best")
    (folder / "config.yaml").write_text(config.to_yaml())
    return folder


@pytest.fixture(scope="module")
def index(run, cache, tmp_path_factory):
    """An index of the test split; not to be changed."""
    folder = tmp_path_factory.mktemp("indexes") / "index"
    printed = invoke("index", run, "--split", "test", "--out", folder, "--cache", cache)
    assert "added 16 images" in printed
    assert "recall@10" in printed
    assert "captions → images" in printed
    assert "200" in printed
    command = printed.partition("search it: counterfoil ")[2].split("\n\n")[0]
    suggested = shlex.split(command.replace("\n", " "))
    assert "images scored" in invoke(*suggested)  # its words are those of a caption: all are known
    return folder


def test_a_folder_that_is_taken_is_refused_before_the_data_are_read(
    run, index, tmp_path, monkeypatch
) -> None:
    def read(*_: object) -> None:
        raise AssertionError("the data were read")

    monkeypatch.setattr("counterfoil.cli.inputs.DataChoice.read", read)
    (tmp_path / "photo.jpg").touch()
    with pytest.raises(ConfigError, match="an index is there already"):
        invoke("index", run, "--out", index)
    with pytest.raises(ConfigError, match="not empty and not an index"):
        invoke("index", run, "--out", tmp_path, "--overwrite")


def test_a_sentence_finds_images_with_both_stages_beside(index) -> None:
    found = json.loads(invoke("search", index, "a red car next to a tree", "-k", 3, "--json"))
    assert found["model"] == "naaf"
    assert [hit["rank"] for hit in found["hits"]] == [1, 2, 3]
    assert all(hit["id"].startswith("scene-test-") for hit in found["hits"])
    assert all(1 <= hit["first_rank"] <= 16 for hit in found["hits"])
    printed = invoke("search", index, "a red car next to a tree", "-k", 3)
    assert found["hits"][0]["id"] in printed
    assert "16 of 16 images scored" in printed
    everything = invoke("search", index, "a red car next to a tree", "-k", 3, "--exhaustive")
    assert "all 16 images scored" in everything


def test_a_file_or_an_id_finds_captions(index, pairs, tmp_path) -> None:
    open_image(pairs.test.pixels[3]).save(tmp_path / "photo.png")
    by_file = json.loads(invoke("search", index, "--image", tmp_path / "photo.png", "--json"))
    by_id = json.loads(invoke("search", index, "--image", pairs.test.ids[3], "--json"))
    assert by_file["target"] == "captions"
    # stored in half precision, read from the file in full
    files = {hit["id"]: hit["score"] for hit in by_file["hits"]}
    for hit in by_id["hits"][:5]:
        assert files[hit["id"]] == pytest.approx(hit["score"], abs=5e-3)


def test_results_are_explained_on_demand(index) -> None:
    printed = invoke("search", index, "a red car", "-k", 2, "--explain", 1)
    tree = json.loads(invoke("search", index, "a red car", "-k", 2, "--explain", 1, "--json"))
    assert [w["word"] for w in tree["hits"][0]["match"]["words"]] == ["a", "red", "car"]
    assert tree["hits"][0]["match"]["boxes"]
    assert tree["hits"][1]["match"] is None
    words = tree["hits"][0]["match"]["words"]
    assert ", ".join(f"{w['word']} {w['effect']:+.3f}" for w in words) in printed
    same = invoke("search", index, "a red car", "--target", "captions", "--explain", 1)
    assert "not explained: the query and the results are both captions" in " ".join(same.split())


def test_photos_are_shown_with_their_place_and_captions_from_the_left(
    run, pairs, cache, tmp_path
) -> None:
    convert(pairs, tmp_path / "photos", "jsonl")
    folder = tmp_path / "index"
    invoke(
        "index",
        run,
        tmp_path / "photos",
        "--split",
        "dev",
        "-o",
        folder,
        "--recall-queries",
        0,
        "--cache",
        cache,
    )
    asked = ["search", folder, "a red car", "-k", 3, "--explain", 1]
    best = json.loads(invoke(*asked, "--json"))["hits"][0]
    printed = invoke(*asked)
    assert f"1. {best['id']}  {best['pixels']['file']}" in printed
    assert f"│ {best['captions'][0]}" in printed


@pytest.fixture
def faulty(pairs, tmp_path):
    """A table of three photos: one can be read, one is broken, one is missing."""
    folder = tmp_path / "photos"
    folder.mkdir()
    open_image(pairs.test.pixels[0]).save(folder / "good.png")
    (folder / "broken.png").write_bytes(b"no image")
    rows = [f"{name}.png,{pairs.test.captions[0][0]},test" for name in ("good", "broken", "lost")]
    (folder / "captions.csv").write_text("\n".join(["image,caption,split", *rows]) + "\n")
    return folder / "captions.csv"


def test_images_that_cannot_be_read_are_named_by_build_and_add(
    run, faulty, cache, tmp_path
) -> None:
    folder = tmp_path / "index"
    command = ("index", run, faulty, "--out", folder, "--cache", cache)
    result = runner.invoke(app, [str(word) for word in command])
    assert "added 1 image " in result.stdout
    messages = " ".join(result.stderr.split())
    assert "left out of the data: test/broken: broken.png: not an image" in messages
    assert "there is no image file 'lost.png'" in messages
    update = ("index", "add", folder, faulty, "--existing", "update", "--cache", cache, "--json")
    left_out = json.loads(invoke(*update))["unread"]
    assert sorted(line.rpartition("[")[2] for line in left_out) == [
        "missing-image]",
        "unreadable-image]",
    ]


def test_photos_without_captions_are_indexed_and_may_get_some_later(
    run, pairs, cache, tmp_path
) -> None:
    photos, folder, options = tmp_path / "photos", tmp_path / "index", ("--cache", cache)
    (photos / "deep").mkdir(parents=True)
    for number, name in enumerate(("one.png", "deep/two.png", "deep/three.png")):
        open_image(pairs.test.pixels[number]).save(photos / name)
    (photos / "broken.png").write_bytes(b"no image")
    (photos / "prices.csv").write_text("product,price\nlamp,12\n")
    command = ("index", run, photos, "--out", folder, *options)
    result = runner.invoke(app, [str(word) for word in command])
    assert "added 3 images and 0 captions" in result.stdout
    messages = " ".join(result.stderr.split())
    assert "broken.png: not an image" in messages
    assert "prices.csv: not used as captions: no column of captions" in messages
    hits = json.loads(invoke("search", folder, "a red car", "--json"))["hits"]
    assert {hit["id"] for hit in hits} == {"one", "deep/two", "deep/three"}
    (photos / "captions.csv").write_text("image,caption\none.png,a red car\n")
    invoke("index", "add", folder, photos, "--existing", "update", *options)
    info = json.loads(invoke("index", "info", folder, "--json"))
    assert (info["images"], info["captions"]) == (3, 1)


def test_photos_keep_their_ids_when_files_of_the_same_name_appear(
    run, pairs, cache, tmp_path
) -> None:
    """An id has no ending, and no folder of images, unless two images then had the same id."""
    photos, folder, options = tmp_path / "photos", tmp_path / "index", ("--cache", cache)

    def add(number: int, name: str) -> None:
        (photos / name).parent.mkdir(parents=True, exist_ok=True)
        open_image(pairs.test.pixels[number]).save(photos / name)

    def ids() -> set[str]:
        hits = json.loads(invoke("search", folder, "a red car", "--json"))["hits"]
        assert len(hits) == len({hit["id"] for hit in hits})
        return {hit["id"] for hit in hits}

    add(0, "images/a.bmp")
    add(1, "images/b.bmp")
    invoke("index", run, photos, "--out", folder, "--recall-queries", 0, *options)
    assert ids() == {"a", "b"}
    add(2, "images/a.png")
    again = ("index", "add", folder, photos, "--existing", "skip", *options)
    assert "added 1 image " in invoke(*again)
    assert ids() == {"a", "a.png", "b"}
    add(3, "b.png")
    add(4, "images/b.png")
    assert "added 2 images" in invoke(*again)
    assert ids() == {"a", "a.png", "b", "b.png", "images/b.png"}
    (photos / "images" / "a.bmp").unlink()
    assert "added 0 images" in invoke(*again)
    invoke("index", "add", folder, photos, "--existing", "update", *options)
    assert ids() == {"a", "a.png", "b", "b.png", "images/b.png"}


@pytest.mark.parametrize("more", [(), ("--json",), ("--markdown",)])
def test_evaluate_says_how_many_items_are_left_out(run, faulty, cache, more) -> None:
    command = ("evaluate", run, "--data", faulty, "--bootstrap", 0, "--cache", cache, *more)
    result = runner.invoke(app, [str(word) for word in command])
    assert not more or "left out" not in result.stdout
    counts = " ".join(result.stderr.split()).partition("left out of the data: ")[2]
    assert "1 × unreadable-image" in counts
    assert "1 × missing-image" in counts


def test_an_index_is_kept_up_to_date(run, cache, pairs, tmp_path) -> None:
    folder = tmp_path / "index"
    options = ["--cache", cache, "--json"]
    built = json.loads(
        invoke(
            "index", "build", run, "--split", "dev", "-o", folder, "--recall-queries", 0, *options
        )
    )
    assert (built["images"], built["recall"]) == (4, [])
    data = ["scenes", "--option", "images=[20,4,16]"]
    added = json.loads(
        invoke("index", "add", folder, *data, "--split", "test", "--recall-queries", 5, *options)
    )
    assert added["images"] == 20
    assert added["recall"][0]["at"]["10"] == 1.0
    with pytest.raises(DataError, match="in the index already"):
        invoke("index", "add", folder, *data, *options)
    assert json.loads(invoke("index", "info", folder, "--json"))["images"] == 20  # none was added
    more = ["--existing", "skip", *options]
    assert json.loads(invoke("index", "add", folder, *data, *more))["added"]["skipped"] == 20
    gone = json.loads(invoke("index", "remove", folder, pairs.test.ids[0], "--json"))
    assert gone == {"removed": 1 + len(pairs.test.captions[0]), "images": 39}
    compacted = json.loads(invoke("index", "compact", folder, "--json"))
    assert "MB now" in invoke("index", "compact", folder)
    info = json.loads(invoke("index", "info", folder, "--check", "--json"))
    assert compacted["bytes_before"] > compacted["bytes"] == info["bytes"]
    assert (info["images"], info["damaged"]) == (39, [])
    assert "naaf" in invoke("index", "info", folder)
    ways = json.loads(invoke("index", "recall", folder, "--shortlist-size", 10, "--json"))
    assert [way["shortlist"] for way in ways] == [10, 10]


def test_the_same_from_python(run, pairs, tmp_path) -> None:
    model = cf.from_pretrained(run / "best")
    with cf.build_index(model, pairs.dev, tmp_path / "index", shortlist_size=2) as made:
        assert len(made) == 4
    opened = cf.open_index(tmp_path / "index", device="cpu")
    assert len(opened.search("a red car", k=2).hits) == 2


def test_what_cannot_be_searched_is_refused_in_words(index, run, tmp_path, cache) -> None:
    with pytest.raises(DataError, match="no words"):
        invoke("search", index, "")
    with pytest.raises(DataError, match="one of the two"):
        invoke("search", index)
    with pytest.raises(DataError, match="not a search index"):
        invoke("search", run, "a dog")
    with pytest.raises(DataError, match="not a search index"):
        invoke("search", tmp_path / "nowhere", "a dog")
    with pytest.raises(CheckpointError, match="neither a run nor a saved model"):
        invoke("index", tmp_path / "nowhere", "--cache", cache)
    with pytest.raises(ConfigError, match="--overwrite"):
        invoke("index", run, "--out", index, "--split", "dev", "--cache", cache)
    with pytest.raises(ConfigError, match="no option 'kind'"):
        invoke(
            "index", run, "-o", tmp_path / "x", "--backend-option", "kind=hnsw", "--cache", cache
        )
    (tmp_path / "photo.jpg").write_bytes(b"\xff\xd8\xff")
    with pytest.raises(DataError, match=r"photo\.jpg"):
        invoke("search", index, "--image", tmp_path / "photo.jpg")


def test_a_damaged_index_fails_its_check(run, cache, tmp_path) -> None:
    folder = tmp_path / "index"
    invoke("index", run, "--split", "dev", "-o", folder, "--recall-queries", 0, "--cache", cache)
    path = next((folder / "segments").glob("images-*/fragments.bin"))
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(DataError, match=r"fragments\.bin: damaged"):
        invoke("index", "info", folder, "--check")


@pytest.mark.parametrize(("effect", "named"), [(-0.2, True), (0.2, False)])
def test_a_word_that_fits_is_not_the_least_fitting_one(effect, named, capsys) -> None:
    words = [WordEffect("car", effect, max(effect, 0.0), min(effect, 0.0))]
    hit = SimpleNamespace(rank=1, id="photo", pixels=None)
    _print_match(hit, Match("car", 0.5, words, [], "leave-one-out", False))
    assert ("least fitting word: car" in capsys.readouterr().out) == named


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--first-stage", "fde", "--first-stage-option", "dim=foo"), "first_stage_options.dim"),
        (("--first-stage", "pooled", "--first-stage-option", "dim=8"), "only 'fde' has options"),
        (("--backend-option", "kind=hnsw"), "no option 'kind'"),
        (("--backend", "faiss", "--dtype", "binary"), "--dtype int8|pip install"),
        (("--backend", "faiss", "--first-stage", "maxsim"), "one vector per item|pip install"),
    ],
)
def test_wrong_options_of_an_index_are_refused_before_features_are_extracted(
    run, pairs, tmp_path, options, message
) -> None:
    photos, own_cache = tmp_path / "photos", tmp_path / "cache"
    photos.mkdir()
    open_image(pairs.test.pixels[0]).save(photos / "one.png")
    with pytest.raises(CounterfoilError, match=message):
        invoke("index", run, photos, "-o", tmp_path / "index", "--cache", own_cache, *options)
    assert not own_cache.exists()
    assert not (tmp_path / "index").exists()
