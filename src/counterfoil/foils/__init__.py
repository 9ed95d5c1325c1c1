"""Foils: false captions made from true ones. Only `generation` imports torch."""

from counterfoil.foils.rules import DEFAULT_KINDS, KINDS, Foil, rule_foils

__all__ = ["DEFAULT_KINDS", "KINDS", "Foil", "rule_foils"]
