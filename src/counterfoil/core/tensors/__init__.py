"""Tensor helpers: devices, free memory, transfers between host and device, eval mode."""
