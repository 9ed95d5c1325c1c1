"""Features of another extractor are refused, though they have the same width."""

from __future__ import annotations

from dataclasses import replace

import pytest

import counterfoil as cf
from counterfoil.audit.audit import audit_split
from counterfoil.core.errors import DataError
from counterfoil.data.pairs import Pairs, Split
from counterfoil.evaluation.words.cases import FoilCase
from counterfoil.evaluation.words.effects import measure_words
from counterfoil.features import with_fragments
from counterfoil.models.model import Model
from counterfoil.scoring.encode import score_split
from counterfoil.search import SearchIndex
from tests.features.tiny_networks import photos as write_photos
from tests.models.test_models import make

LITE = 'efficientnet-lite {"grid": 6, "variant": 2}'


def made_by(split: Split, name: str | None) -> Split:
    return replace(split, fragments=replace(split.require_fragments(), made_by=name))


@pytest.fixture
def model(concepts) -> Model:
    model = make("naaf", concepts, None)
    model.fragments_from = LITE
    return model


@pytest.mark.parametrize("other", ["efficientnet-lite", "segments", "timm:resnet50"])
def test_scores_of_other_features_are_refused(other, model, concepts, tmp_path) -> None:
    split = made_by(concepts.test, other)
    case = FoilCase(0, "a dog", "a cat", ("", "object"))
    for use in (
        lambda: score_split(model, split),
        lambda: audit_split(model, split),
        lambda: measure_words(model, split, [case]),
        lambda: SearchIndex.build(tmp_path / "index", model, split),
        lambda: cf.train(
            model, replace(concepts, splits={"train": split}), folder=tmp_path / "run"
        ),
    ):
        with pytest.raises(
            DataError,
            match=r"reads fragments of 'eff.*these are.* --backbone-option grid=6",
        ):
            use()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("wanted", "options", "given"),
    [
        ("segments", {"side": 96}, "segments"),
        ("segments", {}, 'segments {"side": 96}'),
        ('segments {"side": 96}', {}, "segments"),
        ("segments", {"side": 96}, 'segments {"side": 64}'),
    ],
)
def test_features_of_other_options_are_refused(wanted, options, given, model, concepts) -> None:
    model.fragments_from, model.fragments_options = wanted, options
    with pytest.raises(DataError, match=r"reads fragments of 'segments.*these are of 'segments"):
        model.fragments_of(made_by(concepts.test, given))


def test_an_index_refuses_images_whose_features_were_extracted_with_other_options(tmp_path) -> None:
    images = write_photos(tmp_path / "photos", 4)
    pairs = Pairs("some", {"train": replace(images, captions=[["a dog", "a cat"]] * 4)})
    cache = tmp_path / "cache"
    small = with_fragments(pairs, cache, "segments", {"side": 32})
    model = cf.create("vse-fc", small, embed_size=16, text={"word_dim": 8}).eval()
    index = SearchIndex.build(tmp_path / "index", model, small.train.select([0, 1]))
    other = with_fragments(pairs, cache, "segments", {"side": 48}).train.select([2, 3])
    with pytest.raises(DataError, match=r'"side": 32.*these are of.*"side": 48'):
        index.add(other)
    assert len(index) == 2
    index.add(with_fragments(pairs, cache, 'segments {"side": 32}').train.select([2, 3]))
    assert len(index) == 4


@pytest.mark.parametrize(
    ("wanted", "options", "given"),
    [
        (LITE, {}, LITE),
        (LITE, {}, 'efficientnet-lite {"variant": 2, "grid": 6}'),
        ("efficientnet-lite", {"grid": 6, "variant": 2}, LITE),
        ("efficientnet-lite", {}, 'efficientnet-lite {"variant": 0}'),
        ("efficientnet-lite", {}, 'efficientnet-lite {"batch_size": 8}'),
        ("timm:resnet50", {}, 'timm {"model": "resnet50"}'),
        ("crops", {}, 'crops {"scales": [1.0, 0.5]}'),
        ("onnx:net.onnx", {}, 'onnx {"path": "networks/net.onnx"}'),
        (LITE, {}, None),
        (None, {}, LITE),
    ],
)
def test_the_same_features_by_another_name_are_read(
    wanted, options, given, model, concepts
) -> None:
    model.fragments_from, model.fragments_options = wanted, options
    split = made_by(concepts.test, given)
    assert model.fragments_of(split) is split.fragments
