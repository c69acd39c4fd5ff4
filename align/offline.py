"""Compare files that are there already: traces, folders of ranks, other tools' dumps, run folders. Needs no torch."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from align.compare.judge import judge
from align.compare.pairing_rules import NONE, read_rules
from align.compare.policy import policy_named
from align.compare.source import EVERYTHING, NodeSelection, TraceSource, open_source
from align.compare.traces import compare_traces
from align.dumpers.choice import Plan
from align.dumpers.model import OUTPUT_OP
from align.reports.model import RoleRow, RunReport
from align.reports.stored import load


@dataclass(frozen=True, slots=True)
class Comparing:
    """What `align compare` was asked for."""

    candidate: Path
    reference: Path
    baseline: Path | None
    policy: str
    rules: Path | None = None
    include: tuple[str, ...] = ()


def compare_files(asked: Comparing) -> RunReport:
    """Compare two or three dumps and judge them."""
    policy = policy_named(asked.policy)
    rules = read_rules(asked.rules) if asked.rules else NONE
    select = NodeSelection(asked.include) if asked.include else EVERYTHING
    with ExitStack() as stack:
        candidate = stack.enter_context(open_source(asked.candidate))
        reference = stack.enter_context(open_source(asked.reference))
        baseline = stack.enter_context(open_source(asked.baseline)) if asked.baseline else None
        comparison = compare_traces(candidate, reference, baseline, rules=rules, select=select)
        outputs = tuple(record.key for record in reversed(reference.nodes) if record.key.op == OUTPUT_OP)
        judgement = judge(comparison, policy, outputs=outputs)
        roles = tuple(
            _row(role, path, source)
            for role, path, source in (
                ("reference", asked.reference, reference),
                ("baseline", asked.baseline, baseline),
                ("candidate", asked.candidate, candidate),
            )
            if path is not None and source is not None
        )
    return RunReport(candidate.header.workload, "", roles, comparison, judgement, notes=comparison.warnings)


def _row(role: str, path: Path, source: TraceSource) -> RoleRow:
    header = source.header
    return RoleRow(role, Plan(header.role, header.device, header.dtype), str(path), float("nan"), len(source.nodes), "")


def rejudge(folder: Path, policy: str) -> RunReport:
    """Judge a run folder's measures under another policy, without reading a tensor."""
    report = load(folder)
    judgement = judge(report.comparison, policy_named(policy), outputs=report.judgement.outputs)
    return replace(report, judgement=judgement)
