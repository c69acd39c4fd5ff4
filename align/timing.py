"""Time two runs so that the answer can be believed: warm up until stable, alternate, report medians and an interval.

The ratio is taken pair by pair (round k of one against round k of the other), so slow drift of the machine cancels;
its interval is a percentile bootstrap of the median (Efron and Tibshirani, An Introduction to the Bootstrap, ch. 13).
"""

from __future__ import annotations

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
    """Seconds of alternating rounds of baseline and candidate, in order, and of the discarded warm-up."""

    baseline: tuple[float, ...]
    candidate: tuple[float, ...]
    warm_up: tuple[float, ...]


Run = Callable[[], float]
"""Does one round and returns its seconds, device synchronised at both ends."""


def measure_rounds(baseline: Run, candidate: Run, options: TimingOptions) -> Rounds:
    """Alternate the two runs after warming both up."""
    started = time.perf_counter()
    warm = _warm_up(baseline, options) + _warm_up(candidate, options)
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
    return Rounds(tuple(first), tuple(second), tuple(warm))


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
    baseline, candidate = np.array(rounds.baseline), np.array(rounds.candidate)
    ratios = baseline / candidate
    low, high = bootstrap_interval(ratios, seed=seed)
    speedup = float(np.median(ratios))
    return Timing(
        quantiles(rounds.baseline), quantiles(rounds.candidate), speedup, low, high,
        confidence_of(low, high), warnings=unsteadiness(rounds),
    )  # fmt: skip


def quantiles(seconds: Sequence[float]) -> Quantiles:
    """Median and spread of rounds."""
    p10, median, p90 = np.quantile(np.array(seconds), [0.1, 0.5, 0.9])
    return Quantiles(float(median), float(p10), float(p90), len(seconds))


def bootstrap_interval(values: Floats, *, seed: int, draws: int = 2000, confidence: float = 0.95) -> tuple[float, float]:
    """Percentile bootstrap interval of the median."""
    random = np.random.default_rng(seed)
    picks = random.integers(0, len(values), size=(draws, len(values)))
    medians = np.median(values[picks], axis=1)
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(medians, [tail, 1.0 - tail])
    return float(low), float(high)


def confidence_of(low: float, high: float, *, same_within: float = 0.02) -> Confidence:
    """A winner only if the whole interval says so; SAME only if the whole interval is within 2 % of 1."""
    if low > 1.0:
        return Confidence.FASTER
    if high < 1.0:
        return Confidence.SLOWER
    if low > 1.0 - same_within and high < 1.0 + same_within:
        return Confidence.SAME
    return Confidence.CANNOT_TELL


def unsteadiness(rounds: Rounds) -> tuple[str, ...]:
    """Name the cause when rounds vary by more than 10 %: drift over time, spikes, or a compiling first round."""
    found = []
    for name, seconds in (("baseline", rounds.baseline), ("candidate", rounds.candidate)):
        values = np.array(seconds)
        median = float(np.median(values))
        p10, p90 = np.quantile(values, [0.1, 0.9])
        if p90 - p10 <= 0.1 * median:
            continue
        found.append(f"{name} rounds vary by {100 * (p90 - p10) / median:.0f} %: {_cause(values, median)}")
    if rounds.warm_up and rounds.baseline and max(rounds.warm_up) > 5 * float(np.median(rounds.baseline)):
        found.append("a discarded warm-up round took over five times the median: compilation or first use of a shape")
    return tuple(found)


def _cause(values: Floats, median: float) -> str:
    half = len(values) // 2
    early, late = float(np.median(values[:half])), float(np.median(values[half:]))
    if abs(late - early) > 0.08 * median and _is_monotone(values):
        return "drift over time (clocks or heat)"
    if np.mean(values > 1.15 * median) <= 0.3:
        return "spikes (other processes)"
    return "no single cause found; close other programs and repeat"


def _is_monotone(values: Floats) -> bool:
    """Whether order explains the variation: rank correlation with time above 0.6."""
    ranks = np.argsort(np.argsort(values))
    return bool(abs(np.corrcoef(ranks, np.arange(len(values)))[0, 1]) > 0.6)
