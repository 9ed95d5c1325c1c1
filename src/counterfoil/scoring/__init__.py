"""Encode a split and score all of its image-text pairs."""
