"""Run trials elsewhere: in this process, in worker processes that can be timed out, or on a Ray cluster.

A worker builds the workload and makes the reference and baseline runs once, then answers plan after plan. With
`isolate` every trial has a process of its own, as choices that hold from process start on need.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Protocol

from align.compare.model import Status
from align.dumpers.choice import Plan
from align.dumpers.errors import UsageError
from align.session import Session
from align.settings import RunSettings
from align.bisecting.trial import Criterion, TrialResult, Trials


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """How trials are run. `timeout` in seconds, 0 for none; `ray` is the address of a cluster, "" for none."""

    jobs: int = 1
    isolate: bool = False
    timeout: float = 0.0
    ray: str = ""


class Workers(Protocol):
    """Answers plans, several at once where it can."""

    def answer(self, plans: Sequence[Plan]) -> list[TrialResult]:
        """Run plans; results in their order."""

    def close(self) -> None:
        """Give the workers back."""


class Here:
    """Trials in this process, one after the other: the fastest on one device, and without a timeout."""

    def __init__(self, trials: Trials) -> None:
        self._trials = trials

    def answer(self, plans: Sequence[Plan]) -> list[TrialResult]:
        """Run plans in turn."""
        return [self._trials.run(plan) for plan in plans]

    def close(self) -> None:
        """Nothing to give back."""


def start_workers(trials: Trials, settings: RunSettings, criterion: Criterion, options: WorkerOptions) -> Workers:
    """The workers that the options ask for."""
    if options.ray:
        return RayWorkers(settings, criterion, options)
    if options.isolate or options.timeout or options.jobs > 1:
        return Processes(settings, criterion, options)
    return Here(trials)


# -- processes --------------------------------------------------------------------------------------------------------

_own: Trials | None = None


def _answer(settings: RunSettings, criterion: Criterion, plan: Plan) -> TrialResult:
    global _own
    if _own is None:
        _own = prepared_trials(settings, criterion)
    return _own.run(plan)


def prepared_trials(settings: RunSettings, criterion: Criterion) -> Trials:
    """Build the workload and make the reference and baseline runs, ready for plans."""
    session = Session(settings)
    trials = Trials(session, criterion)
    trials.prepare(session.baseline_plan())
    return trials


class Processes:
    """Trials in child processes. A trial that exceeds the timeout, or kills its process, is UNKNOWN."""

    def __init__(self, settings: RunSettings, criterion: Criterion, options: WorkerOptions) -> None:
        self._told = (settings, criterion)
        self._options = options
        self._pool: ProcessPoolExecutor | None = None

    def answer(self, plans: Sequence[Plan]) -> list[TrialResult]:
        """Run plans, `jobs` at a time."""
        results: list[TrialResult] = []
        width = max(1, self._options.jobs)
        for start in range(0, len(plans), width):
            results.extend(self._batch(plans[start : start + width]))
        return results

    def _batch(self, plans: Sequence[Plan]) -> list[TrialResult]:
        pool = self._open()
        futures = [pool.submit(_answer, *self._told, plan) for plan in plans]
        results = []
        for future in futures:
            try:
                results.append(future.result(timeout=self._options.timeout or None))
            except TimeoutError:
                results.append(unknown(f"no result within {self._options.timeout:g} s"))
                self._kill()
            except BrokenProcessPool:
                results.append(unknown("the trial's process died"))
                self._kill()
            except Exception as exc:
                results.append(unknown(f"{type(exc).__name__}: {exc}"))
        if self._options.isolate:
            self.close()
        return results

    def _open(self) -> ProcessPoolExecutor:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(max(1, self._options.jobs), mp_context=context)
        return self._pool

    def _kill(self) -> None:
        if self._pool is None:
            return
        for process in list((self._pool._processes or {}).values()):
            process.kill()
        self.close()

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None


def unknown(why: str) -> TrialResult:
    """A trial that gave no answer."""
    return TrialResult(Status.UNKNOWN, float("nan"), float("nan"), why, "")


# -- ray --------------------------------------------------------------------------------------------------------------


class RayWorkers:
    """Trials on an existing Ray cluster: one actor a job, each holding one NPU, GPU or CPU."""

    def __init__(self, settings: RunSettings, criterion: Criterion, options: WorkerOptions) -> None:
        self._ray = _load_ray()
        if not self._ray.is_initialized():
            self._ray.init(address=options.ray, log_to_driver=False, ignore_reinit_error=True)
        self._options = options
        self._told = (settings, criterion)
        remote = self._ray.remote(**_resources(settings.device))(_Actor)
        self._actors = [remote.remote(settings, criterion) for _ in range(max(1, options.jobs))]

    def answer(self, plans: Sequence[Plan]) -> list[TrialResult]:
        """Run plans, spread over the actors."""
        pending = [(self._actors[i % len(self._actors)].answer.remote(plan)) for i, plan in enumerate(plans)]
        return [self._wait(item) for item in pending]

    def _wait(self, item: Any) -> TrialResult:
        try:
            result: TrialResult = self._ray.get(item, timeout=self._options.timeout or None)
        except self._ray.exceptions.GetTimeoutError:
            return unknown(f"no result within {self._options.timeout:g} s")
        except self._ray.exceptions.RayError as exc:
            return unknown(f"{type(exc).__name__}: {str(exc).splitlines()[0]}")
        return result

    def close(self) -> None:
        """End the actors."""
        for actor in self._actors:
            self._ray.kill(actor)


class _Actor:
    """One worker of a cluster."""

    def __init__(self, settings: RunSettings, criterion: Criterion) -> None:
        self._trials = prepared_trials(settings, criterion)

    def answer(self, plan: Plan) -> TrialResult:
        """Run one plan."""
        return self._trials.run(plan)


def _resources(device: str) -> dict[str, Any]:
    kind = device.partition(":")[0]
    if kind == "npu":
        return {"num_cpus": 1, "resources": {"NPU": 1}}
    return {"num_cpus": 1, "num_gpus": 1} if kind == "cuda" else {"num_cpus": 1}


def _load_ray() -> Any:
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as exc:
        raise UsageError("ray is not installed", "pip install 'npu-align[cluster]'") from exc
    return ray
