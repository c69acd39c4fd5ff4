"""Compare a run with what was accepted earlier: what got worse beyond noise, what got better, what is new or gone.

A node is worse when its relative L2 is above

    max(accepted * (1 + max(tolerance, 8 / sqrt(n))), u, floor)

    n      its number of elements: an error norm over n roundings scatters by 1 / sqrt(2 n), twice that where errors are
           correlated (measured on perturbed runs of the demo: 1.9 times in the middle); 8 / sqrt(n) is four such
           deviations of a difference. Small tensors, as time embeddings, scatter most
    u      half the gap between 1 and the next value of its dtype: what a single rounding may cost is no regression
    floor  what rounding alone explains there, if perturbed runs measured it (policy `auto`)

and better when the accepted error would be worse than the one now. Integers have u = 0. The speed-up is worse when its
whole interval is below accepted * (1 - speed_tolerance); seconds are kept for readers and not compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from align.compare.model import NodeComparison
from align.gating.checks import error_of, unit_of
from align.gating.lockfile import Accepted, differences, fingerprint
from align.gating.model import Check, Outcome
from align.reports.model import RunReport, Timing
from align.reports.numbers import figure, interval, plural, times
from align.reports.text import one_line
from align.settings import GateSettings

_SCATTER = 8.0


@dataclass(frozen=True, slots=True)
class NodeChange:
    """A node whose error is not the accepted one: now, accepted, and how far it might have gone."""

    key: str
    now: float
    accepted: float
    allowed: float

    @property
    def factor(self) -> float:
        """Error now over the accepted one."""
        return self.now / self.accepted if self.accepted > 0 else math.inf

    @property
    def line(self) -> str:
        """One line for people."""
        figures = f"{figure(self.now)}, accepted {figure(self.accepted)}, allowed {figure(self.allowed)}"
        return one_line(f"{self.key}: {figures}")


@dataclass(frozen=True, slots=True)
class Review:
    """A run beside the accepted one; `worse` and `better` by size of the change, `new` and `gone` count nodes."""

    compared: int
    worse: tuple[NodeChange, ...]
    better: tuple[NodeChange, ...]
    new: int
    gone: int


def entry_of(report: RunReport) -> Accepted:
    """What accepting a run accepts."""
    plan = next((row.plan.digest for row in report.roles if row.role == "candidate"), "")
    errors = ((str(node.key), error_of(node)) for node in report.comparison.nodes)
    nodes = tuple(sorted((key, error) for key, error in errors if not math.isnan(error)))
    timing = report.timing
    speed = (timing.speedup, timing.candidate.median) if timing is not None else (math.nan, math.nan)
    return Accepted(report.workload, fingerprint(report), nodes, plan, *speed)


def review(report: RunReport, accepted: Accepted, tolerance: float) -> Review:
    """Compare every node that both know."""
    known = dict(accepted.nodes)
    floors = {floor.node: floor.rel_l2 for floor in report.floors}
    worse, better, seen = [], [], set()
    new = 0
    for node in report.comparison.nodes:
        now, key = error_of(node), str(node.key)
        if math.isnan(now):
            continue
        if key not in known:
            new += 1
            continue
        seen.add(key)
        change = NodeChange(key, now, known[key], allowed_error(node, known[key], tolerance, floors))
        if now > change.allowed:
            worse.append(change)
        elif known[key] > allowed_error(node, now, tolerance, floors):
            better.append(change)
    worse.sort(key=lambda change: (-change.factor, change.key))
    better.sort(key=lambda change: (change.factor, change.key))
    return Review(len(seen), tuple(worse), tuple(better), new, len(known.keys() - seen))


def allowed_error(node: NodeComparison, accepted: float, tolerance: float, floors: Mapping[str, float]) -> float:
    """The largest error that is not worse than `accepted`: the formula above."""
    count = node.candidate.count if node.candidate is not None else 0
    grown = accepted * (1.0 + max(tolerance, _SCATTER / math.sqrt(max(count, 1))))
    return max(grown, unit_of(node.dtype), floors.get(str(node.key), 0.0))


def budget_checks(
    report: RunReport, accepted: Accepted, gate: GateSettings
) -> tuple[tuple[Check, ...], tuple[str, ...]]:
    """Checks against the accepted run, and remarks: what got better, and what cannot be compared."""
    found = review(report, accepted, gate.tolerance)
    speed, remarks = _speed(report.timing, accepted, gate.speed_tolerance)
    return (_errors(found), *speed), (*_remarks(report, accepted, found), *remarks)


def _errors(found: Review) -> Check:
    total = plural(found.compared, "node")
    if not found.compared:
        return Check(
            "accepted errors",
            Outcome.CANNOT_TELL,
            math.nan,
            0.0,
            "no node of this run is in the budget; accept it anew",
        )
    if not found.worse:
        return Check("accepted errors", Outcome.OK, 0.0, 0.0, f"none of {total} is worse than accepted")
    reason = f"{len(found.worse)} of {total} worse than accepted, most at {found.worse[0].line}"
    return Check(
        "accepted errors",
        Outcome.MISSED,
        float(len(found.worse)),
        0.0,
        reason,
        tuple(change.line for change in found.worse),
    )


def _speed(timing: Timing | None, accepted: Accepted, tolerance: float) -> tuple[tuple[Check, ...], tuple[str, ...]]:
    if math.isnan(accepted.speedup):
        return (), ()
    if timing is None:
        return (), (f"nothing was timed: the accepted speed-up of {times(accepted.speedup)} was not checked",)
    least = accepted.speedup * (1.0 - tolerance)
    outcome = Outcome.MISSED if timing.high < least else Outcome.OK
    found = f"{times(timing.speedup)} ({interval(timing.low, timing.high)})"
    reason = f"{found}, accepted {times(accepted.speedup)}, at least {times(least)}"
    better = timing.low > accepted.speedup * (1.0 + tolerance)
    remarks = (f"faster than accepted: {times(timing.speedup)}, was {times(accepted.speedup)}",) if better else ()
    return (Check("accepted speed-up", outcome, timing.speedup, least, reason),), remarks


def _remarks(report: RunReport, accepted: Accepted, found: Review) -> tuple[str, ...]:
    remarks = []
    if found.better:
        most = found.better[0]
        remarks.append(one_line(
            f"{plural(len(found.better), 'node')} better than accepted, most {most.key}: {figure(most.now)}, "
                f"was {figure(most.accepted)}; "
            "`align gate --accept` keeps it so"
        ))  # fmt: skip
    if found.new:
        remarks.append(f"{plural(found.new, 'node')} not in the budget yet; `align gate --accept` takes them in")
    if found.gone:
        remarks.append(f"{plural(found.gone, 'node')} of the budget not measured in this run")
    plan = next((row.plan.digest for row in report.roles if row.role == "candidate"), "")
    if plan != accepted.plan:
        remarks.append(f"the plan has changed since it was accepted: {accepted.plan} -> {plan}")
    return tuple(remarks)


def unknown_environment(report: RunReport, others: tuple[Accepted, ...], lock: str) -> Check:
    """The check that stands where entries exist for other environments only: nothing is compared with them."""
    ours = fingerprint(report)
    nearest = min((differences(ours, other.environment) for other in others), key=len)
    remedy = "run `align gate --accept` here and commit"
    reason = f"{lock} has no entry for this environment; the nearest differs in {', '.join(nearest)}; {remedy}"
    return Check("accepted errors", Outcome.CANNOT_TELL, math.nan, math.nan, one_line(reason))
