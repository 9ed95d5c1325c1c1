"""Conversion targets, one file each."""

from counterfoil.data.writers.base import Writer, writers
from counterfoil.data.writers.jsonl import JsonlWriter
from counterfoil.data.writers.scan import ScanWriter
from counterfoil.data.writers.shards import ShardWriter

__all__ = ["JsonlWriter", "ScanWriter", "ShardWriter", "Writer", "writers"]
