"""Tell how an error grows over denoising steps or tokens: flat, as a square root, linearly, or exponentially.

Each law is fitted by least squares on the logarithm (errors are multiplicative) over n = 1, 2, ... of the given steps:

    flat         ln e = a                 rounding that does not accumulate
    square root  ln e = a + ln(n) / 2     independent errors that add up
    linear       ln e = a + ln(n)         one systematic error that adds up
    exponential  ln e = a + b n, b > 0    an instability: each step amplifies the last one's error

The law with the least Bayesian information criterion is taken; the exponential one pays for its second parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from align.compare.model import Comparison
from align.dumpers.model import NodeKey

FEWEST_POINTS = 4


class Law(StrEnum):
    """How an error depends on the step."""

    FLAT = "flat"
    SQUARE_ROOT = "square-root"
    LINEAR = "linear"
    EXPONENTIAL = "exponential"
    UNKNOWN = "unknown"  # fewer than four steps with an error above zero


@dataclass(frozen=True, slots=True)
class Growth:
    """A fitted law; `sentence` says it.

    rate      growth a step: relative for EXPONENTIAL (0.1 is 10 %), the error after one step for the roots and lines,
              0 for FLAT
    residual  RMS of ln(error / fit)
    """

    law: Law
    rate: float
    residual: float
    points: int
    sentence: str


def fit_growth(errors: Sequence[tuple[int, float]]) -> Growth:
    """Fit (step, error) pairs; errors that are zero, NaN or infinite are left out. Steps count from their first."""
    usable = [(step, error) for step, error in errors if error > 0.0 and math.isfinite(error)]
    if len(usable) < FEWEST_POINTS:
        return Growth(
            Law.UNKNOWN, math.nan, math.nan, len(usable), f"{len(usable)} steps with an error: too few to tell a growth"
        )
    begin = min(step for step, _ in errors)
    counts = [float(step - begin + 1) for step, _ in usable]
    logs = [math.log(error) for _, error in usable]
    fits = [_fit_power(law, power, counts, logs) for law, power in _POWERS] + [_fit_exponential(counts, logs)]
    best = min(fits, key=lambda fit: _criterion(fit, len(logs)))
    return replace(_describe(best, len(logs)), points=len(logs))


def errors_by_step(comparison: Comparison, key: NodeKey) -> tuple[tuple[int, float], ...]:
    """(step, candidate's relative L2) of one node over all steps at which it was measured."""
    same = (
        (node.key.step, node.candidate.rel_l2)
        for node in comparison.nodes
        if node.candidate is not None and replace(node.key, step=0) == replace(key, step=0)
    )
    return tuple(sorted(same))


def growth_of(comparison: Comparison, key: NodeKey) -> Growth:
    """Growth of one node's error over the steps; the step in the key does not matter."""
    return fit_growth(errors_by_step(comparison, key))


@dataclass(frozen=True, slots=True)
class _Fit:
    law: Law
    start: float  # a
    slope: float  # b, exponential only
    squares: float
    parameters: int


_POWERS = ((Law.FLAT, 0.0), (Law.SQUARE_ROOT, 0.5), (Law.LINEAR, 1.0))


def _fit_power(law: Law, power: float, counts: Sequence[float], logs: Sequence[float]) -> _Fit:
    rest = [log - power * math.log(n) for n, log in zip(counts, logs, strict=True)]
    start = math.fsum(rest) / len(rest)
    return _Fit(law, start, 0.0, math.fsum((value - start) ** 2 for value in rest), 1)


def _fit_exponential(counts: Sequence[float], logs: Sequence[float]) -> _Fit:
    middle, level = math.fsum(counts) / len(counts), math.fsum(logs) / len(logs)
    spread = math.fsum((n - middle) ** 2 for n in counts)
    slope = (
        math.fsum((n - middle) * (log - level) for n, log in zip(counts, logs, strict=True)) / spread if spread else 0.0
    )
    slope = max(slope, 0.0)
    start = level - slope * middle
    squares = math.fsum((log - start - slope * n) ** 2 for n, log in zip(counts, logs, strict=True))
    return _Fit(Law.EXPONENTIAL, start, slope, squares, 2)


def _criterion(fit: _Fit, points: int) -> float:
    return points * math.log(fit.squares / points + 1e-6) + fit.parameters * math.log(points)


def _describe(fit: _Fit, points: int) -> Growth:
    residual = math.sqrt(fit.squares / points)
    rate, sentence = _SENTENCES[fit.law](fit)
    return Growth(fit.law, rate, residual, points, f"{sentence} over {points} steps")


def _say_flat(fit: _Fit) -> tuple[float, str]:
    return 0.0, f"the error stays at {math.exp(fit.start):.3g}"


def _say_root(fit: _Fit) -> tuple[float, str]:
    return math.exp(fit.start), f"the error grows as {math.exp(fit.start):.3g} times the square root of the steps"


def _say_linear(fit: _Fit) -> tuple[float, str]:
    return math.exp(fit.start), f"the error grows by {math.exp(fit.start):.3g} a step"


def _say_exponential(fit: _Fit) -> tuple[float, str]:
    rate = math.expm1(fit.slope)
    doubling = math.log(2.0) / fit.slope if fit.slope else math.inf
    return rate, f"the error grows by {rate:.1%} a step (doubles every {doubling:.3g})"


_SENTENCES: dict[Law, Callable[[_Fit], tuple[float, str]]] = {
    Law.FLAT: _say_flat,
    Law.SQUARE_ROOT: _say_root,
    Law.LINEAR: _say_linear,
    Law.EXPONENTIAL: _say_exponential,
}
