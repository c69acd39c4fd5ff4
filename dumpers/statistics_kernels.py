"""Compiled loops behind `describe`: one pass over memory, block by block, each small enough for the first cache.

Everything that decides (finite, zero, subnormal, order) looks at integer codes and everything that sums is float64, so
no loop needs to promise that NaN is absent, and all vectorise. Each loop does one thing: one fused loop did not
vectorise and measured 4 times slower. Squared deviations are taken about the block's own mean and blocks are merged
by Chan's formula (Chan, Golub, LeVeque 1979), so a large mean costs no digits. One thread, one order: the same sums
always.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numba
import numpy as np

BLOCK = 4096  # elements; 16 KiB of float32 in a 32 KiB cache
_SUMS = {"reassoc", "contract", "nsz"}


class Scan(NamedTuple):
    """What one scan of a flat array found; `lowest` and `highest` are order-preserving codes of finite values."""

    finite: int
    nan: int
    posinf: int
    neginf: int
    zero: int
    subnormal: int
    near_limit: int
    lowest: int
    highest: int
    mean: float
    squares: float  # sum of squared deviations from the mean


Kernel = Callable[..., Any]


def _jit(function: Kernel, *signature: Any, **options: Any) -> Kernel:
    """Compile at once for a signature, or at first use without one; the result is kept in numba's cache folder."""
    try:
        return numba.njit(*signature, nogil=True, cache=True, **options)(function)  # type: ignore[no-any-return, call-overload, unused-ignore]
    except RuntimeError:  # no folder for the cache can be written: compile anew in each process
        return numba.njit(*signature, nogil=True, **options)(function)  # type: ignore[no-any-return, call-overload, unused-ignore]


def _flat(scalar: Any, *, readonly: bool = True) -> Any:
    """numba's type of a flat array. A read-only one takes writable arrays too, so each loop is compiled once."""
    return numba.types.Array(scalar, 1, "C", readonly=readonly)


# The loops are functions of this module, not closures: numba's cache never finds a closure over other loops again.
# `codes.dtype.type` casts every intermediate back to the codes' width, or the counters do not vectorise.


def _extremes(codes: Any, magnitude: Any, minimum: Any) -> Any:
    """Lowest and highest order-preserving code, and the smallest magnitude."""
    code = codes.dtype.type
    shift = code(codes.itemsize * 8 - 1)
    low, high, small = magnitude, minimum, magnitude
    for i in range(codes.size):
        bits = codes[i]
        size = code(bits & magnitude)
        order = code(bits ^ code(code(bits >> shift) & magnitude))
        low = order if order < low else low
        high = order if order > high else high
        small = size if size < small else small
    return low, high, small


def _tally_small(codes: Any, magnitude: Any, tiny: Any) -> Any:
    """How many are zero, and how many below the smallest normal value."""
    code = codes.dtype.type
    none = below = code(0)
    for i in range(codes.size):
        size = code(codes[i] & magnitude)
        none = code(none + (size == code(0)))
        below = code(below + (size < tiny))
    return none, below


def _above_half(codes: Any, magnitude: Any, half: Any) -> Any:
    """How many are larger than half the largest value."""
    code = codes.dtype.type
    above = code(0)
    for i in range(codes.size):
        above = code(above + (code(codes[i] & magnitude) > half))
    return above


def _tally_bad(codes: Any, magnitude: Any, minimum: Any, top: Any) -> Any:
    """NaN, +Inf and -Inf, and the extremes of the finite ones."""
    code = codes.dtype.type
    shift = code(codes.itemsize * 8 - 1)
    nan = up = infinite = code(0)
    low, high = magnitude, minimum
    for i in range(codes.size):
        bits = codes[i]
        size = code(bits & magnitude)
        nan = code(nan + (size > top))
        infinite = code(infinite + (size == top))
        up = code(up + (bits == top))
        order = code(bits ^ code(code(bits >> shift) & magnitude))
        keep = code(-code(size < top))  # all ones for finite values: a conditional did not vectorise
        first = code(code(order & keep) | code(magnitude & code(~keep)))
        last = code(code(order & keep) | code(minimum & code(~keep)))
        low = first if first < low else low
        high = last if last > high else high
    return nan, up, infinite - up, low, high


def _total(codes: Any, values: Any, magnitude: Any, top: Any) -> Any:
    """Sum of the finite values."""
    code = codes.dtype.type
    result = 0.0
    for i in range(values.size):
        result += np.float64(values[i]) if code(codes[i] & magnitude) < top else 0.0
    return result


def _deviations(codes: Any, values: Any, mean: float, magnitude: Any, top: Any) -> Any:
    """Sum of squared distances of the finite values from `mean`."""
    code = codes.dtype.type
    result = 0.0
    for i in range(values.size):
        gap = np.float64(values[i]) - mean if code(codes[i] & magnitude) < top else 0.0
        result += gap * gap
    return result


