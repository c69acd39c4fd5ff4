"""Tell where drift begins: error that a node introduces apart from error it inherits, and a short list of origins.

Errors are relative L2 in excess of the baseline's, e = sqrt(max(0, c^2 - b^2)): independent errors add in squares.
What a node inherits is the largest excess i among its nearest measured ancestors; what it introduces is
sqrt(max(0, e^2 - i^2)), or its local error where the shadow tap measured one. Amplification is e / i.

An origin is a node at fault none of whose ancestors is. A second culprit behind the first is found where the nearest
ancestors pass and the node introduces twice what it inherits, or where its local error exceeds what it inherited. A
movement node that merely passes a fault on inherits it whole and is never an origin.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from align.compare.dataflow import Dataflow
from align.compare.model import Comparison, Judgement, NodeComparison, Status, Verdict, ratio
from align.dumpers.model import NodeKey, OpClass

LONGEST_LIST = 8


@dataclass(frozen=True, slots=True)
class Origin:
    """A node where error begins. Errors are relative L2 in excess of the baseline's; `local` is NaN if not measured."""

    key: NodeKey
    status: Status
    introduced: float
    inherited: float
    amplification: float
    local: float = math.nan
    why: str = ""


def first_faults(flow: Dataflow, verdicts: Mapping[NodeKey, Verdict]) -> tuple[NodeKey, ...]:
    """Nodes at fault with no fault upstream, in order of execution."""
    tainted: set[NodeKey] = set()
    found = []
    for node in flow.nodes:
        inherits = any(above.key in tainted for above in flow.ancestors(node.key))
        is_faulty = _is_faulty(verdicts.get(node.key))
        if is_faulty and not inherits:
            found.append(node.key)
        if is_faulty or (inherits and node.candidate is not None):
            tainted.add(node.key)
    return tuple(found)


def find_origins(
    comparison: Comparison, judgement: Judgement, *, local: Mapping[NodeKey, float] | None = None
) -> tuple[Origin, ...]:
    """At most eight origins in order of execution; of more, those that introduce most.

    `local` holds local relative errors by the shadow tap, of a call from its own inputs.
    """
    flow = Dataflow(comparison.nodes)
    verdicts = {verdict.key: verdict for verdict in judgement.verdicts}
    first = set(first_faults(flow, verdicts))
    faulty = [node for node in flow.nodes if _is_faulty(verdicts.get(node.key))]
    origins = [_origin(node, flow, verdicts[node.key], local or {}) for node in faulty if node.candidate is not None]
    moves = {node.key for node in faulty if node.op_class is OpClass.MOVEMENT}
    calm = {
        node.key
        for node in faulty
        if not any(_is_faulty(verdicts.get(above.key)) for above in flow.ancestors(node.key))
    }
    begin = [o for o in origins if o.key in first or (_is_second(o, o.key in calm) and o.key not in moves)]
    if len(begin) <= LONGEST_LIST:
        return tuple(begin)
    floor = sorted((origin.introduced for origin in begin), reverse=True)[LONGEST_LIST - 1]
    return tuple(origin for origin in begin if origin.introduced >= floor)[:LONGEST_LIST]


def excess_error(node: NodeComparison) -> float:
    """Relative L2 error in excess of the baseline's, in squares; all of it without a baseline; NaN if not measured."""
    if node.candidate is None:
        return math.nan
    ours, base = node.candidate.rel_l2, node.baseline.rel_l2 if node.baseline is not None else 0.0
    if not math.isfinite(ours) or not math.isfinite(base):
        return ours
    return math.sqrt(max(0.0, (ours - base) * (ours + base)))


def _origin(node: NodeComparison, flow: Dataflow, verdict: Verdict, local: Mapping[NodeKey, float]) -> Origin:
    excess = excess_error(node)
    above = [excess_error(ancestor) for ancestor in flow.ancestors(node.key)]
    inherited = max((error for error in above if not math.isnan(error)), default=0.0)
    own = local.get(node.key, math.nan)
    rest = (
        math.sqrt(max(0.0, excess**2 - inherited**2)) if math.isfinite(excess) and math.isfinite(inherited) else excess
    )
    introduced = rest if math.isnan(own) else own
    return Origin(node.key, verdict.status, introduced, inherited, ratio(excess, inherited), own, verdict.why)


def _is_second(origin: Origin, is_calm_above: bool) -> bool:
    return origin.local > origin.inherited or (is_calm_above and origin.introduced >= 2 * origin.inherited)


def _is_faulty(verdict: Verdict | None) -> bool:
    """Faults with a measured or known wrong output; a missing node begins nothing."""
    return verdict is not None and verdict.status.is_fault and verdict.status is not Status.MISSING
