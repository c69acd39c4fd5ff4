"""Trade drift against latency: which choices to switch off for a given loss of time, or for a given drift.

Invariant: along a front latency loss rises and drift falls, strictly; the first point costs least.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from align.compare.attribution import Attribution
from align.compare.search_values import Choices
from align.dumpers.errors import UsageError

MAX_POINTS = 2000
"""An exact front that grows beyond this is replaced by the greedy one (few choices, or rounded costs, stay below)."""


@dataclass(frozen=True, slots=True)
class ParetoPoint:
    """One bargain: with `off` switched off, `drift` (root of `squared_error`) is left and `latency_loss` is paid.

    Units are those of the fitted metric and of the costs. `is_exact` says that no other set does better in both.
    """

    off: Choices
    squared_error: float
    drift: float
    latency_loss: float
    is_exact: bool


@dataclass(frozen=True, slots=True)
class _Bargain:
    off: Choices
    saved: float
    paid: float


def pareto(attribution: Attribution, latency_costs: Mapping[str, float]) -> tuple[ParetoPoint, ...]:
    """All sets of choices worth switching off, the cheapest first, from what each share saves and costs.

    latency_costs: time lost by switching each choice off; negative where off is faster. Exact by merging dominated
    bargains choice by choice (Nemhauser and Ullmann 1969); greedy by share over cost where that front is too long.
    """
    shares = {share.choice: share.squared_error for share in attribution.shares}
    missing = [choice for choice in shares if not math.isfinite(latency_costs.get(choice, math.nan))]
    if missing:
        raise UsageError(f"no finite latency cost for {', '.join(missing[:3])}", "give a cost for each choice")
    bargains, is_exact = _exact_front(shares, latency_costs), True
    if not bargains:
        bargains, is_exact = _greedy_front(shares, latency_costs), False
    total = attribution.floor + sum(shares.values())
    return tuple(_to_point(bargain, total, attribution.floor, is_exact) for bargain in bargains)


def pick_by_latency(points: Sequence[ParetoPoint], max_latency_loss: float) -> ParetoPoint:
    """The least drift for at most this loss of time. Raises UsageError where every point loses more."""
    affordable = [point for point in points if point.latency_loss <= max_latency_loss]
    if not affordable:
        cheapest = min((point.latency_loss for point in points), default=math.nan)
        raise UsageError(
            f"no plan loses at most {max_latency_loss:g}; the cheapest loses {cheapest:g}",
            "allow a larger latency loss",
        )
    return min(affordable, key=lambda point: (point.squared_error, point.latency_loss))


def pick_by_drift(points: Sequence[ParetoPoint], max_drift: float) -> ParetoPoint:
    """The least loss of time for at most this drift. Raises UsageError where every point drifts more."""
    close = [point for point in points if point.drift <= max_drift]
    if not close:
        least = min((point.drift for point in points), default=math.nan)
        raise UsageError(
            f"no plan drifts at most {max_drift:g}; the least drift left is {least:g}", "allow a larger drift"
        )
    return min(close, key=lambda point: (point.latency_loss, point.squared_error))


def _to_point(bargain: _Bargain, total: float, floor: float, is_exact: bool) -> ParetoPoint:
    # Subtracting the saved shares may end a rounding below the floor.
    left = max(total - bargain.saved, floor)
    return ParetoPoint(bargain.off, left, math.sqrt(left), bargain.paid, is_exact)


def _exact_front(shares: Mapping[str, float], costs: Mapping[str, float]) -> list[_Bargain]:
    """The whole front, or nothing where it would be longer than `MAX_POINTS`."""
    front = [_Bargain(frozenset(), 0.0, 0.0)]
    for choice, share in shares.items():
        added = [_Bargain(each.off | {choice}, each.saved + share, each.paid + costs[choice]) for each in front]
        front = _keep_best(front + added)
        if len(front) > MAX_POINTS:
            return []
    return front


def _greedy_front(shares: Mapping[str, float], costs: Mapping[str, float]) -> list[_Bargain]:
    """Switch off in the order of what a choice saves for its cost; free ones first."""
    order = sorted(shares, key=lambda choice: shares[choice] / costs[choice] if costs[choice] > 0 else math.inf)
    bargains = [_Bargain(frozenset(), 0.0, 0.0)]
    for choice in reversed(order):
        last = bargains[-1]
        bargains.append(_Bargain(last.off | {choice}, last.saved + shares[choice], last.paid + costs[choice]))
    return _keep_best(bargains)


def _keep_best(bargains: Sequence[_Bargain]) -> list[_Bargain]:
    """Drop what another bargain beats in both; of equals the smaller set stays."""
    kept: list[_Bargain] = []
    for bargain in sorted(bargains, key=lambda each: (each.paid, -each.saved, len(each.off))):
        if not kept or bargain.saved > kept[-1].saved:
            kept.append(bargain)
    return kept
