"""Say what a policy makes of a comparison: a verdict a node, the run's status, where drift begins. Needs no tensors.

A node's status, the first that holds:
    fused-away, missing      as paired; a node missing inside a module whose own output is measured is `unknown`
    unknown                  only in the candidate, nothing measured, or its override says `ignore`
    mismatch                 the runs produced other shapes or kinds of dtype
    nonfinite                the candidate has NaN or Inf where the reference has not, whatever the baseline has
    reference-suspect        the reference has NaN or Inf where the candidate has not; or candidate and baseline agree
                             with each other (errors equal within 1 %) far from the reference (relative L2 above 0.25
                             and 16 times what came in): both kernels are wrong in one way, or the reference is
    drift                    a figure of the policy's rule is over its limit (`judge_rules`); integers: they differ
    collapsed                drift, with rows that are zero in the candidate but neither in reference nor baseline (not
                             asked of rectified values, whose rows are zero now and then, nor of data movement)
    pass                     otherwise
The run's status is the worst fault of any node: an override is the way to accept one. A missing node decides only when
it is a final output, or nothing was measured. No measured output: unknown, never pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from align.compare.dataflow import Dataflow, Precision
from align.compare.judge_rules import Evidence, Figure, figures_of, is_nearer_than_baseline
from align.compare.model import Comparison, Judgement, Measures, NodeComparison, Pairing, Status, Verdict
from align.compare.origin import first_faults
from align.compare.policy import Method, Overrides, Policy
from align.compare.source import matches_glob
from align.compare.tolerance import NodeLimit, NoiseFloors
from align.compare.unmeasured import MISMATCHES
from align.dumpers.dtypes import DTYPES
from align.dumpers.model import MODULE_OP, NodeKey, OpClass

_SEVERITY = (Status.NONFINITE, Status.COLLAPSED, Status.MISMATCH, Status.DRIFT, Status.MISSING)
_SUSPECT_REL_L2 = 0.25
_SUSPECT_GROWTH = 16.0
_SAME_ERROR = 0.01


def judge(
    comparison: Comparison,
    policy: Policy,
    *,
    overrides: Overrides = (),
    outputs: tuple[NodeKey, ...] = (),
    floors: NoiseFloors | None = None,
) -> Judgement:
    """Judge every node. `outputs` are the keys that decide the run; none known: the root's outputs of the last step.

    Of the overrides whose glob names a node, the longest holds.
    """
    flow = Dataflow(comparison.nodes)
    bench = _Bench(
        flow,
        flow.precision(),
        policy,
        overrides,
        dict(floors.by_key()) if floors else {},
        _measured_modules(comparison),
    )
    verdicts = tuple(bench.verdict(node) for node in comparison.nodes)
    known = {node.key for node in comparison.nodes}
    deciding = tuple(key for key in outputs if key in known) or final_outputs(comparison)
    status = _status_of_run(verdicts, deciding)
    origins = first_faults(flow, {verdict.key: verdict for verdict in verdicts})
    why = _why_of_run(status, verdicts, deciding, origins)
    return Judgement(policy.name, verdicts, status, why, deciding, origins)


def final_outputs(comparison: Comparison) -> tuple[NodeKey, ...]:
    """The root module's outputs at the last step, of every rank; without a root module the reference's last node."""
    ours = [node for node in comparison.nodes if node.pairing is not Pairing.EXTRA]
    roots = [node.key for node in ours if node.key.op == MODULE_OP and not node.key.path]
    if not roots:
        return tuple(node.key for node in ours[-1:])
    last = max((key.step, key.call) for key in roots)
    return tuple(key for key in roots if (key.step, key.call) == last)


@dataclass(frozen=True, slots=True)
class _Bench:
    """What all nodes are judged with."""

    flow: Dataflow
    precision: Mapping[NodeKey, Precision]
    policy: Policy
    overrides: Overrides
    limits: Mapping[NodeKey, NodeLimit]
    modules: frozenset[tuple[str, int, int]]

    def verdict(self, node: NodeComparison) -> Verdict:
        policy = _policy_for(node.key, self.policy, self.overrides)
        unmeasured = self._unmeasured(node, policy)
        if unmeasured is not None:
            return unmeasured
        assert node.candidate is not None
        early = _nonfinite(node.key, node.candidate, node.baseline) or self._suspect(node, node.candidate)
        if early is not None:
            return early
        if _is_exact(node):
            return _exact(node.key, node.candidate, node.baseline, node.dtype)
        precision = self.precision.get(node.key, Precision(0.0, 1))
        return _rounded(Evidence(node, node.candidate, node.baseline, policy, precision, self.limits.get(node.key)))

    def _unmeasured(self, node: NodeComparison, policy: Policy) -> Verdict | None:
        key = node.key
        if node.pairing is Pairing.FUSED_AWAY:
            return Verdict(
                key,
                Status.FUSED_AWAY,
                why=f"interior of {node.site or 'a fused site'}: no tensor exists in the candidate",
            )
        if node.pairing is Pairing.EXTRA:
            return Verdict(key, Status.UNKNOWN, why=f"only in the candidate: {node.problem}")
        if policy.method is Method.IGNORE:
            return Verdict(key, Status.UNKNOWN, why="not judged: an override says ignore")
        if node.pairing is Pairing.MISSING:
            return self._missing(node)
        if node.problem.startswith(MISMATCHES):
            return Verdict(key, Status.MISMATCH, why=f"{node.problem} (candidate against reference)")
        measured = node.candidate
        if measured is None or (math.isnan(measured.rel_l2) and measured.mismatched == 0):
            return Verdict(key, Status.UNKNOWN, why=node.problem or "nothing measured")
        return None

    def _missing(self, node: NodeComparison) -> Verdict:
        enclosing = self._enclosing(node)
        if enclosing:
            return Verdict(
                node.key,
                Status.UNKNOWN,
                why=f"{node.problem}; the output of {enclosing}, which encloses it, is compared",
            )
        return Verdict(node.key, Status.MISSING, why=node.problem)

    def _enclosing(self, node: NodeComparison) -> str:
        path = node.key.path if node.key.op != MODULE_OP else node.key.path.rpartition(".")[0]
        while path:
            if (path, node.key.step, node.key.rank) in self.modules:
                return path
            path = path.rpartition(".")[0]
        return ""

    def _suspect(self, node: NodeComparison, ours: Measures) -> Verdict | None:
        base = node.baseline
        if base is None or not _SUSPECT_REL_L2 < ours.rel_l2 < math.inf:
            return None
        is_same = (
            abs(ours.rel_l2 - base.rel_l2) <= _SAME_ERROR * base.rel_l2
            and abs(ours.max_abs - base.max_abs) <= _SAME_ERROR * base.max_abs
        )
        came_in = [above.candidate.rel_l2 for above in self.flow.ancestors(node.key) if above.candidate is not None]
        if not is_same or not came_in or ours.rel_l2 < _SUSPECT_GROWTH * max(came_in):
            return None
        why = (
            f"candidate and baseline agree, both far from the reference (relative L2 {ours.rel_l2:.3g} and "
            f"{base.rel_l2:.3g}), with inputs that were right (at most {max(came_in):.3g})"
        )
        return Verdict(node.key, Status.REFERENCE_SUSPECT, "rel_l2", ours.rel_l2, _SUSPECT_REL_L2, why)


def _measured_modules(comparison: Comparison) -> frozenset[tuple[str, int, int]]:
    keys = (node.key for node in comparison.nodes if node.candidate is not None and node.key.op == MODULE_OP)
    return frozenset((key.path, key.step, key.rank) for key in keys)


def _policy_for(key: NodeKey, policy: Policy, overrides: Overrides) -> Policy:
    fitting = [(len(glob), at, chosen) for at, (glob, chosen) in enumerate(overrides) if matches_glob(key, glob)]
    return max(fitting, key=lambda item: item[:2])[2] if fitting else policy


def _nonfinite(key: NodeKey, ours: Measures, base: Measures | None) -> Verdict | None:
    if ours.mismatched == 0:
        return None
    bad, theirs = ours.nan_candidate + ours.inf_candidate, ours.nan_reference + ours.inf_reference
    counts = (
        f"{ours.nan_candidate} NaN and {ours.inf_candidate} Inf, "
        f"the reference {ours.nan_reference} and {ours.inf_reference}"
    )
    baseline = f"; the baseline has {base.nan_candidate} and {base.inf_candidate}" if base is not None else ""
    if theirs and not bad:
        why = f"the reference is not finite where the candidate is: the candidate has {counts}{baseline}"
        return Verdict(key, Status.REFERENCE_SUSPECT, "nonfinite", float(ours.mismatched), 0.0, why)
    blame = ", so it is not the candidate's choices" if base is not None and base.mismatched >= ours.mismatched else ""
    why = f"the candidate has {counts}{baseline}{blame}; {ours.mismatched} places disagree"
    return Verdict(key, Status.NONFINITE, "nonfinite", float(ours.mismatched), 0.0, why)


def _is_exact(node: NodeComparison) -> bool:
    dtype = DTYPES.get(node.dtype)
    return node.op_class is OpClass.EXACT or (dtype is not None and dtype.format is None)


def _exact(key: NodeKey, ours: Measures, base: Measures | None, dtype: str) -> Verdict:
    """Integers must be equal, 8-bit ones within 1 (quantised on the edge), or differ as seldom as the baseline's."""
    allowed = 1.0 if dtype in ("int8", "uint8") else 0.0
    if ours.max_abs <= max(allowed, base.max_abs if base is not None else 0.0):
        return Verdict(
            key, Status.PASS, "max_abs", ours.max_abs, allowed, f"values differ by {ours.max_abs:.6g} at most"
        )
    share = 1.0 - ours.share_close
    base_share = 1.0 - base.share_close if base is not None else 0.0
    limit = base_share + 3.0 * math.sqrt(base_share / max(ours.count, 1))  # three sigma of the baseline's count
    why = f"values differ by up to {ours.max_abs:.6g}, at {share:.3%} of the places, the baseline's at {base_share:.3%}"
    if base_share > 0.0 and share <= limit:
        return Verdict(key, Status.PASS, "share_differing", share, limit, why)
    return Verdict(key, Status.DRIFT, "max_abs", ours.max_abs, allowed, why)


