"""Measures of a node whose bits are the same on both sides, from its statistics alone: nothing is read."""

from __future__ import annotations

import math

from align.compare.model import Measures
from align.dumpers.model import NodeRecord, Statistics


def measures_of_identical(record: NodeRecord) -> Measures:
    """Zero error at every element. The record must have statistics."""
    assert record.statistics is not None
    seen = record.statistics
    index = (0,) * len(record.shape) if seen.count > seen.nonfinite else ()
    return _measures(seen, seen, error=0.0, index=index, mismatched=0)


def measures_of_statistics(candidate: Statistics, reference: Statistics) -> Measures:
    """What statistics alone tell: exact counts of NaN and Inf, means and ranges; every distance is NaN (not known)."""
    kinds = ("nan", "posinf", "neginf")
    mismatched = sum(abs(getattr(candidate, kind) - getattr(reference, kind)) for kind in kinds)
    return _measures(candidate, reference, error=math.nan, index=(), mismatched=mismatched)


def _measures(
    ours: Statistics, theirs: Statistics, *, error: float, index: tuple[int, ...], mismatched: int
) -> Measures:
    is_equal = error == 0.0
    return Measures(
        count=ours.count,
        cosine_distance=error,
        max_abs=error,
        max_abs_index=index,
        rel_l2=error,
        mare=error,
        mere=error,
        rmse=error,
        ulp_p50=error,
        ulp_p99=error,
        ulp_max=error,
        share_close=1.0 if is_equal else math.nan,
        snr_db=math.inf if is_equal else math.nan,
        mare_normal=error,
        mere_normal=error,
        small_count=0,
        small_errors=0,
        zero_rows=0,
        nan_candidate=ours.nan,
        nan_reference=theirs.nan,
        inf_candidate=ours.posinf + ours.neginf,
        inf_reference=theirs.posinf + theirs.neginf,
        mismatched=mismatched,
        mean_candidate=ours.mean,
        mean_reference=theirs.mean,
        min_candidate=ours.minimum,
        min_reference=theirs.minimum,
        max_candidate=ours.maximum,
        max_reference=theirs.maximum,
    )
