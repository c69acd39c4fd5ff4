"""Ask torch's profiler which kernels a CUDA device ran: its times hold no launch gaps, which pairs of events may."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from align.profiling.values import KernelTotal


def profile_cuda(run: Callable[[], Any]) -> tuple[KernelTotal, ...]:
    """Run under the profiler and add up what the device did."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    return totals(found.events() or ())


def totals(events: Iterable[Any]) -> tuple[KernelTotal, ...]:
    """Events that ran on the device, by name, the most time first."""
    groups: dict[str, list[float]] = {}
    for event in events:
        if event.device_type == DeviceType.CUDA:
            groups.setdefault(event.name, []).append(event.time_range.elapsed_us() * 1e-6)
    whole = sum(map(sum, groups.values()))
    rows = [
        KernelTotal(name, len(times), sum(times), sum(times) / whole if whole else 0.0)
        for name, times in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.seconds, row.name)))
