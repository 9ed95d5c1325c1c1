"""Compositional benchmarks: public files as items, scores of models, and scores without images."""
