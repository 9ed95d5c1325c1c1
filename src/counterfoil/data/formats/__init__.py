"""Data set formats on disk: one file per layout, with its reader and its writer."""

from __future__ import annotations

from pathlib import Path

from counterfoil.core.errors import ConfigError
from counterfoil.core.progress import Progress
from counterfoil.data.formats.base import Source, Writer, named_sources, sources, writers
from counterfoil.data.formats.coco import CocoSource
from counterfoil.data.formats.flickr8k import Flickr8kSource
from counterfoil.data.formats.karpathy import KarpathySource
from counterfoil.data.formats.scan import ScanSource, ScanWriter
from counterfoil.data.formats.shards import ShardSource, ShardWriter
from counterfoil.data.formats.table import JsonlWriter, TableSource
from counterfoil.data.pairs import Pairs
from counterfoil.data.scenes import load_scenes


@named_sources.register("scenes")
def scenes(
    cache_dir: Path,
    *,
    images: int | list[int] = 5000,
    seed: int = 0,
    captions: int | list[int] = 5,
    progress: Progress | None = None,
) -> Pairs:
    """Synthetic scenes with captions and full ground truth; nothing to download."""
    sizes = tuple(images) if isinstance(images, list) else images
    span = tuple(captions) if isinstance(captions, list) else captions
    if isinstance(sizes, tuple) and len(sizes) != 3:
        raise ConfigError(f"data.options.images: a total, or [train, dev, test]; got {images}")
    if isinstance(span, tuple) and len(span) != 2:
        raise ConfigError(f"data.options.captions: a number, or [least, most]; got {captions}")
    return load_scenes(cache_dir, sizes, seed, span, progress=progress)


__all__ = [
    "CocoSource",
    "Flickr8kSource",
    "JsonlWriter",
    "KarpathySource",
    "ScanSource",
    "ScanWriter",
    "ShardSource",
    "ShardWriter",
    "Source",
    "TableSource",
    "Writer",
    "named_sources",
    "scenes",
    "sources",
    "writers",
]
