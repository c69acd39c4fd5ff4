"""Make untrusted text fit to be shown: names, paths and messages may hold anything and must not steer a terminal."""

from __future__ import annotations

import unicodedata

_HIDDEN = frozenset(
    {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
)  # control, format (bidi), surrogate, private, separators


def printable(text: str) -> str:
    """The text with every invisible or control character written out as an escape (`\\x1b`, `\\u202e`)."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escaped(char) if unicodedata.category(char) in _HIDDEN else char for char in text)


def one_line(text: str) -> str:
    """`printable` after white space, line ends included, became single spaces."""
    return printable(" ".join(text.split()))


def shorten(text: str, width: int) -> str:
    """At most `width` characters: the middle gives way to `...`, and the end keeps the larger part."""
    if len(text) <= width:
        return text
    if width <= 3:
        return text[-width:] if width > 0 else ""
    kept = width - 3
    head = kept // 3
    return f"{text[:head]}...{text[len(text) - (kept - head) :]}"


def _escaped(char: str) -> str:
    return char.encode("unicode_escape", "surrogatepass").decode("ascii")
