"""The extractor "onnx": maps, tokens and vectors of files made here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from counterfoil.core.errors import CheckpointError, ConfigError, MissingExtraError
from counterfoil.features import OnnxFeatures
from tests.features.tiny_networks import picture

WEIGHTS = np.random.default_rng(0).normal(size=(5, 3, 8, 8)).astype(np.float32)


def _save(path: Path, kind: str, batch: int | str = "batch", side: int = 32) -> str:
    """Patches of 8 by 8 pixels to 5 numbers, as a map, as tokens, or averaged."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    helper, floats = onnx.helper, onnx.TensorProto.FLOAT
    nodes = [helper.make_node("Conv", ["pixels", "w"], ["map"], strides=[8, 8])]
    constants = [onnx.numpy_helper.from_array(WEIGHTS, "w")]
    outputs = ["map"]
    if kind == "tokens":
        constants += [onnx.numpy_helper.from_array(np.array([0, 5, -1]), "shape")]
        nodes += [
            helper.make_node("Reshape", ["map", "shape"], ["rows"]),
            helper.make_node("Transpose", ["rows"], ["patches"], perm=[0, 2, 1]),
            helper.make_node("ReduceMean", ["patches"], ["first"], axes=[1], keepdims=1),
            helper.make_node("Concat", ["first", "patches"], ["tokens"], axis=1),
        ]
        outputs = ["tokens", "map"]
    if kind == "vector":
        nodes += [helper.make_node("ReduceMean", ["map"], ["mean"], axes=[2, 3], keepdims=0)]
        outputs = ["mean"]
    given = [helper.make_tensor_value_info("pixels", floats, [batch, 3, side, side])]
    made = [helper.make_tensor_value_info(name, floats, None) for name in outputs]
    graph = helper.make_graph(nodes, "tiny", given, made, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(model, path)
    return str(path)


def _expected(seed: int) -> np.ndarray:
    """The patches by loops, row by row."""
    pixels = np.asarray(picture(seed), dtype=np.float64) / 255
    pixels = (pixels - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    return np.array(
        [
            [np.sum(pixels[y : y + 8, x : x + 8].transpose(2, 0, 1) * kernel) for kernel in WEIGHTS]
            for y in range(0, 32, 8)
            for x in range(0, 32, 8)
        ]
    )


@pytest.mark.parametrize("batch", [1, "batch"])
def test_a_map_gives_its_cells(tmp_path: Path, batch: int | str) -> None:
    tool = OnnxFeatures(path=_save(tmp_path / "net.onnx", "map", batch))
    assert (tool.max_fragments, tool.dim) == (16, 5)
    result = tool.run([tool.views(picture(seed)) for seed in range(3)])
    for seed, fragments in enumerate(result):
        np.testing.assert_allclose(fragments.features, _expected(seed), atol=1e-3)
    assert result[0].boxes is not None
    assert result[0].boxes[1].tolist() == [0.25, 0, 0.5, 0.25]


def test_tokens_give_patches_and_the_first_token_the_whole(tmp_path: Path) -> None:
    path = _save(tmp_path / "net.onnx", "tokens")
    result = OnnxFeatures(path=path, pooled=True).extract(picture(2))
    np.testing.assert_allclose(result.features[1:], _expected(2), atol=1e-3)
    np.testing.assert_allclose(result.features[0], _expected(2).mean(axis=0), atol=1e-3)
    other = OnnxFeatures(path=path, output="map").extract(picture(2))
    np.testing.assert_allclose(other.features, _expected(2), atol=1e-3)


def test_a_vector_is_one_fragment_for_the_whole_picture(tmp_path: Path) -> None:
    result = OnnxFeatures(path=_save(tmp_path / "net.onnx", "vector")).extract(picture(2))
    assert result.boxes is not None
    assert result.boxes.tolist() == [[0, 0, 1, 1]]
    np.testing.assert_allclose(result.features[0], _expected(2).mean(axis=0), atol=1e-3)


def test_what_cannot_be_used_is_said(tmp_path: Path) -> None:
    path = _save(tmp_path / "net.onnx", "map")
    with pytest.raises(ConfigError, match="no output 'maps'"):
        OnnxFeatures(path=path, output="maps").extract(picture(1))
    with pytest.raises(ConfigError, match="32 by 32"):
        OnnxFeatures(path=path, size=64).extract(picture(1))
    (tmp_path / "bad.onnx").write_bytes(b"no network")
    with pytest.raises(CheckpointError, match=r"bad\.onnx"):
        OnnxFeatures(path=str(tmp_path / "bad.onnx")).extract(picture(1))


def test_the_fingerprint_follows_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.onnx").write_bytes(b"a")
    (tmp_path / "b.onnx").write_bytes(b"a")
    prints = [
        OnnxFeatures(path=str(tmp_path / name)).fingerprint() for name in ("a.onnx", "b.onnx")
    ]
    assert prints[0] == prints[1]
    (tmp_path / "b.onnx").write_bytes(b"b")
    assert OnnxFeatures(path=str(tmp_path / "b.onnx")).fingerprint() != prints[0]
    with pytest.raises(CheckpointError, match="cannot be read"):
        OnnxFeatures(path=str(tmp_path / "c.onnx")).fingerprint()
    with pytest.raises(ConfigError, match="name a file"):
        OnnxFeatures().fingerprint()


def test_a_missing_runtime_is_named_with_the_command(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(MissingExtraError, match=r"counterfoil\[onnx\]"):
        OnnxFeatures(path=str(tmp_path / "net.onnx")).extract(picture(1))
