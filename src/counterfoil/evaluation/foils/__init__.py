"""Evaluation on foils: how well models detect them, and how good the foils are."""
