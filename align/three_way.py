"""The main job: reference, baseline and candidate of one workload, dumped, compared, judged, timed and told.

The candidate runs twice, with and without being observed; where its outputs differ, observing changed what is
observed, and the report says so. Timing runs carry no observe tap.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from align.causes import growth_notes, origin_cards
from align.compare.judge import judge
from align.compare.model import Comparison, Judgement
from align.compare.policy import policy_named
from align.compare.tolerance import NoiseFloors
from align.compare.traces import compare_traces
from align.devices.base import process_environment
from align.devices.cpu import Cpu
from align.dumpers.choice import Plan
from align.dumpers.errors import UsageError
from align.dumpers.gradients import watch_gradients
from align.dumpers.model import NodeKey, RunStatus, TraceHeader
from align.dumpers.observe import Dataflow, Keep, Level, NoDataflow, Observe, Selection
from align.dumpers.sink import TraceSink
from align.dumpers.store import Trace, TraceWriter
from align.dumpers.wire import CallId, Wire
from align.environment import describe_environment
from align.execute import Outcome, digest_of
from align.html_report import write_html
from align.isolated import OwnProcess
from align.ledger import choice_rows
from align.noise import Traces, measure_floors
from align.pictures import Album
from align.plan import PlannedSite
from align.progress import Reporter, Stage
from align.reports.model import NodeFloor, OriginCard, RoleRow, RunReport, Timing
from align.reports.stored import store
from align.session import Session
from align.settings import Settings
from align.timing import TimingOptions, measure_rounds, summarise
from align.wire_cost import seconds_per_call
from align.workload import Target, find_target

ROLES = ("reference", "baseline", "candidate")
_PAGES = 80  # node pages in the report that a run writes; `align report --details` makes more


@dataclass(slots=True)
class Job:
    """One three-way run under way: what has been made so far."""

    settings: Settings
    folder: Path
    roles: tuple[str, ...]
    progress: Reporter
    find: Callable[[str], Target] = find_target
    session: Session = field(init=False)
    album: Album = field(init=False)
    rows: list[RoleRow] = field(default_factory=list)
    outputs: list[NodeKey] = field(default_factory=list)
    pictures: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ran: dict[str, dict[str, int]] = field(default_factory=dict)
    floors: NoiseFloors | None = None
    nodes: int = 0
    environment: tuple[tuple[str, str], ...] = ()
    apart: dict[str, OwnProcess] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.album = Album(self.folder)
        self.session = Session(self.settings.run, find=self.find)


def run_three_way(
    settings: Settings,
    folder: Path,
    roles: Sequence[str],
    progress: Reporter,
    *,
    find: Callable[[str], Target] = find_target,
) -> RunReport:
    """Do the whole job into a folder that exists and is empty; return everything that was found out."""
    job = Job(settings, folder, tuple(roles), progress, find)
    try:
        return _whole(job)
    finally:
        for process in job.apart.values():
            process.close()


def _whole(job: Job) -> RunReport:
    _run_reference(job)
    plans = _plans(job)
    for role in ROLES[1:]:
        if role in job.roles:
            run_role(job, plans[role])
    _note_widening(job)
    comparison, judgement = _compare(job, plans)
    wants_timing = job.settings.timing.enabled and {"baseline", "candidate"} <= set(job.roles)
    timing = _time(job, plans) if wants_timing else None
    return _report(job, plans, comparison, judgement, timing)


def _plans(job: Job) -> dict[str, Plan]:
    session = job.session
    return {
        "reference": Plan("reference", "cpu", "float32"),
        "baseline": session.baseline_plan(),
        "candidate": session.candidate_plan(),
    }


# -- runs -------------------------------------------------------------------------------------------------------------


def _run_reference(job: Job) -> None:
    if "reference" not in job.roles:
        with job.progress.stage("survey"):
            job.session.survey()
        return
    plan = Plan("reference", "cpu", "float32")
    with (
        job.progress.stage("reference (cpu, float32)") as stage,
        _recording(job, plan, stage, {}, Dataflow()) as record,
    ):
        outcome = job.session.survey([record.observe], on_value=record.on_value)
    job.nodes = record.count
    _finish_role(job, plan, outcome, record)


def run_role(job: Job, plan: Plan) -> None:
    """Run a plan into its trace; in a process of its own if it has flags that this one can no longer set."""
    session = job.session
    if session.late_flags(plan):
        _run_apart(job, plan)
        return
    sites = _sites_on(session.sites, plan)
    title = f"{plan.role} ({plan.device}, {plan.dtype})"
    with job.progress.stage(title, job.nodes) as stage, _recording(job, plan, stage, sites, NoDataflow()) as record:
        outcome, substitute = session.run(plan, [record.observe], on_value=record.on_value)
    job.ran[plan.role] = dict(substitute.ran)
    _finish_role(job, plan, outcome, record, _run_unobserved(job, plan, digest_of(outcome.result)))


def _run_apart(job: Job, plan: Plan) -> None:
    late = job.session.late_flags(plan)
    if job.find is not find_target:
        raise UsageError(
            f"flag {next(iter(late))} needs a process of its own, which cannot build objects of this one",
            "name the target as file.py:function, or start this process with the flag set",
        )
    title = f"{plan.role} ({plan.device}, {plan.dtype}), in a process of its own"
    with job.progress.stage(title):
        job.apart[plan.role] = process = OwnProcess(process_environment(late))
        recorded = process.call("align.role_server:record", job.settings, job.folder, plan)
    job.rows.extend(recorded.rows)
    job.outputs = job.outputs or list(recorded.outputs)
    job.pictures.extend(recorded.pictures)
    job.notes.extend(recorded.notes)
    flags = ", ".join(f"{name}={value}" for name, value in sorted(late.items()))
    job.notes.append(f"{plan.role} ran in a process of its own: {flags}")
    job.ran.update(recorded.ran)
    job.environment = recorded.environment


def environment_of(session: Session, plan: Plan) -> tuple[tuple[str, str], ...]:
    """What a plan's run depends on, the flags as they are while it runs."""
    if plan.role == "reference":
        device = Cpu()
        with device.set_flags(device.exact_flags()):
            return describe_environment(device)
    with session.device.set_flags(session.flags_in_force(plan)):
        return describe_environment(session.device)


