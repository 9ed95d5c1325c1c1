"""Batches as tensors: items, padding, sampling, features resident on a GPU."""
