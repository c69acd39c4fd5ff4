"""A bounded queue between a running model and its trace: the model waits only when memory would grow past the bound.

One thread computes statistics and digests, stores, and commits on time. An error in it reaches the producer at its next
call, as it was; everything committed before stays.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Self

from align.dumpers.dtypes import RawTensor
from align.dumpers.errors import AlignError, UsageError
from align.dumpers.model import NodeRecord, RunStatus, Storage
from align.dumpers.schema import sample_positions
from align.dumpers.statistics import Describer, describe, digest, warm_up
from align.dumpers.store import TraceWriter, status_after
from align.dumpers.tensors import Snapshot, snapshot, to_raw

if TYPE_CHECKING:
    import torch

_RECORD_BYTES = 2048  # what a waiting record weighs besides its tensor
_QUIET_RECORDS = 256  # so many may wait before the thread is woken for them: waking it takes the interpreter's lock
_Item = tuple[NodeRecord, Snapshot | None]


class BackgroundWriter:
    """Feed a `TraceWriter` from a thread. `max_bytes` bounds what waits; a commit comes every `commit_seconds`."""

    def __init__(self, writer: TraceWriter, *, max_bytes: int = 512 * 2**20, commit_seconds: float = 0.5) -> None:
        warm_up()  # or the first node would wait for the loops to be loaded, longer than a commit may
        self._writer = writer
        self._max_bytes = max_bytes
        self._commit_seconds = commit_seconds
        self._queue: deque[_Item] = deque()
        self._nbytes = 0  # of waiting items and of the one being stored
        self._describe = Describer()  # the thread's
        self._is_busy = False
        self._is_closing = False
        self._error: BaseException | None = None
        self._was_raised = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="align-trace-writer", daemon=True)
        self._thread.start()
        # the thread keeps both alive, so this runs at the interpreter's exit, before the writer's own finaliser
        self._stop = weakref.finalize(writer, _stop_at_exit, weakref.ref(self))

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait for the thread now."""
        return self._nbytes

    def submit(self, record: NodeRecord, taken: Snapshot | None, keep: Storage) -> None:
        """Hand over a record and the snapshot of its tensor; the thread fills in statistics, digest and storage.

        `keep` is TENSOR, SAMPLE or STATISTICS. Without a snapshot the record is stored as it stands. Blocks while the
        queue is full. Raises the thread's error, if it had one.
        """
        if taken is None:
            self._append((record, None), 0)
            return
        if keep not in (Storage.TENSOR, Storage.SAMPLE, Storage.STATISTICS):
            raise UsageError(f"cannot keep a tensor as {keep}", "choose tensor, sample or statistics")
        kept = record if record.storage is keep else replace(record, storage=keep)
        self._append((kept, taken), taken.nbytes)

    def submit_statistics(self, record: NodeRecord, tensor: torch.Tensor) -> None:
        """Describe a tensor here and now, without a copy, and hand over the record: the cheaper way on the CPU.

        A tensor on a device is moved in the background instead, as `submit` does.
        """
        if tensor.device.type != "cpu":
            self.submit(record, snapshot(tensor), Storage.STATISTICS)
            return
        raw = to_raw(tensor)
        described = replace(record, storage=Storage.STATISTICS, statistics=describe(raw), digest=digest(raw))
        self.submit(described, None, Storage.STATISTICS)

    def drain(self) -> None:
        """Wait until everything handed over is committed. Raises the thread's error, if it had one."""
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._error is not None or not (self._queue or self._is_busy))
        self._raise_error()
        self._writer.commit()

    def close(self, status: RunStatus) -> None:
        """Store what waits, close the trace with `status`, and end the thread. Raises an error not yet raised."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join()
        self._stop.detach()
        if self._error is None:
            self._writer.close(status)
            return
        with contextlib.suppress(AlignError):
            self._writer.close(RunStatus.FAILED)
        if not self._was_raised:
            self._raise_error()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(status_after(exc))

    # the producer's side

    def _append(self, item: _Item, nbytes: int) -> None:
        self._raise_error()
        nbytes += _RECORD_BYTES
        with self._changed:
            if self._is_closing:
                raise UsageError("the trace writer is closed", "submit before leaving the `with` block")
            if self._nbytes and self._nbytes + nbytes > self._max_bytes:
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._error is not None or self._fits(nbytes))
            self._queue.append(item)
            self._nbytes += nbytes
            if item[1] is not None or len(self._queue) >= _QUIET_RECORDS:
                self._changed.notify_all()
        self._raise_error()

    def _fits(self, nbytes: int) -> bool:
        return self._nbytes == 0 or self._nbytes + nbytes <= self._max_bytes

    def _raise_error(self) -> None:
        if self._error is not None:
            self._was_raised = True
            raise self._error

    # the thread's side

    def _work(self) -> None:
        try:
            due = time.monotonic() + self._commit_seconds
            while self._take_one(due):
                if time.monotonic() >= due:
                    self._writer.commit()
                    due = time.monotonic() + self._commit_seconds
            self._writer.commit()
        except BaseException as exc:  # raised again in the producer
            with self._changed:
                self._error = exc
                self._queue.clear()
                self._nbytes = 0
                self._changed.notify_all()

    def _take_one(self, due: float) -> bool:
        """Store one item, or wait for one until a commit is due; False once closed and empty."""
        with self._changed:
            if not self._queue and not self._is_closing:
                self._changed.wait(max(0.0, due - time.monotonic()))
            if not self._queue:
                return not self._is_closing
            record, taken = self._queue.popleft()
            self._is_busy = True
        self._store(record, taken)
        with self._changed:
            self._is_busy = False
            self._nbytes -= _RECORD_BYTES + (taken.nbytes if taken else 0)
            self._changed.notify_all()
        return True

    def _store(self, record: NodeRecord, taken: Snapshot | None) -> None:
        if taken is None:
            self._writer.put(record, None)
            return
        raw = taken.wait()
        statistics, content = self._describe(raw)
        self._writer.put(replace(record, statistics=statistics, digest=content), _kept(record, raw))
        taken.release()


def _kept(record: NodeRecord, raw: RawTensor) -> RawTensor | None:
    """What is stored of a tensor: all, values at fixed positions, or nothing."""
    if record.storage is Storage.TENSOR:
        return raw
    if record.storage is Storage.STATISTICS:
        return None
    shape = (-1, 2) if raw.dtype == "complex32" else (-1,)
    flat = raw.bits.reshape(shape)
    return RawTensor(flat[sample_positions(record.key, len(flat))], raw.dtype)


def _stop_at_exit(reference: weakref.ref[BackgroundWriter]) -> None:
    """End the thread of a program that never closed its writer, before the interpreter takes its modules away."""
    background = reference()
    if background is not None:
        with background._changed:
            background._is_closing = True
            background._changed.notify_all()
        background._thread.join(timeout=10)
