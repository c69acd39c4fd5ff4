"""Share out drift that many choices make together, and offer bargains of drift against latency."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from align.bisecting.bisection import Question, plan_with
from align.bisecting.trial import Trials
from align.dumpers.errors import UsageError
from align.progress import Stage


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
    """Shares, bargains (cheapest first), the one picked by the user's limits, and why the shares may not hold."""

    shares: tuple[ShareRow, ...]
    bargains: tuple[Bargain, ...]
    picked: Bargain | None
    goodness: float
    warnings: tuple[str, ...]


def share_out(trials: Trials, question: Question, limits: tuple[float, float], stage: Stage) -> SharedGuilt:
    """Fit squared drift on random subsets of the suspects; `limits` are (latency loss in seconds, drift).

    Raises UsageError without scikit-learn.
    """
    try:
        from align.compare.attribution import fit_shares, plan_subsets
        from align.compare.attribution_pareto import pareto
    except ImportError as exc:
        raise UsageError("sharing out drift needs scikit-learn", "pip install 'npu-align[attribution]'") from exc
    choices = [str(choice) for choice in question.suspects]
    subsets = plan_subsets(choices, max(24, 3 * len(choices)), 0)
    errors, seconds = [], []
    for done, on in enumerate(subsets):
        result = trials.run(plan_with(question, on))
        errors.append(result.drift**2)
        seconds.append(result.seconds)
        stage.reach(done + 1)
    fitted = fit_shares(subsets, errors, choices)
    costs = _costs(subsets, seconds, choices)
    points = pareto(fitted, costs)
    bargains = tuple(Bargain(tuple(sorted(point.off)), point.drift, point.latency_loss) for point in points)
    total = sum(share.squared_error for share in fitted.shares) or math.nan
    rows = tuple(
        ShareRow(share.choice, share.fraction, share.low / total, share.high / total, costs[share.choice])
        for share in fitted.shares
    )
    return SharedGuilt(rows, bargains, _pick(bargains, limits), fitted.goodness, fitted.warnings)


def _costs(subsets: list[frozenset[str]], seconds: list[float], choices: list[str]) -> dict[str, float]:
    """Seconds that switching each choice off costs: difference of medians of the trials without and with it."""
    costs = {}
    for choice in choices:
        with_it = [t for on, t in zip(subsets, seconds, strict=True) if choice in on and math.isfinite(t)]
        without = [t for on, t in zip(subsets, seconds, strict=True) if choice not in on and math.isfinite(t)]
        costs[choice] = statistics.median(without) - statistics.median(with_it) if with_it and without else 0.0
    return costs


def _pick(bargains: tuple[Bargain, ...], limits: tuple[float, float]) -> Bargain | None:
    seconds, drift = limits
    if math.isinf(seconds) and math.isinf(drift):
        return None
    fitting = [bargain for bargain in bargains if bargain.seconds_lost <= seconds and bargain.drift <= drift]
    if not fitting:
        return None
    return min(fitting, key=lambda bargain: bargain.drift if math.isinf(drift) else bargain.seconds_lost)
