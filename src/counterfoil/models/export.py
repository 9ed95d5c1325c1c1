"""ONNX export: `export_model` writes the two encoders and the scorer, `OnnxMatcher` runs them.

An exported folder has three graphs, the tokenizer or vocabulary, and `export.json` with the name
and shape of every input and output. Images, regions, texts and words are dynamic axes. The graphs
are traced inside `exporting`, in which models compute on padded tensors.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from counterfoil.core.errors import CheckpointError, ConfigError, MissingExtraError
from counterfoil.core.storage.checksums import write_sums
from counterfoil.core.storage.reading import read_text
from counterfoil.core.tensors.modes import eval_mode, exporting
from counterfoil.data.batches.collate import ImageBatch, TextBatch, pad_fragments, pad_texts
from counterfoil.data.text.dependencies import create_parser
from counterfoil.data.text.tokenizers import (
    HuggingFaceText,
    TextProcessor,
    load_text_processor,
    with_parser,
)
from counterfoil.encoders.encoded import Encoded
from counterfoil.matchers.cross_encoder import CrossEncoder
from counterfoil.models.catalogue import reads_pixels
from counterfoil.models.model import ImageLike, ImageReader, Model, as_list, read_texts

DESCRIPTION = "export.json"
FORMAT = 1
OPSET = 17
TOLERANCE = 1e-4
"""Largest accepted difference of scores, relative to the largest score if that is above 1."""

SHAPES: dict[str, tuple[str, ...]] = {
    "regions": ("images", "regions", "region_width"),
    "region_mask": ("images", "regions"),
    "boxes": ("images", "regions", "4"),
    "token_ids": ("texts", "words"),
    "token_mask": ("texts", "words"),
    "graph": ("texts", "words", "words"),
    "image_vectors": ("images", "vector_width"),
    "image_fragments": ("images", "image_fragments", "vector_width"),
    "image_mask": ("images", "image_fragments"),
    "text_vectors": ("texts", "vector_width"),
    "text_fragments": ("texts", "text_fragments", "vector_width"),
    "text_mask": ("texts", "text_fragments"),
    "scores": ("images", "texts"),
}
"""Names of all inputs and outputs, and of their axes."""

FIXED = ("region_width", "vector_width", "4")
Arrays = dict[str, NDArray[Any]]


class _Traced(nn.Module):
    """A function of a model and named tensors as a module that can be traced."""

    def __init__(self, model: Model, names: Sequence[str], run: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.names, self.run = model, names, run

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip(self.names, tensors, strict=True))
        return tuple(self.run(self.model, named).values())


def _encode_images(model: Model, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    batch = ImageBatch(given["regions"], given["region_mask"], given.get("boxes"))
    return _named(model.image_encoder(batch).keep(model.matcher.needs), "image")


def _encode_texts(model: Model, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    batch = TextBatch(given["token_ids"], given["token_mask"])
    return _named(model.text_encoder(batch).keep(model.matcher.needs), "text")


def _named(encoded: Encoded, side: str) -> dict[str, Tensor]:
    named = {}
    if encoded.pooled is not None:
        named[f"{side}_vectors"] = encoded.pooled
    if encoded.fragments is not None:
        named |= {f"{side}_fragments": encoded.fragments, f"{side}_mask": encoded.mask}
    return named


def _score(model: Model, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    sides = [_encoded(given, "image"), _encoded(given, "text")]
    images = replace(sides[0], boxes=given.get("boxes"))
    texts = replace(sides[1], graph=given.get("graph"))
    return {"scores": model.matcher(images, texts)}


def _encoded(given: Mapping[str, Tensor], side: str) -> Encoded:
    vectors, fragments = given.get(f"{side}_vectors"), given.get(f"{side}_fragments")
    if fragments is not None:
        return Encoded(fragments, given[f"{side}_mask"], vectors)
    assert vectors is not None  # noqa: S101 - an encoder gives one of both
    return Encoded(None, torch.zeros(0, 0, dtype=torch.bool), vectors)


GRAPHS = {"image": _encode_images, "text": _encode_texts, "scorer": _score}


def export_model(model: Model, folder: Path) -> dict[str, Any]:
    """Write a model as ONNX into a new folder, and compare its scores with PyTorch's.

    Returns the content of `export.json` and ``difference``: the largest difference of scores in
    ONNX Runtime, on batches of other sizes than those of the export.
    """
    _refuse(model)
    for package in ("onnx", "onnxruntime"):
        _require(package)
    graphs = _write_graphs(model, folder)
    model.text.save(folder)
    description = _describe(model, graphs)
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=2), encoding="utf-8")
    difference = _compare(model, folder)
    write_sums(folder)
    return {**description, "difference": difference}


def _refuse(model: Model) -> None:
    name = model.spec.name
    if isinstance(model.matcher, CrossEncoder):
        raise ConfigError(
            f"the model '{name}' cannot be exported: a cross-encoder packs pairs by their length, "
            "which ONNX cannot express; export a model with two encoders"
        )
    if reads_pixels(model.spec):
        raise ConfigError(
            f"the model '{name}' cannot be exported: it reads pixels; export its two halves with "
            "the tools of transformers, or export a model that reads fragments"
        )


def _require(package: str) -> Any:
    try:
        return import_module(package)
    except ImportError:
        raise MissingExtraError(package, "export", "ONNX export") from None


def _write_graphs(model: Model, folder: Path) -> dict[str, dict[str, list[str]]]:
    tensors = _example(model, images=2, regions=3, texts=3, words=4)
    needs_graph = model.matcher.needs_graph
    names = {
        "image": ["regions", "region_mask", *(["boxes"] if _encoder_reads_boxes(model) else [])],
        "text": ["token_ids", "token_mask"],
    }
    graphs: dict[str, dict[str, list[str]]] = {}
    with eval_mode(model), exporting(), torch.no_grad(), _plain_attention():
        for graph, run in GRAPHS.items():
            if graph == "scorer":
                names[graph] = [*graphs["image"]["outputs"], *graphs["text"]["outputs"]]
                names[graph] += ["boxes"] if model.matcher.needs_boxes else []
                names[graph] += ["graph"] if needs_graph else []
            given = {name: tensors[name] for name in names[graph]}
            outputs = run(model, given)
            tensors |= outputs
            graphs[graph] = {"inputs": names[graph], "outputs": list(outputs)}
            _write_graph(_Traced(model, names[graph], run), given, list(outputs), folder, graph)
    return graphs


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Multi-head attention in plain operations: tracing PyTorch's own makes sizes constant."""
    original = nn.MultiheadAttention.forward
    fast_path = torch.backends.mha.get_fastpath_enabled()
    nn.MultiheadAttention.forward = _attend  # type: ignore[method-assign,assignment]
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        nn.MultiheadAttention.forward = original  # type: ignore[method-assign]
        torch.backends.mha.set_fastpath_enabled(fast_path)


