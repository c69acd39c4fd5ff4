"""Say where one node's error lies: histogram, quantiles, worst places, and the slices that carry it.

Computed for the nodes a reader will look at, in one pass of fixed tasks (same bits on any number of threads). Places
that are not finite on both sides are left out. The histogram counts exactly; its last bin also holds errors of 1e6 and
more. Quantiles come from a log histogram and are within 1/256 of the truth between 2**-160, below which they are 0,
and 2**140, above which they stay there; the maximum is exact.
Slices of an axis longer than 4096 above axes of fewer than 16 elements in all are taken in groups of about 1024
elements, which may reach into the next slice of the axis above where the extent has no divisor of that size.
Shares are NaN where a sum of squares overflows float64. Complex errors and values are magnitudes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from align.compare import detail_kernels as dk
from align.compare import engine, exact
from align.compare.engine import Pair, Stream, Task, available_cores
from align.compare.kernels import BLOCK
from align.compare.measures import pair_of, unravel
from align.compare.model import ErrorDetail
from align.dumpers.dtypes import Array, RawTensor

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

PROBABILITIES = (0.25, 0.5, 0.75, 0.9, 0.99, 0.999, 1.0)
WORST = 16
_MOST_INNER = 1 << 16
_MOST_OUTER = 1 << 22
_LEAST_PERIOD = 1024


def histogram_edges() -> tuple[float, ...]:
    """Ends of the histogram's bins: bin 0 is below the first, bin i from edge i-1 to edge i, the last one open."""
    return tuple(10.0 ** (-12 + step / 4) for step in range(73))


def detail(candidate: RawTensor, reference: RawTensor, *, threads: int = available_cores()) -> ErrorDetail:
    """Where the error of two tensors lies. Raises UsageError when their shapes differ or a dtype is unknown."""
    pair = pair_of(candidate, reference)
    return detail_chunks([(engine.flat(candidate), engine.flat(reference))], pair, threads=threads)


def detail_chunks(
    chunks: Iterable[tuple[Array, Array]], pair: Pair, *, threads: int = available_cores()
) -> ErrorDetail:
    """The same of two tensors that arrive as consecutive runs of bits of any lengths."""
    grid = _Grid.of(pair.shape)
    stream, totals = Stream(pair, threads), _Totals(pair, grid)
    for candidate, reference in chunks:
        tasks = stream.push(candidate, reference)
        for task, part in zip(tasks, stream.run(lambda t: _spread(pair, grid, t), tasks), strict=True):
            totals.add(task, part)
    stream.check_end()
    return totals.conclude()


