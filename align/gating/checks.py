"""Check a report against the limits of `[gate]`: each limit gives one check. Pure: nothing is run, read or written.

A limit on time is kept or missed only if the whole interval of the ratio lies on one side of it; else nobody can tell.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from align.compare.model import NodeComparison, Pairing, Status
from align.compare.source import matches_glob
from align.dumpers.dtypes import DTYPES
from align.dumpers.errors import ConfigError
from align.gating.limits import ErrorLimits
from align.gating.model import Check, Outcome
from align.judging import exit_code_of
from align.reports.model import RunReport, Timing
from align.reports.numbers import figure, interval, nbytes, percent, plural, times
from align.reports.text import one_line
from align.settings import GateSettings


def check_limits(report: RunReport, gate: GateSettings) -> tuple[Check, ...]:
    """All checks that `[gate]` asks for, in the order of its keys. Raises ConfigError for a glob that names no node."""
    return (
        _policy(report),
        *_errors(report.comparison.nodes, gate.limits),
        *_speed(report, gate),
        *_memory(report, gate),
        *_coverage(report, gate),
    )


# -- policy -----------------------------------------------------------------------------------------------------------


def _policy(report: RunReport) -> Check:
    judged = report.judgement
    outcome = {0: Outcome.OK, 1: Outcome.MISSED, 3: Outcome.CANNOT_TELL}[exit_code_of(judged)]
    if judged.policy == "ignore":
        return Check(
            "policy ignore", Outcome.OK, math.nan, math.nan, "nodes are not judged; limits and the budget decide"
        )
    faults = sum(verdict.status.is_fault and verdict.status is not Status.MISSING for verdict in judged.verdicts)
    reason = one_line(f"{judged.status}, {judged.why}" if judged.why else judged.status)
    return Check(f"policy {judged.policy}", outcome, float(faults), 0.0, reason)


# -- errors of nodes --------------------------------------------------------------------------------------------------


def _errors(nodes: Sequence[NodeComparison], limits: Mapping[str, ErrorLimits]) -> Iterator[Check]:
    """One check a glob and metric; of the globs that name a node, the longest holds, of equal ones the later."""
    owners: dict[str, list[NodeComparison]] = {glob: [] for glob in limits}
    named: set[str] = set()
    order = sorted(enumerate(limits), key=lambda item: (-len(item[1]), -item[0]))
    for node in nodes:
        fitting = [glob for _, glob in order if matches_glob(node.key, glob)]
        named.update(fitting)
        if fitting:
            owners[fitting[0]].append(node)
    for glob, limit in limits.items():
        if glob not in named:
            raise ConfigError(
                f"[gate.limits] {glob!r} names no node of this run", f"module paths here: {_paths(nodes)}"
            )
        yield from (_error(glob, owners[glob], metric, allowed) for metric, allowed in limit.stated)


def _paths(nodes: Sequence[NodeComparison]) -> str:
    tops = dict.fromkeys(node.key.path.partition(".")[0] for node in nodes if node.key.path)
    return one_line(", ".join(list(tops)[:8])) or 'none but the root ("/*")'


def _error(glob: str, nodes: Sequence[NodeComparison], metric: str, allowed: float) -> Check:
    name = one_line(f"limit {glob} {metric}")
    if not nodes:
        return Check(name, Outcome.OK, math.nan, allowed, "longer globs hold for all its nodes")
    present = [node for node in nodes if node.pairing is not Pairing.FUSED_AWAY]
    known = [(error, node) for node in present if not math.isnan(error := error_of(node, metric))]
    if not known:
        why = (
            "a fused kernel hides all its nodes"
            if not present
            else f"none of {plural(len(present), 'node')} has this figure"
        )
        return Check(name, Outcome.CANNOT_TELL, math.nan, allowed, f"{why}, limit {figure(allowed)}")
    known.sort(key=lambda item: (-item[0], item[1].order))
    over = [(error, node) for error, node in known if error > allowed]
    worst, where = known[0]
    rest = (
        f"; {len(over)} of {plural(len(known), 'node')} over it" if over else f"; worst of {plural(len(known), 'node')}"
    )
    blind = f", {len(present) - len(known)} not measured" if len(known) < len(present) else ""
    return Check(
        name, Outcome.MISSED if over else Outcome.OK, worst, allowed,
        one_line(f"{figure(worst)} at {where.key}, limit {figure(allowed)}{rest}{blind}"),
        tuple(one_line(f"{node.key}: {figure(error)}") for error, node in over),
    )  # fmt: skip


def error_of(node: NodeComparison, metric: str = "rel_l2") -> float:
    """A node's figure; NaN where it was not measured, inf where NaN or Inf stand on one side only.

    The excess of an error below half a unit of the last place is 1: one rounding costs that, whatever the baseline.
    """
    if node.candidate is None:
        return math.nan
    if node.candidate.mismatched:
        return math.inf
    if metric == "excess":
        return 1.0 if node.baseline is not None and node.candidate.rel_l2 <= unit_of(node.dtype) else node.excess
    return float(getattr(node.candidate, metric))


def unit_of(dtype: str) -> float:
    """Half the gap between 1 and the next value of a dtype; 0 for dtypes that do not round."""
    known = DTYPES.get(dtype)
    return known.format.epsilon / 2 if known is not None and known.format is not None else 0.0


# -- time, memory, coverage -------------------------------------------------------------------------------------------


def _timed_shapes(report: RunReport) -> tuple[tuple[str, Timing], ...]:
    """(label of the input set, its timing): the workload's own inputs, whose label is empty."""
    return (("", report.timing),) if report.timing is not None else ()


