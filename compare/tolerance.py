"""Limits nobody has to guess: what mere rounding does to each node, from K runs of the baseline with last-place noise.

Noise model: the perturb tap adds to each node's output, at random, minus one, zero or one unit of the last place
(stochastic rounding), independently a node and a run. Each run is compared with the reference as the candidate is. A
candidate that differs from the baseline by rounding alone has an error e from about the same distribution; ln e is near
normal, as e is a root of a sum of many independent squares times common amplification.

Formula: one-sided tolerance bound of the normal distribution on ln e with K runs (Natrella, Experimental Statistics,
NBS Handbook 91, 1963, section 2-2.3; also the NIST/SEMATECH e-Handbook, 7.2.6.3):

    limit = exp(mean + k s),   k = (z_p + sqrt(z_p^2 - a b)) / a,   a = 1 - z_c^2 / (2 (K - 1)),   b = z_p^2 - z_c^2 / K

With confidence c (0.95) at least the share p (0.9999) of rounding-only candidates lies below. K = 8 gives k = 6.7. A
bound free of distribution needs K >= ln(1-c)/ln(p) runs: 59 for the 0.95 quantile, 29,956 for this one, so the fit is
what a user can afford. s is taken as no less than the median s over all nodes: with K = 8 a single node's s may be
half or twice the truth. Run-to-run nondeterminism is added in squares. Fewer than 4 runs are refused.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from align.compare.model import Comparison
from align.dumpers.errors import UsageError
from align.dumpers.model import NodeKey

COVERAGE = 0.9999
CONFIDENCE = 0.95
FEWEST_RUNS = 4


@dataclass(frozen=True, slots=True)
class Spread:
    """Errors of one node against the reference in each perturbed run: relative L2, and largest absolute error."""

    key: NodeKey
    rel_l2: tuple[float, ...]
    max_abs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class NodeLimit:
    """Errors that rounding alone explains at a node: bounds, the median run (`typical`), and the rerun difference."""

    key: NodeKey
    rel_l2: float
    max_abs: float
    typical: float
    nondeterminism: float
    runs: int


@dataclass(frozen=True, slots=True)
class NoiseFloors:
    """Limits of all nodes, with the share of rounding-only runs they cover and the confidence of that."""

    limits: tuple[NodeLimit, ...]
    coverage: float = COVERAGE
    confidence: float = CONFIDENCE

    def by_key(self) -> Mapping[NodeKey, NodeLimit]:
        """Limits by node."""
        return {limit.key: limit for limit in self.limits}


def noise_floors(
    spreads: Sequence[Spread],
    *,
    reruns: Mapping[NodeKey, float] | None = None,
    coverage: float = COVERAGE,
    confidence: float = CONFIDENCE,
) -> NoiseFloors:
    """Turn K errors a node into limits. `reruns` holds each node's relative L2 between two equal baseline runs.

    Nodes whose error is zero in most runs get no limit. Raises UsageError with fewer than 4 runs.
    """
    for spread in spreads:
        if len(spread.rel_l2) < FEWEST_RUNS:
            raise UsageError(
                f"{len(spread.rel_l2)} perturbed runs at {spread.key}",
                f"make at least {FEWEST_RUNS}; 8 give useful limits",
            )
    usual = tuple(
        _usual_deviation([values for s in spreads for values in (getattr(s, name),)]) for name in ("rel_l2", "max_abs")
    )
    limits = (_limit(spread, usual, (reruns or {}).get(spread.key, 0.0), (coverage, confidence)) for spread in spreads)
    return NoiseFloors(tuple(limit for limit in limits if limit is not None), coverage, confidence)


def floors_of_runs(perturbed: Sequence[Comparison], rerun: Comparison | None = None) -> NoiseFloors:
    """Limits from K comparisons of perturbed baselines with the reference.

    `rerun` compares one baseline run with another (candidate, reference), to measure nondeterminism.
    """
    whole: dict[NodeKey, list[float]] = defaultdict(list)
    largest: dict[NodeKey, list[float]] = defaultdict(list)
    for comparison in perturbed:
        for node in comparison.nodes:
            if node.candidate is not None and math.isfinite(node.candidate.rel_l2):
                whole[node.key].append(node.candidate.rel_l2)
                largest[node.key].append(node.candidate.max_abs)
    complete = (key for key, values in whole.items() if len(values) == len(perturbed))
    spreads = [Spread(key, tuple(whole[key]), tuple(largest[key])) for key in complete]
    return noise_floors(spreads, reruns=nondeterminism(rerun) if rerun is not None else {})


def nondeterminism(rerun: Comparison) -> dict[NodeKey, float]:
    """Relative L2 between two runs of one plan, for the nodes where it is not zero."""
    seen = ((node.key, node.candidate.rel_l2) for node in rerun.nodes if node.candidate is not None)
    return {key: value for key, value in seen if value > 0.0}


def tolerance_factor(runs: int, coverage: float = COVERAGE, confidence: float = CONFIDENCE) -> float:
    """k of the one-sided normal tolerance bound (Natrella's approximation)."""
    normal = statistics.NormalDist()
    z_p, z_c = normal.inv_cdf(coverage), normal.inv_cdf(confidence)
    a = 1.0 - z_c**2 / (2 * (runs - 1))
    b = z_p**2 - z_c**2 / runs
    return (z_p + math.sqrt(z_p**2 - a * b)) / a


def _limit(spread: Spread, usual: tuple[float, ...], rerun: float, quantile: tuple[float, float]) -> NodeLimit | None:
    whole = _bound(spread.rel_l2, usual[0], quantile)
    largest = _bound(spread.max_abs, usual[1], quantile)
    if whole is None or largest is None:
        return None
    typical = statistics.median(spread.rel_l2)
    # Nondeterminism moves the largest error in the same proportion as the whole.
    grown = math.hypot(1.0, rerun / whole)
    return NodeLimit(spread.key, whole * grown, largest * grown, typical, rerun, len(spread.rel_l2))


def _bound(errors: Sequence[float], usual: float, quantile: tuple[float, float]) -> float | None:
    logs = [math.log(error) for error in errors if error > 0.0]
    if 2 * len(logs) <= len(errors):
        return None
    k = tolerance_factor(max(len(logs), FEWEST_RUNS), *quantile)
    return math.exp(statistics.fmean(logs) + k * max(_deviation(logs), usual))


def _usual_deviation(errors: Sequence[Sequence[float]]) -> float:
    logs = [[math.log(error) for error in values if error > 0.0] for values in errors]
    return statistics.median([_deviation(values) for values in logs if len(values) > 1] or [0.0])


def _deviation(logs: Sequence[float]) -> float:
    if len(logs) < 2:
        return 0.0
    mean = math.fsum(logs) / len(logs)  # statistics.stdev is exact in fractions, and a hundred times slower
    return math.sqrt(math.fsum((log - mean) ** 2 for log in logs) / (len(logs) - 1))
