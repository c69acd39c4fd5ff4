"""Run the kernels over two tensors in fixed pieces, on all cores; the figures do not depend on how many there are.

A tensor is cut into tasks of a size that depends on its shape alone, a task into blocks (`kernels.BLOCK`). Threads take
tasks; a block's figures are a row, and rows are put in order before they are added up. Pieces that arrive in any
lengths (a file read chunk by chunk) are regrouped into the same tasks, so a stream gives the same bits as memory.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from align.compare import exact, kernels
from align.compare.kernels import BLOCK
from align.dumpers.dtypes import DTYPES, Array, RawTensor, dtype_of, float8_table, widen
from align.dumpers.errors import UsageError

Floats = npt.NDArray[np.float64]
Result = TypeVar("Result")

_SMALL_TASK = 16 * BLOCK  # a quarter of a million elements: below it a second thread costs more than it brings
_LARGE_TASK = 64 * BLOCK
_LONGEST_GROUP = 16  # tasks handed to a thread at once: bounds the results in flight
_SPAN = 4 * BLOCK  # elements widened at a time: two buffers of float32 or float64 that stay in the second cache
_SINGLE = frozenset({"float32", "bfloat16", "float16"} | {name for name in DTYPES if name.startswith("float8")})
_EXACT = frozenset({"int64", "uint64"})


@dataclass(frozen=True, slots=True)
class Pair:
    """Shape and dtypes of two tensors to be measured, and how they are computed with."""

    shape: tuple[int, ...]
    candidate: str
    reference: str

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        """Length of a row (last axis)."""
        return self.shape[-1] if self.shape else 1

    @property
    def task(self) -> int:
        """Elements of one task: a function of the shape alone."""
        return _SMALL_TASK if self.count < 16 * _SMALL_TASK else _LARGE_TASK

    @property
    def is_exact(self) -> bool:
        """Whether the pair takes the exact numpy path: complex values, or 64-bit integers on both sides."""
        left, right = dtype_of(self.candidate), dtype_of(self.reference)
        return left.is_complex or right.is_complex or (left.name in _EXACT and right.format is None) or (
            right.name in _EXACT and left.format is None
        )  # fmt: skip

    @property
    def working(self) -> type[np.float32] | type[np.float64]:
        """The float type both sides are widened to: exact for every dtype but 64-bit integers against floats."""
        return np.float32 if self.candidate in _SINGLE and self.reference in _SINGLE else np.float64


class _Buffers(threading.local):
    """Buffers of one thread, made once."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, str], Array] = {}
        self.bins = np.empty(BLOCK, np.uint16)

    def get(self, use: str, dtype: Any, shape: tuple[int, ...]) -> Array:
        key = (use, np.dtype(dtype).char)
        if key not in self._made:
            self._made[key] = np.empty(shape, dtype)
        return self._made[key]


BUFFERS = _Buffers()


def available_cores() -> int:
    """Number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="align-measure")


def flat(raw: RawTensor) -> Array:
    """Bits along one axis (complex32 keeps its last axis of two halves)."""
    return np.ascontiguousarray(raw.bits).reshape((-1, 2) if raw.dtype == "complex32" else -1)


def spans(pair: Pair, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The stretches of a task that are computed at a time: the whole of it where nothing has to be widened."""
    step = stop - start if needs_no_widening(pair) else _SPAN
    for low in range(start, stop, step or 1):
        yield low, min(low + step, stop)


def needs_no_widening(pair: Pair) -> bool:
    """Whether both sides already are what the kernels compute with."""
    return not pair.is_exact and pair.candidate == pair.reference and pair.candidate in ("float32", "float64")


def load(bits: Array, dtype: str, pair: Pair, side: str) -> Array:
    """A stretch of bits as the pair's working float type; in this thread's buffer unless it is that type already."""
    working = pair.working
    if bits.dtype == working and bits.flags.aligned and bits.dtype.isnative:
        return bits
    out = BUFFERS.get(side, working, (_SPAN,))[: bits.size]
    if working is np.float32 and dtype == "bfloat16":
        kernels.widen_bfloat16(bits, out.view(np.uint32))
    elif working is np.float32 and dtype == "float16":
        kernels.widen_float16(bits.view(np.uint16), out.view(np.uint32))
    elif working is np.float32 and dtype.startswith("float8"):
        np.take(float8_table(dtype), bits, out=out, mode="clip")
    else:
        out[...] = widen(RawTensor(bits, dtype))
    return out


def choose_factor(candidate: Array, reference: Array, pair: Pair) -> float:
    """The factor b of `kernels.guess_factor` from a tensor's first block; 1 where there is none.

    For float32 it is kept to 29 bits, so that b*r is exact there even without a fused multiply-add.
    """
    if pair.is_exact or not candidate.size:
        return 1.0
    c = load(candidate[:BLOCK], pair.candidate, pair, "c")
    r = load(reference[:BLOCK], pair.reference, pair, "r")
    guess = float(kernels.guess_factor(c, r))
    if not 2.0**-500 < abs(guess) < 2.0**500:
        return 1.0
    if pair.working is np.float64:
        return guess
    fraction, exponent = math.frexp(guess)
    return math.ldexp(round(fraction * 2.0**29), exponent - 29)


class Task(NamedTuple):
    """A stretch of both tensors; `place` is its first element in the tensor."""

    candidate: Array
    reference: Array
    place: int


