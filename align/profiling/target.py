"""Profile a target: time baseline and candidate whole, then call by call, then look at layouts, waits and memory.

Whole rounds carry no clock, so that they are what a user would see; the clocked rounds follow, the two plans in turn;
what looks at tensors rides on a run of its own that nobody times.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from align.dumpers.choice import Plan
from align.dumpers.errors import AlignError
from align.dumpers.wire import Tap
from align.environment import describe_environment
from align.execute import Outcome
from align.profiling.booking import (
    Booking,
    booking_of,
    call_label,
    call_times,
    family_label,
    grouped,
    op_label,
    path_label,
    rebooked,
    site_gains,
    tiny_calls,
)
from align.profiling.cuda_kernels import profile_cuda
from align.profiling.hot_spot import hot_spot
from align.profiling.layout import Layout, Moment
from align.profiling.memory import LiveOutputs
from align.profiling.npu_kernels import profile_npu
from align.profiling.remarks import remarks_on
from align.profiling.shapes import distance, inputs_text, measure_shapes, step_rows
from align.profiling.synchronisation import Synchronisations
from align.profiling.values import CallTime, KernelTotal, Memory, PlanProfile, Profile, Shape, Step
from align.progress import Reporter
from align.session import Session
from align.settings import RunSettings
from align.taps.clock import Clock, ClockCost, Interval, clock_cost
from align.taps.substitute import Substitute
from align.timing import TimingOptions, measure_rounds, summarise
from align.wire_cost import seconds_per_call

FEWEST_TINY = 200


_WHOLE = TimingOptions(min_rounds=8, max_rounds=40, budget_seconds=5.0)
_SHAPES = TimingOptions(min_rounds=6, max_rounds=12, budget_seconds=2.0)


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """How long to measure: whole rounds, clocked rounds, rounds of every further input shape."""

    timing: TimingOptions = _WHOLE
    shapes: TimingOptions = _SHAPES
    clocked_rounds: int = 7


USUAL = ProfileOptions()


@dataclass(slots=True)
class _Job:
    """One profile under way; `plans` and lists by role hold the baseline first."""

    session: Session
    options: ProfileOptions
    progress: Reporter
    reference: Outcome
    plans: tuple[Plan, Plan]
    cold: tuple[Outcome, Outcome]
    substitutes: tuple[Substitute, Substitute]
    cost: ClockCost
    wire_seconds: float
    notes: list[str]

    def run(self, role: int, taps: Sequence[Tap] = ()) -> Outcome:
        """Run a plan again. The tap that runs its sites is kept: it knows by now what their interiors look like."""
        return self.session.run(self.plans[role], taps, substitute=self.substitutes[role])[0]


@dataclass(frozen=True, slots=True)
class _Looked:
    """What the untimed run of a plan saw."""

    layout: Layout
    waits: Synchronisations
    memory: Memory


def profile_target(settings: RunSettings, progress: Reporter, options: ProfileOptions = USUAL) -> Profile:
    """Profile both plans of a target. Raises AlignError for wrong settings and for models that fail."""
    session = Session(settings)
    with progress.stage("reference (cpu, float32)"):
        reference = session.survey()
    plans = session.baseline_plan(), session.candidate_plan()
    with progress.stage("first runs"):
        (first, at_first), (second, at_second) = session.run(plans[0]), session.run(plans[1])
    cost, wire = clock_cost(session.device), seconds_per_call()
    job = _Job(session, options, progress, reference, plans, (first, second), (at_first, at_second), cost, wire, [])
    return _profile(job)


def _profile(job: _Job) -> Profile:
    session, sites = job.session, job.session.sites
    timing, steps = _whole_rounds(job)
    clocked = _clocked(job)
    calls = clocked[0].calls, clocked[1].calls
    medians = timing.baseline.median, timing.candidate.median
    before, after = (_plan_profile(job, role, medians[role], clocked[role]) for role in (0, 1))
    chains = booking_of(sites, job.plans[1], whole_chains=True)
    spot = hot_spot(rebooked(calls[0], chains), rebooked(calls[1], chains))
    shapes = (_own_shape(job, timing), *measure_shapes(session, job.options.shapes, job.progress))
    return Profile(
        session.settings.target, session.device.kind, session.device.name(), job.plans[0].dtype, timing, before, after,
        site_gains(sites, job.plans[1], *calls), spot, shapes, steps,
        remarks=remarks_on(before, after, spot, session.device.kind),
        clock_seconds_per_call=job.cost.inside, clock_total_seconds_per_call=job.cost.total,
        rounds=job.options.clocked_rounds, notes=tuple(job.notes), environment=describe_environment(session.device),
    )  # fmt: skip


# -- rounds -----------------------------------------------------------------------------------------------------------


def _whole_rounds(job: _Job) -> tuple[Any, tuple[Step, ...]]:
    """Timing of whole rounds with the memory peaks, and the steps of the loop."""
    session, steps, peaks = job.session, ([], []), [0.0, 0.0]  # type: ignore[var-annotated]

    def once(role: int) -> float:
        session.device.reset_peak_memory()
        outcome = job.run(role)
        peaks[role] = max(peaks[role], session.device.peak_memory())
        steps[role].append(outcome.step_seconds)
        return outcome.seconds

    with job.progress.stage("timing"):
        rounds = measure_rounds(lambda: once(0), lambda: once(1), job.options.timing)
    counted = len(rounds.baseline)
    medians = tuple(_medians(side[-counted:]) for side in steps)
    timing = replace(
        summarise(rounds, seed=job.options.timing.seed), peak_bytes_baseline=peaks[0], peak_bytes_candidate=peaks[1],
        step_seconds_baseline=medians[0], step_seconds_candidate=medians[1],
    )  # fmt: skip
    values = [(*outcome.steps, outcome.result) for outcome in (*job.cold, job.reference)]
    return timing, step_rows((medians[0], medians[1]), (values[0], values[1]), values[2])


def _medians(rounds: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(statistics.median(times) for times in zip(*rounds, strict=False))


@dataclass(frozen=True, slots=True)
class _Clocked:
    """What the clocked rounds of one plan gave. `tool_seconds` is our own part of an unclocked round."""

    calls: tuple[CallTime, ...]
    between_seconds: float
    tool_seconds: float


def _clocked(job: _Job) -> tuple[_Clocked, _Clocked]:
    rounds: tuple[list[tuple[Interval, ...]], list[tuple[Interval, ...]]] = ([], [])
    whole: tuple[list[float], list[float]] = ([], [])
    with job.progress.stage("call by call", job.options.clocked_rounds) as stage:
        for done in range(job.options.clocked_rounds):
            for role in (0, 1) if done % 2 == 0 else (1, 0):
                clock = Clock(job.session.device)
                whole[role].append(job.run(role, [clock]).seconds)
                rounds[role].append(clock.intervals(job.cost))
            stage.reach(done + 1)
    bookings = Booking({}, {}), booking_of(job.session.sites, job.plans[1])
    before, after = (_summed(job, rounds[role], whole[role], bookings[role]) for role in (0, 1))
    return before, after


def _summed(job: _Job, rounds: Sequence[tuple[Interval, ...]], whole: Sequence[float], booking: Booking) -> _Clocked:
    spent = [
        sum(interval.host_seconds for interval in intervals) + job.cost.total * len(intervals) for intervals in rounds
    ]
    between = statistics.median(max(0.0, seconds - known) for seconds, known in zip(whole, spent, strict=True))
    stand_ins = statistics.median(
        sum(interval.host_seconds for interval in found if interval.is_stand_in) for found in rounds
    )
    tool = stand_ins + min(job.wire_seconds, job.cost.total) * len(rounds[0])
    return _Clocked(call_times(rounds, booking), between, tool)


# -- one plan ---------------------------------------------------------------------------------------------------------


def _look(job: _Job, role: int) -> _Looked:
    device = job.session.device
    layout, waits, live = Layout(), Synchronisations(device.kind), LiveOutputs()
    with job.progress.stage(f"layouts and memory, {job.plans[role].role}"):
        device.reset_peak_memory()
        outcome = job.run(role)
        device_peak = device.peak_memory()
        job.run(role, [layout, waits, live])
    del outcome
    peak, largest = live.peak()
    return _Looked(layout, waits, Memory(device_peak, peak, largest))


def _plan_profile(job: _Job, role: int, seconds: float, clocked: _Clocked) -> PlanProfile:
    calls, looked = clocked.calls, _look(job, role)
    times = {_moment(call): call.device_seconds for call in calls}
    limit = tiny_limit(job.session.device.kind)
    return PlanProfile(
        job.plans[role], seconds, sum(call.device_seconds for call in calls), sum(call.host_seconds for call in calls),
        clocked.between_seconds, clocked.tool_seconds, len(calls),
        grouped(calls, op_label), grouped(calls, path_label), grouped(calls, call_label), grouped(calls, family_label),
        tiny_calls(calls, limit_seconds=limit, fewest=FEWEST_TINY),
        looked.layout.round_trips(times), looked.waits.waits(), looked.memory, _kernels(job, role),
    )  # fmt: skip


def tiny_limit(kind: str) -> float:
    """Seconds below which a call costs less than its dispatch: 10 us on the CPU, 20 us where a kernel is launched."""
    return 10e-6 if kind == "cpu" else 20e-6


def _moment(call: CallTime) -> Moment:
    place, _, index = call.name.rpartition("#")
    path, _, op = place.rpartition("/")
    return call.step, (path, op, int(index))


def _kernels(job: _Job, role: int) -> tuple[KernelTotal, ...]:
    """What the device's own profiler says; a device without one, or one that fails, says nothing."""
    profilers: dict[str, Callable[[Callable[[], Any]], tuple[KernelTotal, ...]]] = {
        "cuda": profile_cuda,
        "npu": profile_npu,
    }
    kind = job.session.device.kind
    if kind not in profilers:
        return ()
    try:
        return profilers[kind](lambda: job.run(role))
    except AlignError as exc:
        job.notes.append(f"{job.plans[role].role}: no kernel times: {exc.problem}")
    except Exception as exc:  # profilers fail in many ways, and the profile stands without them
        job.notes.append(f"{job.plans[role].role}: the device's profiler failed: {type(exc).__name__}: {exc}")
    return ()


def _own_shape(job: _Job, timing: Any) -> Shape:
    """The row of the target's own inputs, whose first run was the very first of all."""
    errors = [distance(outcome.result, job.reference.result) for outcome in job.cold]
    return Shape(
        "inputs", inputs_text(job.session), job.cold[0].seconds, job.cold[1].seconds, timing, errors[0], errors[1]
    )
