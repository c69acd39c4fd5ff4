"""Share out drift that many choices make together, and offer bargains of drift against latency."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from align.bisecting.bisection import Bisection, On
from align.bisecting.trial import TrialResult
from align.dumpers.errors import UsageError
from align.progress import Stage

SUBSETS_A_CHOICE, FEWEST_SUBSETS = 3, 24


@dataclass(frozen=True, slots=True)
class ShareRow:
    """One choice's share of the squared drift, with a 90 % interval as fractions of the whole, and what it costs."""

    choice: str
    fraction: float
    low: float
    high: float
    seconds_cost: float


@dataclass(frozen=True, slots=True)
class Bargain:
    """Switch these off: so much drift is left, so many seconds a run are lost."""

    off: tuple[str, ...]
    drift: float
    seconds_lost: float


@dataclass(frozen=True, slots=True)
class SharedGuilt:
    """Shares, bargains (cheapest first), the one picked by the user's limits with the trial that tried it, and why the
    shares may not hold."""

    shares: tuple[ShareRow, ...]
    bargains: tuple[Bargain, ...]
    picked: Bargain | None
    tried: TrialResult | None
    subsets: int
    goodness: float
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the user accepts: seconds lost a run, drift; inf where not told."""

    seconds: float = math.inf
    drift: float = math.inf

    @property
    def is_given(self) -> bool:
        """Whether there is something to pick by."""
        return math.isfinite(self.seconds) or math.isfinite(self.drift)


def share_out(bisection: Bisection, limits: Limits, stage: Stage) -> SharedGuilt:
    """Fit squared drift on random subsets of the suspects, as many as the budget of trials has room for.

    Raises UsageError without scikit-learn.
    """
    try:
        from align.compare.attribution import fit_shares, plan_subsets
        from align.compare.attribution_pareto import pareto
    except ImportError as exc:
        raise UsageError("sharing out drift needs scikit-learn", "pip install 'npu-align[attribution]'") from exc
    choices = [str(choice) for choice in bisection.question.suspects]
    count = min(max(FEWEST_SUBSETS, SUBSETS_A_CHOICE * len(choices)), max(FEWEST_SUBSETS, bisection.options.max_trials))
    subsets = plan_subsets(choices, count, 0)
    results = _run(bisection, subsets, stage)
    fitted = fit_shares(subsets, [result.drift**2 for result in results], choices)
    costs = _costs(subsets, [result.seconds for result in results], choices)
    bargains = tuple(
        Bargain(tuple(sorted(point.off)), point.drift, point.latency_loss) for point in pareto(fitted, costs)
    )
    total = sum(share.squared_error for share in fitted.shares) or math.nan
    rows = tuple(
        ShareRow(share.choice, share.fraction, share.low / total, share.high / total, costs[share.choice])
        for share in fitted.shares
    )
    picked = pick(bargains, limits)
    tried = bisection.result(frozenset(choices) - set(picked.off)) if picked is not None else None
    return SharedGuilt(rows, bargains, picked, tried, len(subsets), fitted.goodness, fitted.warnings)


def _run(bisection: Bisection, subsets: Sequence[On], stage: Stage) -> list[TrialResult]:
    results: list[TrialResult] = []
    width = bisection.workers.width
    for start in range(0, len(subsets), width):
        results.extend(bisection.run_all(subsets[start : start + width]))
        stage.reach(len(results))
    return results


def _costs(subsets: Sequence[On], seconds: Sequence[float], choices: Sequence[str]) -> dict[str, float]:
    """Seconds that switching each choice off costs: difference of medians of the trials without and with it."""
    costs = {}
    for choice in choices:
        with_it = [t for on, t in zip(subsets, seconds, strict=True) if choice in on and math.isfinite(t)]
        without = [t for on, t in zip(subsets, seconds, strict=True) if choice not in on and math.isfinite(t)]
        costs[choice] = _difference(without, with_it)
    return costs


NOTHING_MEASURABLE = 1e-9
"""Seconds a choice is taken to cost whose price drowns in noise: above zero, so that fewer are switched off."""


def _difference(without: Sequence[float], with_it: Sequence[float]) -> float:
    """Difference of medians, where it exceeds twice its standard error (1.2533 sigma / sqrt(n) for a median)."""
    if min(len(without), len(with_it)) < 3:
        return NOTHING_MEASURABLE
    difference = statistics.median(without) - statistics.median(with_it)
    error = 1.2533 * math.hypot(*(statistics.stdev(times) / math.sqrt(len(times)) for times in (without, with_it)))
    return difference if abs(difference) > 2.0 * error else NOTHING_MEASURABLE


def pick(bargains: Sequence[Bargain], limits: Limits) -> Bargain | None:
    """The least drift for the seconds accepted; with a limit on drift, the cheapest that keeps it. None fits: None."""
    fitting = [
        bargain for bargain in bargains if bargain.seconds_lost <= limits.seconds and bargain.drift <= limits.drift
    ]
    if not fitting or not limits.is_given:
        return None
    return min(fitting, key=lambda bargain: bargain.drift if math.isinf(limits.drift) else bargain.seconds_lost)
