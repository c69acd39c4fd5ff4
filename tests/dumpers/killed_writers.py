"""Write traces in processes that are killed, for test_store and test_writer; print what each had committed as JSON.

usage: killed_writers.py FOLDER moments|operations|background SEED
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from align.dumpers import journal
from align.dumpers.dtypes import RawTensor
from align.dumpers.model import NodeKey, NodeKind, NodeRecord, Storage, TraceHeader
from align.dumpers.statistics import digest
from align.dumpers.store import TraceWriter

HEADER = TraceHeader("toy", "baseline", "cpu", "float32", 0)


def record_of(call: int, raw: RawTensor, **fields: Any) -> NodeRecord:
    """Record number `call`, spread over a few modules."""
    key = NodeKey(f"layer.{call % 7}", "forward", call)
    return NodeRecord(key, call, NodeKind.MODULE, "Linear", raw.dtype, raw.shape, **fields)


def tensor_of(call: int) -> RawTensor:
    """Tensor number `call`: of odd sizes, every fifth equal to an earlier one."""
    return RawTensor(
        np.random.default_rng(call - call % 5 // 4).integers(0, 99, 100 + 37 * (call % 60), np.int32), "int32"
    )


def write_until_killed(path: Path, report: int, most: int) -> None:
    """Put and commit; report the number of committed nodes after every commit."""
    writer = TraceWriter.create(path, HEADER)
    for call in range(most):
        raw = tensor_of(call)
        writer.put(record_of(call, raw, storage=Storage.TENSOR, digest=digest(raw)), raw)
        if call % 3 == 2:
            writer.put_document("progress", "x" * (call % 400))
            writer.commit()
            os.write(report, f"{call + 1}\n".encode())
    writer.commit()
    os.write(report, f"{most}\n".encode())


def forked(path: Path, work: Callable[[Path, int], None], alive: float) -> int:
    """Run `work` in a forked process, kill it after `alive` seconds, and return the last number it reported.

    A negative `alive` means that the work ends, or kills itself, in its own time.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        work(path, write)
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(write)
    if alive >= 0:
        time.sleep(alive)
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(read) as pipe:
        lines = pipe.read().splitlines()
    return int(lines[-1]) if lines else 0


def killed_at(number: int, *, torn: bool) -> Callable[[Path, int], None]:
    """Work that kills itself at its file operation `number`, before it or with half of it done."""

    def work(path: Path, report: int) -> None:
        left = [number]

        def guard(name: str, place: Any, halve: bool) -> None:
            original = getattr(place, name)

            def counted(*args: Any, **kwargs: Any) -> Any:
                left[0] -= 1
                if left[0] == 0:
                    if halve and torn:
                        file, offset, view = args
                        original(file, offset, view[: len(view) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*args, **kwargs)

            setattr(place, name, counted)

        guard("_write_at", journal, halve=True)
        guard("replace", os, halve=False)
        guard("unlink", Path, halve=False)
        guard("write_bytes", Path, halve=False)
        write_until_killed(path, report, 12)

    return work


def submit_until_killed(path: Path, report: int) -> None:
    """Submit to a BackgroundWriter for 2 s; report how many had been submitted a second before the kill."""
    import torch

    from align.dumpers.tensors import snapshot
    from align.dumpers.writer import BackgroundWriter

    writer = BackgroundWriter(TraceWriter.create(path, HEADER))
    times: list[float] = []
    safe, call = 0, 0
    while not times or times[-1] < times[0] + 2.0:
        writer.submit(record_of(call, tensor_of(1)), snapshot(torch.full((500,), float(call))), Storage.TENSOR)
        times.append(time.monotonic())
        while times[safe] < times[-1] - 1.0:
            safe += 1
        call += 1
        time.sleep(0.002)
    os.write(report, f"{safe}\n".encode())


def main(folder: Path, mode: str, seed: int) -> None:
    """Kill writers in the way `mode` says; print one JSON line each: the file and what was surely committed."""
    chance = random.Random(seed)
    runs: list[tuple[Callable[[Path, int], None], float]]
    if mode == "moments":
        runs = [
            (lambda path, report: write_until_killed(path, report, 100_000), chance.uniform(0.0, 0.08))
            for _ in range(30)
        ]
    elif mode == "operations":
        runs = [(killed_at(number, torn=number % 2 == 0), -1.0) for number in range(1, 400, 9)]
    else:
        runs = [(submit_until_killed, -1.0)]
    for number, (work, alive) in enumerate(runs):
        path = folder / f"{number}.h5"
        print(json.dumps([str(path), forked(path, work, alive)]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