def _run_unobserved(job: Job, plan: Plan, observed: str) -> str:
    """Run again without observing; where the digests differ, a third run tells observer effect from nondeterminism."""
    with job.progress.stage(f"{plan.role}, not observed"):
        unobserved = digest_of(job.session.run(plan)[0].result)
        if unobserved == observed:
            return unobserved
        again = digest_of(job.session.run(plan)[0].result)
    if again != unobserved:
        job.notes.append(
            f"{plan.role} is not deterministic: two equal runs give different outputs "
            "(stale state, races, or random numbers)"
        )
    else:
        job.notes.append(
            f"observing changes the {plan.role}: its node figures describe another program than the one "
            "that runs unobserved"
        )
    return unobserved


def _sites_on(sites: Sequence[PlannedSite], plan: Plan) -> dict[CallId, str]:
    return {
        planned.match.calls[-1]: planned.site.name
        for planned in sites
        if planned.choice in plan.choices and planned.kernel is not None
    }


@dataclass(slots=True)
class _Record:
    """The observing side of one run: tap, trace, and what the steps yielded."""

    observe: Observe
    sink: TraceSink
    writer: TraceWriter
    outputs: list[NodeKey] = field(default_factory=list)
    count: int = 0
    step: int = 0
    stop_watching: Callable[[], None] = lambda: None

    def on_value(self, value: Any, wire: Wire) -> None:
        self.step = wire.step
        self.outputs.extend(self.observe.record_result(value, wire.step))

    def __enter__(self) -> _Record:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        status = RunStatus.COMPLETE
        if kind is not None:
            status = RunStatus.INTERRUPTED if issubclass(kind, KeyboardInterrupt) else RunStatus.FAILED
        self.stop_watching()
        self.sink.close(status)


