"""A real small model on items: its scores, shuffled words, ties, and images from every place."""

from __future__ import annotations

import copy
import tarfile

import pytest
import torch
from PIL import Image

from counterfoil.core.config import build_config
from counterfoil.core.errors import ConfigError, DataError
from counterfoil.evaluation.compositional.blind import shuffled
from counterfoil.evaluation.compositional.model_scores import ImageStore, ModelScorer
from counterfoil.evaluation.compositional.readers import Item, Subset
from counterfoil.models import create_model
from counterfoil.training.run_folder import load_model
from tests.evaluation.compositional.small_files import BLUE, DOG, RED, draw_images


@pytest.fixture(scope="module")
def model(run):
    return load_model(run, "cpu")


@pytest.fixture
def images(tmp_path):
    return draw_images(tmp_path / "images")


def score(model, items, *sources, form="choice"):
    scorer = ModelScorer("small", model, ImageStore(sources))
    return scorer.score(Subset("s", form, tuple(items))), scorer.missing


def test_scores_are_those_of_the_model(model, images, pairs) -> None:
    one, two, three, four = pairs.train.texts[:20:5]  # the model knows all of their words
    items = [
        Item("0", ("b.png",), (one,), (two, three)),
        Item("1", ("a.png", "b.png"), (three, four)),
        Item("2", ("a.png",), (four,), (one,)),
    ]
    results, missing = score(model, items, images)
    assert not missing
    assert list(results) == ["small", "small, words shuffled"]
    for name, change in (("small", str), ("small, words shuffled", shuffled)):
        for item, scored in zip(items, results[name], strict=True):
            files = [images / image for image in item.images]
            expected = model.score(files, [change(text) for text in item.texts]).numpy()
            assert scored is not None
            assert scored.scores == pytest.approx(expected, abs=1e-5)


def test_texts_that_differ_in_unknown_words_only_tie_exactly(model, images) -> None:
    item = Item("0", ("a.png",), ("a qwertyish ball on a table",), ("a zxcvbish ball on a table",))
    results, _ = score(model, [item], images)
    (scored,) = results["small"]
    assert scored is not None
    assert scored.scores[0, 0] == scored.scores[0, 1]


def test_swapped_words_tie_once_they_are_shuffled(model, images) -> None:
    item = Item("0", ("a.png",), ("a red ball and a blue dog",), ("a blue ball and a red dog",))
    results, _ = score(model, [item], images)
    (mixed,) = results["small, words shuffled"]
    assert mixed is not None
    assert mixed.scores[0, 0] == mixed.scores[0, 1]


def test_folders_subfolders_and_shards_give_the_same_scores(model, images, tmp_path) -> None:
    item = Item("0", ("a", "b.jpg"), (RED, DOG))  # other endings than the files have
    deep = tmp_path / "deep"
    (deep / "val").mkdir(parents=True)
    with tarfile.open(tmp_path / "shard.tar", "w") as archive:
        for name in ("a.png", "b.png"):
            archive.add(images / name, f"part/{name}")
            (deep / "val" / name).write_bytes((images / name).read_bytes())
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "0.tar").write_bytes((tmp_path / "shard.tar").read_bytes())
    tables = []
    for source in (images, deep, tmp_path / "shard.tar", tmp_path / "shards"):
        results, missing = score(model, [item], source, form="square")
        assert not missing
        (scored,) = results["small"]
        assert scored is not None
        tables.append(scored.scores.tolist())
    assert all(table == tables[0] for table in tables)


def test_missing_and_damaged_images_are_counted_and_their_items_have_no_score(
    model, images
) -> None:
    (images / "damaged.png").write_bytes(b"no picture")
    items = [
        Item("0", ("absent.png",), (RED,), (BLUE,)),
        Item("1", ("a.png",), (RED,), (BLUE,)),
        Item("2", ("damaged.png",), (RED,), (BLUE,)),
        Item("3", ("a.png", "absent.png"), (RED, BLUE)),
    ]
    results, missing = score(model, items, images)
    assert [scored is not None for scored in results["small"]] == [False, True, False, False]
    assert sorted(missing) == ["absent.png", "damaged.png"]
    assert missing["absent.png"] == "not found"
    assert "damaged.png" in missing["damaged.png"]


