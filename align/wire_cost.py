"""Measure what the wire itself costs a call on this machine, so that it can be printed beside every timing."""

from __future__ import annotations

import statistics
import time

import torch

from align.dumpers.wire import Wire


def seconds_per_call(*, calls: int = 400, rounds: int = 7) -> float:
    """Seconds that a wire without taps adds to one torch call: median difference of alternating rounds."""
    x = torch.zeros(8)

    def once() -> float:
        started = time.perf_counter()
        for _ in range(calls):
            torch.add(x, x)
        return (time.perf_counter() - started) / calls

    differences = []
    with torch.no_grad():
        for _ in range(rounds):
            bare = once()
            with Wire({}, (), sees_calls=True):
                wired = once()
            differences.append(wired - bare)
    return max(0.0, statistics.median(differences))
