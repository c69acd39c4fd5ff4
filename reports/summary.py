"""Turn a RunReport into the rows and sentences that every form of report shows; pure, no layout, no escaping."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from align.compare.model import NodeComparison, Status, Verdict
from align.dumpers.errors import UsageError
from align.dumpers.model import NodeKey
from align.reports.model import RunReport
from align.reports.numbers import count, figure, percent, plural, times

MARKS: Mapping[Status, str] = {
    Status.PASS: "✓",
    Status.DRIFT: "▲",
    Status.NONFINITE: "✕",
    Status.COLLAPSED: "▼",
    Status.MISMATCH: "≠",
    Status.MISSING: "∅",
    Status.FUSED_AWAY: "◌",
    Status.REFERENCE_SUSPECT: "?",
    Status.UNKNOWN: "·",
}
SEVERITY: tuple[Status, ...] = (
    Status.NONFINITE,
    Status.COLLAPSED,
    Status.MISMATCH,
    Status.DRIFT,
    Status.MISSING,
    Status.REFERENCE_SUSPECT,
    Status.PASS,
    Status.UNKNOWN,
    Status.FUSED_AWAY,
)
_RANK: Mapping[Status, int] = {status: rank for rank, status in enumerate(SEVERITY)}


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node with what is said of it; `steps` counts the steps in which the same call has the same status."""

    node: NodeComparison
    verdict: Verdict
    steps: int = 1

    @property
    def status(self) -> Status:
        """The verdict's status."""
        return self.verdict.status

    @property
    def candidate_error(self) -> float:
        """Relative L2 of the candidate against the reference, NaN if not measured."""
        return self.node.candidate.rel_l2 if self.node.candidate else math.nan

    @property
    def baseline_error(self) -> float:
        """Relative L2 of the baseline against the reference, NaN if not measured."""
        return self.node.baseline.rel_l2 if self.node.baseline else math.nan

    @property
    def max_abs(self) -> float:
        """Largest absolute error of the candidate, NaN if not measured."""
        return self.node.candidate.max_abs if self.node.candidate else math.nan

    @property
    def _overrun(self) -> float:
        """A fault's figure over its limit: what stands for the excess where there is no baseline."""
        value, limit = self.verdict.value, self.verdict.limit
        return value / limit if self.status.is_fault and limit > 0.0 and value > limit else math.nan

    @property
    def heat(self) -> float:
        """Excess over the baseline; inf where a fault has no figure, 1 where there is none and nothing is wrong."""
        if self.status in (Status.NONFINITE, Status.COLLAPSED, Status.MISMATCH, Status.MISSING):
            return math.inf
        excess = self.node.excess if self.node.baseline else self._overrun
        if math.isnan(excess) or (math.isinf(excess) and not self.status.is_fault):
            return 1.0
        return excess


