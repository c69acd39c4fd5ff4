"""Time two runs so that the answer can be believed: warm up until stable, alternate, report medians and an interval.

The ratio is taken pair by pair (round k of one against round k of the other), so slow drift of the machine cancels.
Its interval is a percentile bootstrap of the median (Efron and Tibshirani, An Introduction to the Bootstrap, ch. 13),
widened to the exact order-statistic interval where that is wider: with 7 rounds the bootstrap alone names a winner
among two equal runs in one comparison of ten (simulated), not in one of twenty.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from align.reports.model import Confidence, Quantiles, Timing

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TimingOptions:
    """How long to measure: rounds between the bounds, as many as fit into `budget_seconds`."""

    min_rounds: int = 7
    max_rounds: int = 60
    budget_seconds: float = 8.0
    max_warm_up: int = 8
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Rounds:
    """Seconds of alternating rounds of baseline and candidate, in order, and of each one's discarded warm-up."""

    baseline: tuple[float, ...]
    candidate: tuple[float, ...]
    warm_up_baseline: tuple[float, ...] = ()
    warm_up_candidate: tuple[float, ...] = ()


Run = Callable[[], float]
"""Does one round and returns its seconds, device synchronised at both ends."""


def measure_rounds(baseline: Run, candidate: Run, options: TimingOptions) -> Rounds:
    """Alternate the two runs after warming both up.

    The number of rounds depends on time alone, never on the figures: stopping when they look good makes winners.
    """
    warm_baseline, warm_candidate = _warm_up(baseline, options), _warm_up(candidate, options)
    started = time.perf_counter()  # compiling in the warm-up must not eat up the rounds
    first: list[float] = []
    second: list[float] = []
    while len(first) < options.max_rounds:
        spent = time.perf_counter() - started
        if len(first) >= options.min_rounds and spent > options.budget_seconds:
            break
        if len(first) % 2 == 0:  # A B B A: neither always runs in the other's wake
            first.append(baseline())
            second.append(candidate())
        else:
            second.append(candidate())
            first.append(baseline())
    return settled(Rounds(tuple(first), tuple(second), tuple(warm_baseline), tuple(warm_candidate)))


def settled(rounds: Rounds, *, slow: float = 2.0) -> Rounds:
    """Count leading rounds still over `slow` times the median of the rest as warm-up, at most a third of all."""
    most = len(rounds.baseline) // 3
    late = 0
    for index in range(most):
        if any(times[index] > slow * float(np.median(times[most:])) for times in (rounds.baseline, rounds.candidate)):
            late = index + 1
    return Rounds(
        rounds.baseline[late:], rounds.candidate[late:],
        (*rounds.warm_up_baseline, *rounds.baseline[:late]), (*rounds.warm_up_candidate, *rounds.candidate[:late]),
    )  # fmt: skip


def _warm_up(run: Run, options: TimingOptions) -> list[float]:
    """Run until two rounds in a row agree within 10 %; the first rounds never count."""
    seconds = [run()]
    while len(seconds) < options.max_warm_up:
        seconds.append(run())
        if abs(seconds[-1] - seconds[-2]) <= 0.1 * seconds[-2]:
            break
    return seconds


def summarise(rounds: Rounds, *, seed: int = 0) -> Timing:
    """Medians, spread and the speed-up with its interval; `cannot tell` when the interval holds no clear winner."""
    ratios = np.array(rounds.baseline) / np.array(rounds.candidate)
    low, high = median_interval(ratios, seed=seed)
    confidence, warnings = confidence_of(low, high), unsteadiness(rounds)
    if len(ratios) < FEWEST_ROUNDS:
        confidence = Confidence.CANNOT_TELL
        warnings = (
            f"only {len(ratios)} rounds: fewer than {FEWEST_ROUNDS} cannot name a winner; raise min_rounds",
            *warnings,
        )
    speedup = float(np.median(ratios))
    return Timing(
        quantiles(rounds.baseline), quantiles(rounds.candidate), speedup, low, high, confidence, warnings=warnings
    )


