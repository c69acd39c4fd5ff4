"""Do a whole bisect: prepare the ends, check the observer, search, share out what no small set explains, leave files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from align.api import run_folder
from align.bisecting.artifacts import Artifacts, write_artifacts
from align.bisecting.bisection import (
    BisectOptions,
    BisectResult,
    Question,
    bisect_session,
    fusion_question,
    precision_question,
)
from align.bisecting.journal import Journal
from align.bisecting.shared import SharedGuilt, share_out
from align.bisecting.trial import Criterion, Trials
from align.bisecting.workers import WorkerOptions, start_workers
from align.compare.policy import policy_named
from align.compare.search import Status as Found
from align.progress import Reporter
from align.session import Session
from align.settings import Settings

MANY = 4  # culprits beyond which guilt is better shared out than listed


@dataclass(frozen=True, slots=True)
class BisectRequest:
    """What the user asked for."""

    settings: Settings
    nodes: tuple[str, ...] = ()
    metric: str = ""
    max_error: float = 0.0
    precision: bool = False
    max_trials: int = 400
    repeats: int = 3
    max_latency_loss: float = 0.0
    max_drift: float = 0.0
    workers: WorkerOptions = WorkerOptions()
    out: Path | None = None

    @property
    def criterion(self) -> Criterion:
        """What a trial is judged by. Precision is judged by absolute limits: its baseline is float32 itself."""
        policy = self.settings.judge.policy
        if self.precision and policy.startswith("cann"):
            policy = "standard"
        return Criterion(policy_named(policy), self.nodes, self.metric, self.max_error, has_baseline=not self.precision)


@dataclass(frozen=True, slots=True)
class BisectDone:
    """The result with everything that was left on disk."""

    request: BisectRequest
    result: BisectResult
    artifacts: Artifacts
    trials: int
    shared: SharedGuilt | None = None


def run_bisect(request: BisectRequest, progress: Reporter) -> BisectDone:
    """Bisect as asked. The folder keeps journal, plans, snippet and reproduction script."""
    settings = request.settings
    folder = _folder(request)
    session = Session(settings.run)
    trials = Trials(session, request.criterion)
    with progress.stage("reference and baseline"):
        trials.prepare(session.baseline_plan())
    question = precision_question(session) if request.precision else fusion_question(session)
    journal = Journal(folder / "bisect.journal.jsonl", _name_of(request, question))
    options = BisectOptions(request.max_trials, request.repeats, workers=request.workers)
    workers = start_workers(trials, settings.run, request.criterion, request.workers)
    try:
        with progress.stage(f"searching {len(question.suspects)} choices") as stage:
            result = bisect_session(
                trials, question, workers, journal, options, lambda done, _total, _said: stage.reach(done)
            )
        shared = _shared(request, trials, question, result, progress)
    finally:
        workers.close()
    result = replace(result, notes=(*result.notes, *_notes(session)))
    return BisectDone(request, result, write_artifacts(folder, session, result), trials.count, shared)


def _folder(request: BisectRequest) -> Path:
    """The folder asked for is reused, so that a killed bisect goes on; else a new one is made."""
    if request.out is not None and request.out.is_dir():
        return request.out
    return run_folder(request.out, f"bisect-{request.settings.run.target}", force=False)


def _name_of(request: BisectRequest, question: Question) -> str:
    """What an answer in the journal depends on."""
    run = request.settings.run
    return f"{run.target} {run.seed} {run.steps} {question.everything.digest} {request.criterion}"


def _shared(
    request: BisectRequest, trials: Trials, question: Question, result: BisectResult, progress: Reporter
) -> SharedGuilt | None:
    """Where no small set explains the drift, share it out."""
    wanted = request.max_drift > 0 or request.max_latency_loss > 0
    many = result.status is Found.FOUND and len(result.cards) > MANY
    if not (wanted or many) or len(question.suspects) < 2:
        return None
    with progress.stage("sharing out the drift") as stage:
        return share_out(trials, question, limits(request), stage)


def limits(request: BisectRequest) -> tuple[float, float]:
    """(latency loss in seconds, drift) that the user accepts; inf where not told."""
    return request.max_latency_loss or math.inf, request.max_drift or math.inf


def _notes(session: Session) -> Sequence[str]:
    if session.executor.workload.model.training:
        return ("the model is in training mode: dropout and batch statistics are active",)
    return ()
