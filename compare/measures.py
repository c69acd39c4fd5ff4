"""Measure how far a candidate tensor is from a reference tensor, in one pass; says nothing about whether that is well.

Every figure but the counts of NaN and Inf is over the positions where both sides are finite. Decided for odd input:
  NaN against NaN, Inf against Inf of the same sign agree; everything else that is not finite is `mismatched`
  zero reference     rel_l2 and cosine_distance are 0 if the candidate is zero too, else inf and 1; snr_db inf or -inf
  nothing to compare (empty, or no position finite on both sides) every error is 0, share_close 1, snr_db inf, the
                     index () and the means and extremes NaN
  scalar             as a tensor of one element, index (); zero_rows counts rows of two elements or more
  integers, bools    values, bools as 0 and 1; a ULP is 1; 64-bit differences are exact before they are rounded once
  complex            sums over both components, so the cosine is that of the real vectors; |c - r| and |r| are
                     magnitudes; means and extremes are of magnitudes; the ULP distance is the larger component's
ULP distances and the small-value domain are in the candidate's dtype, in the reference's where that is the narrower.
ulp_max is exact; ulp_p50 and ulp_p99 are lower edges of a log histogram: exact for whole ULPs up to 128, at most
1/64 too low elsewhere, and 0 below 1/256.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import StrEnum
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from align.compare import engine
from align.compare import kernels as k
from align.compare.engine import Job, Pair, available_cores
from align.compare.model import Measures
from align.dumpers.dtypes import Array, Dtype, RawTensor, dtype_of
from align.dumpers.errors import UsageError

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

_SMALL_DOMAIN = {  # CANN operator precision standard: |r| below the first is judged by the second, an absolute bound
    "float16": (2.0**-11, 2.0**-16),
    "bfloat16": (2.0**-8, 2.0**-16),
    "float32": (2.0**-14, 2.0**-30),
    "float8_e4m3fn": (2.0**-4, 2.0**-6),
    "float8_e4m3fnuz": (2.0**-4, 2.0**-6),
    "float8_e5m2": (2.0**-3, 2.0**-5),
    "float8_e5m2fnuz": (2.0**-3, 2.0**-5),
    "complex32": (2.0**-11, 2.0**-16),
    "complex64": (2.0**-14, 2.0**-30),
}


class Depth(StrEnum):
    """How much is measured: CORE leaves what only some policies need (see `measure_core`) as NaN or 0."""

    CORE = "core"
    ALL = "all"


def measure(candidate: RawTensor, reference: RawTensor, *, threads: int = available_cores()) -> Measures:
    """Measure all of `Measures`. Raises UsageError when the shapes differ or a dtype is unknown."""
    return _measure(candidate, reference, Depth.ALL, threads)


def measure_core(candidate: RawTensor, reference: RawTensor, *, threads: int = available_cores()) -> Measures:
    """Measure cosine, max abs with its place, relative L2, MARE, MERE, RMSE, SNR, zero rows, NaN and Inf.

    The ULP, small-value, share_close, mean, minimum and maximum fields stay NaN, counts of the small-value domain 0.
    """
    return _measure(candidate, reference, Depth.CORE, threads)


def measure_chunks(
    chunks: Iterable[tuple[Array, Array]], pair: Pair, *, depth: Depth = Depth.ALL, threads: int = available_cores()
) -> Measures:
    """Measure two tensors that arrive as consecutive runs of bits of any lengths: the same figures, bit for bit."""
    accumulator = Accumulator(pair, depth=depth, threads=threads)
    for candidate, reference in chunks:
        accumulator.add(candidate, reference)
    return accumulator.finish()


def pair_of(candidate: RawTensor, reference: RawTensor) -> Pair:
    """The pair of two tensors. Raises UsageError when their shapes differ or a dtype is unknown."""
    if candidate.shape != reference.shape:
        raise UsageError(
            f"shapes differ: candidate {list(candidate.shape)}, reference {list(reference.shape)}",
            "compare tensors of one shape, or name the axis that moved in a rules file",
        )
    for raw in (candidate, reference):
        dtype_of(raw.dtype)
    return Pair(candidate.shape, candidate.dtype, reference.dtype)


def _measure(candidate: RawTensor, reference: RawTensor, depth: Depth, threads: int) -> Measures:
    accumulator = Accumulator(pair_of(candidate, reference), depth=depth, threads=threads)
    accumulator.add(engine.flat(candidate), engine.flat(reference))
    return accumulator.finish()


class Accumulator:
    """Measure a pair that arrives in pieces. Holds less than one task of it, and one row of figures a block."""

    def __init__(self, pair: Pair, *, depth: Depth = Depth.ALL, threads: int = available_cores()) -> None:
        self._pair = pair
        self._depth = depth
        self._stream = engine.Stream(pair, threads)
        self._rows: list[Floats] = []
        self._counts: Counts = np.zeros(k.ULP_BINS, np.int64)
        self._factor = math.nan

    def add(self, candidate: Array, reference: Array) -> None:
        """Take the next run of bits of both sides (one axis, equal lengths; complex32 with its axis of two halves)."""
        self._consume(self._stream.push(candidate, reference))

    def finish(self) -> Measures:
        """Measure what is left, and add up. Raises UsageError when the runs were not as long as the shape says."""
        self._stream.check_end()
        rows = np.concatenate(self._rows) if len(self._rows) > 1 else self._rows[0] if self._rows else None
        totals = _add_up(rows) if rows is not None else [0.0] * k.FIELDS
        quantiles = _ulp_quantiles(self._counts, totals) if self._depth is Depth.ALL else (math.nan, math.nan)
        return _conclude(totals, self._pair, math.nan if self._depth is Depth.CORE else 1.0, quantiles)

    def _consume(self, tasks: Sequence[engine.Task]) -> None:
        if not tasks:
            return
        if math.isnan(self._factor):
            self._factor = engine.choose_factor(tasks[0].candidate, tasks[0].reference, self._pair)
        job = Job(self._pair, self._factor, *_judged(self._pair.candidate, self._pair.reference))
        if self._depth is Depth.CORE:
            self._rows.extend(self._stream.run(lambda t: engine.run_core(job, t), tasks))
            return
        for rows, counts in self._stream.run(lambda t: engine.run_all(job, t), tasks):
            self._rows.append(rows)
            self._counts += counts


@lru_cache(maxsize=256)
def _judged(candidate: str, reference: str) -> tuple[Floats, Floats]:
    """Small-value threshold and bound, and the ULP constants of `kernels.count_ulps`, of the pair's narrower dtype."""
    judged = _narrower(dtype_of(candidate), dtype_of(reference))
    small = np.array(_SMALL_DOMAIN.get(judged.name, (0.0, 0.0)))
    if judged.format is None:
        return small, np.array([2.0**51, 1023.0, 1023.0, 0.5])
    mantissa = judged.format.mantissa_bits
    rounding = 2.0 ** (51 - mantissa) if mantissa < 52 else 0.0
    lowest, highest = (math.frexp(x)[1] + 1022 for x in (judged.format.smallest_normal, judged.format.largest))
    return small, np.array([rounding, lowest, highest, 2.0 ** (mantissa - 1)])


