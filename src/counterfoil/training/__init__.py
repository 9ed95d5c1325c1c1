"""Training runs: data and model from a config, the loop, checkpoints, guides, reports."""
