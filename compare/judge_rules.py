"""The rules of the policies on one node: each gives its figures against their limits, or none when nothing can be said.

What the letter of the CANN standard leaves open, and what is done here (tests/compare/test_judge.py states each):

* Tiny denominators. A ratio is taken to the baseline's error or to what one rounding explains, whichever is larger:
  eps/2 of the coarsest dtype on the way to the node for relative figures (at least 2^-16, what long float32 sums in
  the reference itself lose), one last place of the largest reference value for the largest error. A baseline that
  equals the reference bit for bit (float32 on the CPU) is no second opinion: there the absolute rule holds.
* Chance. Two runs of the same accuracy have errors whose ratio varies as sqrt(F(k, k)), k independent errors a tensor.
  Errors inside one tensor are correlated (a row shares its normaliser, a channel its bias), so k = sqrt(elements) is
  counted, and its root for the largest error. A ratio convicts only beyond its limit and beyond the 0.9999 quantile
  of chance, or beyond its limit where the absolute rule allows the baseline's error but not the candidate's.
* MARE. The largest of |d|/|r| is decided by the reference value nearest to zero: for two legitimate runs the ratio has
  a tail 1/x, so that one node in six would exceed 5. In its place the largest absolute error is held to the MARE
  limit: a local fault (one row, one head) moves it as much, chance does not. MARE itself is reported.
* MERE and ErrorCount are over elements near zero to a large part too: they convict only together with a relative L2
  error above the baseline's and above one rounding, with enough elements behind them.
* A candidate whose relative L2 and largest error do not exceed the baseline's is never at fault, under any policy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from align.compare.dataflow import Precision
from align.compare.model import Measures, NodeComparison, ratio
from align.compare.policy import Method, Policy, threshold_of
from align.compare.tolerance import NodeLimit

# What the float32 reference's own rounding reaches in long sums and deep networks: differences below cannot be blamed.
_REFERENCE_FLOOR = 2.0**-16
# Independent roundings add in squares; beyond this depth errors rather saturate (normalisation, residual paths).
_DEEPEST = 64
# sqrt of the 0.9999 quantile of F(k, k), by k.
_CHANCE = (
    (1, 6366.2), (2, 99.995), (3, 25.678), (4, 13.110), (6, 6.701), (8, 4.765), (12, 3.338), (16, 2.758), (24, 2.236),
    (32, 1.988), (64, 1.608), (128, 1.394), (256, 1.263), (1024, 1.123), (4096, 1.060),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a node against its limit, with the words for it. Over the limit means at fault."""

    metric: str
    value: float
    limit: float
    words: str

    @property
    def strain(self) -> float:
        """value / limit: above 1 is over; figures of one node are ranked by it."""
        return ratio(self.value, self.limit)

    @property
    def is_over(self) -> bool:
        """Whether the figure convicts."""
        return self.value > self.limit


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that a rule looks at: measures of both runs, the policy, the node's precision, its measured spread."""

    node: NodeComparison
    candidate: Measures
    baseline: Measures | None
    policy: Policy
    precision: Precision
    spread: NodeLimit | None = None

    @property
    def largest_reference(self) -> float:
        """Largest finite magnitude in the reference."""
        known = [abs(v) for v in (self.candidate.min_reference, self.candidate.max_reference) if math.isfinite(v)]
        return max(known, default=0.0)

    @property
    def rounding(self) -> float:
        """Relative error below which nobody is blamed: one rounding on the way to the node."""
        return max(self.precision.epsilon / 2, _REFERENCE_FLOOR)

    @property
    def last_place(self) -> float:
        """Absolute error below which nobody is blamed: one last place of the largest reference value."""
        return 2 * self.rounding * self.largest_reference

    @property
    def allowance(self) -> float:
        """Relative error the absolute rule allows in a network: T, or the coarsest epsilon times sqrt(depth)."""
        grown = self.precision.epsilon * math.sqrt(min(max(self.precision.depth, 1), _DEEPEST))
        return max(threshold_of(self.node.dtype), grown) * self.policy.share(self.node.op_class)


def is_nearer_than_baseline(seen: Evidence) -> bool:
    """Whether the candidate's error exceeds the baseline's neither on the whole nor anywhere."""
    base = seen.baseline
    return base is not None and seen.candidate.rel_l2 <= base.rel_l2 and seen.candidate.max_abs <= base.max_abs


def figures_of(seen: Evidence) -> tuple[Figure, ...]:
    """The figures of the policy's rule, never empty."""
    method = seen.policy.method
    if method is Method.COSINE:
        return _cosine(seen)
    if method is Method.SPREAD and seen.spread is not None:
        return _spread(seen, seen.spread)
    if method is Method.ABSOLUTE or seen.baseline is None or seen.baseline.rel_l2 == 0.0:
        return _absolute(seen)
    return _ratios(seen, seen.baseline)


def chance_ratio(independent: float) -> float:
    """The 0.9999 quantile of the ratio of two equally accurate runs' errors with so many independent errors each."""
    at = max(independent, 1.0)
    for (low, upper), (high, lower) in pairwise(_CHANCE):
        if at <= high:
            share = math.log(at / low) / math.log(high / low)
            return math.exp((1 - share) * math.log(upper) + share * math.log(lower))
    return _CHANCE[-1][1]