def _speed(report: RunReport, gate: GateSettings) -> Iterator[Check]:
    if gate.min_speedup:
        yield _speedup(report.timing, gate.min_speedup)
    if gate.max_slowdown:
        shapes = _timed_shapes(report)
        if not shapes:
            yield _untimed("slow-down", gate.max_slowdown)
        yield from (_slowdown(label, timing, gate.max_slowdown) for label, timing in shapes)


def _untimed(name: str, limit: float) -> Check:
    return Check(
        name, Outcome.CANNOT_TELL, math.nan, limit, f"nothing was timed, limit {times(limit)}; run without --no-timing"
    )


def _speedup(timing: Timing | None, least: float) -> Check:
    if timing is None:
        return _untimed("speed-up", least)
    outcome = Outcome.OK if timing.low >= least else Outcome.MISSED if timing.high < least else Outcome.CANNOT_TELL
    return Check(
        "speed-up",
        outcome,
        timing.speedup,
        least,
        _ratio_reason(timing.speedup, timing, (timing.low, timing.high), f"at least {times(least)}"),
    )


def _slowdown(label: str, timing: Timing, most: float) -> Check:
    low, high, value = 1.0 / timing.high, 1.0 / timing.low, 1.0 / timing.speedup
    outcome = Outcome.OK if high <= most else Outcome.MISSED if low > most else Outcome.CANNOT_TELL
    name = one_line(f"slow-down {label}".strip())
    return Check(name, outcome, value, most, _ratio_reason(value, timing, (low, high), f"at most {times(most)}"))


def _ratio_reason(value: float, timing: Timing, bounds: tuple[float, float], limit: str) -> str:
    rounds = plural(timing.candidate.rounds, "round")
    doubts = f"; {'; '.join(timing.warnings)}" if timing.warnings else ""
    return one_line(f"{times(value)} ({interval(*bounds)}, {rounds}), {limit}{doubts}")


def _memory(report: RunReport, gate: GateSettings) -> Iterator[Check]:
    if not gate.max_memory_bytes:
        return
    peak = report.timing.peak_bytes_candidate if report.timing is not None else math.nan
    most = float(gate.max_memory_bytes)
    if math.isnan(peak):
        why = "nothing was timed" if report.timing is None else "this device does not tell its peak"
        yield Check("peak memory", Outcome.CANNOT_TELL, peak, most, f"{why}, at most {nbytes(most)}")
        return
    yield Check(
        "peak memory",
        Outcome.OK if peak <= most else Outcome.MISSED,
        peak,
        most,
        f"{nbytes(peak)}, at most {nbytes(most)}",
    )


def _coverage(report: RunReport, gate: GateSettings) -> Iterator[Check]:
    if not gate.min_coverage:
        return
    cover = report.comparison.coverage
    seen = f"{percent(cover.share)} of {plural(cover.nodes, 'node')} compared or fused"
    reason = f"{seen}, at least {percent(gate.min_coverage)}"
    yield Check(
        "coverage",
        Outcome.OK if cover.share >= gate.min_coverage else Outcome.MISSED,
        cover.share,
        gate.min_coverage,
        reason,
    )
