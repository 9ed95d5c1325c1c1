"""The extractor "transformers": real forward passes of every kind of network it knows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from counterfoil.core.errors import CheckpointError, ConfigError
from counterfoil.features import TransformersFeatures, extractors
from tests.features.tiny_networks import MEAN, STD, picture, save_network

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# Cells and the side of the input that gives them.
GRIDS = {
    "vit": (16, None),
    "clip-vision": (16, None),
    "clip": (16, None),
    "siglip-vision": (16, None),
    "dinov2": (16, None),
    "swin": (16, None),
    "convnext": (4, 64),
    "resnet": (64, 64),
}


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("networks")
    made: dict[str, Path] = {}

    def get(kind: str) -> str:
        if kind not in made:
            made[kind] = save_network(root / kind, kind)
        return str(made[kind])

    return get


def _input(image: Image.Image) -> object:
    pixels = np.asarray(image, dtype=np.float64) / 255
    values = (pixels - np.array(MEAN)) / np.array(STD)
    return torch.tensor(values.transpose(2, 0, 1)[None], dtype=torch.float32)


@pytest.mark.parametrize("kind", GRIDS)
def test_a_grid_network_gives_its_cells_and_a_vector_of_the_whole(networks, kind: str) -> None:
    cells, size = GRIDS[kind]
    tool = TransformersFeatures(model=networks(kind), size=size)
    assert (tool.max_fragments, tool.dim) == (cells + 1, 16)
    result = tool.extract(picture(1, 50, 40))
    assert result.features.shape == (cells + 1, 16)
    assert np.isfinite(result.features).all()
    assert result.boxes is not None
    assert result.boxes[0].tolist() == [0, 0, 1, 1]
    side = round(cells**0.5)
    assert result.boxes[-1].tolist() == [1 - 1 / side, 1 - 1 / side, 1, 1]
    bare = TransformersFeatures(model=networks(kind), size=size, pooled=False)
    np.testing.assert_allclose(
        bare.extract(picture(1, 50, 40)).features, result.features[1:], atol=1e-5
    )


@pytest.mark.parametrize("kind", ["vit", "clip-vision", "dinov2", "siglip-vision"])
def test_the_numbers_are_those_of_the_library(networks, kind: str) -> None:
    network = transformers.AutoModel.from_pretrained(networks(kind)).eval()
    with torch.no_grad():
        made = network(pixel_values=_input(picture(3)))
    result = TransformersFeatures(model=networks(kind)).extract(picture(3)).features
    np.testing.assert_allclose(result[0], made.pooler_output[0], atol=1e-4)
    np.testing.assert_allclose(result[1:], made.last_hidden_state[0, -16:], atol=1e-4)


def test_the_seeing_half_of_a_dual_encoder_is_taken(networks) -> None:
    whole = transformers.AutoModel.from_pretrained(networks("clip")).eval()
    with torch.no_grad():
        made = whole.vision_model(pixel_values=_input(picture(3)))
    result = TransformersFeatures(model=networks("clip")).extract(picture(3)).features
    np.testing.assert_allclose(result[1:], made.last_hidden_state[0, 1:], atol=1e-4)


@pytest.mark.parametrize("kind", ["vit", "dinov2"])
@pytest.mark.parametrize("cell", [0, 3, 6, 13])
def test_a_change_in_a_patch_is_found_in_its_box(networks, kind: str, cell: int) -> None:
    tool = TransformersFeatures(model=networks(kind), layer=0, pooled=False)
    before = tool.extract(picture(5))
    assert before.boxes is not None
    x1, y1, x2, y2 = (before.boxes[cell] * 32).round().astype(int)
    pixels = np.asarray(picture(5)).copy()
    pixels[y1:y2, x1:x2] ^= 255
    after = tool.extract(Image.fromarray(pixels))
    changed = np.abs(after.features - before.features).max(axis=1) > 1e-4
    assert np.flatnonzero(changed).tolist() == [cell]


def test_layers_can_be_chosen(networks) -> None:
    network = transformers.AutoModel.from_pretrained(networks("vit")).eval()
    with torch.no_grad():
        made = network(pixel_values=_input(picture(3)), output_hidden_states=True)
    tool = TransformersFeatures(model=networks("vit"), layer=-2, pooled=False)
    np.testing.assert_allclose(
        tool.extract(picture(3)).features, made.hidden_states[-2][0, 1:], atol=1e-4
    )
    with pytest.raises(ConfigError, match="layer 9"):
        TransformersFeatures(model=networks("vit"), layer=9).extract(picture(3))


def test_another_size_stretches_the_positions(networks) -> None:
    for kind in ("vit", "dinov2"):
        tool = TransformersFeatures(model=networks(kind), size=48)
        assert tool.max_fragments == 36 + 1


@pytest.mark.parametrize("kind", ["detr", "yolos"])
def test_a_detector_gives_its_most_certain_regions(networks, kind: str, tmp_path: Path) -> None:
    tool = TransformersFeatures(model=networks(kind), top=4, size=64)
    network = transformers.AutoModelForObjectDetection.from_pretrained(networks(kind)).eval()
    with torch.no_grad():
        made = network(pixel_values=_input(picture(2, 64, 64)))
    certainty = made.logits[0].softmax(-1)[:, :-1].max(-1).values
    best = certainty.argsort(descending=True)[:4]
    result = tool.extract(picture(2, 64, 64))
    assert (tool.max_fragments, tool.dim) == (4, 16)
    states = made.last_hidden_state[0, -7:]
    np.testing.assert_allclose(result.features, states[best], atol=1e-3)
    cx, cy, w, h = made.pred_boxes[0][best].numpy().T
    expected = np.stack([cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2], axis=1)
    assert result.boxes is not None
    np.testing.assert_allclose(result.boxes, expected.clip(0, 1), atol=2e-3)


def test_a_detector_keeps_proportions_and_has_no_more_regions_than_queries(networks) -> None:
    tool = TransformersFeatures(model=networks("detr"), size=40)
    (view,) = tool.views(picture(2, 80, 60))
    assert view.pixels.shape == (40, 53, 3)
    assert tool.max_fragments == 7


def test_pictures_of_different_sizes_do_not_disturb_each_other(networks) -> None:
    tool = TransformersFeatures(model=networks("detr"), size=40)
    images = [picture(1, 80, 60), picture(2, 60, 80), picture(3, 80, 60)]
    together = tool.run([tool.views(image) for image in images])
    for image, result in zip(images, together, strict=True):
        alone = tool.extract(image)
        np.testing.assert_allclose(result.features, alone.features, atol=1e-4)
        np.testing.assert_allclose(result.boxes, alone.boxes, atol=1e-4)


def test_the_fingerprint_follows_weights_and_options_not_the_place(networks, tmp_path) -> None:
    first = TransformersFeatures(model=networks("vit")).fingerprint()
    copy = save_network(tmp_path / "copy", "vit")
    assert TransformersFeatures(model=str(copy)).fingerprint() == first
    assert TransformersFeatures(model=str(copy), layer=0).fingerprint() != first
    assert TransformersFeatures(model=str(copy), fit="crop").fingerprint() != first
    network = transformers.AutoModel.from_pretrained(copy)
    with torch.no_grad():
        next(iter(network.parameters())).add_(1)
    network.save_pretrained(copy)
    assert TransformersFeatures(model=str(copy)).fingerprint() != first


def test_what_cannot_be_loaded_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name a model"):
        TransformersFeatures().fingerprint()
    with pytest.raises(CheckpointError, match="no vision model"):
        TransformersFeatures(model=str(tmp_path / "nowhere" / "at" / "all")).fingerprint()
    text = transformers.BertConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
        vocab_size=20,
    )  # fmt: skip
    transformers.AutoModel.from_config(text).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="takes no images"):
        TransformersFeatures(model=str(tmp_path)).fingerprint()
    with pytest.raises(ConfigError, match="kind"):
        extractors.create("transformers", {"kind": "boxes"})
