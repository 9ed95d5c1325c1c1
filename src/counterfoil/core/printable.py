"""Text that came from files, made safe to print on a terminal or to show on an HTML page."""

from __future__ import annotations

import base64
import hashlib
import re
from html import escape

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str, keep: str = "") -> str:
    r"""Text with escapes for what a terminal would obey, or what no encoding has.

    ``keep`` are characters that stay as they are.

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


def is_encodable(text: str) -> bool:
    """Whether a text is Unicode: JSON may hold half of a surrogate pair, which UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


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
