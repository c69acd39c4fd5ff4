"""Trials in other processes: several at once, timed out, killed, with their own environment; and on a Ray cluster."""

import os
from collections.abc import Iterator

import pytest

from align.bisecting.bisection import BisectOptions
from align.bisecting.trial import Criterion, Trials
from align.bisecting.workers import Processes, WorkerOptions, start_workers
from align.compare.model import Status
from align.compare.policy import policy_named
from align.dumpers.choice import Choice, ChoiceKind, Plan
from align.session import Session
from align.settings import RunSettings

TROUBLE = """
import os
import time

CHOICES = ("fine", "wrong", "hangs", "dies", "raises")


class Net(nn.Module):
    def __init__(self, on):
        super().__init__()
        self.linear, self.on = nn.Linear(16, 16), frozenset(on)

    def forward(self, x):
        if "hangs" in self.on:
            time.sleep(600)
        if "dies" in self.on:
            os._exit(7)
        if "raises" in self.on:
            raise RuntimeError("no kernel for this shape")
        h = self.linear(x)
        return h * 1.5 if "wrong" in self.on else h


def build(choices):
    return Net(choices).eval(), torch.randn(4, 16)
"""


def trials_of(build: str, **more: object) -> Trials:
    session = Session(RunSettings(target=build, device="cpu", **more))
    trials = Trials(session, Criterion(policy_named("cann-l1")))
    trials.prepare(session.baseline_plan())
    return trials


def plan_of(trials: Trials, *names: str) -> Plan:
    return trials.session.candidate_plan().with_choices(Choice(ChoiceKind.USER, name) for name in names)


@pytest.fixture
def trials(target) -> Trials:
    return trials_of(target(TROUBLE))


@pytest.fixture
def two_processes(trials: Trials) -> Iterator[Processes]:
    workers = start_workers(trials, WorkerOptions(jobs=2, timeout=2.0))
    assert isinstance(workers, Processes)
    yield workers
    workers.close()


def test_trouble_in_one_trial_is_told_and_the_others_are_answered(trials: Trials, two_processes: Processes) -> None:
    asked = [("fine",), ("dies",), ("hangs",), ("wrong",), ("raises",), ()]
    results = two_processes.answer([plan_of(trials, *names) for names in asked])
    assert [result.status for result in results] == [
        Status.PASS, Status.UNKNOWN, Status.UNKNOWN, Status.DRIFT, Status.UNKNOWN, Status.PASS,
    ]  # fmt: skip
    assert results[1].why == "the trial's process died (exit code 7)"
    assert results[2].why == "no result within 2 s"
    assert "no kernel for this shape" in results[4].why
    here = trials.run(plan_of(trials, "wrong"))
    assert (here.drift, here.why, here.digest) == (results[3].drift, results[3].why, results[3].digest)


def test_the_choice_that_hangs_is_found_by_a_search_with_a_timeout(target, bisect, named) -> None:
    text = TROUBLE.replace('"wrong", "hangs", "dies", "raises"', '"hangs", "other"')
    done = bisect(
        target(text), workers=WorkerOptions(timeout=1.0), options=BisectOptions(repeats=0, audits=0, is_priced=False)
    )
    assert named(done) == {frozenset({"user:hangs"})}
    assert done.result.cards[0].evidence == "no result within 1 s"


ENVIRONMENT = """
import os

from align.devices.base import Flag, When
from align.devices.cpu import Cpu

known = Cpu.flags


def refuse(value):
    if value != os.environ.get("COARSE", "0"):
        raise RuntimeError("COARSE can be set at process start only")


def flags(self):
    flag = Flag("cpu.env.COARSE", ("0", "1"), "0", When.PROCESS_START, lambda: os.environ.get("COARSE", "0"), refuse)
    return {**known(self), flag.name: flag}


Cpu.flags = flags
COARSE = os.environ.get("COARSE", "0") == "1"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        h = self.linear(x)
        return (h * 8).round() / 8 if COARSE else h


def build():
    return Net().eval(), torch.randn(4, 16)
"""


def test_a_flag_of_process_start_is_set_for_trials_in_processes_of_their_own(target) -> None:
    assert "COARSE" not in os.environ
    trials = trials_of(target(ENVIRONMENT), flags=("cpu.env.COARSE=1",))
    plan = trials.session.candidate_plan()
    assert "process start" in trials.run(plan).why
    workers = start_workers(trials, WorkerOptions(isolate=True))
    try:
        coarse, plain = workers.answer([plan, plan.with_choices(())])
    finally:
        workers.close()
    assert (coarse.status, plain.status) == (Status.DRIFT, Status.PASS)
    assert "COARSE" not in os.environ


def test_trials_run_on_every_node_of_a_ray_cluster(target, bisect, named) -> None:
    ray = pytest.importorskip("ray", reason="ray is not installed")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    text = TROUBLE.replace('"wrong", "hangs", "dies", "raises"', '"wrong", "other", "third"')
    try:
        done = bisect(target(text), workers=WorkerOptions(ray=cluster.address, timeout=60.0))
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert named(done) == {frozenset({"user:wrong"})}
    assert done.trials >= 4
