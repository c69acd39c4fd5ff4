"""Run trials in this process or in others: worker processes that can be timed out, or actors of a Ray cluster.

A worker builds the workload and surveys it once, then answers plan after plan, measuring against the ends that the
parent found. With `isolate` every trial has a process of its own, whose environment holds the plan's flags of process
start. Time is counted from the moment a worker is ready, so building a model never counts as hanging.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Protocol

import torch

from align.bisecting.trial import Criterion, Ends, TrialResult, Trials, unknown
from align.devices import select_device
from align.devices.base import process_environment
from align.dumpers.choice import Plan
from align.isolated import OwnProcess
from align.plan import flags_of
from align.session import Session
from align.settings import RunSettings


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """How trials are run. `timeout` in seconds, 0 for none; `ray` is the address of a cluster, "" for none."""

    jobs: int = 1
    isolate: bool = False
    timeout: float = 0.0
    ray: str = ""

    @property
    def is_here(self) -> bool:
        """Whether trials run in this process."""
        return not (self.ray or self.isolate or self.timeout or self.jobs > 1)


@dataclass(frozen=True, slots=True)
class Told:
    """What a worker is told at its start."""

    settings: RunSettings
    criterion: Criterion
    ends: Ends

    def trials(self) -> Trials:
        """Build and survey the workload, ready for plans."""
        trials = Trials(Session(self.settings), self.criterion)
        trials.adopt(self.ends)
        return trials


class Workers(Protocol):
    """Answers plans, `width` at once."""

    width: int

    def answer(self, plans: Sequence[Plan]) -> list[TrialResult]:
        """Run plans; results in their order."""

    def close(self) -> None:
        """Give the workers back."""


class Here:
    """Trials in this process, one after the other: the fastest on one device, and without a timeout."""

    width = 1

    def __init__(self, trials: Trials) -> None:
        self._trials = trials

    def answer(self, plans: Sequence[Plan]) -> list[TrialResult]:
        """Run plans in turn."""
        return [self._trials.run(plan) for plan in plans]

    def close(self) -> None:
        """Nothing to give back."""


def start_workers(trials: Trials, options: WorkerOptions) -> Workers:
    """The workers that the options ask for; `trials` must be prepared."""
    if options.is_here:
        return Here(trials)
    session = trials.session
    settings = (
        session.settings.model_copy(update={"device": session.device.kind})
        if session.settings.device == "auto"
        else session.settings
    )
    told = Told(settings, trials.criterion, trials.ends)
    if options.ray:
        from align.bisecting.cluster import RayWorkers

        return RayWorkers(told, options)
    return Processes(told, options)


# -- processes --------------------------------------------------------------------------------------------------------


class Processes:
    """Trials in child processes. A trial that exceeds the timeout, or kills its process, is UNKNOWN."""

    def __init__(self, told: Told, options: WorkerOptions) -> None:
        self._told = told
        self._options = options
        self._idle: list[_Child] = []
        self._busy: list[_Child] = []
        self.width = max(1, options.jobs)

    def answer(self, plans: Sequence[Plan]) -> list[TrialResult]:
        """Run plans, `jobs` at a time."""
        waiting, results = deque(enumerate(plans)), dict[int, TrialResult]()
        while waiting or self._busy:
            while waiting and len(self._busy) < self.width:
                index, plan = waiting.popleft()
                child = self._idle.pop() if self._idle else self._born(plan)
                child.take(index, plan, self._options.timeout)
                self._busy.append(child)
            for child, result in self._news():
                results[child.index] = result
                self._busy.remove(child)
                self._keep(child)
        return [results[index] for index in range(len(plans))]

    def _born(self, plan: Plan) -> _Child:
        """A new child, on the first device that no other child has."""
        taken = {child.slot for child in (*self._idle, *self._busy)}
        slot = next(slot for slot in range(self.width) if slot not in taken)
        flags = flags_of(plan) if self._options.isolate else {}
        variables = process_environment(flags) | _visible_device(self._told.settings.device, slot)
        return _Child(self._told, variables, slot, flags)

    def _news(self) -> list[tuple[_Child, TrialResult]]:
        """Wait for an answer, or for the first child to run out of time."""
        soonest = min(child.seconds_left() for child in self._busy)
        ready = wait([child.pipe for child in self._busy], timeout=soonest if soonest < _FOREVER else None)
        heard = [(child, child.hear()) for child in self._busy if child.pipe in ready]
        late = [
            (child, child.give_up()) for child in self._busy if child.pipe not in ready and child.seconds_left() <= 0
        ]
        return [(child, result) for child, result in (*heard, *late) if result is not None]

    def _keep(self, child: _Child) -> None:
        if self._options.isolate or not child.is_alive:
            child.close()
        else:
            self._idle.append(child)

    def close(self) -> None:
        """End the processes."""
        for child in (*self._idle, *self._busy):
            child.close()
        self._idle, self._busy = [], []


_FOREVER = 1e9


class _Child(OwnProcess):
    """A worker process: getting ready, at a plan, or idle."""

    def __init__(self, told: Told, variables: dict[str, str], slot: int, flags: dict[str, str]) -> None:
        super().__init__(variables)
        self.slot = slot
        self.pipe = self._pipe
        self.pipe.send((f"{__name__}:get_ready", (told, flags)))
        self.index, self._plan = -1, Plan("", "", "")
        self._timeout, self._deadline = 0.0, float("inf")
        self._is_ready, self.is_alive = False, True

    def take(self, index: int, plan: Plan, timeout: float) -> None:
        self.index, self._plan, self._timeout = index, plan, timeout
        if self._is_ready:
            self._begin()

    def _begin(self) -> None:
        self.pipe.send((f"{__name__}:try_plan", (self._plan,)))
        self._deadline = time.monotonic() + self._timeout if self._timeout else float("inf")

    def seconds_left(self) -> float:
        return max(0.0, min(self._deadline - time.monotonic(), _FOREVER))

    def hear(self) -> TrialResult | None:
        """The trial's result; None when the child has only become ready, and begins."""
        try:
            is_good, said = self.pipe.recv()
        except (EOFError, OSError):
            self.is_alive = False
            return unknown(f"the trial's process died (exit code {self._process.wait()})")
        self._deadline = float("inf")
        if not is_good:
            self.is_alive = False
            return unknown(f"a worker could not start: {said.problem}")
        if self._is_ready:
            return said  # type: ignore[no-any-return]
        self._is_ready = True
        self._begin()
        return None

    def give_up(self) -> TrialResult:
        self.is_alive = False
        return unknown(f"no result within {self._timeout:g} s")


_own: list[Trials] = []


def get_ready(told: Told, flags: dict[str, str]) -> None:
    """Set the flags that must be first, build and survey the workload, in a child.

    Ctrl-C is the parent's affair from here on.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    device = select_device(told.settings.device)
    device.prepare({name: value for name, value in flags.items() if name in device.flags()})  # others: the target's own
    _own[:] = [told.trials()]


def try_plan(plan: Plan) -> TrialResult:
    """Run a plan, in a child."""
    return _own[0].run(plan)


_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}


def _visible_device(device: str, slot: int) -> dict[str, str]:
    """The variable that shows a child one device of several; nothing where the user named the device, or on a CPU."""
    variable = _VISIBLE.get(device)
    if variable is None:
        return {}
    told = [name for name in os.environ.get(variable, "").split(",") if name]
    names = told or [str(number) for number in range(max(1, getattr(torch, device).device_count()))]
    return {variable: names[slot % len(names)]}
