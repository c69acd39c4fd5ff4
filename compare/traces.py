"""Compare two or three runs node by node: pair, read, measure. Says how far apart they are, never whether too far.

Results are in the reference's order of execution and do not depend on the number of threads. A pair that cannot be
measured (shapes or kinds of dtype differ, no data kept) carries the reason in `problem`; nothing raises for it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from align.compare.judge import judge
from align.compare.measuring import LARGE_NBYTES, ReferenceNode, is_same_content
from align.compare.model import Comparison, Coverage, Judgement, NodeComparison, Pairing
from align.compare.pairing import Counting, Pair, pair
from align.compare.pairing_fusion import fusion_map
from align.compare.pairing_rules import NONE, RenameRules
from align.compare.policy import DEFAULT, Overrides, policy_named
from align.compare.source import EVERYTHING, NodeSelection, TraceSource, open_source
from align.compare.suspicion import check_same_model, warnings_of
from align.compare.tolerance import NoiseFloors
from align.dumpers.model import NodeKey, NodeRecord, OpClass, RunStatus, Storage


@dataclass(frozen=True, slots=True)
class Compared:
    """What `align.compare(...)` returns: how far apart the runs are, and what the policy says of it."""

    comparison: Comparison
    judgement: Judgement


def compare_traces(
    candidate: TraceSource,
    reference: TraceSource,
    baseline: TraceSource | None = None,
    *,
    rules: RenameRules = NONE,
    select: NodeSelection = EVERYTHING,
    threads: int = 0,
) -> Comparison:
    """Measure every node of the candidate, and of the baseline, against the reference.

    `threads` is how many nodes are measured at a time; 0 means one a processor. Large ones go one by one, each on all.
    Raises UsageError when two runs are of different models, ConfigError for a rename rule that matches nothing.
    """
    pairs = pair(
        candidate.nodes, reference.nodes, rules=rules, fusions=fusion_map(candidate), counting=_counting(candidate)
    )
    check_same_model(candidate, reference, pairs)
    beside = _pair_baseline(baseline, reference, rules)
    chosen = tuple(found for found in pairs if select.accepts(_record(found)))
    runs = _Runs(candidate, reference, baseline)
    nodes = _measure_all([(found, beside.get(found.key)) for found in chosen], runs, threads)
    warnings = warnings_of((candidate, reference, baseline), chosen, beside, nodes)
    return Comparison(nodes, _coverage(chosen, nodes), baseline is not None, warnings)


def compare_folders(
    candidate: Path,
    reference: Path,
    baseline: Path | None = None,
    *,
    rules: RenameRules = NONE,
    select: NodeSelection = EVERYTHING,
) -> Comparison:
    """Compare trace files, or folders that hold one trace file a rank; see `compare_traces`."""
    with open_source(candidate) as ours, open_source(reference) as theirs:
        if baseline is None:
            return compare_traces(ours, theirs, rules=rules, select=select)
        with open_source(baseline) as beside:
            return compare_traces(ours, theirs, beside, rules=rules, select=select)


def compare(
    candidate: TraceSource | str | Path,
    reference: TraceSource | str | Path,
    baseline: TraceSource | str | Path | None = None,
    policy: str = DEFAULT,
    *,
    rules: RenameRules = NONE,
    select: NodeSelection = EVERYTHING,
    overrides: Overrides = (),
    floors: NoiseFloors | None = None,
) -> Compared:
    """Compare two or three traces (paths, folders of ranks, or open traces) and judge them under a named policy."""
    chosen = policy_named(policy)
    with open_source(candidate) as ours, open_source(reference) as theirs:
        if baseline is None:
            comparison = compare_traces(ours, theirs, rules=rules, select=select)
        else:
            with open_source(baseline) as beside:
                comparison = compare_traces(ours, theirs, beside, rules=rules, select=select)
    return Compared(comparison, judge(comparison, chosen, overrides=overrides, floors=floors))


@dataclass(frozen=True, slots=True)
class _Runs:
    candidate: TraceSource
    reference: TraceSource
    baseline: TraceSource | None


def _counting(candidate: TraceSource) -> Counting:
    return Counting.STRICT if candidate.status is RunStatus.COMPLETE else Counting.TRUNCATED


def _record(found: Pair) -> NodeRecord:
    record = found.reference or found.candidate
    assert record is not None
    return record


def _pair_baseline(
    baseline: TraceSource | None, reference: TraceSource, rules: RenameRules
) -> dict[NodeKey, NodeRecord]:
    """Records of the baseline by the reference's key; rules that do not fit its names are passed over."""
    if baseline is None:
        return {}
    keys = frozenset(record.key for record in reference.nodes)
    fitting = rules.applicable((record.key for record in baseline.nodes), keys)
    pairs = pair(
        baseline.nodes, reference.nodes, rules=fitting, fusions=fusion_map(baseline), counting=_counting(baseline)
    )
    check_same_model(baseline, reference, pairs)
    return {
        found.key: found.candidate for found in pairs if found.reference is not None and found.candidate is not None
    }


