"""Captions as text: words, tokens, vocabularies, stems, dependencies."""
