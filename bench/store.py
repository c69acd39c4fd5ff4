"""Measure the trace file and the statistics by themselves: cost per tensor beyond a plain write, listing, compression.

usage: python bench/store.py [FOLDER]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from align.dumpers.dtypes import RawTensor
from align.dumpers.model import NodeKey, NodeKind, NodeRecord, RunStatus, Storage, TraceHeader
from align.dumpers.statistics import describe, digest, warm_up
from align.dumpers.store import COMPRESSIONS, Trace, TraceWriter

HEADER = TraceHeader("bench", "baseline", "cpu", "float32", 0)
SHAPE = (4, 128, 256)  # 0.5 MiB of float32


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Median time of one call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def record_of(order: int, storage: Storage, raw: RawTensor) -> NodeRecord:
    """A record as the wire would make it."""
    key = NodeKey(f"layers.{order % 100}.attn", "forward", 0, "0", order // 100)
    before = (NodeKey(f"layers.{(order - 1) % 100}.attn", "forward", 0, "0", (order - 1) // 100),) if order else ()
    return NodeRecord(
        key, order, NodeKind.MODULE, "Linear", raw.dtype, raw.shape, producers=before, storage=storage,
        statistics=describe(raw), digest=f"{order:032x}",
    )  # fmt: skip


def bench_puts(folder: Path, count: int = 400) -> None:
    """Tensors of 0.5 MiB: time of a put beside a plain write of the same bytes, interleaved, and of a commit."""
    raw = RawTensor(np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32), "float32")
    puts, writes, commits = [], [], []
    writer = TraceWriter.create(folder / "puts.h5", HEADER, overwrite=True)
    with (folder / "plain.bin").open("wb", buffering=0) as plain:
        for order in range(count):
            record = record_of(order, Storage.TENSOR, raw)
            start = time.perf_counter()
            writer.put(record, raw)
            middle = time.perf_counter()
            plain.write(raw.bits.data)
            puts.append(middle - start)
            writes.append(time.perf_counter() - middle)
            if order % 100 == 99:
                start = time.perf_counter()
                writer.commit()
                commits.append(time.perf_counter() - start)
    writer.close(RunStatus.COMPLETE)
    put, write = statistics.median(puts) * 1e6, statistics.median(writes) * 1e6
    print(f"put of 0.5 MiB          {put:8.0f} us, plain write {write:.0f} us, beyond it {put - write:.0f} us")
    print(f"commit after 100 puts   {statistics.median(commits) * 1e3:8.1f} ms")


def bench_listing(folder: Path, count: int = 100_000) -> None:
    """Records only: cost of one, and of opening and listing them all."""
    raw = RawTensor(np.zeros(SHAPE, np.float32), "float32")
    template = record_of(1, Storage.STATISTICS, raw)
    path = folder / "listing.h5"
    start = time.perf_counter()
    with TraceWriter.create(path, HEADER, overwrite=True) as writer:
        for order in range(count):
            key = NodeKey(f"layers.{order % 100}.attn", "forward", 0, "0", order // 100)
            fields = (template.kind, template.type_name, template.dtype, template.shape)
            writer.put(NodeRecord(key, order, *fields, statistics=template.statistics, digest=f"{order:032x}"), None)
            if order % 1000 == 999:
                writer.commit()
    written = time.perf_counter() - start
    start = time.perf_counter()
    with Trace.open(path) as trace:
        opened = time.perf_counter() - start
        nodes = len(trace.nodes)
        listed = time.perf_counter() - start
    print(f"record without tensor   {written / count * 1e6:8.1f} us, {path.stat().st_size / count:.0f} bytes")
    print(f"open, list {nodes} nodes {opened:.3f} s, {listed:.2f} s")


def bench_compression(folder: Path) -> None:
    """Activation-like tensors (half of them zeros): size and rate of each compression."""
    rng = np.random.default_rng(0)
    tensors = [np.maximum(rng.standard_normal((8, 64, 64, 64)), 0).astype(np.float32) for _ in range(4)]
    nbytes = sum(tensor.nbytes for tensor in tensors)
    for name in COMPRESSIONS:
        path = folder / "compressed.h5"
        start = time.perf_counter()
        with TraceWriter.create(path, HEADER, overwrite=True, compression=name) as writer:
            for order, tensor in enumerate(tensors):
                raw = RawTensor(tensor, "float32")
                writer.put(record_of(order, Storage.TENSOR, raw), raw)
        rate = nbytes / (time.perf_counter() - start) / 2**20
        print(f"compression {name:8s}    {path.stat().st_size / nbytes:8.2f} of the size, {rate:.0f} MiB/s written")


def bench_statistics() -> None:
    """One description and one digest of 0.5 MiB of each dtype."""
    values = np.random.default_rng(0).standard_normal(2**20).astype(np.float32)
    arrays = {
        "float32": values[: 2**17],
        "bfloat16": (values[: 2**18].view(np.uint32) >> 16).astype(np.uint16),
        "float16": values[: 2**18].astype(np.float16),
        "float8_e5m2": (values[: 2**19] * 20).astype(np.int8).view(np.uint8),
        "float64": values[: 2**16].astype(np.float64),
        "complex64": values[: 2**17].view(np.complex64),
        "int64": (values[: 2**16] * 100).astype(np.int64),
        "bool": values[: 2**19] > 0,
    }
    for name, array in arrays.items():
        raw = RawTensor(np.ascontiguousarray(array), name)
        describe(raw)
        first, second = seconds(lambda raw=raw: describe(raw), 100), seconds(lambda raw=raw: digest(raw), 100)
        rate = 0.5 / first / 1024
        print(f"describe 0.5 MiB {name:12s} {first * 1e6:5.0f} us ({rate:.1f} GiB/s), digest {second * 1e6:.0f} us")


def main() -> None:
    """Run all in the given folder, or a temporary one."""
    start = time.perf_counter()
    warm_up()
    print(f"load or compile loops   {time.perf_counter() - start:8.2f} s")
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as name:
        bench_statistics()
        bench_puts(Path(name))
        bench_listing(Path(name))
        bench_compression(Path(name))


if __name__ == "__main__":
    main()
