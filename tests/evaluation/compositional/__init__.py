"""Compositional benchmarks."""