def _recording(job: Job, plan: Plan, stage: Stage, sites: dict[CallId, str], flow: Dataflow) -> _Record:
    capture, run = job.settings.capture, job.settings.run
    header = TraceHeader(
        run.target, plan.role, plan.device, plan.dtype, run.seed, capture.level,
        created=time.strftime("%Y-%m-%dT%H:%M:%S"), environment=environment_of(job.session, plan),
    )  # fmt: skip
    writer = TraceWriter.create(job.folder / f"{plan.role}.h5", header, compression=capture.compression)
    writer.put_document("plan", plan.to_json())
    sink = TraceSink(writer, max_bytes=capture.max_bytes)
    selection = selection_of(job.settings)
    record = _Record(None, sink, writer)  # type: ignore[arg-type]

    def on_node(count: int) -> None:
        record.count = count
        if count % 64 == 0:
            stage.reach(count)

    record.observe = Observe(sink, selection, dataflow=flow, sites=sites, on_node=on_node)
    if run.grad:
        model = job.session.workload_of(plan).model
        record.stop_watching = watch_gradients({"": model}, record.observe, lambda: record.step)
    return record


def selection_of(settings: Settings) -> Selection:
    """What the settings want recorded."""
    capture = settings.capture
    return Selection(
        Level(capture.level),
        Keep(capture.keep),
        capture.include,
        capture.exclude,
        operators=capture.operators,
        inputs=capture.inputs,
    )


def _finish_role(job: Job, plan: Plan, outcome: Outcome, record: _Record, unobserved: str = "") -> None:
    digest = digest_of(outcome.result)
    notes = record.sink.notes
    if outcome.opaque:
        notes = (*notes, f"compiled modules are seen from outside only: {', '.join(outcome.opaque)}")
    row = RoleRow(plan.role, plan, f"{plan.role}.h5", outcome.seconds, record.count, digest, unobserved, notes)
    job.rows.append(row)
    if not job.outputs:
        job.outputs = record.outputs[::-1]  # the result first, then what the steps yielded, the last one first
    job.pictures.extend(job.album.add(plan.role, outcome.result))


def _note_widening(job: Job) -> None:
    widened = job.session.widened
    if widened:
        first = ", ".join(sorted(widened)[:3])
        job.notes.append(
            f"{sum(widened.values())} low-precision casts in the model were widened in the reference: {first}"
        )


# -- comparing --------------------------------------------------------------------------------------------------------


def _compare(job: Job, plans: dict[str, Plan]) -> tuple[Comparison, Judgement]:
    present = [role for role in ROLES if role in job.roles]
    reference = present[0]
    candidate = present[-1]
    baseline = "baseline" if len(present) == 3 else ""
    with job.progress.stage("comparing"), Trace.open(job.folder / f"{reference}.h5") as theirs:
        with Trace.open(job.folder / f"{candidate}.h5") as ours:
            if baseline:
                with Trace.open(job.folder / "baseline.h5") as beside:
                    comparison = compare_traces(ours, theirs, beside)
            else:
                comparison = compare_traces(ours, theirs)
        job.floors = _floors(job, plans["baseline"], theirs)
    judgement = judge_as_told(job.settings, comparison, tuple(job.outputs), job.floors)
    job.notes.extend(growth_notes(comparison, judgement.outputs))
    return comparison, judgement


def _origins(job: Job, comparison: Comparison, judgement: Judgement) -> tuple[OriginCard, ...]:
    with ExitStack() as stack:
        traces = {row.role: stack.enter_context(Trace.open(job.folder / row.trace)) for row in job.rows}
        return origin_cards(comparison, judgement, traces)


def _floors(job: Job, baseline: Plan, reference: Trace) -> NoiseFloors | None:
    """The spread of perturbed baselines, if the policy asks for it and there is a baseline."""
    told = job.settings.judge
    if "auto" not in (told.policy, *told.overrides.values()) or "baseline" not in job.roles:
        return None
    selection, runs = selection_of(job.settings), told.perturbed_runs
    with (
        job.progress.stage("perturbed baselines", runs) as stage,
        Trace.open(job.folder / "baseline.h5") as plain,
    ):
        floors = measure_floors(job.session, baseline, selection, Traces(reference, plain), runs, stage)
    unsteady = [limit for limit in floors.limits if limit.nondeterminism > 0.0]
    if unsteady:
        worst = max(unsteady, key=lambda limit: limit.nondeterminism)
        job.notes.append(
            f"the baseline is not deterministic: two equal runs differ at {len(unsteady)} nodes, by up to "
            f"{worst.nondeterminism:.3g} at {worst.key}; limits include it"
        )
    return floors