def _narrower(candidate: Dtype, reference: Dtype) -> Dtype:
    if candidate.format is None or reference.format is None:
        return candidate
    return reference if reference.format.mantissa_bits < candidate.format.mantissa_bits else candidate


def _add_up(rows: Floats) -> list[float]:
    """One row for the tensor; ARG_MAX becomes an element's place in it, ZERO_ROWS includes rows across blocks."""
    spanning = _rows_across(rows)
    if len(rows) == 1:
        totals: list[float] = rows[0].tolist()
    else:
        totals = _merge(rows)
    totals[k.ZERO_ROWS] += spanning
    return totals


def _merge(rows: Floats) -> list[float]:
    units = _share_units(rows) if rows[:, k.E_VALUE : k.E_REST + 1].any() else (0, 0, 0)
    totals: list[float] = np.ascontiguousarray(rows.T).sum(axis=1).tolist()
    for field in (k.MAX_ABS, k.MAX_REL, k.MAX_REL_NORMAL, k.MAX_C, k.MAX_R, k.MAX_ULP):
        totals[field] = float(rows[:, field].max())
    for field in (k.MIN_C, k.MIN_R):
        totals[field] = float(rows[:, field].min())
    block = int(np.argmax(np.where(rows[:, k.N] > 0, rows[:, k.MAX_ABS], -1.0)))
    totals[k.ARG_MAX] = block * k.BLOCK + float(rows[block, k.ARG_MAX])
    totals[k.E_VALUE], totals[k.E_DIFF], totals[k.E_REST] = units
    return totals


