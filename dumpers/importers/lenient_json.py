"""Read JSON as tools write it: bare NaN and Infinity, and files whose writer died half-way."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from align.dumpers.errors import TraceError, TraceFormatError

_SPACE = re.compile(r"[\s,]*")
_DECODER = json.JSONDecoder()


def read_text(path: Path) -> str:
    """A file's text; bytes that are no UTF-8 become replacement marks. Raises TraceError when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as exc:
        raise TraceError(f"cannot read {path}: {exc.strerror}", "check the path and its permissions") from exc


def read_object(path: Path) -> tuple[dict[str, Any], bool]:
    """The object in a file, and whether it is whole; of a torn one, every member that was written in full.

    Raises TraceFormatError when the file does not begin as an object.
    """
    text = read_text(path)
    try:
        whole = json.loads(text)
    except ValueError:
        start = _skip(text, 0)
        if text[start : start + 1] != "{":
            raise TraceFormatError(f"{path} is no JSON object", "give the dump.json that the tool wrote") from None
        return _members(text, start), False
    if not isinstance(whole, dict):
        raise TraceFormatError(
            f"{path} holds a {type(whole).__name__}, no object", "give the dump.json that the tool wrote"
        )
    return whole, True


def _members(text: str, start: int) -> dict[str, Any]:
    """Members of the object that opens at `start`, as far as they are whole; of a torn `data`, its whole members."""
    found: dict[str, Any] = {}
    place = _skip(text, start + 1)
    while True:
        try:
            name, place = _DECODER.raw_decode(text, place)
        except ValueError:
            return found
        place = _skip(text, place)
        if text[place : place + 1] != ":":
            return found
        place = _skip(text, place + 1)
        try:
            value, end = _DECODER.raw_decode(text, place)
        except ValueError:
            if text[place : place + 1] == "{" and name == "data":
                found[name] = _members(text, place)
            return found
        if isinstance(value, (int, float)) and not isinstance(value, bool) and end >= len(text):
            return found  # a number at the very end may have lost digits
        found[name], place = value, _skip(text, end)


def _skip(text: str, place: int) -> int:
    match = _SPACE.match(text, place)
    return match.end() if match else place
