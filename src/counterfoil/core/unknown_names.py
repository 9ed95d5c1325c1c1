"""Refuse unknown models, objectives, parts and options of a config, without importing torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from counterfoil.core.config import RunConfig
from counterfoil.core.errors import ConfigError, nearest
from counterfoil.core.registry import declared, own_advice
from counterfoil.core.unread_options import PARTS


def check_names(config: RunConfig) -> None:
    """Refuse unknown models, objectives and options, without importing torch.

    Values of options are checked later, when the parts are built.
    """
    models, terms = declared("models", "models"), declared("objectives", "objectives")
    if models and config.model.name not in models:
        raise ConfigError(_unknown("model.name", "model", config.model.name, models))
    for part in PARTS:
        _check_part(part, getattr(config.model, part))
    for name, given in config.objective.items():
        if not terms or name == "protect":
            continue
        if name not in terms:
            raise ConfigError(_unknown("objective", "objective", name, terms))
        known = terms[name]
        if known is None or not isinstance(given, Mapping):
            continue
        for key in given:
            if key not in (*known, "weight", "epochs"):
                raise ConfigError(
                    f"objective.{name}.{key}: objective '{name}' has no option '{key}'"
                    f"{nearest(str(key), known)} (options: {', '.join(known) or 'none'})"
                )


def _check_part(part: str, given: Mapping[str, Any]) -> None:
    """Refuse options that the named part, or without a name any part, does not have."""
    entries = declared(*PARTS[part])
    name = given.get("name")
    if entries and isinstance(name, str) and name not in entries:
        kind = part if part == "matcher" else f"{part} encoder"
        raise ConfigError(_unknown(f"model.{part}.name", kind, name, entries))
    if not entries or (name is not None and entries.get(name) is None):
        return
    owners = entries.values() if name is None else [entries[name]]
    known = sorted({option for options in owners for option in options or ()})
    owner = f"'{name}' has" if name is not None else "there is"
    for key in given:
        if key not in ("name", *known):
            hint = nearest(str(key), known)
            raise ConfigError(f"model.{part}.{key}: {owner} no option '{key}'{hint}")


def _unknown(key: str, kind: str, name: str, known: Mapping[str, Any]) -> str:
    hint, listed = nearest(name, known), ", ".join(sorted(known))
    own = own_advice(name, known)
    return f"{key}: unknown {kind} '{name}'{hint} (known: {listed}){own}"
