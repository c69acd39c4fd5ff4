"""The gate: may this go on? Run or read a three-way run, hold it against `[gate]` and the accepted budget.

Accepting does not switch limits off: `--accept` writes the budget, and policy and limits still decide the exit code.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from align.compare.judge import judge
from align.compare.policy import Method, policy_named
from align.dumpers.errors import UndecidedError, UsageError
from align.gating.budget import budget_checks, entry_of, review, unknown_environment
from align.gating.checks import check_limits
from align.gating.lockfile import find_entry, fingerprint, read_lock, replace_entry, write_lock
from align.gating.model import Check, GateResult, Outcome
from align.progress import Reporter
from align.reports.model import RunReport
from align.reports.numbers import plural
from align.reports.stored import load
from align.settings import Settings


def run_for_gate(settings: Settings, *, out: Path | None, force: bool, progress: Reporter) -> RunReport:
    """Make the three runs, judged by the gate's policy if it names one."""
    from align.api import run_with_settings

    policy = settings.gate.policy or settings.judge.policy
    policy_named(policy)
    asked = settings.model_copy(update={"judge": settings.judge.model_copy(update={"policy": policy})})
    return run_with_settings(
        asked, roles=("reference", "baseline", "candidate"), out=out, force=force, progress=progress
    )


def read_for_gate(folder: Path, settings: Settings) -> RunReport:
    """Read a run folder and judge it by the gate's policy and today's overrides. No tensor is read.

    Raises UsageError when that policy is `auto` and the run was not judged by it: its spread was not measured.
    """
    report = load(folder)
    policy = policy_named(settings.gate.policy or report.judgement.policy)
    overrides = tuple((glob, policy_named(name)) for glob, name in settings.judge.overrides.items())
    if Method.SPREAD in {policy.method, *(chosen.method for _, chosen in overrides)}:
        if policy.name == report.judgement.policy:
            return report  # as it was judged, with the spread that was measured then
        raise UsageError(
            f"{folder} holds no perturbed runs, which policy `auto` needs",
            "run `align gate` anew, or choose another policy",
        )
    return replace(
        report, judgement=judge(report.comparison, policy, overrides=overrides, outputs=report.judgement.outputs)
    )


def check(report: RunReport, settings: Settings, lock: Path) -> GateResult:
    """Check limits and budget. Raises ConfigError for a glob without nodes and for a broken lock file."""
    checks = check_limits(report, settings.gate)
    entries = tuple(entry for entry in read_lock(lock) if entry.workload == report.workload)
    if not entries:
        return GateResult(
            report,
            checks,
            (f"nothing was accepted yet for {report.workload} in {lock}: errors and speed have no budget",),
        )
    entry = find_entry(entries, report.workload, fingerprint(report))
    if entry is None:
        return GateResult(report, (*checks, unknown_environment(report, entries, lock.name)))
    more, remarks = budget_checks(report, entry, settings.gate)
    return GateResult(report, (*checks, *more), remarks)


def accept(report: RunReport, settings: Settings, lock: Path) -> GateResult:
    """Write this run into the lock file as what is accepted, beside the other environments' entries.

    Raises UndecidedError, and writes nothing, when the run says nothing of the candidate.
    """
    checks = check_limits(report, settings.gate)
    if checks[0].outcome is Outcome.CANNOT_TELL:
        raise UndecidedError(
            f"this run cannot be accepted: {checks[0].line}",
            "mend what it names; a budget has to rest on a run that says something",
        )
    entries = read_lock(lock)
    fresh = entry_of(report)
    before = find_entry(entries, fresh.workload, fresh.environment)
    write_lock(lock, replace_entry(entries, fresh))
    said = Check(
        "accepted errors",
        Outcome.OK,
        math.nan,
        math.nan,
        f"{plural(len(fresh.nodes), 'node')} written to {lock}; commit it",
    )
    if before is None:
        return GateResult(report, (*checks, said))
    change = review(report, before, settings.gate.tolerance)
    remark = f"against what was accepted before: {plural(len(change.worse), 'node')} worse, {len(change.better)} better"
    return GateResult(report, (*checks, said), (remark,))
