"""Fused Triton kernels: tiles of words (forward and backward), and one thread per caption."""
