"""Measure runs against one node of the reference: whole, in a stream when large, or on a sample of the elements.

Memory stays bounded: a tensor beyond 32 MiB is never held whole, its chunks are read one ahead of the measuring.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from align.compare.engine import Pair, flat
from align.compare.identical import measures_of_identical
from align.compare.measures import measure, measure_chunks
from align.compare.model import Measures
from align.compare.source import TraceSource
from align.compare.unmeasured import problem_of
from align.dumpers.dtypes import Array, RawTensor
from align.dumpers.errors import AlignError
from align.dumpers.model import NodeKey, NodeRecord, Storage
from align.dumpers.schema import sample_positions

LARGE_NBYTES = 32 << 20
_CHUNK_ELEMENTS = 4 << 20


class ReferenceNode:
    """One node of the reference, read at most once however many runs are measured against it, unless it is large."""

    def __init__(self, record: NodeRecord, source: TraceSource) -> None:
        self._record = record
        self._source = source
        self._raw: RawTensor | None = None

    def measure(self, record: NodeRecord, source: TraceSource) -> tuple[Measures | None, str]:
        """Measures and no problem, or the problem; where statistics alone show NaN or Inf, both."""
        measured, problem = problem_of(record, self._record)
        if problem:
            return measured, problem
        if is_same_content(record, self._record) and record.statistics is not None:
            return measures_of_identical(record), ""
        try:
            if Storage.SAMPLE in (record.storage, self._record.storage):
                return self._measure_sample(record, source)
            if max(record.nbytes, self._record.nbytes) >= LARGE_NBYTES:
                return self._measure_stream(record, source), ""
            return measure(source.read(record.key), self._read()), ""
        except (AlignError, KeyError, OSError) as exc:
            reason = exc.problem if isinstance(exc, AlignError) else f"{type(exc).__name__} {exc}"
            return None, f"cannot be read: {reason}"

    def _read(self) -> RawTensor:
        if self._raw is None:
            self._raw = self._source.read(self._record.key)
        return self._raw

    def _measure_stream(self, record: NodeRecord, source: TraceSource) -> Measures:
        pair = Pair(record.shape, record.dtype, self._record.dtype)

        def read(start: int) -> tuple[Array, Array]:
            stop = min(start + _CHUNK_ELEMENTS, pair.count)
            ours, theirs = (source, record.key), (self._source, self._record.key)
            return _stretch(*ours, start, stop), _stretch(*theirs, start, stop)

        def chunks() -> Iterator[tuple[Array, Array]]:
            starts = range(0, pair.count, _CHUNK_ELEMENTS)
            with ThreadPoolExecutor(1) as reader:
                ahead = reader.submit(read, 0)
                for start in starts[1:]:
                    now, ahead = ahead.result(), reader.submit(read, start)
                    yield now
                yield ahead.result()

        return measure_chunks(chunks(), pair)

    def _measure_sample(self, record: NodeRecord, source: TraceSource) -> tuple[Measures | None, str]:
        """Compare at the sampled positions, which follow from the key; of a whole tensor, the same elements."""
        sampled = record if record.storage is Storage.SAMPLE else self._record
        if {record.storage, self._record.storage} == {Storage.SAMPLE} and _drawn_from(record) != _drawn_from(
            self._record
        ):
            return None, "samples of nodes with different names hold different elements"
        count = int(np.prod(record.shape, dtype=np.int64))
        positions = sample_positions(sampled.key, count)
        ours = _sample(source.read(record.key), record, positions)
        measured = measure(ours, _sample(self._read(), self._record, positions))
        place = measured.max_abs_index
        if place:
            place = tuple(int(index) for index in np.unravel_index(positions[place[0]], record.shape))
        return replace(measured, max_abs_index=place), ""


def is_same_content(one: NodeRecord, other: NodeRecord) -> bool:
    """Whether two records hold the same bits, by digest."""
    alike = (one.digest, one.dtype, one.shape, one.storage) == (other.digest, other.dtype, other.shape, other.storage)
    return alike and bool(one.digest)


def _stretch(source: TraceSource, key: NodeKey, start: int, stop: int) -> Array:
    return source.read_flat(key, start, stop).bits


def _drawn_from(record: NodeRecord) -> tuple[str, str, int]:
    return record.key.call_name, record.key.slot, record.key.step


def _sample(raw: RawTensor, record: NodeRecord, positions: Array) -> RawTensor:
    return raw if record.storage is Storage.SAMPLE else RawTensor(flat(raw)[positions], raw.dtype)
