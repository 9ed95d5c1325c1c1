"""Text for a terminal or an HTML page: numbers with their nouns, and untrusted text escaped."""

from __future__ import annotations

import base64
import hashlib
import re
from html import escape

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def plural(number: int, one: str, many: str = "") -> str:
    """A number with its noun, and with the verb if that differs, too.

    >>> plural(1, "id is", "ids are"), plural(1200, "caption")
    ('1 id is', '1,200 captions')
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def printable(text: str, keep: str = "") -> str:
    r"""Escape control characters and lone surrogates, except those in ``keep``.

    >>> printable("a\x1b[2Jb\ud800é")
    'a\\x1b[2Jb\\ud800é'
    """
    if text.isprintable():
        return text
    return "".join(
        letter
        if letter.isprintable() or letter in keep
        else letter.encode("unicode_escape").decode()
        for letter in text
    )


def is_encodable(text: str, encoding: str = "utf-8") -> bool:
    """Whether an encoding has all of a text; UTF-8 lacks lone surrogates, which JSON may have."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def clean(text: str) -> str:
    """Escape for HTML and its attributes; control characters become U+FFFD.

    >>> clean('<b title="x">\\x07')
    '&lt;b title=&quot;x&quot;&gt;\ufffd'
    """
    return escape(visible(text))


def visible(text: str) -> str:
    """Replace control characters, which XML does not allow, by U+FFFD."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def page_policy(script: str = "") -> str:
    """Content-Security-Policy of a page in one file: only ``script`` may run."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    scripts = f"script-src 'sha256-{digest}'; " if script else ""
    return (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; {scripts}"
        "base-uri 'none'; form-action 'none'"
    )