def _attend(
    self: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention within items [B, N, D]; ``key_padding_mask`` is True, or −∞, at padding."""
    weights, biases = self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3)
    q, k, v = (
        F.linear(x, weight, bias).view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)
        for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
    )
    logits = q @ k.transpose(2, 3) * self.head_dim**-0.5
    if key_padding_mask is not None:
        padding = key_padding_mask if key_padding_mask.dtype == torch.bool else key_padding_mask < 0
        logits = logits.masked_fill(padding[:, None, None], -torch.inf)
    attended = (logits.softmax(-1) @ v).transpose(1, 2).flatten(2)
    return self.out_proj(attended), None


def _write_graph(
    module: nn.Module, given: Mapping[str, Tensor], outputs: list[str], folder: Path, graph: str
) -> None:
    """Trace a module with PyTorch's TorchScript exporter.

    It exports a GRU as one operator for any number of words. The newer exporter takes minutes and
    makes the number of words constant after a GRU.
    """
    axes = {
        name: {at: axis for at, axis in enumerate(SHAPES[name]) if axis not in FIXED}
        for name in [*given, *outputs]
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracer warns of constant Python branches
        try:
            torch.onnx.export(
                module.eval(),
                tuple(given.values()),
                str(folder / f"{graph}.onnx"),
                input_names=list(given),
                output_names=outputs,
                dynamic_axes=axes,
                opset_version=OPSET,
                dynamo=False,
            )
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(
                f"the {graph} graph of this model cannot be exported to ONNX: {reason}; choose "
                "another encoder or matcher (counterfoil models)"
            ) from error


def _example(model: Model, images: int, regions: int, texts: int, words: int) -> dict[str, Tensor]:
    """Random tensors with padding in the last item of each side."""
    rng = np.random.default_rng(images)
    given: Arrays = {
        "regions": rng.normal(size=(images, regions, model.input_dim)).astype(np.float32),
        "region_mask": np.ones((images, regions), dtype=bool),
        "boxes": np.sort(rng.random((images, regions, 2, 2)), 2).reshape(images, regions, 4),
        "token_ids": rng.integers(1, len(model.text), size=(texts, words)),
        "token_mask": np.ones((texts, words), dtype=bool),
        "graph": rng.random((texts, words, words)) < 0.5,
    }
    given["boxes"] = given["boxes"].astype(np.float32)
    given["region_mask"][-1, 1:] = given["token_mask"][-1, 2:] = False
    given["regions"][~given["region_mask"]] = 0.0
    given["token_ids"][~given["token_mask"]] = model.text.pad
    return {name: torch.from_numpy(value).to(model.device) for name, value in given.items()}


def _encoder_reads_boxes(model: Model) -> bool:
    return getattr(model.image_encoder, "boxes", "none") != "none"


def _describe(model: Model, graphs: Mapping[str, Mapping[str, list[str]]]) -> dict[str, Any]:
    words = isinstance(model.text, HuggingFaceText)
    return {
        "format": FORMAT,
        "model": model.spec.name,
        "precision": "float32",
        "opset": OPSET,
        "region_width": model.input_dim,
        "vector_width": model.spec.embed_size * model.spec.ensemble_size,
        "fragments": {"extractor": model.fragments_from, "options": model.fragments_options},
        "text": {
            "processor": model.text.kind,
            "pad": model.text.pad,
            "max_length": getattr(model.text, "max_length", None) if words else None,
            "parser": model.matcher.parser if model.matcher.needs_graph else None,
        },
        "graphs": {
            graph: {
                "file": f"{graph}.onnx",
                **{side: {name: SHAPES[name] for name in part[side]} for side in part},
            }
            for graph, part in graphs.items()
        },
    }


def _compare(model: Model, folder: Path) -> float:
    """Largest difference of scores on a batch of other sizes; raises above `TOLERANCE`."""
    given = _example(model, images=5, regions=7, texts=4, words=6)
    arrays = {name: tensor.cpu().numpy() for name, tensor in given.items()}
    with eval_mode(model), torch.no_grad():
        images = _encode_images(model, given)
        texts = _encode_texts(model, given)
        expected = _score(model, {**given, **images, **texts})["scores"].float().cpu().numpy()
    try:
        exported = OnnxMatcher(folder)
        scores = exported.run("scorer", {**arrays, **exported.encode(arrays)})["scores"]
    except Exception as error:  # ONNX Runtime has many exception classes
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"ONNX Runtime cannot run the exported model '{model.spec.name}': {reason}; choose "
            "another encoder or matcher (counterfoil models)"
        ) from error
    difference = float(np.abs(scores - expected).max())
    if not difference <= TOLERANCE * max(1.0, float(np.abs(expected).max())):
        raise ConfigError(
            f"the exported graphs score differently by {difference:.2g} (at most {TOLERANCE:g} is "
            "accepted), so nothing was written; a matcher of your own must leave out the padded "
            "words that Tile.query_mask marks (docs/tutorials/new-matcher.md); otherwise please "
            "report which model this is"
        )
    return difference


class OnnxMatcher:
    """An exported model in ONNX Runtime: NumPy arrays in, NumPy arrays out.

    ``providers`` are ONNX Runtime's, the CPU by default.
    """

    def __init__(self, folder: str | Path, providers: Sequence[str] = ("CPUExecutionProvider",)):
        self.folder = Path(folder)
        self.description = _read_description(self.folder / DESCRIPTION)
        source = self.description["fragments"]
        self.reader = ImageReader(
            source["extractor"], source["options"], self.description["region_width"]
        )
        runtime = _require("onnxruntime")
        options = runtime.SessionOptions()
        options.log_severity_level = 3  # errors
        self.sessions = {
            name: runtime.InferenceSession(
                str(self.folder / graph["file"]), options, providers=list(providers)
            )
            for name, graph in self.description["graphs"].items()
        }

    def run(self, graph: str, given: Mapping[str, NDArray[Any]]) -> Arrays:
        """Outputs of the graph "image", "text" or "scorer" by name; extra inputs are ignored."""
        session = self.sessions[graph]
        wanted = [x.name for x in session.get_inputs()]
        missing = [name for name in wanted if name not in given]
        if missing:
            raise ConfigError(f"the graph '{graph}' needs more inputs: {', '.join(missing)}")
        outputs = [x.name for x in session.get_outputs()]
        return dict(zip(outputs, session.run(outputs, {k: given[k] for k in wanted}), strict=True))

    def encode(self, given: Mapping[str, NDArray[Any]]) -> Arrays:
        """Encode both sides of a batch of padded arrays."""
        return {**self.run("image", given), **self.run("text", given)}

    def score(
        self, images: ImageLike | Sequence[ImageLike], captions: str | Sequence[str]
    ) -> NDArray[np.float32]:
        """Scores [n_images, n_texts], as `Model.score` gives them, of the same arguments."""
        text = self.text
        read = read_texts(text, captions)
        batch = pad_fragments([self.reader.fragments(one) for one in as_list(images, "images")])
        texts = pad_texts([text.encode(caption) for caption in read], text.pad)
        given = {
            "regions": batch.fragments.float(),
            "region_mask": batch.mask,
            "boxes": batch.boxes,
            "token_ids": texts.ids,
            "token_mask": texts.mask,
            "graph": texts.graph,
        }
        arrays = {name: tensor.numpy() for name, tensor in given.items() if tensor is not None}
        return self.run("scorer", {**arrays, **self.encode(arrays)})["scores"]

    @property
    def text(self) -> TextProcessor:
        """The text processor that converts captions to token ids."""
        about = self.description["text"]
        text = load_text_processor(about["processor"], self.folder)
        if isinstance(text, HuggingFaceText) and about["max_length"]:
            text.max_length = about["max_length"]
        return with_parser(text, create_parser(about["parser"])) if about["parser"] else text


def _read_description(path: Path) -> dict[str, Any]:
    try:
        description: dict[str, Any] = json.loads(read_text(path))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.parent}: not an exported model (no {path.name} there); make one with: "
            "counterfoil export RUN --out FOLDER"
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{path}: damaged ({error})") from None
    if description.get("format") != FORMAT:
        version = description.get("format")
        raise CheckpointError(f"{path}: written in format {version!r}, this version reads {FORMAT}")
    return description
