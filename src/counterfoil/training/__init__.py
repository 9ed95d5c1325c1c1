"""Runs: data and model from a configuration, the loop, checkpoints, guides, reports."""