class Stream:
    """Regroup runs of bits of any lengths into tasks, and run work over tasks."""

    def __init__(self, pair: Pair, threads: int) -> None:
        self._pair = pair
        self._threads = threads
        self._place = 0
        self._waiting: list[tuple[Array, Array]] = []

    def push(self, candidate: Array, reference: Array) -> list[Task]:
        """The tasks that are complete with this run; the rest is copied, so that the caller may reuse its buffers."""
        if len(candidate) != len(reference):
            raise UsageError(
                f"runs of {len(candidate)} and {len(reference)} elements", "pass equally long runs of both tensors"
            )
        if self._waiting:
            self._waiting.append((candidate, reference))
            candidate, reference = (np.concatenate(side) for side in zip(*self._waiting, strict=True))
            self._waiting = []
        tasks, used = [], 0
        while used < len(candidate):
            end = min(used + self._pair.task, len(candidate))
            if end - used < self._pair.task and self._place + end - used < self._pair.count:
                self._waiting = [(candidate[used:].copy(), reference[used:].copy())]
                break
            tasks.append(Task(candidate[used:end], reference[used:end], self._place))
            self._place += end - used
            used = end
        return tasks

    def check_end(self) -> None:
        """Raise UsageError unless exactly the elements that the shape promises have come."""
        waiting = sum(len(run[0]) for run in self._waiting)
        if self._place + waiting != self._pair.count:
            raise UsageError(
                f"{self._place + waiting} elements came for the shape {list(self._pair.shape)}",
                "pass the tensors whole, in order",
            )

    def run(self, work: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[Result]:
        """Yield the work of each task in order, computed on all threads; at most two groups a thread are in flight."""
        if len(tasks) < 2 or self._threads < 2:
            yield from map(work, tasks)
            return
        group = max(1, min(len(tasks) // (4 * self._threads), _LONGEST_GROUP))
        flying = deque[Future[list[Result]]]()
        for first in range(0, len(tasks), group):
            flying.append(_pool(self._threads).submit(_work_through, work, tasks[first : first + group]))
            if len(flying) >= 2 * self._threads:
                yield from flying.popleft().result()
        while flying:
            yield from flying.popleft().result()


def _work_through(work: Callable[[Task], Result], tasks: Sequence[Task]) -> list[Result]:
    return [work(task) for task in tasks]


@dataclass(frozen=True, slots=True)
class Job:
    """What every task of one measurement shares: the pair, the factor, and the judged format's constants."""

    pair: Pair
    factor: float
    small: Floats
    ulp: Floats


def run_core(job: Job, task: Task) -> Floats:
    """Rows of core fields of the blocks of one task."""
    return _run(job, task, ())


def run_all(job: Job, task: Task) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Rows of all fields, and the counts of the ULP histogram, of one task."""
    counts = np.zeros(4 * kernels.ULP_BINS, np.int32)
    rows = _run(job, task, (job.small, job.ulp, BUFFERS.bins, counts))
    return rows, counts.reshape(4, -1).sum(axis=0)


def _run(job: Job, task: Task, extra: tuple[Array, ...]) -> Floats:
    pair, (candidate, reference, place) = job.pair, task
    size = len(candidate)
    rows = np.zeros((-(-size // BLOCK), kernels.FIELDS))
    for low, high in spans(pair, 0, size):
        part, at = rows[low // BLOCK : -(-high // BLOCK)], place + low
        c_bits, r_bits = candidate[low:high], reference[low:high]
        if pair.is_exact:
            exact.fill(part, (c_bits, pair.candidate), (r_bits, pair.reference), (at, pair.width), extra)
            continue
        c, r = load(c_bits, pair.candidate, pair, "c"), load(r_bits, pair.reference, pair, "r")
        if _run_kernel(job, c, r, at, part, extra):
            _redo_odd(job, c, r, part, extra)
    return rows


def _run_kernel(job: Job, c: Array, r: Array, place: int, rows: Floats, extra: tuple[Array, ...]) -> int:
    if extra:
        return int(kernels.run_all(c, r, job.factor, place, job.pair.width, rows, *extra))
    return int(kernels.run_core(c, r, job.factor, place, job.pair.width, rows))


def _redo_odd(job: Job, c: Array, r: Array, rows: Floats, extra: tuple[Array, ...]) -> None:
    """Blocks with NaN, Inf or extreme float64: without the odd positions, the exact way where that is not enough."""
    for block in np.flatnonzero(rows[:, kernels.N] < 0):
        part, row = slice(block * BLOCK, (block + 1) * BLOCK), rows[block]
        edges = row[kernels.ZERO_ROWS :].copy()
        row[:] = 0.0
        keep = exact.note_nonfinite(row, c[part, None], r[part, None])
        noted = row[kernels.NAN_C : kernels.ZERO_ROWS].copy()
        x, y = c[part][keep], r[part][keep]
        if _run_kernel(job, x, y, 0, row[None], extra):
            exact.fill_block(row, x.astype(np.float64), y.astype(np.float64), job.factor, extra)
        row[kernels.ARG_MAX] = np.flatnonzero(keep)[int(row[kernels.ARG_MAX])] if x.size else -1
        row[kernels.NAN_C : kernels.ZERO_ROWS], row[kernels.ZERO_ROWS :] = noted, edges