def _rounded(seen: Evidence) -> Verdict:
    figures = figures_of(seen)
    worst = max(figures, key=lambda figure: figure.strain)
    if is_nearer_than_baseline(seen):
        why = f"no farther from the reference than the baseline: {worst.words}"
        return _verdict(seen, Status.PASS, worst, why)
    if not worst.is_over:
        return _verdict(seen, Status.PASS, worst, f"{worst.words}; allowed {worst.limit:.3g}")
    zero_rows = seen.candidate.zero_rows
    # After ReLU, rows of zeros come and go with any error; what merely moves them on does not make them.
    is_natural = seen.candidate.min_reference == 0.0 or seen.node.op_class is OpClass.MOVEMENT
    if not is_natural and zero_rows > (seen.baseline.zero_rows if seen.baseline is not None else 0):
        why = f"{zero_rows} rows are zero that are not zero in the reference; {worst.words}, allowed {worst.limit:.3g}"
        return _verdict(seen, Status.COLLAPSED, worst, why)
    return _verdict(seen, Status.DRIFT, worst, f"{worst.words}; allowed {worst.limit:.3g}")


def _verdict(seen: Evidence, status: Status, figure: Figure, why: str) -> Verdict:
    return Verdict(seen.node.key, status, figure.metric, figure.value, figure.limit, why)


