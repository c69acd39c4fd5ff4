"""Shrink a failing set to a minimal one, and grow a passing set to a maximal one. Pure strategy over a ledger.

Shrinking looks for flips: with the choices in order, the shortest prefix that fails ends in a choice that is needed.
That choice stays on, the prefix before it is searched the same way, until what stays on fails by itself. One pass
costs log2(n) + 1 probes a member, for single choices and for sets that only fail together alike (the dichotomic
deletion of Hemery et al. 2006, "Extracting MUCs from constraint networks"). UNKNOWN counts as "does not fail", as in
Zeller's ddmin. No step needs monotonicity to end in a set that fails and whose members cannot be left out singly.
"""

from __future__ import annotations

from collections.abc import Sequence

from align.compare.search_ledger import Ledger
from align.compare.search_order import Order, galloping_cuts
from align.compare.search_values import Answer, Choices


class Shrinker:
    """Strategies that share one ledger, one order and one width."""

    def __init__(self, ledger: Ledger, order: Order, width: int) -> None:
        self._ledger = ledger
        self._order = order
        self._width = width

    def shrink(self, failing: Choices) -> Choices:
        """A minimal failing part of a failing set: it fails, and leaving out any one member does not."""
        while True:
            core = self._collect(failing)
            smaller = [core - {choice} for choice in self._order.sort(core)]
            answers = self._ledger.ask(smaller)
            if Answer.BAD not in answers:
                return core
            failing = smaller[answers.index(Answer.BAD)]

    def grow(self, passing: Choices, within: Choices) -> Choices:
        """Switch on what can be switched on: a passing set to which no choice tried could be added.

        The least suspicious are tried first, in halves where a group does not pass as a whole.
        """
        chunks = [self._order.sort(within - passing)]
        while chunks:
            chunk = chunks.pop()
            if not chunk:
                continue
            if self._ledger.ask_one(passing.union(chunk)) is Answer.GOOD:
                passing = passing.union(chunk)
            elif len(chunk) > 1:
                middle = len(chunk) // 2
                chunks += [chunk[:middle], chunk[middle:]]
        return passing

    def _collect(self, failing: Choices) -> Choices:
        """Members found by flips, the last first, until they fail by themselves."""
        needed: Choices = frozenset()
        rest = self._order.sort(failing)
        while True:
            flip = self._find_flip(needed, rest)
            needed, rest = needed | {rest[flip - 1]}, rest[: flip - 1]
            if not rest or self._ledger.ask_one(needed) is Answer.BAD:
                return needed

    def _find_flip(self, needed: Choices, rest: Sequence[str]) -> int:
        """A length at which needed + rest[:length] fails while one choice less does not; needed + rest fails."""
        low, high = self._known_passing(needed, rest), len(rest)
        start, tries, is_galloping = low, 0, self._order.is_ranked
        while high - low > 1:
            cuts = galloping_cuts(start, high, self._width, tries) if is_galloping else []
            is_galloping = bool(cuts)
            cuts = cuts or self._order.even_cuts(rest, low, high, self._width)
            answers = self._ledger.ask(needed.union(rest[:cut]) for cut in cuts)
            first_bad = answers.index(Answer.BAD) if Answer.BAD in answers else len(cuts)
            is_galloping, tries = is_galloping and first_bad == len(cuts), tries + len(cuts)
            low = cuts[first_bad - 1] if first_bad > 0 else low
            high = cuts[first_bad] if first_bad < len(cuts) else high
        return high

    def _known_passing(self, needed: Choices, rest: Sequence[str]) -> int:
        """The longest prefix that lies in a set known to pass: part of a passing set is taken to pass.

        A set that fails inside one that passes speaks against that; there nothing is taken for granted.
        """
        longest = max(
            (_prefix_inside(rest, good) for good in self._ledger.sets(Answer.GOOD) if needed <= good), default=0
        )
        return longest if longest < len(rest) else 0


def _prefix_inside(choices: Sequence[str], passing: Choices) -> int:
    return next((index for index, choice in enumerate(choices) if choice not in passing), len(choices))
