"""The slow, exact way for pairs that no real float holds: complex values, and 64-bit integers. numpy, block by block.

Owns the same fields as the compiled loops. Complex values count as vectors of two components in the sums (so the
cosine is that of the real vectors), as magnitudes |c - r|, |r| in relative errors and extremes; a ULP distance is the
larger of the two components'. Differences of 64-bit integers are taken in integers, then rounded once.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from align.compare import kernels as k
from align.dumpers.dtypes import Array, RawTensor, widen

Floats = npt.NDArray[np.float64]
Bits = tuple[Array, str]


def fill(rows: Floats, candidate: Bits, reference: Bits, place: tuple[int, int], extra: tuple[Array, ...]) -> None:
    """Fill rows[block] of a stretch that starts at element place[0] of rows of place[1] elements."""
    for block, row in enumerate(rows):
        part = slice(block * k.BLOCK, (block + 1) * k.BLOCK)
        c, r = (values(bits[part], name) for bits, name in (candidate, reference))
        fill_block(row, c, r, 1.0, extra)
        if place[1] > 1:
            k.count_zero_rows(c != 0, r != 0, place[0] + block * k.BLOCK, place[1], row)


def values(bits: Array, name: str) -> Array:
    """Integers as themselves, complex values as complex128."""
    wide = widen(RawTensor(bits, name))
    return wide.astype(np.complex128) if wide.dtype.kind == "c" else wide


def distance(c: Array, r: Array) -> Floats:
    """|c - r| as float64; exact up to one rounding for integers."""
    if c.dtype.kind in "iub" and r.dtype.kind in "iub":
        return _integer_distance(c, r)
    return np.asarray(np.abs(c - r), np.float64)


def _integer_distance(c: Array, r: Array) -> Floats:
    """Within one sign the larger minus the smaller is exact in uint64; across zero nothing cancels, so floats do."""
    left, right = c.astype(np.uint64), r.astype(np.uint64)
    within = np.where(left > right, left - right, right - left).astype(np.float64)
    return np.where((c < 0) == (r < 0), within, np.abs(c.astype(np.float64) - r.astype(np.float64)))


def components(values: Array) -> Floats:
    """Real values as [n, 1], complex ones as [n, 2], in float64."""
    if values.dtype.kind == "c":
        return np.ascontiguousarray(values.astype(np.complex128)).view(np.float64).reshape(-1, 2)
    return values.astype(np.float64).reshape(-1, 1)


def pair_up(c: Array, r: Array) -> tuple[Floats, Floats]:
    left, right = components(c), components(r)
    width = max(left.shape[1], right.shape[1])
    return tuple(np.pad(x, ((0, 0), (0, width - x.shape[1]))) for x in (left, right))  # type: ignore[return-value]


def fill_block(row: Floats, c: Array, r: Array, factor: float, extra: tuple[Array, ...]) -> None:
    """Fill all fields of one block but the zero rows; the ULP histogram too where `extra` holds it."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        _fill(row, c, r, factor, extra)


def _fill(row: Floats, c: Array, r: Array, factor: float, extra: tuple[Array, ...]) -> None:
    left, right = pair_up(c, r)
    keep = note_nonfinite(row, left, right)
    places = np.flatnonzero(keep)
    row[k.N], row[k.ARG_MAX] = places.size, -1
    row[[k.MIN_C, k.MIN_R]], row[[k.MAX_C, k.MAX_R]] = np.inf, -np.inf
    if not places.size:
        return
    left, right = left[keep], right[keep]
    diff = distance(c[keep], r[keep])
    _sum_squares(row, left, right, diff, factor)
    row[k.MAX_ABS], row[k.ARG_MAX] = diff.max(), places[int(np.argmax(diff))]
    size = np.hypot(right[:, 0], right[:, -1]) if right.shape[1] > 1 else np.abs(right[:, 0])
    relative = _relative(left, right, diff, size)
    row[k.MAX_REL], row[k.SUM_REL] = relative.max(), relative.sum()
    if extra:
        _describe(row, c[keep], r[keep])
        _judge_small(row, relative, diff, size, extra[0])
        row[k.MAX_ULP] = _count_ulps(left, right, diff, extra)


def _relative(left: Floats, right: Floats, diff: Floats, size: Floats) -> Floats:
    """|c - r| / (|r| + spare); by quarters where the difference of two float64 overflows."""
    over = np.isinf(diff)
    if not over.any():
        return diff / (size + k.SPARE)
    quarter = np.hypot(left[:, 0] / 4 - right[:, 0] / 4, left[:, -1] / 4 - right[:, -1] / 4)
    if left.shape[1] == 1:
        quarter = np.abs(left[:, 0] / 4 - right[:, 0] / 4)
    return np.where(over, quarter / (size / 4 + k.SPARE / 4), diff / (size + k.SPARE))


