"""Evaluation of word effects: how well they find the wrong words of a caption."""