def _share_units(rows: Floats) -> tuple[int, int, int]:
    """Bring all blocks' sums to the units of the largest, in place; the three exponents."""
    shared = []
    for field, is_there in (
        (k.E_VALUE, rows[:, k.CC] + rows[:, k.RR]),
        (k.E_DIFF, rows[:, k.DD]),
        (k.E_REST, rows[:, k.EE]),
    ):
        used = rows[is_there > 0, field]
        unit = float(used.max()) if used.size else 0.0
        rows[:, field] = np.where(is_there > 0, rows[:, field] - unit, 0.0)
        shared.append(int(unit))
    value, diff, rest = (rows[:, field].astype(np.int64) for field in (k.E_VALUE, k.E_DIFF, k.E_REST))
    shifts = {
        k.CC: 2 * value,
        k.RR: 2 * value,
        k.CR: 2 * value,
        k.SUM_C: value,
        k.SUM_R: value,
        k.DD: 2 * diff,
        k.EE: 2 * rest,
        k.ER: rest + value,
    }
    for field, shift in shifts.items():
        rows[:, field] = np.ldexp(rows[:, field], shift)
    return shared[0], shared[1], shared[2]


def _rows_across(rows: Floats) -> int:
    """Rows over a block border that are zero in the candidate only; only blocks with a zero piece are walked."""
    if not (rows[:, k.HEAD : k.TAIL + 1] >= k.BOTH_ZERO).any():
        return 0
    found, state = 0, k.NO_PIECE
    for head, tail, goes_on in rows[:, k.HEAD : k.WHOLE + 1].astype(np.int64).tolist():
        state = _join(state, head)
        if not goes_on:
            found += state == k.ONLY_CANDIDATE_ZERO
            state = tail
    return found + (state == k.ONLY_CANDIDATE_ZERO)


def _join(left: int, right: int) -> int:
    """What two neighbouring pieces of one row are together."""
    if k.NO_PIECE in (left, right):
        return max(left, right)
    return k.ALIVE if k.ALIVE in (left, right) else max(left, right)


def _ulp_quantiles(counts: Counts, totals: Sequence[float]) -> tuple[float, float]:
    """ULP distance that half, and 99 in 100, of the elements do not exceed."""
    total = totals[k.N]
    if not total:
        return 0.0, 0.0
    wanted = [math.ceil(0.5 * total), math.ceil(0.99 * total)]
    low, high = (ulp_edge(int(at)) for at in np.searchsorted(np.cumsum(counts), wanted))
    return min(low, totals[k.MAX_ULP]), min(high, totals[k.MAX_ULP])


def ulp_edge(index: int) -> float:
    """Lower edge of a bin of the ULP histogram."""
    if index == 0:
        return 0.0
    octave, step = divmod(index, 1 << k.ULP_BINS_PER_OCTAVE_LOG2)
    return math.ldexp(1.0 + step / (1 << k.ULP_BINS_PER_OCTAVE_LOG2), octave + k.ULP_LOWEST_LOG2)


def _scaled(value: float, exponent: float) -> float:
    """value * 2**exponent, inf where it overflows."""
    if exponent == 0.0:
        return value
    try:
        return math.ldexp(value, int(exponent))
    except OverflowError:
        return math.copysign(math.inf, value)


