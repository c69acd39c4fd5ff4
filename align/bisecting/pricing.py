"""Price plans: time several of them in alternating rounds, and say what one costs beside another, with an interval.

Ratios are taken round by round, so that slow drift of the machine cancels (see `align.timing`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from align.dumpers.choice import Plan
from align.session import Session
from align.timing import FEWEST_ROUNDS, median_interval

BUDGET_SECONDS, MOST_ROUNDS = 8.0, 40
TOO_SLOW_SECONDS = 120.0
"""A price is nice to have: where the fewest rounds that could tell anything would take longer, none is given."""
WIDEST_SHARE = 0.2
"""The share of the gain is told where its interval is not wider than this to each side."""


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds a run that one plan takes longer than another, with a 95 % interval."""

    seconds: float = math.nan
    low: float = math.nan
    high: float = math.nan

    @property
    def is_known(self) -> bool:
        """Whether the interval says that there is a difference."""
        return self.low > 0.0 or self.high < 0.0


UNPRICED = Price()
Rounds = Mapping[Plan, Sequence[float]]


def time_plans(
    session: Session, plans: Sequence[Plan], now: Callable[[], float] = time.perf_counter
) -> dict[Plan, list[float]]:
    """Seconds of each plan in rounds that alternate in order; empty where that would take too long."""
    distinct = list(dict.fromkeys(plans))
    started = now()
    for plan in distinct:  # the first run of a plan never counts: kernels are chosen, caches filled
        session.run(plan)
    a_round = now() - started
    if a_round * FEWEST_ROUNDS > TOO_SLOW_SECONDS:
        return {}
    seconds: dict[Plan, list[float]] = {plan: [] for plan in distinct}
    started = now()
    for done in range(MOST_ROUNDS):
        if done >= FEWEST_ROUNDS and now() - started > BUDGET_SECONDS:
            break
        for plan in distinct if done % 2 == 0 else reversed(distinct):
            seconds[plan].append(session.run(plan)[0].seconds)
    return seconds


def price_of(rounds: Rounds, without: Plan, with_it: Plan) -> Price:
    """What `without` takes longer than `with_it`."""
    if without not in rounds or with_it not in rounds:
        return UNPRICED
    scale = float(np.median(rounds[with_it]))
    ratios = np.array(rounds[without]) / np.array(rounds[with_it])
    low, high = median_interval(ratios, seed=0)
    return Price((float(np.median(ratios)) - 1.0) * scale, (low - 1.0) * scale, (high - 1.0) * scale)


def share_of_gain(rounds: Rounds, nothing: Plan, everything: Plan, kept: Plan) -> float:
    """The part of what everything saves over nothing that a plan keeps; NaN where noise drowns it."""
    if kept == everything:
        return 1.0
    gain = price_of(rounds, nothing, everything)
    if not gain.low > 0.0:
        return math.nan
    first, whole, part = (np.array(rounds[plan]) for plan in (nothing, everything, kept))
    shares = (first - part) / np.median(first - whole)
    low, high = median_interval(shares, seed=0)
    share = float(np.median(shares))
    return share if max(high - share, share - low) <= WIDEST_SHARE else math.nan