def _ratios(seen: Evidence, base: Measures) -> tuple[Figure, ...]:
    ours, policy, op_class = seen.candidate, seen.policy, seen.node.op_class
    independent = math.sqrt(ours.count)
    rmse = ours.rel_l2 / max(base.rel_l2, seen.rounding)
    peak = ratio(ours.max_abs, max(base.max_abs, seen.last_place))
    rmse_limit, peak_limit = (policy.ratio_limit(limit, op_class) for limit in (policy.rmse, policy.mare))
    if ours.rel_l2 <= seen.allowance or base.rel_l2 > seen.allowance:
        rmse_limit = max(rmse_limit, chance_ratio(independent))
        peak_limit = max(peak_limit, chance_ratio(math.sqrt(independent)))  # a maximum rests on still fewer elements
    figures = [
        Figure("rmse_ratio", rmse, rmse_limit, _beside("RMSE", ours.rmse, base.rmse, rmse)),
        Figure(
            "max_abs_ratio",
            peak,
            peak_limit,
            f"{_beside('largest error', ours.max_abs, base.max_abs, peak)}{_mare(ours, base)}",
        ),
    ]
    if rmse > 1.0:
        figures += _near_zero(seen, base)
    return tuple(figures)


def _near_zero(seen: Evidence, base: Measures) -> list[Figure]:
    """MERE and ErrorCount, where enough elements stand behind them."""
    ours, policy = seen.candidate, seen.policy
    figures = []
    # 1/|r| over the normal domain has 16 times the variance of |d|: a quarter of the independent errors
    independent = min(math.sqrt(ours.count) / 4, (ours.count - ours.small_count) / 64)
    if independent >= 1.0:
        mere = ours.mere_normal / max(base.mere_normal, seen.rounding)
        limit = max(policy.ratio_limit(policy.mere, seen.node.op_class), chance_ratio(independent))
        figures.append(Figure("mere_ratio", mere, limit, _beside("MERE", ours.mere_normal, base.mere_normal, mere)))
    excess = ours.small_errors - policy.small_errors * base.small_errors
    noise = 3.0 * math.sqrt(ours.small_errors + policy.small_errors**2 * base.small_errors)  # three sigma of two counts
    if excess > noise:
        count = ratio(ours.small_errors, base.small_errors)
        words = f"{ours.small_errors} of {ours.small_count} small values are off, {base.small_errors} in the baseline"
        figures.append(Figure("small_error_ratio", count, policy.small_errors, words))
    return figures


def _absolute(seen: Evidence) -> tuple[Figure, ...]:
    """The standard's letter (MERE < T, MARE < 10 T, no small-value error), or its limits on the network's scale."""
    ours, threshold = seen.candidate, threshold_of(seen.node.dtype) * seen.policy.share(seen.node.op_class)
    if ours.mere_normal < threshold and ours.mare_normal < 10 * threshold and ours.small_errors == 0:
        return (
            Figure("mere", ours.mere_normal, threshold, f"MERE is {ours.mere_normal:.3g}, MARE {ours.mare_normal:.3g}"),
        )
    allowance = seen.allowance
    peak = ratio(ours.max_abs, seen.largest_reference)
    return (
        Figure("rel_l2", ours.rel_l2, allowance, f"relative L2 is {ours.rel_l2:.3g} at depth {seen.precision.depth}"),
        Figure("peak", peak, 10 * allowance, f"the largest error is {peak:.3g} of the largest reference value"),
    )


def _cosine(seen: Evidence) -> tuple[Figure, ...]:
    ours, policy = seen.candidate, seen.policy
    share = policy.share(seen.node.op_class)
    distance, largest = share * policy.cosine_distance, share * policy.peak * seen.largest_reference
    peak = ratio(ours.max_abs, seen.largest_reference) if ours.max_abs else 0.0
    words = f"the largest error is {ours.max_abs:.3g}, {peak:.3g} of the largest reference value"
    return (
        Figure("cosine_distance", ours.cosine_distance, distance, f"1 - cos is {ours.cosine_distance:.3g}"),
        Figure("max_abs", ours.max_abs, largest, words),
    )


def _spread(seen: Evidence, spread: NodeLimit) -> tuple[Figure, ...]:
    ours = seen.candidate
    whole, largest = max(spread.rel_l2, seen.rounding), max(spread.max_abs, seen.last_place)
    words = f"in {spread.runs} perturbed baseline runs"
    return (
        Figure("rel_l2", ours.rel_l2, whole, f"relative L2 is {ours.rel_l2:.3g}, about {spread.typical:.3g} {words}"),
        Figure(
            "max_abs",
            ours.max_abs,
            largest,
            f"the largest error is {ours.max_abs:.3g}, typically below {spread.max_abs:.3g} {words}",
        ),
    )


def _beside(name: str, ours: float, base: float, times: float) -> str:
    is_ratio_to_baseline = math.isclose(ratio(ours, base), times, rel_tol=1e-2)
    measure = "the baseline's" if is_ratio_to_baseline else "what rounding explains"
    return f"{name} is {ours:.3g} beside the baseline's {base:.3g}, {times:.3g} times {measure}"


def _mare(ours: Measures, base: Measures) -> str:
    return f" (MARE {ours.mare_normal:.3g} beside {base.mare_normal:.3g})"
