"""The web service and its page: search, explanations, corrections, audits, runs.

Everything here needs ``counterfoil[app]``; `require_web` raises an error if it is not installed.
"""

from __future__ import annotations

from importlib.util import find_spec

from counterfoil.core.errors import MissingExtraError

PACKAGES = {"fastapi": "fastapi", "uvicorn": "uvicorn", "python_multipart": "python-multipart"}


def require_web() -> None:
    """Raise an error that names the extra if one of its packages is missing."""
    for module, package in PACKAGES.items():
        if find_spec(module) is None:
            raise MissingExtraError(package, "app", "the web page")
