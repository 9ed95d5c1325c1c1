"""How well models tell captions from foils, and how good foils are."""
