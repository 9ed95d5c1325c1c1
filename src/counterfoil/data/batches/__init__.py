"""Batches as tensors: items, padding, sampling, features kept on a GPU."""
