"""Triton kernels: tiles for most jobs, a thread per caption for the largest."""
