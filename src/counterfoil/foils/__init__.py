"""Synthetic negative captions. Only `generation` imports torch."""

from counterfoil.foils.rules import DEFAULT_KINDS, KINDS, Foil, rule_foils

__all__ = ["DEFAULT_KINDS", "KINDS", "Foil", "rule_foils"]
