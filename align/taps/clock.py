"""Take host and device time of every function call, and know what that itself costs.

Put it last among the taps: it then starts right before the call runs and stops right after, so that the work of
other taps is outside but for what replaces the call. Host time is dispatch: until Python goes on. Device time lies
between two marks in the device's own order of work; on the CPU both are the same.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from align.devices.base import Device
from align.dumpers.naming import flat_tensors
from align.dumpers.placeholder import Placeholder
from align.dumpers.wire import Call, CallId, Tap, Wire


@dataclass(frozen=True, slots=True)
class Interval:
    """One call of a run: seconds on host and device without those of calls inside it.

    `is_stand_in` tells that a fused site swallowed the call: nothing was computed, the time is the tool's own.
    """

    step: int
    ident: CallId
    host_seconds: float
    device_seconds: float
    is_stand_in: bool = False


@dataclass(frozen=True, slots=True)
class ClockCost:
    """What the clock costs, seconds a call: inside the measured interval (subtracted) and in all (stated)."""

    inside: float = 0.0
    total: float = 0.0


class _Span:
    """A call under way, or done. A done one holds no call, so that no tensor lives longer for being timed."""

    __slots__ = (
        "call",
        "end",
        "ident",
        "inner_device",
        "inner_host",
        "is_stand_in",
        "outer",
        "start",
        "started",
        "step",
        "stopped",
    )

    def __init__(self, call: Call, outer: _Span | None) -> None:
        self.call: Call | None = call
        self.ident = call.ident
        self.step = call.step
        self.outer = outer
        self.is_stand_in = False
        self.inner_host = 0.0
        self.inner_device = 0.0
        self.start = self.end = 0.0
        self.started: Any = None
        self.stopped: Any = None


class _Innermost(threading.local):
    span: _Span | None = None


class Clock(Tap):
    """Note when every call begins and ends; `intervals` tells once the run is over."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._marks = device.has_own_clock
        self._innermost = _Innermost()
        self._spans: list[_Span] = []

    def prepare(self, call: Call) -> None:
        span = _Span(call, self._innermost.span)
        self._innermost.span = span
        if self._marks:
            span.started = self._device.mark()
        span.start = time.perf_counter()

    def finish(self, call: Call, output: Any) -> Any:
        end = time.perf_counter()
        span = self._innermost.span
        if span is None or span.call is not call:
            return output
        span.end = end
        if self._marks:
            span.stopped = self._device.mark()
        span.is_stand_in = _is_stand_in(output)
        self._innermost.span = span.outer
        self._spans.append(span)
        span.call = None
        return output

    def fail(self, call: Call, error: BaseException) -> None:
        span = self._innermost.span
        if span is not None and span.call is call:
            self._innermost.span = span.outer

    def intervals(self, cost: ClockCost) -> tuple[Interval, ...]:
        """All calls in the order in which they ended, the clock's own cost taken off. Waits for the device."""
        self._device.synchronize()
        return tuple(self._measured(cost))

    def _measured(self, cost: ClockCost) -> Iterator[Interval]:
        for span in self._spans:  # inner calls end, and so come, before the call they are in
            host = span.end - span.start
            device = self._device.seconds_between(span.started, span.stopped) if self._marks else host
            if span.outer is not None:
                span.outer.inner_host += host + cost.total - cost.inside
                span.outer.inner_device += device if self._marks else host + cost.total - cost.inside
            host = max(0.0, host - span.inner_host - cost.inside)
            device = max(0.0, device - span.inner_device) if self._marks else host
            yield Interval(span.step, span.ident, host, device, span.is_stand_in)


def _is_stand_in(output: Any) -> bool:
    if isinstance(output, torch.Tensor):
        return isinstance(output, Placeholder)
    return isinstance(output, (tuple, list)) and any(isinstance(tensor, Placeholder) for tensor in flat_tensors(output))


def clock_cost(device: Device, *, calls: int = 300, rounds: int = 7) -> ClockCost:
    """Measure the clock on a call that takes next to no time: medians of alternating rounds with and without it."""
    x = torch.zeros(8, device=device.torch_device)
    inside, total = [], []
    with torch.no_grad():
        for _ in range(rounds):
            bare = _seconds_per_call(x, calls)
            clock = Clock(device)
            with Wire({}, (clock,), sees_calls=True):
                clocked = _seconds_per_call(x, calls)
            total.append(clocked - bare)
            inside.append(statistics.median(span.host_seconds for span in clock.intervals(ClockCost())) - bare)
    return ClockCost(max(0.0, statistics.median(inside)), max(0.0, statistics.median(total)))


def _seconds_per_call(x: torch.Tensor, calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        torch.add(x, x)
    return (time.perf_counter() - started) / calls