def _status_of_run(verdicts: Sequence[Verdict], outputs: tuple[NodeKey, ...]) -> Status:
    deciding = set(outputs)
    at_outputs = {verdict.status for verdict in verdicts if verdict.key in deciding}
    faults: set[Status] = {
        verdict.status for verdict in verdicts if verdict.status.is_fault and verdict.status is not Status.MISSING
    }
    if Status.MISSING in at_outputs:
        faults.add(Status.MISSING)
    for status in _SEVERITY:
        if status in faults:
            return status
    if Status.REFERENCE_SUSPECT in at_outputs:
        return Status.REFERENCE_SUSPECT
    return Status.PASS if Status.PASS in at_outputs else Status.UNKNOWN


def _finals(by_key: Mapping[NodeKey, Verdict], outputs: tuple[NodeKey, ...]) -> str:
    """What became of the outputs that decide: one by one while they are few."""
    seen = [key for key in outputs if key in by_key]
    if len(seen) > 2:
        bad = sum(by_key[key].status.is_fault for key in seen)
        return f"{bad} of {len(seen)} outputs at fault"
    return "final output: " + (", ".join(f"{key} {by_key[key].status}" for key in seen) or "none")


def _why_of_run(
    status: Status, verdicts: Sequence[Verdict], outputs: tuple[NodeKey, ...], origins: tuple[NodeKey, ...]
) -> str:
    by_key = {verdict.key: verdict for verdict in verdicts}
    judged = sum(verdict.status is Status.PASS or verdict.status.is_fault for verdict in verdicts)
    faults = sum(verdict.status.is_fault for verdict in verdicts if verdict.status is not Status.MISSING)
    missing = sum(verdict.status is Status.MISSING for verdict in verdicts)
    ending = f"; {missing} nodes are missing" if missing else ""
    if faults:
        begin = f"first at {origins[0]}: {by_key[origins[0]].why}" if origins else ""
        return f"{faults} of {judged} judged nodes at fault, {begin}; {_finals(by_key, outputs)}{ending}"
    if status is Status.PASS:
        return f"{judged} judged nodes within their limits{ending}"
    deciding = [by_key[key].why for key in outputs if key in by_key]
    return f"{'; '.join(deciding) or 'no final output was compared'}{ending}"
