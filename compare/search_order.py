"""The order in which suspects are tried, and where an ordered list of them is cut. Order changes the number of
probes, never the answer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from align.compare.search_values import Suspect

BOUNDARY_SHARE = 16
"""A cut moves by at most this fraction of its interval to fall between two modules: splits stay nearly even
(worst 9:7, 15 cuts for 5,000 sites instead of 13), and most follow the module tree."""


class Order:
    """Suspects sorted by score, then so that the sites of one module lie side by side."""

    def __init__(self, suspects: Sequence[Suspect]) -> None:
        keys = _tree_keys(suspects)
        ranked = sorted(suspects, key=lambda suspect: (-_score(suspect), keys[suspect.choice]))
        self.choices = tuple(suspect.choice for suspect in ranked)
        self.is_ranked = len({_score(suspect) for suspect in suspects}) > 1
        self._position = {choice: index for index, choice in enumerate(self.choices)}
        self._path = {suspect.choice: suspect.path for suspect in suspects}

    def sort(self, choices: Iterable[str]) -> list[str]:
        """The most suspicious first."""
        return sorted(choices, key=self._position.__getitem__)

    def position(self, choice: str) -> int:
        return self._position[choice]

    def even_cuts(self, choices: Sequence[str], low: int, high: int, width: int) -> list[int]:
        """At most `width` cuts strictly between low and high that split the interval evenly; a cut c keeps
        choices[:c]."""
        size = high - low
        if size - 1 <= width:
            return list(range(low + 1, high))
        slack = size // (BOUNDARY_SHARE * width)
        targets = [low + size * part // (width + 1) for part in range(1, width + 1)]
        return sorted({self._nearest_boundary(choices, target, slack) for target in targets})

    def _nearest_boundary(self, choices: Sequence[str], target: int, slack: int) -> int:
        """The cut within `slack` of the target that parts the least related neighbours, the nearest of those."""
        cuts = sorted(range(target - slack, target + slack + 1), key=lambda cut: abs(cut - target))
        return min(cuts, key=lambda cut: _shared_depth(self._path[choices[cut - 1]], self._path[choices[cut]]))


def galloping_cuts(low: int, high: int, width: int, tries: int) -> list[int]:
    """Cuts low+1, +2, +4, +16, +256, ... (Bentley and Yao's unbounded search), from the `tries`-th on.

    Empty once the sequence has left the first half: even cuts do better there. A culprit on top of a ranking costs
    one cut, a useless ranking about log2 log2 n more than none.
    """
    steps = [1] + [2 ** (2**power) for power in range(tries + width)]
    return [low + step for step in steps[tries : tries + width] if 2 * step <= high - low]


def _tree_keys(suspects: Sequence[Suspect]) -> dict[str, tuple[int, ...]]:
    """For each choice, when each of its path's prefixes was first seen, outermost first, then its own number."""
    first: dict[tuple[str, ...], int] = {}
    keys: dict[str, tuple[int, ...]] = {}
    for number, suspect in enumerate(suspects):
        prefixes = [suspect.path[: depth + 1] for depth in range(len(suspect.path))]
        keys[suspect.choice] = (*(first.setdefault(prefix, number) for prefix in prefixes), number)
    return keys


def _score(suspect: Suspect) -> float:
    """A local error that is not a number is as suspicious as can be."""
    return math.inf if math.isnan(suspect.score) else suspect.score


def _shared_depth(left: tuple[str, ...], right: tuple[str, ...]) -> int:
    depth = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        depth += 1
    return depth