def _sum_squares(row: Floats, left: Floats, right: Floats, diff: Floats, factor: float) -> None:
    """Sums in units of powers of two that keep every square in range."""
    value_exp = _exponent(max(np.abs(left).max(), np.abs(right).max()))
    u, v = np.ldexp(left, -value_exp), np.ldexp(right, -value_exp)
    less = 2 if np.isinf(diff).any() else 0
    x, y = np.ldexp(left, -less), np.ldexp(right, -less)
    signed = x - y if less or left.shape[1] > 1 else np.where(left >= right, diff[:, None], -diff[:, None])
    rest = signed if factor == 1.0 else x - factor * y
    diff_exp, rest_exp = _exponent(np.abs(signed).max()), _exponent(np.abs(rest).max())
    d, e = np.ldexp(signed, -diff_exp), np.ldexp(rest, -rest_exp)
    products = (u * u, v * v, u * v, d * d, e * e, e * v)
    row[k.CC], row[k.RR], row[k.CR], row[k.DD], row[k.EE], row[k.ER] = (float(x.sum()) for x in products)
    row[k.E_VALUE], row[k.E_DIFF], row[k.E_REST] = value_exp, diff_exp + less, rest_exp + less


def _exponent(value: float) -> int:
    """A power of two near `value`; 0 for zero."""
    return int(np.clip(np.floor(np.log2(value)), -1000, 1000)) if 0.0 < value < np.inf else 0


def _describe(row: Floats, c: Array, r: Array) -> None:
    for side, total, low, high in ((c, k.SUM_C, k.MIN_C, k.MAX_C), (r, k.SUM_R, k.MIN_R, k.MAX_R)):
        shown = np.asarray(np.abs(side) if side.dtype.kind == "c" else side, np.float64)
        row[low], row[high] = shown.min(), shown.max()
        row[total] = np.ldexp(shown, -int(row[k.E_VALUE])).sum()


def _judge_small(row: Floats, relative: Floats, diff: Floats, size: Floats, small: Array) -> None:
    is_small = size < small[0]
    normal = np.where(is_small, 0.0, relative)
    row[k.CLOSE_COUNT], row[k.SMALL] = (relative < k.CLOSE).sum(), is_small.sum()
    row[k.SMALL_ERRORS] = (is_small & (diff > small[1])).sum()
    row[k.MAX_REL_NORMAL], row[k.SUM_REL_NORMAL] = normal.max(), normal.sum()


def _count_ulps(left: Floats, right: Floats, diff: Floats, extra: tuple[Array, ...]) -> float:
    _, ulp, _, counts = extra
    rounded = (np.abs(right).view(np.int64) + np.int64(ulp[0])) >> 52
    exponent = np.clip(rounded, int(ulp[1]), int(ulp[2]))
    each = diff[:, None] if left.shape[1] == 1 else np.abs(left - right)
    distances = (np.ldexp(each, 1024 - exponent) * ulp[3]).max(axis=1)
    at = (distances.view(np.int64) >> k.ULP_SHIFT) - k.ULP_OFFSET
    counts[: k.ULP_BINS] += np.bincount(np.clip(at, 0, k.ULP_BINS - 1), minlength=k.ULP_BINS).astype(np.int32)
    return float(distances.max())


def note_nonfinite(row: Floats, left: Floats, right: Floats) -> npt.NDArray[np.bool_]:
    """Count NaN and Inf of a block, given as components; which elements are finite on both sides."""
    nan_c, nan_r = np.isnan(left).any(axis=1), np.isnan(right).any(axis=1)
    bad_c, bad_r = ~np.isfinite(left).all(axis=1), ~np.isfinite(right).all(axis=1)
    codes = [np.where(np.isfinite(x), 0.0, np.where(np.isnan(x), 2.0, np.sign(x))) for x in (left, right)]
    row[k.NAN_C], row[k.NAN_R] = nan_c.sum(), nan_r.sum()
    row[k.INF_C], row[k.INF_R] = (bad_c & ~nan_c).sum(), (bad_r & ~nan_r).sum()
    row[k.MISMATCHED] = (codes[0] != codes[1]).any(axis=1).sum()
    keep: npt.NDArray[np.bool_] = np.logical_not(bad_c | bad_r)
    return keep