def quantiles(seconds: Sequence[float]) -> Quantiles:
    """Median and spread of rounds."""
    p10, median, p90 = np.quantile(np.array(seconds), [0.1, 0.5, 0.9])
    return Quantiles(float(median), float(p10), float(p90), len(seconds))


FEWEST_ROUNDS = 6
"""With fewer, even the interval from the least to the greatest round holds the median less than 95 % of the time."""


def median_interval(values: Floats, *, seed: int) -> tuple[float, float]:
    """The bootstrap interval of the median or the exact one, whichever reaches further, on each side."""
    low, high = bootstrap_interval(values, seed=seed)
    exact_low, exact_high = order_interval(values)
    return min(low, exact_low), max(high, exact_high)


def bootstrap_interval(
    values: Floats, *, seed: int, draws: int = 2000, confidence: float = 0.95
) -> tuple[float, float]:
    """Percentile bootstrap interval of the median."""
    random = np.random.default_rng(seed)
    picks = random.integers(0, len(values), size=(draws, len(values)))
    medians = np.median(values[picks], axis=1)
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(medians, [tail, 1.0 - tail])
    return float(low), float(high)


def order_interval(values: Floats, *, confidence: float = 0.95) -> tuple[float, float]:
    """Interval of the median between two order statistics, exact for any continuous distribution (the sign test).

    The k-th least and k-th greatest, with the greatest k for which 2 P(Binomial(n, 1/2) < k) <= 1 - confidence.
    """
    ordered = np.sort(values)
    count, tail, below = len(ordered), 0.0, 0
    for index in range(count):
        tail += math.comb(count, index) / 2.0**count
        if 2.0 * tail > 1.0 - confidence:
            break
        below = index
    return float(ordered[below]), float(ordered[count - 1 - below])


def confidence_of(low: float, high: float, *, same_within: float = 0.02) -> Confidence:
    """SAME if the whole interval is within 2 % of 1, else a winner only if the whole interval says so."""
    if low > 1.0 - same_within and high < 1.0 + same_within:
        return Confidence.SAME
    if low > 1.0:
        return Confidence.FASTER
    if high < 1.0:
        return Confidence.SLOWER
    return Confidence.CANNOT_TELL


def unsteadiness(rounds: Rounds) -> tuple[str, ...]:
    """Name the cause when rounds vary by more than 10 %: drift over time, spikes, or a compiling first round."""
    found = []
    for name, seconds, warm_up in (
        ("baseline", rounds.baseline, rounds.warm_up_baseline),
        ("candidate", rounds.candidate, rounds.warm_up_candidate),
    ):
        values = np.array(seconds)
        median = float(np.median(values))
        p10, p90 = np.quantile(values, [0.1, 0.9])
        if p90 - p10 > 0.1 * median:
            found.append(f"{name} rounds vary by {100 * (p90 - p10) / median:.0f} %: {_cause(values, median)}")
        if warm_up and max(warm_up) > _COMPILING * median:
            times = f"{max(warm_up) / median:.0f} times its median"
            found.append(f"a first round of the {name}, discarded, took {times}: compilation or first use of a shape")
    return tuple(found)


_COMPILING = 5.0


def _cause(values: Floats, median: float) -> str:
    half = len(values) // 2
    early, late = float(np.median(values[:half])), float(np.median(values[half:]))
    if abs(late - early) > 0.08 * median and _is_ordered(values):
        return "drift over time (clocks or heat)"
    lower, upper = np.quantile(values, [0.1, 0.7])
    if upper - lower <= 0.1 * median:  # but for the slowest three of ten the rounds agree
        return "spikes (other processes)"
    return "no single cause found; close other programs and repeat"


def _is_ordered(values: Floats) -> bool:
    """Whether order in time explains the variation: rank correlation with it above 0.6."""
    ranks = np.argsort(np.argsort(values))
    return bool(abs(np.corrcoef(ranks, np.arange(len(values)))[0, 1]) > 0.6)
