"""The compiled loops of one block: sums, extremes, ULP bins. Owns the order in which a block's terms are added.

A block is at most `BLOCK` elements; its figures fill one column of `rows`, one field a row. Because a block is always
summed whole, by one loop, its figures do not depend on the thread that ran it. LLVM may reorder a block's sum into
vector lanes (`reassoc`), but must not assume that values are finite: a NaN or Inf anywhere shows in the sums of
squares, which is how a block of ordinary values pays nothing for the check. Division needs numpy's error model:
Python's (raise on zero) is an early exit that keeps a loop from being vectorised.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from align.dumpers.dtypes import Array

BLOCK = 16384
SPARE = 1e-7  # added to |r| below a relative error, as the CANN operator precision standard does
CLOSE = 1e-3

# Fields of a block. Sums of values are in units of 2**E_VALUE, of d = c - r of 2**E_DIFF, of e = c - b*r of 2**E_REST;
# sums of products in products of these units.
(N, CC, RR, CR, DD, EE, ER, MAX_ABS, ARG_MAX, MAX_REL, SUM_REL, CLOSE_COUNT, MAX_REL_NORMAL, SUM_REL_NORMAL, SMALL,
 SMALL_ERRORS, SUM_C, SUM_R, MIN_C, MAX_C, MIN_R, MAX_R, MAX_ULP, E_VALUE, E_DIFF, E_REST, NAN_C, NAN_R, INF_C, INF_R,
 MISMATCHED, ZERO_ROWS, HEAD, TAIL, WHOLE, FIELDS) = range(36)  # fmt: skip

# What a block holds of a row that it shares with its neighbours (fields HEAD and TAIL; WHOLE: HEAD's row does not end).
NO_PIECE, ALIVE, BOTH_ZERO, ONLY_CANDIDATE_ZERO = range(4)

ULP_BINS_PER_OCTAVE_LOG2 = 6
ULP_LOWEST_LOG2 = -8  # below 2**-8 ULP counts as 0
ULP_BINS = (64 - ULP_LOWEST_LOG2) << ULP_BINS_PER_OCTAVE_LOG2
ULP_SHIFT = 52 - ULP_BINS_PER_OCTAVE_LOG2
ULP_OFFSET = (1023 + ULP_LOWEST_LOG2) << ULP_BINS_PER_OCTAVE_LOG2
_EXPONENT = 0x7FF << 52

_FLAGS: dict[str, Any] = {
    "nogil": True,
    "cache": True,
    "fastmath": {"reassoc", "contract", "nsz"},
    "error_model": "numpy",
}


def _unordered(name: str) -> Any:
    """Minimum or maximum that may assume it never meets a NaN: the one form LLVM turns into vector reductions.

    Only its own result is undefined on a NaN, and that result is thrown away when a block's sums are not finite.
    """

    @intrinsic
    def pick(typing: Any, left: Any, right: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kind = arguments[0].type
            function = builder.module.declare_intrinsic(name, [kind], ir.FunctionType(kind, [kind, kind]))
            return builder.call(function, arguments, fastmath=("nnan", "nsz"))

        return types.float64(types.float64, types.float64), build

    return pick


larger = _unordered("llvm.maxnum")
smaller = _unordered("llvm.minnum")


@njit(**_FLAGS)  # type: ignore[untyped-decorator]
def guess_factor(c: Array, r: Array) -> float:
    """The factor b that makes c - b*r smallest in one block; not finite where there is nothing to tell it by."""
    cross, square = 0.0, 0.0
    for i in range(c.size):
        x, y = np.float64(c[i]), np.float64(r[i])
        cross += x * y
        square += y * y
    return cross / square


@njit(**_FLAGS)  # type: ignore[untyped-decorator]
def _sum_core(c: Array, r: Array, factor: float, row: Array) -> None:
    cc, rr, cr, dd, ee, er, top, top_rel, rel = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for i in range(c.size):
        x, y = np.float64(c[i]), np.float64(r[i])
        d = abs(x - y)
        e = x - factor * y
        cc += x * x
        rr += y * y
        cr += x * y
        dd += d * d
        ee += e * e
        er += e * y
        top = larger(top, d)
        q = d / (abs(y) + SPARE)
        top_rel = larger(top_rel, q)
        rel += q
    row[N], row[CC], row[RR], row[CR], row[DD], row[EE], row[ER] = c.size, cc, rr, cr, dd, ee, er
    row[MAX_ABS], row[MAX_REL], row[SUM_REL] = top, top_rel, rel


@njit(**_FLAGS)  # type: ignore[untyped-decorator]
def _sum_all(c: Array, r: Array, factor: float, small_below: float, small_bound: float, row: Array) -> None:
    cc, rr, cr, dd, ee, er, top, top_rel, rel = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    sum_c, sum_r, top_normal, rel_normal = 0.0, 0.0, 0.0, 0.0
    low_c, high_c, low_r, high_r = np.inf, -np.inf, np.inf, -np.inf
    close, small, errors = np.int64(0), np.int64(0), np.int64(0)
    for i in range(c.size):
        x, y = np.float64(c[i]), np.float64(r[i])
        d, size = abs(x - y), abs(y)
        e = x - factor * y
        cc += x * x
        rr += y * y
        cr += x * y
        dd += d * d
        ee += e * e
        er += e * y
        top = larger(top, d)
        q = d / (size + SPARE)
        top_rel = larger(top_rel, q)
        rel += q
        sum_c += x
        sum_r += y
        low_c, high_c = smaller(low_c, x), larger(high_c, x)
        low_r, high_r = smaller(low_r, y), larger(high_r, y)
        close += q < CLOSE
        is_small = size < small_below
        small += is_small
        errors += is_small & (d > small_bound)
        normal = 0.0 if is_small else q
        top_normal = larger(top_normal, normal)
        rel_normal += normal
    row[N], row[CC], row[RR], row[CR], row[DD], row[EE], row[ER] = c.size, cc, rr, cr, dd, ee, er
    row[MAX_ABS], row[MAX_REL], row[SUM_REL] = top, top_rel, rel
    row[MAX_REL_NORMAL], row[SUM_REL_NORMAL] = top_normal, rel_normal
    row[CLOSE_COUNT], row[SMALL], row[SMALL_ERRORS] = close, small, errors
    row[SUM_C], row[SUM_R] = sum_c, sum_r
    row[MIN_C], row[MAX_C], row[MIN_R], row[MAX_R] = low_c, high_c, low_r, high_r


@njit(**_FLAGS)  # type: ignore[untyped-decorator]
def _is_plain(row: Array, single: bool) -> bool:
    """Whether all values are finite, and float64's squares neither overflow nor vanish; float32's cannot do so here."""
    low, high = (0.0, np.inf) if single else (1e-200, 1e240)
    if not (low <= row[CC] < high and low <= row[RR] < high and row[DD] < high):
        return False
    return bool(row[MAX_ABS] == 0.0 or row[DD] >= low)


@njit(**_FLAGS)  # type: ignore[untyped-decorator]
def _find(c: Array, r: Array, wanted: float) -> int:
    """The first place where |c - r| is the block's maximum."""
    for i in range(c.size):
        x, y = np.float64(c[i]), np.float64(r[i])
        if abs(x - y) == wanted:
            return i
    return 0


