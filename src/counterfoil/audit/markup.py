"""Text of strangers in a page."""

from __future__ import annotations

import re
from html import escape

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def clean(text: str) -> str:
    """Safe in HTML and in attributes; control characters become a visible sign.

    >>> clean('<b title="x">\\x07')
    '&lt;b title=&quot;x&quot;&gt;\ufffd'
    """
    return escape(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", text))
