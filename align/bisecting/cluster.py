"""Trials on an existing Ray cluster: one actor a job, each holding one NPU, GPU or CPU.

The target and what it imports must be on every node under the same path, as on a shared file system.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from align.bisecting.trial import TrialResult, unknown
from align.bisecting.workers import Told, WorkerOptions
from align.dumpers.choice import Plan
from align.dumpers.errors import UndecidedError, UsageError

MOST = 8
"""Actors started where `--jobs` does not say how many: more probes at once than this save no rounds worth a device."""


class RayWorkers:
    """Actors on a cluster. Without a number of jobs, one for each device that the cluster has, at most eight."""

    def __init__(self, told: Told, options: WorkerOptions) -> None:
        self._ray = _load_ray()
        self._is_ours = not self._ray.is_initialized()
        if self._is_ours:
            self._connect(options.ray)
        self._told = told
        self._timeout = options.timeout or None
        kind = told.settings.device.partition(":")[0]
        name, self._resources = _resources(kind)
        there = int(self._ray.cluster_resources().get(name, 0))
        if not there:
            raise UsageError(
                f"the cluster has no {name}", "start its nodes with that resource, or choose another --device"
            )
        self.width = min(options.jobs if options.jobs > 1 else MOST, there)
        self._actors = self._started(self.width)

    def _connect(self, address: str) -> None:
        paths = os.pathsep.join((str(Path.cwd()), *(path for path in sys.path if path)))
        try:
            self._ray.init(
                address=address,
                log_to_driver=False,
                logging_level="ERROR",
                runtime_env={"env_vars": {"PYTHONPATH": paths}},
            )
        except (ConnectionError, ValueError, RuntimeError) as exc:
            reason = str(exc).partition("\n")[0]
            raise UsageError(
                f"no Ray cluster at {address}: {reason}", "start one with `ray start --head`, or give its address"
            ) from exc

    def _started(self, count: int) -> list[Any]:
        remote = self._ray.remote(**self._resources)(_Actor)
        actors = [remote.remote(self._told) for _ in range(count)]
        try:
            self._ray.get([actor.ready.remote() for actor in actors])
        except self._ray.exceptions.RayError as exc:
            raise UndecidedError(
                f"a worker could not start: {_last_line(exc)}", "check that every node can import the target"
            ) from exc
        return actors

    def answer(self, plans: Sequence[Plan]) -> list[TrialResult]:
        """Run plans, one an actor at a time."""
        results: list[TrialResult] = []
        for start in range(0, len(plans), self.width):
            batch = plans[start : start + self.width]
            pending = [actor.answer.remote(plan) for actor, plan in zip(self._actors, batch, strict=False)]
            done, _ = self._ray.wait(pending, num_returns=len(pending), timeout=self._timeout)
            results.extend(self._result(index, item, item in done) for index, item in enumerate(pending))
        return results

    def _result(self, index: int, item: Any, is_done: bool) -> TrialResult:
        if not is_done:
            self._replace(index)
            return unknown(f"no result within {self._timeout:g} s")
        try:
            result: TrialResult = self._ray.get(item)
        except self._ray.exceptions.RayError as exc:
            self._replace(index)
            return unknown(f"the trial's worker died: {_last_line(exc)}")
        return result

    def _replace(self, index: int) -> None:
        self._ray.kill(self._actors[index])
        self._actors[index] = self._started(1)[0]

    def close(self) -> None:
        """End the actors, and the connection if it was made here."""
        for actor in self._actors:
            self._ray.kill(actor)
        if self._is_ours:
            self._ray.shutdown()


class _Actor:
    """One worker of a cluster."""

    def __init__(self, told: Told) -> None:
        self._trials = told.trials()

    def ready(self) -> bool:
        """Answered once the workload is built and surveyed."""
        return True

    def answer(self, plan: Plan) -> TrialResult:
        """Run one plan."""
        return self._trials.run(plan)


def _last_line(exc: Exception) -> str:
    return str(exc).strip().splitlines()[-1]


def _resources(kind: str) -> tuple[str, dict[str, Any]]:
    """The cluster's name of a kind of device, and what an actor asks for."""
    if kind == "npu":
        return "NPU", {"num_cpus": 1, "resources": {"NPU": 1}}
    return ("GPU", {"num_cpus": 1, "num_gpus": 1}) if kind == "cuda" else ("CPU", {"num_cpus": 1})


def _load_ray() -> Any:
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as exc:
        raise UsageError("ray is not installed", "pip install 'npu-align[cluster]'") from exc
    return ray