def judge_as_told(
    settings: Settings, comparison: Comparison, outputs: tuple[NodeKey, ...], floors: NoiseFloors | None
) -> Judgement:
    """Judge under the settings' policy and overrides."""
    overrides = tuple((glob, policy_named(name)) for glob, name in settings.judge.overrides.items())
    return judge(comparison, policy_named(settings.judge.policy), overrides=overrides, outputs=outputs, floors=floors)


# -- timing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Round:
    """One timed run: seconds in all and of each step, and bytes of memory at the peak."""

    seconds: float
    step_seconds: tuple[float, ...]
    peak_bytes: float


def timed(session: Session, plan: Plan) -> Round:
    """Run a plan once, not observed."""
    session.device.reset_peak_memory()
    outcome, _ = session.run(plan)
    return Round(outcome.seconds, outcome.step_seconds, session.device.peak_memory())


def _time(job: Job, plans: dict[str, Plan]) -> Timing:
    session, told = job.session, job.settings.timing
    options = TimingOptions(told.min_rounds, told.max_rounds, told.budget_seconds, seed=job.settings.run.seed)
    steps: dict[str, list[tuple[float, ...]]] = {"baseline": [], "candidate": []}
    peaks: dict[str, float] = {}

    def once(plan: Plan) -> float:
        apart = job.apart.get(plan.role)
        done: Round = timed(session, plan) if apart is None else apart.call("align.role_server:once", plan)
        peaks[plan.role] = max(peaks.get(plan.role, 0.0), done.peak_bytes)
        steps[plan.role].append(done.step_seconds)
        return done.seconds

    with job.progress.stage("timing"):
        rounds = measure_rounds(lambda: once(plans["baseline"]), lambda: once(plans["candidate"]), options)
    timing = summarise(rounds, seed=options.seed)
    return replace(
        timing, peak_bytes_baseline=peaks["baseline"], peak_bytes_candidate=peaks["candidate"],
        wire_seconds_per_call=seconds_per_call(), calls=job.nodes,
        step_seconds_baseline=_median_steps(steps["baseline"]),
        step_seconds_candidate=_median_steps(steps["candidate"]),
    )  # fmt: skip


def _median_steps(rounds: list[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(statistics.median(times) for times in zip(*rounds, strict=True))


# -- telling ----------------------------------------------------------------------------------------------------------


def _report(
    job: Job, plans: dict[str, Plan], comparison: Comparison, judgement: Judgement, timing: Timing | None
) -> RunReport:
    for role in job.roles:
        if role in plans:
            (job.folder / f"{role}.plan.json").write_text(plans[role].to_json() + "\n", encoding="utf-8")
    sites = {
        "sites": [{"name": p.site.name, "calls": list(p.site.calls), "reason": p.reason} for p in job.session.sites]
    }
    (job.folder / "sites.json").write_text(json.dumps(sites, indent=1) + "\n", encoding="utf-8")
    floors = tuple(NodeFloor(str(limit.key), limit.rel_l2) for limit in job.floors.limits) if job.floors else ()
    files = {path.name for path in job.folder.iterdir()} | {"comparison.json", "report.html", "report.json"}
    report = RunReport(
        job.settings.run.target,
        str(job.folder),
        tuple(job.rows),
        comparison,
        judgement,
        choices=choice_rows(job.session, plans["candidate"], comparison),
        timing=timing,
        floors=floors,
        origins=_origins(job, comparison, judgement),
        pictures=tuple(job.pictures),
        files=tuple(sorted(files)),
        notes=tuple(job.notes),
        environment=job.environment or environment_of(job.session, plans["candidate"]),
    )
    store(report, job.folder)
    with job.progress.stage("report"):
        write_html(report, job.folder, job.folder / "report.html", pages=_PAGES)
    return report
