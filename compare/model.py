"""What a comparison found (measures, never a verdict) and what we say of it (verdicts), as frozen values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from align.dumpers.model import NodeKey, NodeKind, NodeRecord, OpClass


@dataclass(frozen=True, slots=True)
class Measures:
    """Distance of a candidate tensor from a reference tensor; every figure is over the positions where both are finite.

    cosine_distance   1 - cos = half the squared distance of the two unit vectors (accurate where cos rounds to 1)
    max_abs           max |c - r|, at `max_abs_index`
    rel_l2            ||c - r|| / ||r||
    mare, mere        max and mean of |c - r| / (|r| + 1e-7)      (CANN operator precision standard)
    rmse              sqrt(mean (c - r)^2)
    ulp_*             |c - r| in units of the last place of the reference value rounded to the candidate's dtype
    share_close       share of elements with relative error below 1e-3
    snr_db            10 log10(sum r^2 / sum (c - r)^2)
    small_*           the small-value domain of the CANN standard: elements with |r| below the dtype's threshold,
                      and how many of them miss the absolute bound; `mare_normal`, `mere_normal`, are over the others
    zero_rows         rows (last axis, two elements or more) that are all zero in the candidate and not in the reference
    mismatched        positions where one side is NaN, +Inf or -Inf and the other side is not the same
    Zero reference: rel_l2 is 0 if the candidate is zero too, else inf; cosine_distance 0 resp. 1. Empty, or finite
    nowhere on both sides: every error 0, share_close 1, snr_db inf, means and extremes NaN, index ().
    """

    count: int
    cosine_distance: float
    max_abs: float
    max_abs_index: tuple[int, ...]
    rel_l2: float
    mare: float
    mere: float
    rmse: float
    ulp_p50: float
    ulp_p99: float
    ulp_max: float
    share_close: float
    snr_db: float
    mare_normal: float
    mere_normal: float
    small_count: int
    small_errors: int
    zero_rows: int
    nan_candidate: int
    nan_reference: int
    inf_candidate: int
    inf_reference: int
    mismatched: int
    mean_candidate: float
    mean_reference: float
    min_candidate: float
    min_reference: float
    max_candidate: float
    max_reference: float

    @property
    def cosine(self) -> float:
        """Cosine similarity, for readers; judge on `cosine_distance`."""
        return 1.0 - self.cosine_distance


@dataclass(frozen=True, slots=True)
class ErrorDetail:
    """Where and how one node's error lies: computed for the nodes a reader will look at.

    `histogram` counts |c - r| by decade bins of width 1/4 from 1e-12 (first bin: below, incl. 0) to 1e6;
    `quantiles` are (probability, |c - r|) pairs; `worst` are (index, candidate, reference) of the largest errors;
    `axes` are (axis, extent, share): the share of squared error that the worst eighth of that axis' slices carry.
    """

    histogram: tuple[int, ...]
    quantiles: tuple[tuple[float, float], ...]
    worst: tuple[tuple[tuple[int, ...], float, float], ...]
    axes: tuple[tuple[int, int, float], ...]


class Pairing(StrEnum):
    """How two nodes were matched."""

    EXACT = "exact"
    PREFIX = "prefix"  # the same key after wrapper prefixes (`module.`, `_orig_mod.`) were dropped
    RULE = "rule"  # by the user's rules file
    FUSED_OUTPUT = "fused-output"  # the fused kernel's output stands for the last original node
    FUSED_AWAY = "fused-away"  # interior of a fused site: no tensor exists in the candidate
    MISSING = "missing"  # no partner
    EXTRA = "extra"  # only in the candidate


@dataclass(frozen=True, slots=True)
class NodeComparison:
    """Measures of one node: candidate against reference beside baseline against reference. Holds no verdict.

    `candidate` is None when there is nothing to measure (fused-away, missing, statistics only, shape mismatch: see
    `pairing` and `problem`); `baseline` is None without a baseline run.
    """

    key: NodeKey
    order: int
    kind: NodeKind
    op_class: OpClass
    type_name: str
    dtype: str
    shape: tuple[int, ...]
    pairing: Pairing
    candidate: Measures | None = None
    baseline: Measures | None = None
    site: str = ""
    problem: str = ""
    producers: tuple[NodeKey, ...] = ()

    @property
    def excess(self) -> float:
        """Candidate's relative L2 error over the baseline's; NaN without both, 1 when both are zero."""
        if self.candidate is None or self.baseline is None:
            return math.nan
        return ratio(self.candidate.rel_l2, self.baseline.rel_l2)


def ratio(value: float, base: float) -> float:
    """value / base with 0/0 = 1 and x/0 = inf."""
    if base == 0.0:
        return 1.0 if value == 0.0 else math.inf
    return value / base


class Status(StrEnum):
    """What we say of a node."""

    PASS = "pass"  # noqa: S105
    DRIFT = "drift"
    NONFINITE = "nonfinite"
    COLLAPSED = "collapsed"
    MISMATCH = "mismatch"
    MISSING = "missing"
    FUSED_AWAY = "fused-away"
    REFERENCE_SUSPECT = "reference-suspect"
    UNKNOWN = "unknown"  # nothing to judge by: no tensor kept, meta tensor

    @property
    def is_fault(self) -> bool:
        """Whether this status makes a run fail."""
        return self in (Status.DRIFT, Status.NONFINITE, Status.COLLAPSED, Status.MISMATCH, Status.MISSING)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One status with the one figure it rests on: `metric` was `value`, allowed `limit`; `why` says it in words."""

    key: NodeKey
    status: Status
    metric: str = ""
    value: float = math.nan
    limit: float = math.nan
    why: str = ""


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much was compared: nodes and bytes of the reference run, and how many found a measured partner."""

    nodes: int
    compared: int
    fused_away: int
    missing: int
    nbytes: int
    nbytes_compared: int

    @property
    def share(self) -> float:
        """Share of the nodes that were compared or are accounted for by a fusion."""
        return (self.compared + self.fused_away) / self.nodes if self.nodes else 1.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """All nodes of a three-way comparison in execution order, with coverage; verdicts are kept apart."""

    nodes: tuple[NodeComparison, ...]
    coverage: Coverage
    has_baseline: bool
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a policy says of a comparison: one verdict a node (same order), the worst of them, and where drift begins.

    `outputs` are the keys that decide the run (final outputs); `origins` are the first faulty nodes whose ancestors
    all pass, in execution order.
    """

    policy: str
    verdicts: tuple[Verdict, ...]
    status: Status
    why: str
    outputs: tuple[NodeKey, ...] = ()
    origins: tuple[NodeKey, ...] = ()


__all__ = [
    "Comparison",
    "Coverage",
    "ErrorDetail",
    "Judgement",
    "Measures",
    "NodeComparison",
    "NodeRecord",
    "Pairing",
    "Status",
    "Verdict",
    "ratio",
]
