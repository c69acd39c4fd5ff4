"""The queue stores what it is given, in bounded memory, and its errors reach the producer."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from align.dumpers import journal
from align.dumpers.errors import TraceError, TraceFormatError, UsageError
from align.dumpers.model import NodeKey, NodeKind, NodeRecord, RunStatus, Storage, TraceHeader
from align.dumpers.schema import sample_positions
from align.dumpers.statistics import describe, digest
from align.dumpers.store import Trace, TraceWriter
from align.dumpers.tensors import snapshot, to_raw
from align.dumpers.writer import BackgroundWriter

HEADER = TraceHeader("toy", "baseline", "cpu", "float32", 0)


def _record(call: int, tensor: torch.Tensor) -> NodeRecord:
    return NodeRecord(NodeKey("m", "forward", call), call, NodeKind.MODULE, "Linear", "float32", tuple(tensor.shape))


def _background(tmp_path: Path, **options: Any) -> BackgroundWriter:
    return BackgroundWriter(TraceWriter.create(tmp_path / "t.h5", HEADER), **options)


def test_each_way_of_keeping_stores_what_it_says(tmp_path: Path) -> None:
    tensor = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0))
    with _background(tmp_path) as writer:
        writer.submit(_record(0, tensor), snapshot(tensor), Storage.TENSOR)
        writer.submit(_record(1, tensor), snapshot(tensor), Storage.STATISTICS)
        writer.submit(_record(2, tensor), snapshot(tensor), Storage.SAMPLE)
        writer.submit_statistics(_record(3, tensor), tensor)
        writer.submit(_record(4, tensor), None, Storage.ABSENT)
        with pytest.raises(UsageError, match="cannot keep"):
            writer.submit(_record(5, tensor), snapshot(tensor), Storage.FUSED)
        tensor.zero_()
    tensor = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0))
    with Trace.open(tmp_path / "t.h5") as trace:
        storages = [record.storage for record in trace.nodes]
        assert storages == [Storage.TENSOR, Storage.STATISTICS, Storage.SAMPLE, Storage.STATISTICS, Storage.ABSENT]
        assert {record.statistics for record in trace.nodes[:4]} == {describe(to_raw(tensor))}
        assert {record.digest for record in trace.nodes[:4]} == {digest(to_raw(tensor))}
        assert (trace.nodes[4].statistics, trace.nodes[4].digest) == (None, "")
        np.testing.assert_array_equal(trace.read(trace.nodes[0].key).bits, tensor.numpy())
        key = trace.nodes[2].key
        np.testing.assert_array_equal(trace.read(key).bits, tensor.numpy().reshape(-1)[sample_positions(key, 15_000)])


def test_what_waits_stays_within_the_bound(tmp_path: Path) -> None:
    writer, most = _background(tmp_path, max_bytes=1_000_000), 0
    for call in range(60):
        tensor = torch.full((40_000,), float(call))
        writer.submit(_record(call, tensor), snapshot(tensor), Storage.TENSOR)
        most = max(most, writer.waiting_bytes)
    writer.close(RunStatus.COMPLETE)
    assert most <= 1_000_000
    with Trace.open(tmp_path / "t.h5") as trace:
        assert len(trace.nodes) == 60
        assert all(good for _, good in trace.verify())


def test_one_tensor_larger_than_the_bound_still_passes(tmp_path: Path) -> None:
    tensor = torch.ones(1000)
    with _background(tmp_path, max_bytes=100) as writer:
        writer.submit(_record(0, tensor), snapshot(tensor), Storage.TENSOR)
        writer.submit(_record(1, tensor), snapshot(tensor), Storage.TENSOR)
    with Trace.open(tmp_path / "t.h5") as trace:
        assert len(trace.nodes) == 2


def test_commits_come_on_time_without_further_submits(tmp_path: Path) -> None:
    with _background(tmp_path, commit_seconds=0.05) as writer:
        writer.submit_statistics(_record(0, torch.ones(3)), torch.ones(3))
        deadline = time.monotonic() + 10
        count = 0
        while count == 0 and time.monotonic() < deadline:
            time.sleep(0.05)
            # a reader that comes in the middle of a commit may have to come again
            with contextlib.suppress(TraceFormatError), Trace.open(tmp_path / "t.h5") as trace:
                count = len(trace.nodes)
        assert count == 1


def test_drain_commits_all_that_was_submitted(tmp_path: Path) -> None:
    with _background(tmp_path, commit_seconds=1000) as writer:
        for call in range(20):
            writer.submit(_record(call, torch.ones(9)), snapshot(torch.ones(9)), Storage.TENSOR)
        writer.drain()
        with Trace.open(tmp_path / "t.h5") as trace:
            assert len(trace.nodes) == 20


def test_an_error_of_the_thread_reaches_the_producer_and_keeps_the_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = _background(tmp_path)
    writer.submit(_record(0, torch.ones(9)), snapshot(torch.ones(9)), Storage.TENSOR)
    writer.drain()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def submit_many() -> None:
        for call in range(1, 10_000):
            writer.submit(_record(call, torch.ones(99)), snapshot(torch.ones(99)), Storage.TENSOR)

    with monkeypatch.context() as patch:
        patch.setattr(journal, "_write_at", full)
        with pytest.raises(TraceError, match="No space left"):
            submit_many()
        writer.close(RunStatus.FAILED)  # told once: closing afterwards is quiet
    with Trace.open(tmp_path / "t.h5") as trace:
        assert (trace.status, len(trace.nodes)) == (RunStatus.INCOMPLETE, 1)


def test_an_error_not_yet_told_is_raised_by_close(tmp_path: Path) -> None:
    writer = _background(tmp_path)
    for _ in range(2):
        writer.submit(_record(0, torch.ones(9)), snapshot(torch.ones(9)), Storage.TENSOR)
        time.sleep(0)
    with pytest.raises(UsageError, match="stored already"):
        writer.close(RunStatus.COMPLETE)
    with Trace.open(tmp_path / "t.h5") as trace:
        assert (trace.status, len(trace.nodes)) == (RunStatus.FAILED, 1)


def test_a_blocked_producer_is_freed_by_the_threads_error(tmp_path: Path) -> None:
    writer = _background(tmp_path, max_bytes=10)
    gate = threading.Event()
    store = writer._store

    def wait_and_fail(*item: Any) -> None:
        gate.wait(10)
        store(*item)
        raise TraceError("planted", "none")

    writer._store = wait_and_fail  # type: ignore[method-assign]
    writer.submit(_record(0, torch.ones(9)), snapshot(torch.ones(9)), Storage.TENSOR)
    threading.Timer(0.1, gate.set).start()
    with pytest.raises(TraceError, match="planted"):
        writer.submit(_record(1, torch.ones(9)), snapshot(torch.ones(9)), Storage.TENSOR)
    writer.close(RunStatus.FAILED)


def test_a_failing_run_keeps_what_it_submitted(tmp_path: Path) -> None:
    def run() -> None:
        with _background(tmp_path) as writer:
            writer.submit_statistics(_record(0, torch.ones(3)), torch.ones(3))
            raise RuntimeError("the model failed")

    with pytest.raises(RuntimeError, match="the model failed"):
        run()
    with Trace.open(tmp_path / "t.h5") as trace:
        assert (trace.status, len(trace.nodes)) == (RunStatus.FAILED, 1)


def test_a_program_that_never_closes_keeps_what_it_submitted(tmp_path: Path) -> None:
    code = """
import sys
sys.path.insert(0, sys.argv[2])
from test_writer import *
from test_writer import _background, _record
writer = _background(Path(sys.argv[1]))
writer.submit_statistics(_record(0, torch.ones(3)), torch.ones(3))
"""
    command = [sys.executable, "-c", code, str(tmp_path), str(Path(__file__).parent)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    with Trace.open(tmp_path / "t.h5") as trace:
        assert (trace.status, len(trace.nodes)) == (RunStatus.INCOMPLETE, 1)


def test_a_kill_loses_at_most_the_last_second(tmp_path: Path) -> None:
    script = Path(__file__).with_name("killed_writers.py")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(script), str(tmp_path), "background", "1"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    path, submitted_a_second_ago = json.loads(run.stdout)
    with Trace.open(path) as trace:
        assert submitted_a_second_ago > 10
        assert len(trace.nodes) >= submitted_a_second_ago
        assert all(good for _, good in trace.verify())