def _measure_all(
    work: Sequence[tuple[Pair, NodeRecord | None]], runs: _Runs, threads: int
) -> tuple[NodeComparison, ...]:
    """Small nodes side by side, large ones one after the other, put together in the order given."""
    small = [item for item in work if _record(item[0]).nbytes < LARGE_NBYTES]
    results: dict[int, NodeComparison] = {}
    with ThreadPoolExecutor(threads or os.cpu_count() or 1) as pool:
        measured = pool.map(lambda item: _compare_node(item[0], item[1], runs), small)
        results.update((id(item[0]), node) for item, node in zip(small, measured, strict=True))
    for found, beside in work:
        if id(found) not in results:
            results[id(found)] = _compare_node(found, beside, runs)
    return tuple(results[id(found)] for found, _ in work)


def _compare_node(found: Pair, beside: NodeRecord | None, runs: _Runs) -> NodeComparison:
    node = _describe(found)
    ours, theirs = found.candidate, found.reference
    if theirs is None:
        return node
    aim = ReferenceNode(theirs, runs.reference)
    if ours is not None and found.pairing is not Pairing.FUSED_AWAY:
        measured, problem = aim.measure(ours, runs.candidate)
        node = replace(node, candidate=measured, problem=problem)
    if beside is None or runs.baseline is None or beside.storage is Storage.FUSED:
        return node
    if node.candidate is not None and ours is not None and is_same_content(ours, beside):
        return replace(
            node, baseline=node.candidate
        )  # the same bits need no second look: half the reading upstream of a fusion
    return replace(node, baseline=aim.measure(beside, runs.baseline)[0])


def _describe(found: Pair) -> NodeComparison:
    """All of a node but its measures; a fused output is as sensitive as the stricter of the two calls."""
    record = _record(found)
    partner = found.candidate or record
    is_sensitive = OpClass.SENSITIVE in (record.op_class, partner.op_class) and found.pairing is Pairing.FUSED_OUTPUT
    return NodeComparison(
        key=record.key,
        order=record.order,
        kind=record.kind,
        op_class=OpClass.SENSITIVE if is_sensitive else record.op_class,
        type_name=partner.type_name if found.pairing is Pairing.FUSED_OUTPUT else record.type_name,
        dtype=partner.dtype,
        shape=record.shape,
        pairing=found.pairing,
        site=found.site,
        problem=found.problem,
        producers=record.producers or partner.producers,
    )


def _coverage(pairs: Sequence[Pair], nodes: Sequence[NodeComparison]) -> Coverage:
    ours = [(found.reference, node) for found, node in zip(pairs, nodes, strict=True) if found.reference is not None]
    measured = [record for record, node in ours if node.candidate is not None and not math.isnan(node.candidate.rel_l2)]
    return Coverage(
        nodes=len(ours),
        compared=len(measured),
        fused_away=sum(node.pairing is Pairing.FUSED_AWAY for _, node in ours),
        missing=sum(node.pairing is Pairing.MISSING for _, node in ours),
        nbytes=sum(record.nbytes for record, _ in ours),
        nbytes_compared=sum(record.nbytes for record in measured),
    )
