"""What turns an image into fragments, by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from PIL import Image

from counterfoil.core.registry import Registry
from counterfoil.data.fragments import Fragments


class Extractor(Protocol):
    """Makes up to ``max_fragments`` fragments of ``dim`` numbers from any RGB image."""

    @property
    def name(self) -> str: ...

    @property
    def dim(self) -> int: ...

    @property
    def max_fragments(self) -> int: ...

    def fingerprint(self) -> str:
        """Changes whenever the same image would give other fragments."""
        ...

    def extract(self, image: Image.Image) -> Fragments:
        """At least one fragment, boxes in 0…1, every number finite."""
        ...


class ExtractorRegistry(Registry[Callable[..., Extractor]]):
    """Extractors by name, or by a name with options as `full_name` writes it.

    Features on disk say by such a name what made them, so that a model that was trained on them
    reads a new photo in the same way.
    """

    def create(self, name: str, options: Mapping[str, Any], *args: Any, where: str = "") -> Any:
        plain, own = split_full_name(name)
        return super().create(plain, {**own, **options}, *args, where=where)


def full_name(name: str, options: Mapping[str, Any]) -> str:
    """An extractor and its options in one line.

    >>> full_name("efficientnet-lite", {"variant": 1}), full_name("segments", {})
    ('efficientnet-lite {"variant": 1}', 'segments')
    """
    return f"{name} {json.dumps(dict(options), sort_keys=True)}" if options else name


# The option that stands after a colon: `timm:resnet50`.
SHORT = {"timm": "model", "transformers": "model", "pixels": "model", "onnx": "path"}


def split_full_name(text: str) -> tuple[str, dict[str, Any]]:
    """The parts of a `full_name`; a text that is not one is a name without options.

    >>> split_full_name('efficientnet-lite {"variant": 1}')
    ('efficientnet-lite', {'variant': 1})
    >>> split_full_name("timm:resnet50")
    ('timm', {'model': 'resnet50'})
    """
    start, brace, rest = text.partition(" {")
    name, colon, main = start.partition(":")
    short = {SHORT[name]: main} if colon and name in SHORT else {}
    try:
        options = json.loads("{" + rest) if brace else {}
    except ValueError:
        return text, {}
    return (name, {**short, **options}) if short or not colon else (text, {})


extractors = ExtractorRegistry("extractor")