@njit(**_FLAGS)  # type: ignore[untyped-decorator]
def _piece(c: Array, r: Array) -> int:
    """Whether a stretch of a row is zero in the candidate, and in the reference too."""
    for i in range(c.size):
        if c[i] != 0:
            return ALIVE
    for i in range(c.size):
        if r[i] != 0:
            return ONLY_CANDIDATE_ZERO
    return BOTH_ZERO


@njit(**_FLAGS)  # type: ignore[untyped-decorator]
def _zero_rows(c: Array, r: Array, place: int, width: int, row: Array) -> None:
    """Count the rows inside the block that are zero in the candidate only; note the pieces at its two ends."""
    left = (width - place % width) % width
    head = min(left, c.size)
    row[WHOLE] = left > c.size
    row[HEAD] = _piece(c[:head], r[:head]) if head else NO_PIECE
    found, at = 0, head
    while at + width <= c.size:
        if c[at] == 0:
            found += _piece(c[at : at + width], r[at : at + width]) == ONLY_CANDIDATE_ZERO
        at += width
    row[ZERO_ROWS] = found
    row[TAIL] = _piece(c[at:], r[at:]) if at < c.size else NO_PIECE


@njit(**_FLAGS)  # type: ignore[untyped-decorator]
def _count_ulps(c: Array, r: Array, ulp: Array, bins: Array, counts: Array) -> float:
    """Add |c - r| in ULPs to the log histogram; the largest. `ulp`: rounding, lowest, highest, 2**(mantissa - 1).

    The unit is the last place of r rounded to the judged format: half a unit is added to the bits of |r|, what is left
    of the exponent is held between the format's lowest and highest, and the quotient by 2**exponent is a product with
    a float built from the exponent's bits.
    """
    rounding, lowest, highest = np.int64(ulp[0]), np.int64(ulp[1]) << 52, np.int64(ulp[2]) << 52
    unit = ulp[3]
    top = 0.0
    for i in range(c.size):
        y = np.float64(r[i])
        d = abs(np.float64(c[i]) - y)
        exponent = min(max((np.float64(abs(y)).view(np.int64) + rounding) & _EXPONENT, lowest), highest)
        u = d * np.int64((2047 << 52) - exponent).view(np.float64) * unit
        top = larger(top, u)
        at = (np.float64(u).view(np.int64) >> ULP_SHIFT) - ULP_OFFSET
        bins[i] = min(max(at, 0), ULP_BINS - 1)
    # Four histograms side by side: equal neighbours would otherwise wait for each other's store.
    whole = np.uint64(c.size & ~3)
    for j in range(np.uint64(0), whole, np.uint64(4)):
        counts[bins[j]] += 1
        counts[bins[j + np.uint64(1)] + np.uint64(ULP_BINS)] += 1
        counts[bins[j + np.uint64(2)] + np.uint64(2 * ULP_BINS)] += 1
        counts[bins[j + np.uint64(3)] + np.uint64(3 * ULP_BINS)] += 1
    for i in range(c.size & ~3, c.size):
        counts[bins[i]] += 1
    return top


