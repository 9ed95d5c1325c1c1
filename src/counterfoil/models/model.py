"""`Model`: an image encoder, a text encoder and a matcher, to train, score and explain with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from counterfoil.core.config import DataConfig, ModelConfig
from counterfoil.core.errors import ArgumentError, ConfigError, DataError, require_batch_size
from counterfoil.core.progress import Progress, as_progress
from counterfoil.core.registry import Registry
from counterfoil.core.tensors.device import MemoryGuard
from counterfoil.core.tensors.modes import eval_mode
from counterfoil.data.batches.collate import ImageBatch, TextBatch, pad_fragments, pad_texts
from counterfoil.data.fragments import Fragments, FragmentTable
from counterfoil.data.images import FileImage, open_image, to_upright_rgb
from counterfoil.data.pairs import Split
from counterfoil.data.text.dependencies import create_parser
from counterfoil.data.text.tokenizers import (
    HuggingFaceText,
    TextProcessor,
    WordText,
    require_known,
    with_parser,
)
from counterfoil.data.text.vocabulary import Vocabulary
from counterfoil.data.text.words import caption_words
from counterfoil.encoders import Encoded, image_encoders, text_encoders
from counterfoil.encoders.bert import pretrained_names
from counterfoil.encoders.encoded import Needs
from counterfoil.features.extractors import (
    Extractor,
    extractors,
    same_extractor,
    split_full_name,
    with_options,
)
from counterfoil.matchers import Matcher, matchers
from counterfoil.matchers.cross_encoder import CrossEncoder
from counterfoil.matchers.ensemble import EnsembleEncoder, EnsembleMatcher
from counterfoil.models.catalogue import ModelSpec, resolve, with_one_checkpoint
from counterfoil.models.correction_rule import CorrectionRule
from counterfoil.models.explain import explain
from counterfoil.models.match import Match, Method, Yardstick

ImageLike: TypeAlias = "str | PathLike[str] | Image.Image | Fragments | NDArray[Any] | Tensor"
"""A file, a picture, pixels [height, width, 3] (uint8), or fragments [n, D] (floats)."""


class Model(nn.Module):
    """A composition by its spec; ``input_dim`` is the width of the image fragments it reads.

    ``fragments_from`` names the extractor of these fragments, None if they were precomputed; a
    saved model reads new images with it. ``pretrained`` are the names of parameters that were
    initialized from a language or vision model. ``yardstick`` has the usual scores and word
    effects, if measured. ``correction_rule`` says when a model that corrects captions replaces a
    word. ``init_from`` is the run whose weights a new model was given, None after training.
    """

    def __init__(
        self,
        spec: ModelSpec,
        input_dim: int,
        text: TextProcessor,
        fragments_from: str | None = None,
        fragments_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.spec, self.input_dim, self.text = spec, input_dim, text
        self.fragments_from = fragments_from
        self.fragments_options = dict(fragments_options or {})
        self._reader: ImageReader | None = None
        self.yardstick: Yardstick | None = None
        self.correction_rule: CorrectionRule | None = None
        self.init_from: str | None = None
        members = [
            (
                _create(image_encoders, "image", spec.image, input_dim, spec.embed_size),
                _create(text_encoders, "text", spec.text, text, spec.embed_size),
                _create(matchers, "matcher", spec.matcher, spec.embed_size),
            )
            for _ in range(spec.ensemble_size)
        ]
        for _, words, matcher in members:
            if isinstance(matcher, CrossEncoder):
                table = getattr(words, "word_table", None)
                matcher.fill_word_heads(table.weight if table is not None else None)
        self.image_encoder, self.text_encoder = members[0][0], members[0][1]
        self.matcher: Matcher = members[0][2]
        if spec.ensemble_size > 1:
            images, texts, compared = zip(*members, strict=True)
            self.image_encoder = EnsembleEncoder(images)
            self.text_encoder = EnsembleEncoder(texts)
            self.matcher = EnsembleMatcher(compared)
        if self.matcher.needs_graph:
            self.text = with_parser(text, create_parser(self.matcher.parser))
        self.pretrained = pretrained_names(self)

    def __repr__(self) -> str:
        """One line; ``print(model.image_encoder)`` lists layers."""
        weights = sum(one.numel() for one in self.parameters())
        return (
            f"Model({self.spec.name!r}, {weights:,} weights, embed_size={self.spec.embed_size}, "
            f"{len(self.text):,} words, fragments of {self.input_dim} numbers"
            f"{f' from {self.fragments_from!r}' if self.fragments_from else ''}, {self.device})"
        )

    @property
    def reader(self) -> ImageReader:
        """Reads images with the extractor that the model was trained on; cached."""
        wanted = (self.fragments_from, self.fragments_options)
        if self._reader is None or (self._reader.name, self._reader.options) != wanted:
            self._reader = ImageReader(*wanted, self.input_dim)
        return self._reader

    @property
    def fragments_name(self) -> str | None:
        """The extractor of the model's fragments with all its options; None if it is not known."""
        if self.fragments_from is None:
            return None
        return with_options(self.fragments_from, self.fragments_options)

    def fragments_of(self, split: Split) -> FragmentTable:
        """The fragments of a split; `DataError` if they are not of the kind that the model reads.

        Features of different extractors may have the same width, and scores of the wrong ones say
        nothing.
        """
        table = split.require_fragments()
        wanted = self.fragments_name
        if wanted is None or table.made_by is None:
            return table
        if not same_extractor(wanted, table.made_by):
            name, options = split_full_name(wanted)
            chosen = "".join(f" --backbone-option {key}={value}" for key, value in options.items())
            raise DataError(
                f"split '{split.name}': the model '{self.spec.name}' reads fragments of "
                f"'{wanted}', these are of '{table.made_by}'; name the images themselves instead "
                f"of these features, or extract them with: counterfoil features IMAGES -b {name}"
                f"{chosen}{_unrecorded(wanted, table.made_by)}"
            )
        return table

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def encode_images(
        self,
        images: ImageBatch | ImageLike | Sequence[ImageLike],
        needs: Needs | None = None,
        *,
        batch_size: int = 256,
        progress: Progress | bool | None = None,
    ) -> Encoded:
        """Encode images for the matcher, or with more outputs if ``needs`` says so.

        Files, pictures, pixels or fragments are read and encoded ``batch_size`` at a time, without
        gradients, and returned on the CPU. A padded `ImageBatch`, as in training, is encoded with
        gradients and stays on its device.
        """
        if not isinstance(images, ImageBatch):
            given = as_list(images, "images")

            def encode(start: int) -> Encoded:
                part = [self.reader.fragments(one) for one in given[start : start + batch_size]]
                return self.encode_images(pad_fragments(part).to(self.device), needs)

            return self._in_batches(encode, len(given), batch_size, "encoding images", progress)
        if images.fragments.shape[-1] != self.input_dim:
            remedy = (
                f"; extract them with '{self.fragments_from}' (in Python: "
                "cf.load_pairs(…, extractor=model.fragments_from))"
            )
            raise DataError(
                f"the model '{self.spec.name}' reads fragments of {self.input_dim} numbers, "
                f"these have {images.fragments.shape[-1]}{remedy if self.fragments_from else ''}"
            )
        if self.matcher.needs_boxes and images.boxes is None:
            raise DataError(
                f"the model '{self.spec.name}' reads where regions are, but these images have no "
                "boxes: use features that have them (in the SCAN layout SPLIT_ims_bbx.npy and "
                "SPLIT_ims_size.npy beside SPLIT_ims.npy; our own extractors always do)"
            )
        encoded: Encoded = self.image_encoder(images)
        boxes = images.boxes if self.matcher.needs_boxes else None
        return replace(encoded.keep(self._needed_parts(needs)), boxes=boxes)

    def encode_texts(
        self,
        texts: TextBatch | str | Sequence[str],
        needs: Needs | None = None,
        *,
        batch_size: int = 256,
        progress: Progress | bool | None = None,
    ) -> Encoded:
        """Encode texts for the matcher, or with more outputs if ``needs`` says so.

        Sentences are encoded ``batch_size`` at a time, without gradients, and returned on the CPU.
        Unknown words are removed; a sentence without known words raises.
        A padded `TextBatch` is encoded with gradients and stays on its device.
        """
        if not isinstance(texts, TextBatch):
            read = read_texts(self.text, texts)

            def encode(start: int) -> Encoded:
                ids = [self.text.encode(one) for one in read[start : start + batch_size]]
                return self.encode_texts(pad_texts(ids, self.text.pad).to(self.device), needs)

            return self._in_batches(encode, len(read), batch_size, "encoding texts", progress)
        encoded: Encoded = self.text_encoder(texts)
        graph = texts.graph if self.matcher.needs_graph else None
        return replace(encoded.keep(self._needed_parts(needs)), graph=graph)

    @torch.inference_mode()
    def _in_batches(
        self,
        encode: Callable[[int], Encoded],
        count: int,
        batch_size: int,
        title: str,
        progress: Progress | bool | None,
    ) -> Encoded:
        """Encoded items on the CPU, in order; ``encode`` gets the start of each batch."""
        require_batch_size(batch_size)
        starts = range(0, count, batch_size)
        steps = as_progress(progress).track(starts, title, len(starts))
        with eval_mode(self):
            return Encoded.cat([encode(start).to("cpu") for start in steps])

    def _needed_parts(self, needs: Needs | None) -> Needs:
        return self.matcher.needs if needs in (None, self.matcher.needs) else "both"

    def forward(self, images: ImageBatch, texts: TextBatch) -> Tensor:
        """Scores [n_images, n_texts]."""
        scores: Tensor = self.matcher(self.encode_images(images), self.encode_texts(texts))
        return scores

    @torch.inference_mode()
    def score(
        self,
        images: ImageLike | Sequence[ImageLike],
        texts: str | Sequence[str],
        *,
        batch_size: int = 256,
        progress: Progress | bool | None = None,
    ) -> Tensor:
        """Scores [n_images, n_texts] on the CPU.

        Images are files, pictures, pixels [height, width, 3] or fragments. Images and texts are
        encoded ``batch_size`` at a time. Unknown words are removed; a text without known words
        raises. ``progress=True`` shows bars on a terminal and in a notebook.
        """
        encoded_texts = self.encode_texts(texts, batch_size=batch_size, progress=progress)
        encoded_images = self.encode_images(images, batch_size=batch_size, progress=progress)
        with eval_mode(self):
            scores: Tensor = self.matcher(
                encoded_images.to(self.device), encoded_texts.to(self.device)
            )
            return scores.float().cpu()

    def explain(self, image: ImageLike, text: str, method: Method | None = None) -> Match:
        """The effect of each word of a text on its match with an image, colored in a notebook.

        ``method`` is one of `METHODS`, such as ``"parts"`` (the word's own part of the score) or
        ``"leave-one-out"`` (the fall of the score without the word). The default is the one whose
        signs were right most often on dev after training; if that was not measured, parts, or
        leave-one-out without parts.
        """
        if not isinstance(text, str):
            raise ArgumentError(f"text: expected one string, got {type(text).__name__}")
        fragments, picture = self.reader.read(image)
        return replace(explain(self, fragments, text, method), picture=picture)


