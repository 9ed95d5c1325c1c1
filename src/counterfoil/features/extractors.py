"""What turns an image into fragments, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from PIL import Image

from counterfoil.data.fragments import Fragments
from counterfoil.registry import Registry


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


extractors: Registry[Callable[..., Extractor]] = Registry("extractor")