def test_a_name_that_two_subfolders_have_says_so(model, images) -> None:
    for folder in ("one", "two"):
        (images / folder).mkdir()
        (images / folder / "twice.png").write_bytes((images / "a.png").read_bytes())
    results, missing = score(model, [Item("0", ("twice.png",), (RED,), (BLUE,))], images)
    assert results["small"] == [None]
    assert "several have that name" in missing["twice.png"]


def test_only_the_box_of_an_image_is_looked_at(model, images) -> None:
    Image.open(images / "a.png").crop((0, 0, 112, 112)).save(images / "corner.png")
    items = [
        Item("0", ("a.png",), (RED,), (BLUE,), box=(0, 0, 112, 112)),
        Item("1", ("corner.png",), (RED,), (BLUE,)),
        Item("2", ("a.png",), (RED,), (BLUE,)),
        Item("3", ("b.png",), (RED,), (BLUE,), box=(500, 500, 600, 600)),
    ]
    results, missing = score(model, items, images)
    boxed, cropped, whole, outside = results["small"]
    assert boxed is not None
    assert cropped is not None
    assert whole is not None
    assert boxed.scores == pytest.approx(cropped.scores, abs=1e-6)
    assert boxed.scores.tolist() != whole.scores.tolist()
    assert outside is None
    assert list(missing) == ["b.png"]


def test_words_have_the_effects_of_the_explanation(model, images) -> None:
    item = Item("0", ("a.png",), ("A red ball, unheardof.",), wrong=((2, 5),))
    results, _ = score(model, [item], images, form="words")
    (scored,) = results["small"]
    assert scored is not None
    assert scored.effects is not None
    match = model.explain(images / "a.png", item.captions[0])
    expected = {w.span: w.effect for w in match.words if w.known and not w.is_punctuation}
    assert {(s, e): effect for s, e, effect in scored.effects} == pytest.approx(expected, abs=1e-5)
    assert "unheardof" not in {item.captions[0][s:e] for s, e, _ in scored.effects}


def test_a_name_that_leads_out_of_the_folder_is_not_followed(model, images) -> None:
    item = Item("0", ("../a.png",), (RED,), (BLUE,))
    results, missing = score(model, [item], images)
    assert results["small"] == [None]
    assert "leads out" in missing["../a.png"]


def test_what_is_no_source_of_images_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="no such folder or tar"):
        ImageStore([tmp_path / "absent"])
    (tmp_path / "cut.tar").write_bytes(b"cut")
    with pytest.raises(DataError, match=r"cut\.tar"):
        ImageStore([tmp_path / "cut.tar"])


def test_a_model_of_precomputed_features_is_refused(model) -> None:
    other = copy.deepcopy(model)
    other.fragments_from = None
    with pytest.raises(ConfigError, match="precomputed"):
        ModelScorer("small", other, ImageStore())


def test_text_vectors_compare_captions_without_images(pairs, images) -> None:
    torch.manual_seed(0)
    config = build_config({"model": {"name": "vse-fc", "embed_size": 16}})
    dual = create_model(config.model, pairs.train, config.data)
    dual.fragments_from = "segments"
    one, two, three = pairs.train.texts[:15:5]
    item = Item("0", ("a.png",), (one, two), (three,))
    results, _ = score(dual, [item], images)
    (scored,) = results["small"]
    assert scored is not None
    assert scored.similarity is not None
    vectors = dual.encode_texts([one, two, three]).pooled
    expected = torch.nn.functional.cosine_similarity(vectors[:, None], vectors[None], dim=-1)
    assert scored.similarity == pytest.approx(expected.double().numpy(), abs=1e-5)
