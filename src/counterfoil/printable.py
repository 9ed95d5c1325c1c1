"""Text that came from files, made safe to print."""

from __future__ import annotations


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
