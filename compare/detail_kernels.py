"""The compiled loop behind `detail`, which says where the error lies. Owns the order of its sums: one set a task."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from align.compare.kernels import BLOCK, larger
from align.dumpers.dtypes import Array

FINE_LOG2 = 7  # bins an octave of the fine histogram, as a power of two
FINE_LOWEST = -160  # |c - r| below 2**-160 counts as 0
FINE_BINS = (300 << FINE_LOG2) + 1
_SHIFT = 52 - FINE_LOG2
_OFFSET = (1023 + FINE_LOWEST) << FINE_LOG2

_FLAGS: dict[str, Any] = {
    "nogil": True,
    "cache": True,
    "fastmath": {"reassoc", "contract", "nsz"},
    "error_model": "numpy",
}


@njit(**_FLAGS)  # type: ignore[untyped-decorator]
def _sum_squares(sizes: Array, inner: Array) -> float:
    """Add squares onto `inner`; their sum."""
    total = 0.0
    for i in range(sizes.size):
        square = sizes[i] * sizes[i]
        total += square
        inner[i] += square
    return total


@njit(**_FLAGS)  # type: ignore[untyped-decorator]
def _measure(c: Array, r: Array, sizes: Array, bins: Array) -> float:
    """|c - r| into `sizes`, its fine bin into `bins`; the largest."""
    top = 0.0
    for i in range(c.size):
        d = abs(np.float64(c[i]) - np.float64(r[i]))
        sizes[i] = d
        top = larger(top, d)
        at = (np.float64(d).view(np.int64) >> _SHIFT) - (_OFFSET - 1)
        bins[i] = min(max(at, 0), FINE_BINS - 1)
    return top


@njit(**_FLAGS)  # type: ignore[untyped-decorator]
def _count(sizes: Array, bins: Array, fine: Array, over: Array, edges: Array) -> None:
    """Count fine bins; `over` counts, of a bin that a coarse edge cuts (edges[bin] > 0), what lies above the edge."""
    for i in range(sizes.size):
        at = np.uint64(bins[i])
        fine[at] += 1
        if edges[at] > 0.0:
            over[at] += sizes[i] >= edges[at]


@njit(**_FLAGS)  # type: ignore[untyped-decorator]
def _insert(worst: Array, size: float, place: int) -> None:
    """Keep worst[0] (errors, falling) and worst[1] (places): among equals the first stays first."""
    at = worst.shape[1] - 1
    while at > 0 and worst[0, at - 1] < size:
        worst[0, at], worst[1, at] = worst[0, at - 1], worst[1, at - 1]
        at -= 1
    worst[0, at], worst[1, at] = size, place


@njit(**_FLAGS)  # type: ignore[untyped-decorator]
def spread(
    c: Array, r: Array, place: int, period: int, buffers: tuple[Array, Array], fine: Array, over: Array,
    edges: Array, inner: Array, outer: Array, worst: Array,
) -> None:  # fmt: skip
    """Add a stretch whose first element is `place` to the histograms, marginals and worst places.

    The tensor is [n / period, period]: `inner` sums squares by the second axis, outer[i] is the sum of the i-th row
    that the stretch touches. A place that is not finite on both sides comes as 0 against 0, and is taken off the first
    bin by the caller.
    """
    line, first = 0, place % period
    for low in range(0, c.size, BLOCK):
        x, y = c[low : low + BLOCK], r[low : low + BLOCK]
        sizes, bins = buffers[0][: x.size], buffers[1][: x.size]
        top = _measure(x, y, sizes, bins)
        _count(sizes, bins, fine, over, edges)
        done = 0
        while done < x.size:
            count = min(period - first, x.size - done)
            outer[line] += _sum_squares(sizes[done : done + count], inner[first : first + count])
            done += count
            first += count
            if first == period:
                line, first = line + 1, 0
        if top > worst[0, -1]:
            for i in range(x.size):
                if sizes[i] > worst[0, -1]:
                    _insert(worst, sizes[i], place + low + i)