def _create(registry: Registry[Any], part: str, spec: dict[str, Any], *args: Any) -> Any:
    options = {key: value for key, value in spec.items() if key != "name"}
    return registry.create(spec["name"], options, *args, where=f"model.{part}")


def create_model(config: ModelConfig, train: Split, data: DataConfig | None = None) -> Model:
    """A new model for a data set; its training split gives input width and vocabulary."""
    data = data or DataConfig()
    spec = with_one_checkpoint(resolve(config))
    input_dim = train.require_fragments().dim
    text: TextProcessor
    defaults = text_encoders.options(spec.text["name"])
    if "pretrained" in defaults:  # a language model has its own vocabulary
        text = HuggingFaceText.from_pretrained(
            spec.text.get("pretrained") or defaults["pretrained"]
        )
    elif data.vocabulary:
        text = WordText(Vocabulary.load(data.vocabulary))
    else:
        text = WordText(Vocabulary.build(train.texts, data.min_count))
    with MemoryGuard():
        return Model(_with_vocabulary(spec, text), input_dim, text)


def _with_vocabulary(spec: ModelSpec, text: TextProcessor) -> ModelSpec:
    """The spec with the vocabulary size of its matcher's language heads, unless it is set."""
    matcher = spec.matcher
    if not matcher.get("extras") or matcher.get("vocabulary"):
        return spec
    return spec.model_copy(update={"matcher": {**matcher, "vocabulary": len(text)}})


