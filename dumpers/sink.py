"""Bridge from the observe tap to the trace: decide how each node is read, and keep within a byte budget."""

from __future__ import annotations

from dataclasses import replace

import torch

from align.dumpers.model import NodeRecord, RunStatus, Storage
from align.dumpers.statistics import Describer
from align.dumpers.store import TraceWriter
from align.dumpers.tensors import snapshot, to_raw
from align.dumpers.writer import BackgroundWriter

QUEUE_BYTES = 512 * 2**20
_SHARE = 8  # once half a budget is used, a tensor may take an eighth of what is left


class TraceSink:
    """Write nodes to a trace in the background; what waits is bounded by `queue_bytes`.

    With `max_bytes`, tensors that do not fit become statistics, large ones first. How much is still to come is not
    known, so the rule is: all tensors are kept until half the budget is used, and then those that take no more than an
    eighth of what is left. So the budget is never exceeded, and small tensors are kept to the end.
    """

    def __init__(self, writer: TraceWriter, *, max_bytes: int = 0, queue_bytes: int = QUEUE_BYTES) -> None:
        self._trace = writer
        self._writer = BackgroundWriter(writer, max_bytes=queue_bytes)
        self._max_bytes = max_bytes
        self._left = max_bytes
        self._degraded = 0
        self._largest = 0
        self._describe = Describer()

    @property
    def notes(self) -> tuple[str, ...]:
        """What the reader of the trace has to know."""
        if not self._degraded:
            return ()
        return (
            f"{self._degraded} tensors, the largest of {self._largest} bytes, were kept as statistics only"
            f" to stay within the budget of {self._max_bytes} bytes; {self._left} bytes of it are left",
        )

    def submit(self, record: NodeRecord, tensor: torch.Tensor) -> None:
        """Take a node: its value is read, or copied, before this returns."""
        if self._max_bytes and record.storage is Storage.TENSOR:
            record = self._within_budget(record)
        if record.storage is Storage.STATISTICS and tensor.device.type == "cpu":
            self._writer.submit(self._described(record, tensor), None, Storage.STATISTICS)
        else:
            self._writer.submit(record, snapshot(tensor), record.storage)

    def submit_bare(self, record: NodeRecord) -> None:
        """Take a record without data."""
        self._writer.submit(record, None, record.storage)

    def put_document(self, name: str, text: str) -> None:
        """Store a text beside the nodes, once everything handed over is written."""
        self._writer.drain()
        self._trace.put_document(name, text)

    def close(self, status: RunStatus) -> None:
        """Write what is queued and seal the trace."""
        self._writer.close(status)

    def _described(self, record: NodeRecord, tensor: torch.Tensor) -> NodeRecord:
        """The record with statistics, computed now: cheaper than a copy. Known content is not described again."""
        raw = to_raw(tensor)
        known, content = self._describe(raw)
        return NodeRecord(
            record.key,
            record.order,
            record.kind,
            record.type_name,
            record.dtype,
            record.shape,
            record.device,
            record.op_class,
            record.producers,
            record.storage,
            known,
            content,
            record.site,
            record.note,
        )

    def _within_budget(self, record: NodeRecord) -> NodeRecord:
        nbytes = record.nbytes
        used = self._max_bytes - self._left
        if used + nbytes <= self._max_bytes // 2 or nbytes <= self._left // _SHARE:
            self._left -= nbytes
            return record
        self._degraded += 1
        self._largest = max(self._largest, nbytes)
        return replace(
            record, storage=Storage.STATISTICS, note="; ".join(filter(None, (record.note, "over the byte budget")))
        )
