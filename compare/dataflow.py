"""Which measured nodes a node's error can come from, and what follows: its coarsest precision, its depth.

Nodes nothing was measured of (fused away, statistics only) are looked through. A module's node also inherits from the
calls inside it. Without any recorded dataflow the order of execution stands in for it, as one chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from align.compare.model import NodeComparison, Pairing
from align.dumpers.dtypes import DTYPES
from align.dumpers.model import MODULE_OP, NodeKey, NodeKind, OpClass


@dataclass(frozen=True, slots=True)
class Precision:
    """What rounding may do to a node: `epsilon` of the coarsest dtype on the way, `depth` rounding calls at most."""

    epsilon: float
    depth: int


class Dataflow:
    """The nearest measured ancestors of every node."""

    def __init__(self, nodes: Sequence[NodeComparison]) -> None:
        ours = (node for node in nodes if node.pairing is not Pairing.EXTRA)
        self.nodes = tuple(sorted(ours, key=lambda node: node.order))
        self._by_key = {node.key: node for node in self.nodes}
        self._has_producers = any(node.producers for node in self.nodes)
        self._inner = _inner_nodes(self.nodes)
        self._last_of_step = {(node.key.step, node.key.rank): node for node in self.nodes}
        self._above: dict[NodeKey, tuple[NodeComparison, ...]] = {}
        previous: NodeComparison | None = None
        for node in self.nodes:
            self._above[node.key] = self._find_above(node, previous)
            previous = node

    def ancestors(self, key: NodeKey) -> tuple[NodeComparison, ...]:
        """The nearest measured nodes upstream; empty for inputs and unknown keys."""
        return self._above.get(key, ())

    def has_inner(self, key: NodeKey) -> bool:
        """Whether calls inside this module call were recorded: then its own node adds no rounding."""
        return bool(self._inner.get(key))

    def precision(self) -> dict[NodeKey, Precision]:
        """Precision of every node, following the candidate's dtypes along the dataflow."""
        found: dict[NodeKey, Precision] = {}
        for node in self.nodes:
            above = [found[ancestor.key] for ancestor in self._above[node.key]]
            adds = (
                0 if self.has_inner(node.key) or node.op_class is OpClass.MOVEMENT or node.kind is NodeKind.INPUT else 1
            )
            epsilon = max([epsilon_of(node.dtype), *(item.epsilon for item in above)])
            found[node.key] = Precision(epsilon, max((item.depth for item in above), default=0) + adds)
        return found

    def _find_above(self, node: NodeComparison, previous: NodeComparison | None) -> tuple[NodeComparison, ...]:
        if not self._has_producers:
            direct: tuple[NodeComparison, ...] = (previous,) if previous is not None else ()
        else:
            keys = dict.fromkeys((*node.producers, *self._inner.get(node.key, ())))
            direct = tuple(self._by_key[key] for key in keys if key in self._by_key)
        earlier = [other for other in direct if other.order < node.order]
        if not earlier and node.key.step > 0:  # what the user's step loop does between two steps is not recorded
            key = replace(node.key, step=node.key.step - 1)
            last = self._last_of_step.get((key.step, key.rank))
            earlier = [last] if last is not None and last.order < node.order else []
        return self._look_through(earlier)

    def _look_through(self, direct: Sequence[NodeComparison]) -> tuple[NodeComparison, ...]:
        above: dict[NodeKey, NodeComparison] = {}
        for node in direct:
            reached = (node,) if node.candidate is not None else self._above[node.key]
            above.update((other.key, other) for other in reached)
        return tuple(above.values())


def _inner_nodes(nodes: Sequence[NodeComparison]) -> dict[NodeKey, tuple[NodeKey, ...]]:
    """For each module call the nodes completed inside it: below its path, since the module's previous call ended."""
    return {
        node.key: _inner_of(nodes, at)
        for at, node in enumerate(nodes)
        if node.key.op == MODULE_OP and node.kind is NodeKind.MODULE
    }


def _inner_of(nodes: Sequence[NodeComparison], at: int) -> tuple[NodeKey, ...]:
    module, found = nodes[at], []
    for before in range(at - 1, -1, -1):
        other = nodes[before]
        is_interleaved = other.key.rank != module.key.rank
        is_other_slot = (other.key.call_name, other.key.step) == (module.key.call_name, module.key.step)
        if is_interleaved or is_other_slot:
            continue
        if not _is_inside(other, module):
            break
        found.append(other.key)
    return tuple(found)


def _is_inside(other: NodeComparison, module: NodeComparison) -> bool:
    is_earlier_call = other.key.path == module.key.path and other.key.op == MODULE_OP
    if (
        is_earlier_call
        or (other.key.step, other.key.rank) != (module.key.step, module.key.rank)
        or other.kind is NodeKind.INPUT
    ):
        return False
    path = module.key.path
    return not path or other.key.path == path or other.key.path.startswith(f"{path}.")


def epsilon_of(dtype: str) -> float:
    """Gap between 1 and the next value; 0 for dtypes that do not round."""
    known = DTYPES.get(dtype)
    return known.format.epsilon if known is not None and known.format is not None else 0.0
