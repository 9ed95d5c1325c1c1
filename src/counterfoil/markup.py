"""Pages that hold text of strangers: none of it is markup, and nothing is fetched or run."""

from __future__ import annotations

import base64
import hashlib
import re
from html import escape

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def clean(text: str) -> str:
    """Safe in HTML and in attributes; control characters become a visible sign.

    >>> clean('<b title="x">\\x07')
    '&lt;b title=&quot;x&quot;&gt;\ufffd'
    """
    return escape(visible(text))


def visible(text: str) -> str:
    """The text with a visible sign for each control character, which XML does not allow."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def page_policy(script: str = "") -> str:
    """A Content-Security-Policy for a page that is one file: only this script may run, if any."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    scripts = f"script-src 'sha256-{digest}'; " if script else ""
    return (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; {scripts}"
        "base-uri 'none'; form-action 'none'"
    )