@dataclass(frozen=True, slots=True)
class Headline:
    """The verdict of a run: its status, one word in capitals, a mark, and one sentence."""

    status: Status
    word: str
    mark: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the overview: what, how much, and a remark."""

    label: str
    value: str
    remark: str = ""


def node_rows(report: RunReport) -> tuple[NodeRow, ...]:
    """All nodes in execution order, each with its verdict (`unknown` where none was given)."""
    said = {verdict.key: verdict for verdict in report.judgement.verdicts}
    nodes = report.comparison.nodes
    return tuple(NodeRow(node, said.get(node.key, Verdict(node.key, Status.UNKNOWN))) for node in nodes)


def worst_first(rows: Iterable[NodeRow]) -> tuple[NodeRow, ...]:
    """Rows by gravity of their status, then by excess over the baseline, then by the error itself."""
    return tuple(sorted(rows, key=_gravity))


def _gravity(row: NodeRow) -> tuple[int, float, float, int]:
    error = row.candidate_error
    return _RANK[row.status], -row.heat, 0.0 if math.isnan(error) else -error, row.node.order


def worst_nodes(report: RunReport, top: int = 10) -> tuple[NodeRow, ...]:
    """The `top` worst measured or faulty nodes, one row a call: of its steps the worst."""
    hidden = (Status.FUSED_AWAY, Status.UNKNOWN)
    rows = [row for row in node_rows(report) if row.status not in hidden]
    same = Counter((_without_step(row.node.key), row.status) for row in rows)
    first: dict[NodeKey, NodeRow] = {}
    for row in worst_first(rows):
        call = _without_step(row.node.key)
        first.setdefault(call, replace(row, steps=same[call, row.status]))
        if len(first) == top:
            break
    return tuple(first.values())


def _without_step(key: NodeKey) -> NodeKey:
    return replace(key, step=0)


def origin_rows(report: RunReport) -> tuple[NodeRow, ...]:
    """Where drift begins: the origins of the judgement, in its order."""
    by_key = {row.node.key: row for row in node_rows(report)}
    return tuple(by_key[key] for key in report.judgement.origins if key in by_key)


def origin_remarks(report: RunReport) -> dict[str, tuple[str, ...]]:
    """By node: what it introduces beside what it inherits, and what its error looks like."""
    remarks: dict[str, tuple[str, ...]] = {}
    for card in report.origins:
        first = f"introduces {figure(card.introduced)}, inherits {figure(card.inherited)}"
        remarks[card.node] = (first, f"looks like {card.looks_like}") if card.looks_like else (first,)
    return remarks


def parse_statuses(text: str) -> frozenset[Status]:
    """Read `--only`: status names with commas between them; `fault` stands for all that fail a run."""
    chosen: set[Status] = set()
    for word in filter(None, (part.strip() for part in text.split(","))):
        if word in ("fault", "faults"):
            chosen |= {status for status in Status if status.is_fault}
        elif word in set(Status):
            chosen.add(Status(word))
        else:
            raise UsageError(f"unknown status {word!r}", f"known: fault, {', '.join(Status)}")
    return frozenset(chosen)


def headline(report: RunReport) -> Headline:
    """The first line of every report."""
    status = report.judgement.status
    return Headline(status, status.value.upper(), MARKS[status], report.judgement.why or _tally(report))


def _tally(report: RunReport) -> str:
    faults = sum(verdict.status.is_fault for verdict in report.judgement.verdicts)
    total = plural(len(report.judgement.verdicts), "node")
    return f"{count(faults)} of {total} out of tolerance" if faults else f"{total}, none out of tolerance"


def status_counts(rows: Iterable[NodeRow]) -> tuple[tuple[Status, int], ...]:
    """How many nodes have each status, gravest first, without the empty ones."""
    tally = Counter(row.status for row in rows)
    return tuple((status, tally[status]) for status in SEVERITY if tally[status])


def coverage_line(report: RunReport) -> str:
    """How much was compared, in one sentence."""
    cover = report.comparison.coverage
    share = cover.nbytes_compared / cover.nbytes if cover.nbytes else math.nan
    parts = [f"{count(cover.compared)} of {plural(cover.nodes, 'node')} compared"]
    if not math.isnan(share):
        parts.append(f"{percent(share)} of the bytes")
    if cover.fused_away:
        parts.append(f"{count(cover.fused_away)} inside fused kernels")
    if cover.missing:
        parts.append(f"{count(cover.missing)} without a partner")
    return ", ".join(parts)


def output_findings(report: RunReport) -> tuple[Finding, ...]:
    """The error of each final output: candidate, baseline, ratio."""
    by_key = {row.node.key: row for row in node_rows(report)}
    rows = [by_key[key] for key in report.judgement.outputs if key in by_key]
    return tuple(Finding(str(row.node.key), figure(row.candidate_error), against_baseline(row)) for row in rows)


def against_baseline(row: NodeRow) -> str:
    """`baseline 0.0041, 18.2x`; empty without a baseline."""
    if row.node.baseline is None:
        return ""
    ratio = times(row.node.excess)
    return f"baseline {figure(row.baseline_error)}" + (f", {ratio}" if row.node.candidate else "")
