"""The embedded scenes as a named data set."""

from __future__ import annotations

from pathlib import Path

from counterfoil.data.pairs import Pairs
from counterfoil.data.scenes import load_scenes
from counterfoil.data.sources.base import named_sources
from counterfoil.errors import ConfigError
from counterfoil.progress import Progress


@named_sources.register("scenes")
def scenes(
    cache_dir: Path,
    *,
    images: int | list[int] = 5000,
    seed: int = 0,
    captions: int | list[int] = 5,
    progress: Progress | None = None,
) -> Pairs:
    """Drawn scenes with captions and full ground truth, made by code; nothing to download."""
    sizes = tuple(images) if isinstance(images, list) else images
    span = tuple(captions) if isinstance(captions, list) else captions
    if isinstance(sizes, tuple) and len(sizes) != 3:
        raise ConfigError(f"data.options.images: a total, or [train, dev, test]; got {images}")
    if isinstance(span, tuple) and len(span) != 2:
        raise ConfigError(f"data.options.captions: a number, or [least, most]; got {captions}")
    return load_scenes(cache_dir, sizes, seed, span, progress=progress)