@njit(**_FLAGS)  # type: ignore[untyped-decorator]
def run_core(c: Array, r: Array, factor: float, place: int, width: int, rows: Array) -> int:
    """Fill rows[block] with the core fields of every block of c and r (float32 or float64, one axis).

    The number of blocks that are not plain: for those N is -1 and only the zero rows hold.
    """
    best, odd = -1.0, 0
    for b in range(rows.shape[0]):
        x, y, row = c[b * BLOCK : (b + 1) * BLOCK], r[b * BLOCK : (b + 1) * BLOCK], rows[b]
        _sum_core(x, y, factor, row)
        if width > 1:
            _zero_rows(x, y, place + b * BLOCK, width, row)
        if not _is_plain(row, c.itemsize == 4):
            row[N] = -1
            odd += 1
            continue
        row[ARG_MAX] = -1
        if row[MAX_ABS] > best:
            best = row[MAX_ABS]
            row[ARG_MAX] = _find(x, y, best)
    return odd


@njit(**_FLAGS)  # type: ignore[untyped-decorator]
def run_all(
    c: Array, r: Array, factor: float, place: int, width: int, rows: Array,
    small: Array, ulp: Array, bins: Array, counts: Array,
) -> int:  # fmt: skip
    """As `run_core`, with all fields and the ULP histogram; `small` holds (threshold, absolute bound)."""
    best, odd = -1.0, 0
    for b in range(rows.shape[0]):
        x, y, row = c[b * BLOCK : (b + 1) * BLOCK], r[b * BLOCK : (b + 1) * BLOCK], rows[b]
        _sum_all(x, y, factor, small[0], small[1], row)
        if width > 1:
            _zero_rows(x, y, place + b * BLOCK, width, row)
        if not _is_plain(row, c.itemsize == 4):
            row[N] = -1
            odd += 1
            continue
        row[ARG_MAX] = -1
        if row[MAX_ABS] > best:
            best = row[MAX_ABS]
            row[ARG_MAX] = _find(x, y, best)
        if row[MAX_ABS] > 0.0:
            row[MAX_ULP] = _count_ulps(x, y, ulp, bins, counts)
        else:
            counts[0] += x.size
    return odd


@njit(**_FLAGS)  # type: ignore[untyped-decorator]
def count_zero_rows(c: Array, r: Array, place: int, width: int, row: Array) -> None:
    """The zero rows of one block, for pairs that take the exact way: c and r say which elements are not zero."""
    _zero_rows(c, r, place, width, row)


@njit(**_FLAGS)  # type: ignore[untyped-decorator]
def widen_bfloat16(bits: Array, out: Array) -> None:
    """Bits of bfloat16 as float32: `out` is the float32 buffer seen as uint32."""
    for i in range(bits.size):
        out[i] = np.uint32(bits[i]) << np.uint32(16)


@njit(**_FLAGS)  # type: ignore[untyped-decorator]
def widen_float16(bits: Array, out: Array) -> None:
    """Bits of float16 as float32 bits, exact. Subnormals come of a subtraction: a flush-to-zero mode does no harm."""
    for i in range(bits.size):
        h = np.uint32(bits[i])
        fields = (h & np.uint32(0x7FFF)) << np.uint32(13)
        wide = np.uint32(fields + np.uint32(112 << 23))
        top = h & np.uint32(0x7C00)
        if top == np.uint32(0x7C00):
            wide = fields | np.uint32(0x7F800000)
        if top == np.uint32(0):
            wide = np.float32(np.uint32(fields + np.uint32(113 << 23)).view(np.float32) - np.float32(2.0**-14)).view(
                np.uint32
            )
        out[i] = wide | ((h & np.uint32(0x8000)) << np.uint32(16))
