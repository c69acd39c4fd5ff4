"""The cheapest set of choices that has a member in each of several sets (a weighted hitting set).

Every passing plan leaves out a member of every failing set, so the cheapest cover of the failing sets found so far
bounds from below what must be switched off; when the rest passes, the bound is met and the plan is the best there is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from align.compare.search_values import Choices

MAX_NODES = 20_000
"""Branches tried before the best cover so far is taken; sets that overlap this much share their guilt."""


@dataclass(frozen=True, slots=True)
class Cover:
    """Choices to switch off; `is_cheapest` says that the search for a cheaper set was finished."""

    off: Choices
    is_cheapest: bool


@dataclass(slots=True)
class _Branching:
    cost: Callable[[str], float]
    position: Callable[[str], int]
    best: Choices
    bound: tuple[float, int]
    nodes: int = field(default=0)

    def visit(self, taken: Choices, spent: float, open_sets: Sequence[Choices]) -> None:
        self.nodes += 1
        if not open_sets:
            self.best, self.bound = taken, (spent, len(taken))
            return
        smallest = min(open_sets, key=len)
        for choice in sorted(smallest, key=lambda name: (self.cost(name), self.position(name))):
            price = spent + self.cost(choice)
            left = [group for group in open_sets if choice not in group]
            extra, count = self._least(left)
            if self.nodes < MAX_NODES and (price + extra, len(taken) + 1 + count) < self.bound:
                self.visit(taken | {choice}, price, left)

    def _least(self, open_sets: Sequence[Choices]) -> tuple[float, int]:
        """What disjoint open sets cost at least, and how many choices they take."""
        seen: Choices = frozenset()
        price, count = 0.0, 0
        for group in sorted(open_sets, key=len):
            if seen.isdisjoint(group):
                seen, price, count = seen | group, price + min(map(self.cost, group)), count + 1
        return price, count


def find_cover(groups: Sequence[Choices], cost: Callable[[str], float], position: Callable[[str], int]) -> Cover:
    """Cover all groups at the least cost, with the fewest choices among equals, the earliest positions first."""
    greedy = _cover_greedily(groups, cost, position)
    # Only a strictly better cover replaces the first one, so that ties are settled by branching order alone.
    branching = _Branching(cost, position, greedy, (sum(map(cost, greedy)) + 1e-12, len(greedy) + 1))
    branching.visit(frozenset(), 0.0, groups)
    return Cover(branching.best, branching.nodes < MAX_NODES)


def _cover_greedily(groups: Sequence[Choices], cost: Callable[[str], float], position: Callable[[str], int]) -> Choices:
    """Take, again and again, the choice that meets the most open groups for its cost."""
    off: Choices = frozenset()
    left = list(groups)
    while left:
        members = sorted(frozenset().union(*left), key=position)
        best = max(members, key=lambda name: sum(name in group for group in left) / (cost(name) + 1e-12))
        off, left = off | {best}, [group for group in left if best not in group]
    return off