@dataclass(frozen=True, slots=True)
class _Grid:
    """The tensor seen as [lines, period]: `inner` trailing axes have `block` elements, a line is some of those blocks.

    Long axes above few elements are summed in groups of their slices: a sum for each would be as long as the tensor.
    """

    inner: int
    block: int
    period: int

    @classmethod
    def of(cls, shape: tuple[int, ...]) -> _Grid:
        """As many trailing axes inside as fit the inner sums."""
        inner, block = 0, 1
        while inner < len(shape) and block * shape[-1 - inner] <= _MOST_INNER:
            block *= shape[-1 - inner]
            inner += 1
        block = max(block, 1)
        if inner == len(shape):
            return cls(inner, block, block)
        lines = math.prod(shape) // block
        least = max(-(-_LEAST_PERIOD // block) if block < 16 else 1, -(-lines // _MOST_OUTER))
        extent = shape[-1 - inner]
        group = next((size for size in range(least, 4 * least) if extent % size == 0), least)
        return cls(inner, block, block * group)


@dataclass(frozen=True, slots=True)
class _Part:
    """What one task found."""

    fine: Counts
    over: Counts
    inner: Floats
    outer: Floats
    worst: Floats


@cache
def _tables() -> tuple[Floats, Counts]:
    """The coarse edge inside each fine bin (0: none), and the coarse bin of each fine bin's lower end."""
    ends = np.array(histogram_edges())
    lows = np.array([0.0, *(_fine_edge(index) for index in range(1, dk.FINE_BINS))])
    lookup = np.minimum(np.searchsorted(ends, lows, side="right"), ends.size - 1)
    after = np.append(np.searchsorted(ends, lows[1:], side="left"), ends.size)
    cut = (after > np.searchsorted(ends, lows, side="right")) & (lows < ends[-2])
    return np.where(cut, ends[np.minimum(lookup, ends.size - 1)], 0.0), lookup


def _fine_edge(index: int) -> float:
    octave, step = divmod(index - 1, 1 << dk.FINE_LOG2)
    return math.ldexp(1.0 + step / (1 << dk.FINE_LOG2), octave + dk.FINE_LOWEST)


def _spread(pair: Pair, grid: _Grid, task: Task) -> _Part:
    edges, _ = _tables()
    period, count = grid.period, len(task.candidate)
    lines = (task.place + count - 1) // period - task.place // period + 1
    fine, over = np.zeros(dk.FINE_BINS, np.int64), np.zeros(dk.FINE_BINS, np.int64)
    inner, outer, worst = np.zeros(period), np.zeros(lines), np.full((2, WORST), -1.0)
    buffers = (engine.BUFFERS.get("sizes", np.float64, (BLOCK,)), engine.BUFFERS.bins)
    for low, high in engine.spans(pair, 0, count):
        c, r, skipped = _values(pair, task.candidate[low:high], task.reference[low:high])
        line = (task.place + low) // period - task.place // period
        dk.spread(c, r, task.place + low, period, buffers, fine, over, edges, inner, outer[line:], worst)
        fine[0] -= skipped
    return _Part(fine, over, inner, outer, worst)


def _values(pair: Pair, c_bits: Array, r_bits: Array) -> tuple[Array, Array, int]:
    """Both sides as one float type (pairs on the exact way as |c - r| against 0), zero where either is not finite."""
    if pair.is_exact:
        left, right = exact.values(c_bits, pair.candidate), exact.values(r_bits, pair.reference)
        with np.errstate(over="ignore", invalid="ignore"):
            keep = np.isfinite(left) & np.isfinite(right)
            distance = np.where(keep, exact.distance(left, right), 0.0)
        return distance, np.zeros_like(distance), int(keep.size - keep.sum())
    c, r = engine.load(c_bits, pair.candidate, pair, "c"), engine.load(r_bits, pair.reference, pair, "r")
    with np.errstate(over="ignore", invalid="ignore"):
        if math.isfinite(float(np.add.reduce(c)) - float(np.add.reduce(r))):
            return c, r, 0
    keep = np.isfinite(c) & np.isfinite(r)
    return np.where(keep, c, 0), np.where(keep, r, 0), int(keep.size - keep.sum())


class _Totals:
    """Adds the parts of a tensor in their order, then says what they amount to."""

    def __init__(self, pair: Pair, grid: _Grid) -> None:
        self._pair = pair
        self._grid = grid
        self._fine: Counts = np.zeros(0, np.int64)
        self._over: Counts = np.zeros(0, np.int64)
        self._inner = np.zeros(grid.period)
        self._outer = np.zeros(-(-pair.count // grid.period))
        self._worst: list[tuple[float, int, float, float]] = []

    def add(self, task: Task, part: _Part) -> None:
        """Add the part of the next task."""
        if self._fine.size:
            self._fine += part.fine
            self._over += part.over
        else:
            self._fine, self._over = part.fine, part.over
        self._inner += part.inner
        line = task.place // self._grid.period
        self._outer[line : line + len(part.outer)] += part.outer
        for size, place in part.worst.T.tolist():
            if size >= 0.0 and (len(self._worst) < WORST or size > -self._worst[-1][0]):
                self._note(task, size, int(place))

    def _note(self, task: Task, size: float, place: int) -> None:
        at = slice(place - task.place, place - task.place + 1)
        sides = (task.candidate[at], self._pair.candidate), (task.reference[at], self._pair.reference)
        values = [_shown(exact.values(bits, name)[0]) for bits, name in sides]
        if all(math.isfinite(value) for value in values):
            self._worst = sorted([*self._worst, (-size, place, values[0], values[1])])[:WORST]

    def conclude(self) -> ErrorDetail:
        """The detail of the whole tensor."""
        worst = tuple((unravel(place, self._pair.shape), c, r) for _, place, c, r in self._worst)
        return ErrorDetail(self._histogram(), self._quantiles(), worst, self._axes())

    def _histogram(self) -> tuple[int, ...]:
        bins, used = len(histogram_edges()), np.flatnonzero(self._fine)
        groups, over = _tables()[1][used], self._over[used]
        counts = np.bincount(groups, weights=self._fine[used] - over, minlength=bins)
        counts[1:] += np.bincount(groups, weights=over, minlength=bins)[:-1]
        return tuple(int(count) for count in counts)

    def _quantiles(self) -> tuple[tuple[float, float], ...]:
        used = np.flatnonzero(self._fine)
        if not used.size:
            return tuple((p, 0.0) for p in PROBABILITIES)
        reached = np.cumsum(self._fine[used])
        largest = -self._worst[0][0] if self._worst else 0.0
        bins = used[np.searchsorted(reached, [math.ceil(p * int(reached[-1])) for p in PROBABILITIES])].tolist()
        found = [0.0 if index == 0 else (_fine_edge(index) + _fine_edge(index + 1)) / 2 for index in bins]
        return tuple(
            (p, largest if p == 1.0 else min(value, largest)) for p, value in zip(PROBABILITIES, found, strict=True)
        )

    def _axes(self) -> tuple[tuple[int, int, float], ...]:
        shape, grid = self._pair.shape, self._grid
        split = len(shape) - grid.inner
        if not self._pair.count:
            return tuple((axis, extent, 0.0) for axis, extent in enumerate(shape))
        inner = self._inner.reshape(-1, grid.block).sum(axis=0).reshape(shape[split:])
        sums = self._outer_sums(shape[:split])
        sums += [inner.sum(axis=_others(inner.ndim, axis)) for axis in range(inner.ndim)]
        return tuple((axis, extent, _worst_share(s)) for axis, (extent, s) in enumerate(zip(shape, sums, strict=True)))

    def _outer_sums(self, shape: tuple[int, ...]) -> list[Floats]:
        """Sums by each leading axis; a group of slices counts as the first of them."""
        if not shape:
            return []
        starts = np.arange(self._outer.size) * (self._grid.period // self._grid.block)
        places = np.unravel_index(starts, shape)
        return [_by_slice(index, self._outer, extent) for index, extent in zip(places, shape, strict=True)]


def _shown(value: np.generic) -> float:
    """A value as a reader sees it: a complex one by its magnitude."""
    return float(np.abs(value)) if isinstance(value, np.complexfloating) else float(value)


def _by_slice(index: npt.NDArray[np.intp], sums: Floats, extent: int) -> Floats:
    """Sums of the slices that a group falls on; slices between two groups' starts do not count as slices."""
    totals: Floats = np.bincount(index, weights=sums, minlength=extent).astype(np.float64)
    return totals[np.bincount(index, minlength=extent) > 0]


def _others(ndim: int, axis: int) -> tuple[int, ...]:
    return tuple(other for other in range(ndim) if other != axis)


def _worst_share(sums: Floats) -> float:
    """Share of the total that the largest eighth of the entries (one at least) carries; 0 when there is no error."""
    total = float(sums.sum()) if sums.size else 0.0
    if total == 0.0:
        return 0.0
    if not math.isfinite(total):
        return math.nan
    worst = -(-sums.size // 8)
    return float(np.partition(sums, sums.size - worst)[sums.size - worst :].sum()) / total
