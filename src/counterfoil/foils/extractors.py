"""Extractors of scene graphs by name."""

from __future__ import annotations

from counterfoil.errors import ConfigError, nearest
from counterfoil.foils.graph import GraphExtractor
from counterfoil.foils.rule_graph import RuleExtractor
from counterfoil.foils.spacy_graph import SpacyExtractor

EXTRACTORS = ("rules", "spacy")


def create_extractor(name: str) -> GraphExtractor:
    """``rules``, ``spacy``, or ``spacy:NAME`` for another of its pipelines."""
    kind, _, pipeline = name.partition(":")
    if kind == "rules" and not pipeline:
        return RuleExtractor()
    if kind == "spacy":
        return SpacyExtractor(pipeline) if pipeline else SpacyExtractor()
    raise ConfigError(
        f"foils: unknown extractor of scene graphs '{name}'{nearest(kind, EXTRACTORS)} "
        "(known: rules, spacy, spacy:PIPELINE)"
    )