_extremes, _tally_small, _above_half, _tally_bad = (
    _jit(loop) for loop in (_extremes, _tally_small, _above_half, _tally_bad)
)
_total, _deviations = (_jit(loop, fastmath=_SUMS) for loop in (_total, _deviations))


def _scan(codes: Any, values: Any, half: Any, tiny: Any, magnitude: Any, minimum: Any, top: Any) -> Any:
    finite = nan = posinf = neginf = zero = subnormal = near = 0
    lowest, highest = magnitude, minimum
    mean = squares = 0.0
    for start in range(0, codes.size, BLOCK):
        part, floats = codes[start : start + BLOCK], values[start : start + BLOCK]
        good = part.size
        low, high, small = _extremes(part, magnitude, minimum)
        large = max(high, -(low + 1))  # the code of a negative value is -(magnitude + 1)
        if small < tiny:
            none, below = _tally_small(part, magnitude, tiny)
            zero += none
            subnormal += below - none
        if large > half:
            near += _above_half(part, magnitude, half)
        if large >= top:
            invalid, up, down, low, high = _tally_bad(part, magnitude, minimum, top)
            good -= invalid + up + down
            near -= invalid + up + down
            nan += invalid
            posinf += up
            neginf += down
        if good == 0:
            continue
        lowest, highest = min(lowest, low), max(highest, high)
        block_mean = _total(part, floats, magnitude, top) / good
        step = block_mean - mean
        both = finite + good
        mean += step * (good / both)
        squares += _deviations(part, floats, block_mean, magnitude, top) + step * step * (finite * (good / both))
        finite = both
    return finite, nan, posinf, neginf, zero, subnormal, near, lowest, highest, mean, squares


@cache
def scan_kernel(width: int) -> Kernel:
    """Compile the scan of IEEE floats of 32 or 64 bits: `(codes, values, half, tiny) -> fields of Scan`.

    `codes` (signed integers) and `values` are two views of the same flat memory; `half` is the code of half the largest
    value and `tiny` that of the smallest normal one, of the tensor's own dtype.
    """
    integer, real = (numba.int32, numba.float32) if width == 32 else (numba.int64, numba.float64)
    scan = _jit(_scan, (_flat(integer), _flat(real), *(5 * (integer,))))
    code: Any = np.int32 if width == 32 else np.int64
    magnitude, minimum = code(2 ** (width - 1) - 1), code(-(2 ** (width - 1)))
    infinity = code(0x7F800000 if width == 32 else 0x7FF0000000000000)  # NaN lies above
    return lambda codes, values, half, tiny: scan(codes, values, half, tiny, magnitude, minimum, infinity)


def _widen_bfloat16(codes: Any, out: Any) -> None:
    for i in range(codes.size):
        out[i] = np.int32(np.uint32(codes[i]) << np.uint32(16))


def _widen_float16(codes: Any, out: Any) -> None:
    floats = out.view(np.float32)
    for i in range(codes.size):  # right for subnormals: m * 2^-24
        floats[i] = np.float32(np.int32(codes[i] & 0x7FFF)) * np.float32(2.0**-24)
    for i in range(codes.size):
        size = np.int32(codes[i] & 0x7FFF)
        sign = np.int32(np.uint32(codes[i] & 0x8000) << np.uint32(16))
        normal = np.int32((size << 13) + 0x38000000)  # exponent bias 127 - 15
        special = np.int32((size << 13) | 0x7F800000)
        widened = out[i] if size < 0x400 else (normal if size < 0x7C00 else special)
        out[i] = np.int32(widened | sign)


def _histogram(codes: Any) -> Any:
    counts = np.zeros((4, 256), np.int64)  # four tables, so that equal neighbours do not wait for each other
    whole = codes.size - codes.size % 4
    for i in range(0, whole, 4):
        counts[0, codes[i]] += 1
        counts[1, codes[i + 1]] += 1
        counts[2, codes[i + 2]] += 1
        counts[3, codes[i + 3]] += 1
    for i in range(whole, codes.size):
        counts[0, codes[i]] += 1
    return counts


@cache
def decode_kernel(name: str) -> Kernel:
    """Compile the exact widening of 16-bit codes: `(codes uint16, out int32)`, where `out` becomes float32 bits.

    float16 is widened by integer steps, not by multiplying subnormals: torch.set_flush_denormal would zero them.
    """
    loops = {"bfloat16": _widen_bfloat16, "float16": _widen_float16}
    return _jit(loops[name], (_flat(numba.uint16), _flat(numba.int32, readonly=False)))


@cache
def histogram_kernel() -> Kernel:
    """Compile the count of each of 256 codes: `(codes uint8) -> int64[4, 256]`, to be added up."""
    return _jit(_histogram, (_flat(numba.uint8),))
