"""Scores of trained models that guide the training of others."""