class ImageReader:
    """Reads images with the extractor whose fragments a model was trained on."""

    def __init__(self, extractor: str | None, options: dict[str, Any], dim: int) -> None:
        self.name, self.options, self.dim = extractor, options, dim
        self._extractor: Extractor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Drop the extractor: those that run ONNX cannot be copied; a copy creates its own."""
        return {**self.__dict__, "_extractor": None}

    @property
    def extractor(self) -> Extractor:
        if self.name is None:
            raise ConfigError(
                "this model was trained on precomputed features, so it cannot read pixels; give "
                "fragments of the same kind, or train on images"
            )
        if self._extractor is None:
            self._extractor = extractors.create(self.name, self.options)
        return self._extractor

    def fragments(self, image: ImageLike) -> Fragments:
        return self.read(image)[0]

    def read(self, image: ImageLike) -> tuple[Fragments, Image.Image | None]:
        """Fragments of an image, and its picture unless it was given as fragments."""
        if isinstance(image, Fragments):
            _require_finite(image.features)
            return image, None
        if isinstance(image, (np.ndarray, Tensor)):
            if not _is_pixels(image):
                return self._given(_to_numpy(image)), None
            if 0 in image.shape:
                raise ArgumentError(f"image: expected pixels, got shape {list(image.shape)}")
        elif not isinstance(image, (str, PathLike, Image.Image)):
            raise _not_an_image(image)
        extractor = self.extractor
        picture = open_picture(image)
        return extractor.extract(picture), picture

    def _given(self, features: NDArray[Any]) -> Fragments:
        if features.ndim != 2 or features.shape[1] != self.dim or features.dtype.kind != "f":
            raise ArgumentError(
                f"image: expected fragments [n, {self.dim}] (floats) or pixels [height, width, 3] "
                f"(uint8), got {features.dtype} {list(features.shape)}"
            )
        _require_finite(features)
        return Fragments(features.astype(np.float32, copy=False))


def open_picture(image: str | PathLike[str] | Image.Image | NDArray[Any] | Tensor) -> Image.Image:
    """A file, a picture or pixels as an upright RGB image."""
    if isinstance(image, (str, PathLike)):
        return open_image(FileImage(Path(image), str(image)))
    if isinstance(image, Image.Image):
        return to_upright_rgb(image)
    if isinstance(image, (np.ndarray, Tensor)):
        return Image.fromarray(_to_numpy(image))
    raise _not_an_image(image)


def _not_an_image(given: Any) -> ArgumentError:
    return ArgumentError(
        "image: expected a path, a PIL image, pixels, or fragments, got " + type(given).__name__
    )


def _require_finite(features: NDArray[Any]) -> None:
    if not len(features) or not np.isfinite(features).all():
        raise DataError("image: expected at least one fragment, all numbers finite")


def _to_numpy(array: NDArray[Any] | Tensor) -> NDArray[Any]:
    if not isinstance(array, Tensor):
        return array
    array = array.detach().cpu()
    return (array.float() if array.dtype == torch.bfloat16 else array).numpy()


def _is_pixels(array: NDArray[Any] | Tensor) -> bool:
    return array.ndim == 3 and array.shape[2] == 3 and str(array.dtype).endswith("uint8")


def read_texts(processor: TextProcessor, given: Any) -> list[str]:
    """One or several texts as a list, without their unknown words; each must have a known word."""
    texts = as_list(given, "texts")
    for text in texts:
        if not isinstance(text, str):
            raise ArgumentError(f"texts: expected strings, got {type(text).__name__} among them")
        if not caption_words(text):
            raise DataError(f"texts: {text!r} has no words; give at least one word to score")
    return [require_known(processor, text).text for text in texts]


def as_list(given: Any, what: str) -> list[Any]:
    """One or several items as a list; a batch of fragments [images, n, D] is split."""
    if isinstance(given, (str, PathLike, Image.Image, Fragments)):
        return [given]
    if isinstance(given, (np.ndarray, Tensor)) and (given.ndim == 2 or _is_pixels(given)):
        return [given]
    try:
        items = list(given)
    except TypeError:  # also of arrays without axes
        raise ArgumentError(
            f"{what}: expected one or a list of them, got {type(given).__name__}"
        ) from None
    if not items:
        raise ArgumentError(f"{what}: expected at least one, got none")
    return items


def reads_the_same(one: Model, other: Model) -> bool:
    """Whether two models read fragments of the same extractor, options and width."""
    names = [each for each in (one.fragments_name, other.fragments_name) if each is not None]
    if one.input_dim != other.input_dim or len(names) == 1:
        return False
    return not names or same_extractor(*names)


def _unrecorded(wanted: str, given: str) -> str:
    """A hint if a model may have been made before the options of extractors were stored."""
    (name, options), (given_name, given_options) = split_full_name(wanted), split_full_name(given)
    if name != given_name or options:
        return ""
    return (
        "; a model made in Python by an older version does not have these options: set "
        f"model.fragments_options = {given_options} and save it again"
    )
