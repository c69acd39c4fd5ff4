"""Doubts about the runs before any number is believed: other models or inputs, stale results, broken-off runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from align.compare.model import NodeComparison, Pairing
from align.compare.pairing import Pair
from align.compare.source import TraceSource, name_of
from align.dumpers.dtypes import is_floating
from align.dumpers.errors import UsageError
from align.dumpers.model import NodeKey, NodeKind, NodeRecord, RunStatus, Storage

# Inputs rounded to the coarsest 8-bit float differ by 2^-3 at most; beyond half of that in L2 they are other inputs.
_INPUT_REL_L2 = 2.0**-4


def check_same_model(candidate: TraceSource, reference: TraceSource, pairs: Sequence[Pair]) -> None:
    """Raise UsageError naming both runs when they share no node, or differ in workload and in most nodes or shapes.

    Another workload alone is no error: a candidate may be the user's own fused code, paired by key.
    """
    total = sum(found.reference is not None for found in pairs)
    partners = [(found.candidate, found.reference) for found in pairs if found.candidate and found.reference]
    names = f"{name_of(candidate)} and {name_of(reference)}"
    if not partners:
        raise UsageError(
            f"no node in common: {names}", "compare two runs of one model; rename rules (--rules) map other names"
        )
    alike = sum(ours.shape == theirs.shape for ours, theirs in partners)
    if candidate.header.workload != reference.header.workload and 2 * alike < total:
        raise UsageError(
            f"two different models ({alike} of {total} nodes alike): {names}",
            "compare two runs of one model; rename rules (--rules) map other names",
        )


def warnings_of(
    runs: Sequence[TraceSource | None],
    pairs: Sequence[Pair],
    baseline: Mapping[NodeKey, NodeRecord],
    nodes: Sequence[NodeComparison],
) -> tuple[str, ...]:
    """All doubts in words; `runs` are candidate, reference and baseline."""
    present = [run for run in runs if run is not None]
    found = (
        *_doubts_of_headers(present),
        *_stale(pairs, baseline),
        *_other_inputs(nodes),
        *_kept_too_little(pairs, nodes),
    )
    return tuple(found)


def _doubts_of_headers(runs: Sequence[TraceSource]) -> Iterator[str]:
    for run in runs:
        if run.status is not RunStatus.COMPLETE:
            yield f"the run is {run.status}, its last nodes may lack: {name_of(run)}"
    workloads = {run.header.workload for run in runs}
    if len(workloads) > 1:
        yield f"the runs are of different workloads, paired by name: {', '.join(sorted(workloads))}"
    seeds = {run.header.seed for run in runs}
    if len(seeds) > 1:
        yield f"the runs have different seeds: {', '.join(map(str, sorted(seeds)))}"


def _stale(pairs: Sequence[Pair], baseline: Mapping[NodeKey, NodeRecord]) -> Iterator[str]:
    """Another kernel hardly ever gives the very same bits at every site: then the fusions were probably not on."""
    digests = [
        (found.candidate.digest, baseline[found.key].digest)
        for found in pairs
        if found.pairing is Pairing.FUSED_OUTPUT and found.candidate is not None and found.key in baseline
    ]
    known = [(ours, theirs) for ours, theirs in digests if ours and theirs]
    if known and all(ours == theirs for ours, theirs in known):
        yield (
            f"all {len(known)} fused outputs are byte-identical to the baseline's: a stale cache, a replayed graph, "
            "or fusions that were not on; nothing was compared there"
        )


def _other_inputs(nodes: Sequence[NodeComparison]) -> Iterator[str]:
    for node in nodes:
        if node.kind is not NodeKind.INPUT or node.candidate is None:
            continue
        is_same = node.candidate.rel_l2 <= _INPUT_REL_L2 if is_floating(node.dtype) else node.candidate.max_abs == 0.0
        if not is_same:
            far = f"relative L2 {node.candidate.rel_l2:.3g}"
            yield f"the runs did not get the same input {node.key} ({far}): no figure below is to be trusted"


def _kept_too_little(pairs: Sequence[Pair], nodes: Sequence[NodeComparison]) -> Iterator[str]:
    statistics = sum(node.problem.startswith("statistics only") for node in nodes)
    if statistics:
        yield f"{statistics} nodes have statistics only: without tensors their error is not known"
    samples = sum(
        found.candidate is not None and found.candidate.storage is Storage.SAMPLE and node.candidate is not None
        for found, node in zip(pairs, nodes, strict=True)
    )
    if samples:
        yield f"{samples} nodes are compared on a sample of their elements"