def _cosine_distance(t: Sequence[float]) -> float:
    """1 - cos from e = c - b r: sin^2 = (ee rr - (er)^2) / (cc rr), and 1 - cos = sin^2 / (1 + cos).

    e is small when b is well chosen: then nothing large cancels, and rounding stays relative to the answer. Where e is
    no smaller than c, the answer is no smaller than the rounding of the textbook quotient by much, which serves.
    """
    cc, rr = t[k.CC], t[k.RR]
    if cc == 0.0 or rr == 0.0:
        return 0.0 if cc == rr else 1.0
    cosine = t[k.CR] / math.sqrt(cc) / math.sqrt(rr)
    shift = t[k.E_REST] - t[k.E_VALUE]
    if cosine < 0.5 or not _scaled(t[k.EE] / cc, 2 * shift) <= 1.0:
        return min(max(1.0 - cosine, 0.0), 2.0)
    squared_sine = _scaled((t[k.EE] - t[k.ER] / rr * t[k.ER]) / cc, 2 * shift)
    return max(squared_sine, 0.0) / (1.0 + min(cosine, 1.0))


def _relative_l2(t: Sequence[float]) -> float:
    if t[k.RR] == 0.0:
        return 0.0 if t[k.DD] == 0.0 else math.inf
    return _scaled(math.sqrt(t[k.DD]) / math.sqrt(t[k.RR]), t[k.E_DIFF] - t[k.E_VALUE])


def _snr(relative: float) -> float:
    return math.inf if relative == 0.0 else -20.0 * math.log10(relative)


def unravel(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Index of the element at a place in row-major order."""
    index = []
    for extent in reversed(shape):
        place, at = divmod(place, extent)
        index.append(at)
    return tuple(reversed(index))


def _conclude(t: Sequence[float], pair: Pair, known: float, ulps: tuple[float, float]) -> Measures:
    """The figures; `known` is 1, or NaN where only the core was measured."""
    n = t[k.N]
    share = 1.0 / n if n else 0.0
    described = known if n else math.nan
    relative = _relative_l2(t)
    normal = n - t[k.SMALL]
    return Measures(
        count=pair.count,
        cosine_distance=_cosine_distance(t),
        max_abs=t[k.MAX_ABS],
        max_abs_index=unravel(int(t[k.ARG_MAX]), pair.shape) if n else (),
        rel_l2=relative,
        mare=t[k.MAX_REL],
        mere=t[k.SUM_REL] * share,
        rmse=_scaled(math.sqrt(t[k.DD] * share), t[k.E_DIFF]),
        ulp_p50=ulps[0],
        ulp_p99=ulps[1],
        ulp_max=t[k.MAX_ULP] * known,
        share_close=(t[k.CLOSE_COUNT] * share if n else 1.0) * known,
        snr_db=_snr(relative),
        mare_normal=t[k.MAX_REL_NORMAL] * known,
        mere_normal=(t[k.SUM_REL_NORMAL] / normal if normal else 0.0) * known,
        small_count=int(t[k.SMALL]),
        small_errors=int(t[k.SMALL_ERRORS]),
        zero_rows=int(t[k.ZERO_ROWS]),
        nan_candidate=int(t[k.NAN_C]),
        nan_reference=int(t[k.NAN_R]),
        inf_candidate=int(t[k.INF_C]),
        inf_reference=int(t[k.INF_R]),
        mismatched=int(t[k.MISMATCHED]),
        mean_candidate=_scaled(t[k.SUM_C] * share, t[k.E_VALUE]) * described,
        mean_reference=_scaled(t[k.SUM_R] * share, t[k.E_VALUE]) * described,
        min_candidate=t[k.MIN_C] * described,
        min_reference=t[k.MIN_R] * described,
        max_candidate=t[k.MAX_C] * described,
        max_reference=t[k.MAX_R] * described,
    )
