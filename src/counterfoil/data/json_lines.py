"""JSON as this library writes it: one object a line, UTF-8, every string representable."""

from __future__ import annotations

import json
from typing import Any

EXTRAS = "extras"


def json_bytes(value: Any) -> bytes:
    """Readable UTF-8; escapes where a string holds a lone surrogate, which UTF-8 cannot carry."""
    try:
        return json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(value).encode()


def merge_extras(
    record: dict[str, Any], extras: dict[str, Any], reserved: frozenset[str]
) -> dict[str, Any]:
    """Add extras beside a record's own keys, or under ``extras`` where a key would be mistaken."""
    if any(key.strip().lower() in reserved or key == EXTRAS for key in extras):
        return {**record, EXTRAS: extras}
    return {**record, **extras}


def split_extras(rest: dict[str, Any]) -> dict[str, Any]:
    """Undo `merge_extras` on what is left of a record without its own keys."""
    nested = rest.get(EXTRAS)
    if isinstance(nested, dict):
        return {**{key: value for key, value in rest.items() if key != EXTRAS}, **nested}
    return rest
