"""Why a pair has no distance, in words: shapes or kinds of dtype differ, or no tensor was kept."""

from __future__ import annotations

import math

from align.compare.identical import measures_of_statistics
from align.compare.model import Measures
from align.dumpers.dtypes import DTYPES, is_floating
from align.dumpers.model import NodeRecord, Statistics, Storage

# `problem` starts with one of these when the two runs produced different things, not merely kept too little.
MISMATCHES = ("shape ", "dtype ")


def problem_of(candidate: NodeRecord, reference: NodeRecord) -> tuple[Measures | None, str]:
    """The reason why two records cannot be measured element by element; empty when they can.

    Where only statistics were kept and the candidate alone has NaN or Inf, measures with those counts come along.
    """
    if candidate.shape != reference.shape:
        return None, f"shape {_shape(candidate)} against {_shape(reference)}"
    if _family(candidate.dtype) != _family(reference.dtype):
        return None, f"dtype {candidate.dtype} against {reference.dtype}"
    kept = {candidate.storage, reference.storage}
    if kept <= {Storage.TENSOR, Storage.SAMPLE}:
        return None, ""
    if Storage.ABSENT in kept or candidate.statistics is None or reference.statistics is None:
        return None, f"no data kept: {candidate.storage} against {reference.storage}"
    return _problem_of_statistics(candidate.statistics, reference.statistics)


def _problem_of_statistics(ours: Statistics, theirs: Statistics) -> tuple[Measures | None, str]:
    described = (
        f"statistics only: mean {ours.mean:.6g} against {theirs.mean:.6g}, l2 {ours.l2:.6g} against {theirs.l2:.6g}"
    )
    if ours.nonfinite > theirs.nonfinite:
        return measures_of_statistics(
            ours, theirs
        ), f"{described}, {ours.nonfinite} NaN or Inf against {theirs.nonfinite}"
    if theirs.l2 > 0.0 and math.isfinite(ours.l2):
        # Reverse triangle inequality: ||c - r|| >= | ||c|| - ||r|| |
        described += f"; the relative L2 error is at least {abs(ours.l2 - theirs.l2) / theirs.l2:.3g}"
    return None, described


def _shape(record: NodeRecord) -> str:
    return "x".join(map(str, record.shape)) or "scalar"


def _family(dtype: str) -> str:
    """Dtypes of one family hold the same kind of value; an unknown dtype is a family of its own."""
    known = DTYPES.get(dtype)
    if known is None:
        return dtype
    if is_floating(dtype):
        return "floating"
    if known.is_complex:
        return "complex"
    return "bool" if dtype == "bool" else "integer"
