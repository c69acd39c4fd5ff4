"""Bridge from the observe tap to the trace: decide how each node is read, and keep within a byte budget."""

from __future__ import annotations

from dataclasses import replace

import torch

from align.dumpers.model import NodeRecord, RunStatus, Storage
from align.dumpers.store import TraceWriter
from align.dumpers.tensors import snapshot
from align.dumpers.writer import BackgroundWriter


class TraceSink:
    """Write nodes to a trace in the background. With `max_bytes`, tensors that no longer fit become statistics."""

    def __init__(self, writer: TraceWriter, *, max_bytes: int = 0) -> None:
        self._trace = writer
        self._writer = BackgroundWriter(writer)
        self._left = max_bytes
        self._is_bounded = max_bytes > 0
        self._degraded: list[str] = []

    @property
    def notes(self) -> tuple[str, ...]:
        """What the reader of the trace has to know."""
        if not self._degraded:
            return ()
        return (f"{len(self._degraded)} tensors were kept as statistics only to stay within the byte budget",)

    def submit(self, record: NodeRecord, tensor: torch.Tensor) -> None:
        """Take a node."""
        if record.storage is Storage.TENSOR and self._is_bounded:
            record = self._within_budget(record)
        if record.storage is Storage.STATISTICS and tensor.device.type == "cpu":
            self._writer.submit_statistics(record, tensor)
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

    def _within_budget(self, record: NodeRecord) -> NodeRecord:
        if record.nbytes <= self._left:
            self._left -= record.nbytes
            return record
        self._degraded.append(str(record.key))
        return replace(record, storage=Storage.STATISTICS, note="over the byte budget")
