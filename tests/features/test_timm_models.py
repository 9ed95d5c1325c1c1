"""The extractor "timm": real networks where the library can be imported, a clear word where not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from counterfoil.core.errors import CheckpointError, ConfigError
from counterfoil.features import TimmFeatures, extractors
from counterfoil.features.extractors import split_full_name
from counterfoil.features.timm_models import import_timm
from tests.features.tiny_networks import picture


def usable() -> bool:
    try:
        import_timm()
    except ConfigError:
        return False
    return True


here = pytest.mark.skipif(not usable(), reason="timm cannot be imported here")
absent = pytest.mark.skipif(usable(), reason="timm can be imported here")


@pytest.fixture
def weights(tmp_path: Path):
    """A file of random weights for a network, since none can be downloaded."""

    def save(name: str) -> str:
        torch.manual_seed(0)
        network = import_timm().create_model(name)  # with its classifier, as published
        torch.save(network.state_dict(), tmp_path / f"{name}.pth")
        return str(tmp_path / f"{name}.pth")

    return save


def test_a_network_can_be_named_after_a_colon() -> None:
    assert split_full_name("timm:vit_tiny_patch16_224") == (
        "timm",
        {"model": "vit_tiny_patch16_224"},
    )
    assert split_full_name('timm:resnet18 {"fit": "crop"}') == (
        "timm",
        {"model": "resnet18", "fit": "crop"},
    )
    assert split_full_name("onnx:a/b.onnx") == ("onnx", {"path": "a/b.onnx"})
    assert split_full_name("stranger:thing") == ("stranger:thing", {})
    tool = extractors.create("timm:resnet18", {"fit": "crop"})
    assert isinstance(tool, TimmFeatures)
    assert (tool.model, tool.fit) == ("resnet18", "crop")


def test_a_network_must_be_named() -> None:
    with pytest.raises(ConfigError, match="--backbone timm:NAME"):
        TimmFeatures().fingerprint()


@absent
def test_without_the_library_the_error_names_it() -> None:
    with pytest.raises(ConfigError, match=r"needs the package timm.*pip install timm"):
        TimmFeatures(model="resnet18").extract(picture(1))


@here
@pytest.mark.parametrize(
    ("name", "size", "cells", "dim"),
    [
        ("resnet10t", 64, 4, 512),
        ("vit_tiny_patch16_224", 64, 16, 192),
        ("swin_tiny_patch4_window7_224", None, 49, 768),
    ],
)
def test_cells_and_patches_have_boxes(name, size, cells, dim, weights) -> None:
    tool = TimmFeatures(model=name, weights=weights(name), size=size)
    result = tool.extract(picture(1, 50, 40))
    assert result.features.shape == (cells + 1, dim)
    assert np.isfinite(result.features).all()
    assert result.boxes[0].tolist() == [0, 0, 1, 1]
    area = (result.boxes[1:, 2] - result.boxes[1:, 0]) * (result.boxes[1:, 3] - result.boxes[1:, 1])
    assert area.sum() == pytest.approx(1.0, abs=1e-4)


@here
def test_an_unknown_network_is_refused() -> None:
    with pytest.raises(CheckpointError, match="no-such-network"):
        TimmFeatures(model="no-such-network").extract(picture(1))
