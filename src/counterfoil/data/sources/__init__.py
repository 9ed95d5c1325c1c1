"""Layouts of images and captions on disk, one file each."""

from counterfoil.data.sources.base import Source, named_sources, sources
from counterfoil.data.sources.coco import CocoSource
from counterfoil.data.sources.flickr8k import Flickr8kSource
from counterfoil.data.sources.karpathy import KarpathySource
from counterfoil.data.sources.scan import ScanSource
from counterfoil.data.sources.scenes import scenes
from counterfoil.data.sources.shards import ShardSource
from counterfoil.data.sources.table import TableSource

__all__ = [
    "CocoSource",
    "Flickr8kSource",
    "KarpathySource",
    "ScanSource",
    "ShardSource",
    "Source",
    "TableSource",
    "named_sources",
    "scenes",
    "sources",
]
