"""Counterfoil: match images with texts, and learn it from negatives."""

__version__ = "0.1.0"
