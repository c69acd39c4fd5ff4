"""Do a whole bisect: prepare the ends, check the observer, search, share out shared drift, leave files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from align.api import run_folder
from align.bisecting.artifacts import Artifacts, write_artifacts
from align.bisecting.bisection import Bisection, BisectOptions, Fault, rank
from align.bisecting.conclude import conclude
from align.bisecting.journal import Journal
from align.bisecting.question import Question, Topic, ask
from align.bisecting.result import BisectResult
from align.bisecting.shared import Limits, SharedGuilt, share_out
from align.bisecting.trial import Criterion, TrialResult, Trials, require_same
from align.bisecting.workers import WorkerOptions, start_workers
from align.compare.model import Status
from align.compare.policy import policy_named
from align.compare.search import Outcome
from align.compare.search import Status as Found
from align.dumpers.choice import Plan
from align.dumpers.errors import UsageError
from align.progress import Reporter
from align.session import Session
from align.settings import Settings


@dataclass(frozen=True, slots=True)
class BisectRequest:
    """What the user asked for. `metric_limit` NaN leaves the limit of the metric to the baseline."""

    settings: Settings
    nodes: tuple[str, ...] = ()
    metric: str = ""
    metric_limit: float = math.nan
    topic: Topic = Topic.CHOICES
    limits: Limits = field(default_factory=Limits)
    options: BisectOptions = field(default_factory=BisectOptions)
    workers: WorkerOptions = field(default_factory=WorkerOptions)
    out: Path | None = None

    @property
    def criterion(self) -> Criterion:
        """What a trial is judged by. Precision is judged by absolute limits: its baseline is the candidate itself."""
        policy = self.settings.judge.policy
        if self.topic.is_precision and policy.startswith(("cann", "auto")):
            policy = "standard"
        if policy == "auto":
            raise UsageError(
                "policy auto needs perturbed runs, which a bisect does not make",
                "choose cann-l0, cann-l1, cann-l2, standard or cosine",
            )
        overrides = tuple((glob, policy_named(name)) for glob, name in self.settings.judge.overrides.items())
        return Criterion(
            policy_named(policy), self.nodes, self.metric, self.metric_limit, not self.topic.is_precision, overrides
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class BisectDone:
    """The result with everything that was left on disk. `trials` were run now, `replayed` came from the journal."""

    request: BisectRequest
    result: BisectResult
    artifacts: Artifacts
    trials: int
    replayed: int = 0
    shared: SharedGuilt | None = None
    picked: Plan | None = None


@dataclass(slots=True)
class Job:
    """One bisect under way."""

    request: BisectRequest
    progress: Reporter
    folder: Path
    session: Session = field(init=False)
    trials: Trials = field(init=False)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.session = Session(self.request.settings.run)
        self.trials = Trials(self.session, self.request.criterion)


def run_bisect(request: BisectRequest, progress: Reporter) -> BisectDone:
    """Bisect as asked. The folder keeps journal, plans, snippet and reproduction scripts."""
    job = Job(request, progress, _folder(request))
    with progress.stage("reference and baseline"):
        baseline = job.trials.prepare(job.session.baseline_plan())
    question = ask(job.session, request.topic)
    if request.nodes:
        _check_observer(job, question)
    job.notes.extend(_training_notes(job.session, question))
    journal = Journal(job.folder / "bisect.journal.jsonl", _name_of(request, question, baseline))
    # Flags that only a fresh process can set: each trial then has one.
    late = bool(job.session.late_flags(question.everything))
    workers = start_workers(job.trials, replace(request.workers, isolate=request.workers.isolate or late))
    try:
        return _searched(job, Bisection(job.session, question, workers, journal, request.options, _ignore))
    finally:
        workers.close()


def _ignore(done: int, expected: int, said: str) -> None:
    """Tell nobody."""


def _searched(job: Job, bisection: Bisection) -> BisectDone:
    request, question = job.request, bisection.question
    _trust_journal(job, bisection)
    options = request.options
    ranking = rank(job.session, question) if options.is_ranked else {}
    count, budget = len(question.suspects), options.max_trials
    with job.progress.stage(f"searching {count} choices (at most {budget} trials)", total=bisection.expected) as stage:
        bisection.on_trial = lambda done, expected, said: stage.reach(done)
        outcome, fault = bisection.search(ranking, Fault.DRIFT), Fault.DRIFT
        if _everything_crashes(bisection) and not bisection.is_interrupted:
            outcome, fault = bisection.search(ranking, Fault.CRASH), Fault.CRASH
    with job.progress.stage("first bad node, kind, price"):
        result = _concluded(job, bisection, outcome, fault)
    shared = _shared(job, bisection, result)
    result = replace(result, notes=(*job.notes, *result.notes), is_interrupted=bisection.is_interrupted)
    picked = bisection.plan(question.all_on - set(shared.picked.off)) if shared and shared.picked else None
    artifacts = write_artifacts(job.folder, job.session, result, picked)
    return BisectDone(request, result, artifacts, bisection.trials, bisection.journal.replayed, shared, picked)


def _concluded(job: Job, bisection: Bisection, outcome: Outcome, fault: Fault) -> BisectResult:
    """What was found, with evidence and price; after Ctrl-C, what was found."""
    try:
        return conclude(bisection, outcome, fault, job.trials.criterion)
    except KeyboardInterrupt:
        bisection.is_interrupted = True
        return conclude(bisection, outcome, fault, job.trials.criterion)


def _everything_crashes(bisection: Bisection) -> bool:
    """Whether the candidate fails to run while the baseline runs, so that the failing choice can be searched."""
    nothing, everything = (bisection.results.get(on) for on in (frozenset[str](), bisection.question.all_on))
    if not nothing or not everything:
        return False
    return nothing[0].status is not Status.UNKNOWN and all(result.status is Status.UNKNOWN for result in everything)


# -- before the search ------------------------------------------------------------------------------------------------


def _folder(request: BisectRequest) -> Path:
    """The folder asked for is reused, so that a killed bisect goes on; else a new one is made."""
    if request.out is not None and request.out.is_dir():
        return request.out
    return run_folder(request.out, f"bisect-{Path(request.settings.run.target).name.replace(':', '-')}", force=False)


def _name_of(request: BisectRequest, question: Question, baseline: TrialResult) -> str:
    """What an answer in the journal depends on."""
    run = request.settings.run
    ran = f"{run.target} {run.candidate} {run.seed} {run.steps} {baseline.digest}"
    return f"{ran} {question.everything.digest} {question.topic} {request.criterion}"


def _trust_journal(job: Job, bisection: Bisection) -> None:
    """Answers of an earlier bisect hold as long as the candidate still gives the same bits."""
    journal, whole = bisection.journal, bisection.question.all_on
    before = journal.digests(whole)
    if not journal or len(before) != 1:
        return
    result = bisection.workers.answer([bisection.plan(whole)])[0]
    bisection.trials += 1
    if result.digest not in before:
        journal.forget()
        job.notes.append("the candidate's results have changed since the journal was written: searched anew")


def _check_observer(job: Job, question: Question) -> None:
    """Where nodes are judged, looking at them must not change the results. Raises UndecidedError."""
    plan = question.everything
    try:
        first, again = (job.trials.digest(plan, is_observed=False) for _ in range(2))
        observed = job.trials.digest(plan, is_observed=True)
    except Exception:  # the candidate fails to run: the search finds out which choice does it
        return
    if first == again:
        require_same(observed, first)


def _training_notes(session: Session, question: Question) -> Sequence[str]:
    """Dropout is no precision fault: say that it is on."""
    found = []
    if session.executor.workload.model.training:
        found.append("the model is in training mode: dropout and batch statistics are active")
    if any(choice.name == "training_mode" for choice in question.suspects):
        found.append(
            "the candidate is in training mode where the baseline is not: dropout and batch statistics, not precision"
        )
    return found


# -- after it ---------------------------------------------------------------------------------------------------------


def _shared(job: Job, bisection: Bisection, result: BisectResult) -> SharedGuilt | None:
    """Where no small set explains the drift, or the user asks for a bargain, share the drift out."""
    limits = job.request.limits
    no_small_set = result.status is Found.FOUND and result.fault is Fault.DRIFT and result.is_spread
    if bisection.is_interrupted or not (limits.is_given or no_small_set) or len(bisection.question.suspects) < 2:
        return None
    if limits.is_given and not _ends_ran(bisection):
        return None
    try:
        with job.progress.stage("sharing out the drift") as stage:
            return share_out(bisection, limits, stage)
    except KeyboardInterrupt:
        bisection.is_interrupted = True
        return None


def _ends_ran(bisection: Bisection) -> bool:
    ends = (bisection.results.get(on) for on in (frozenset[str](), bisection.question.all_on))
    return all(results and results[0].status is not Status.UNKNOWN for results in ends)


__all__ = ["BisectDone", "BisectRequest", "run_bisect"]
