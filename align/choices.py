"""Let the user's own code ask at run time whether a choice is on: `if align.choice("fast_norm"): ...`.

A name is known once it was asked for, so the reference run finds out which names there are; outside a run every choice
is on, as the code would be without the tool.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class _State:
    """The names switched on in the run under way (None: no run), and all names asked for so far."""

    def __init__(self) -> None:
        self.on: frozenset[str] | None = None
        self.asked: set[str] = set()


_state = _State()


def choice(name: str) -> bool:
    """Whether the choice of that name is on in this run."""
    _state.asked.add(name)
    return _state.on is None or name in _state.on


@contextmanager
def switched(on: frozenset[str]) -> Iterator[set[str]]:
    """Switch exactly these names on for the context; yields the set of names that are asked for in it."""
    before = _state.on, _state.asked
    _state.on, _state.asked = on, set()
    try:
        yield _state.asked
    finally:
        _state.on, _state.asked = before
