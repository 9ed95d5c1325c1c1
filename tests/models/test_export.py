"""Models in ONNX Runtime score as in PyTorch, in batches of any size and padding."""

from __future__ import annotations

import json
import re
import sys

import numpy as np
import pytest

from counterfoil.core.errors import (
    ArgumentError,
    CheckpointError,
    ConfigError,
    DataError,
    MissingExtraError,
)
from counterfoil.core.storage.checksums import check_sums
from counterfoil.data.batches.collate import pad_fragments, pad_texts
from counterfoil.models import models
from counterfoil.models.export import DESCRIPTION, OnnxMatcher, export_model
from tests.conftest import thinned
from tests.models.test_models import FEATURE_MODELS, make, tiny_bert  # noqa: F401

CROSS_ENCODERS = [name for name in FEATURE_MODELS if name.startswith("uniter")]
EXPORTED = [name for name in FEATURE_MODELS if name not in CROSS_ENCODERS]
DIFFERENT = ("vsrn", "hrem", "chan")
"""Each has operations in its graph that the others have not."""


def exported(model, folder) -> OnnxMatcher:
    folder.mkdir()
    export_model(model, folder)
    return OnnxMatcher(folder)


def assert_same(found, expected) -> None:
    assert found.shape == expected.shape
    scale = max(1.0, float(expected.abs().max()))
    assert np.abs(found - expected.numpy()).max() <= 1e-4 * scale


@pytest.mark.parametrize("name", thinned(EXPORTED, *DIFFERENT))
def test_every_model_scores_the_same_in_onnx_runtime(
    name,
    concepts,
    tiny_bert,  # noqa: F811
    tmp_path,
) -> None:
    model = make(name, concepts, tiny_bert).eval()
    matcher = exported(model, tmp_path / "model")
    images = [concepts.test.fragments.read(i) for i in range(9)]
    captions = ["a dog", *concepts.test.texts[:5], "a cat near the boat and the lamp and a kite"]
    assert len({len(image) for image in images}) > 1  # there is padding
    for some, others in ((images, captions), (images[:1], captions[:1]), (images[:2], captions)):
        assert_same(matcher.score(some, others), model.score(some, others))


@pytest.mark.parametrize("name", thinned(["vse-infty", "naaf"], "naaf"))
def test_what_stands_in_padding_does_not_matter(
    name,
    concepts,
    tiny_bert,  # noqa: F811
    tmp_path,
) -> None:
    model = make(name, concepts, tiny_bert).eval()
    matcher = exported(model, tmp_path / "model")
    images = [concepts.test.fragments.read(i) for i in range(3)]
    captions = concepts.test.texts[:2]
    batch = pad_fragments(images)
    texts = pad_texts([model.text.encode(caption) for caption in captions], model.text.pad)
    wide = {
        "regions": np.pad(batch.fragments.numpy(), ((0, 0), (0, 5), (0, 0)), constant_values=9.0),
        "region_mask": np.pad(batch.mask.numpy(), ((0, 0), (0, 5))),
        "token_ids": np.pad(texts.ids.numpy(), ((0, 0), (0, 3)), constant_values=2),
        "token_mask": np.pad(texts.mask.numpy(), ((0, 0), (0, 3))),
    }
    scores = matcher.run("scorer", matcher.encode(wide))["scores"]
    assert_same(scores, model.score(images, captions))


def test_copies_are_exported_as_one(concepts, tiny_bert, tmp_path) -> None:  # noqa: F811
    model = make("vse++", concepts, tiny_bert, ensemble_size=2).eval()
    matcher = exported(model, tmp_path / "model")
    images = [concepts.test.fragments.read(i) for i in range(3)]
    captions = concepts.test.texts[:4]
    assert_same(matcher.score(images, captions), model.score(images, captions))
    assert matcher.description["vector_width"] == 24


def test_the_description_says_what_goes_in_and_comes_out(concepts, tiny_bert, tmp_path) -> None:  # noqa: F811
    model = make("scan-t2i", concepts, tiny_bert).eval()
    model.fragments_from, model.fragments_options = "segments", {"regions": 12}
    matcher = exported(model, tmp_path / "model")
    about = json.loads((tmp_path / "model" / DESCRIPTION).read_text())
    assert about["model"] == "scan-t2i"
    assert about["precision"] == "float32"
    assert about["region_width"] == 16
    assert about["vector_width"] == 12
    assert about["fragments"] == {"extractor": "segments", "options": {"regions": 12}}
    assert about["graphs"]["image"]["inputs"]["regions"] == ["images", "regions", "region_width"]
    for graph, session in matcher.sessions.items():
        described = about["graphs"][graph]
        assert [x.name for x in session.get_inputs()] == list(described["inputs"])
        assert [x.name for x in session.get_outputs()] == list(described["outputs"])
        for x in session.get_inputs():  # names of dynamic axes, numbers of fixed ones
            axes = zip(x.shape, described["inputs"][x.name], strict=True)
            assert all(size in (axis, 12, 16) for size, axis in axes)
    check_sums(tmp_path / "model")


def test_an_input_that_is_missing_is_named(concepts, tiny_bert, tmp_path) -> None:  # noqa: F811
    matcher = exported(make("vse++", concepts, tiny_bert).eval(), tmp_path / "model")
    with pytest.raises(ConfigError, match="needs more inputs: region_mask"):
        matcher.run("image", {"regions": np.zeros((1, 2, 16), np.float32)})


def test_images_and_texts_are_checked_as_by_the_model(concepts, tiny_bert, tmp_path) -> None:  # noqa: F811
    model = make("vse++", concepts, tiny_bert).eval()
    matcher = exported(model, tmp_path / "model")
    image = concepts.test.fragments.read(0)
    assert_same(matcher.score(image.features, "a dog"), model.score(image, "a dog"))
    for images, texts in ((image, None), (image, [None]), (image, ""), (None, "a dog")):
        with pytest.raises((ArgumentError, DataError)) as theirs:
            model.score(images, texts)
        with pytest.raises(theirs.type, match=re.escape(str(theirs.value))):
            matcher.score(images, texts)


@pytest.mark.parametrize("name", CROSS_ENCODERS[:1])
def test_a_cross_encoder_is_refused(name, concepts, tiny_bert, tmp_path) -> None:  # noqa: F811
    model = make(name, concepts, tiny_bert, matcher={"layers": 1, "heads": 2})
    with pytest.raises(ConfigError, match=r"cannot be exported: a cross-encoder packs pairs"):
        export_model(model, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_difference_of_scores_is_refused(concepts, tiny_bert, tmp_path, monkeypatch) -> None:  # noqa: F811
    monkeypatch.setattr("counterfoil.models.export.TOLERANCE", -1.0)
    with pytest.raises(ConfigError, match="score differently"):
        export_model(make("vse++", concepts, tiny_bert), tmp_path)


def test_a_missing_package_names_the_extra(concepts, tiny_bert, tmp_path, monkeypatch) -> None:  # noqa: F811
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingExtraError, match=r"counterfoil\[export\]"):
        export_model(make("vse++", concepts, tiny_bert), tmp_path)


def test_a_folder_that_is_no_export_is_refused(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="not an exported model"):
        OnnxMatcher(tmp_path)
    (tmp_path / DESCRIPTION).write_text('{"format": 99}')
    with pytest.raises(CheckpointError, match="format 99"):
        OnnxMatcher(tmp_path)


def test_all_models_that_read_fragments_are_tried() -> None:
    assert set(EXPORTED) | set(CROSS_ENCODERS) | {"clip", "siglip"} == set(models)
