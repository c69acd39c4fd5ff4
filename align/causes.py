"""Say more of the nodes where drift begins: error introduced and inherited, what it looks like, and how it grows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from align.compare.growth import Law, growth_of
from align.compare.model import Comparison, Judgement
from align.compare.origin import find_origins
from align.compare.signature import SignatureKind, diagnose
from align.dumpers.dtypes import RawTensor
from align.dumpers.errors import AlignError
from align.dumpers.model import NodeKey, Storage
from align.dumpers.store import Trace
from align.reports.model import OriginCard
from align.reports.numbers import figure

_MOST = 3  # origins whose error is looked at: each costs a few passes over its tensors


def origin_cards(comparison: Comparison, judgement: Judgement, traces: Mapping[str, Trace]) -> tuple[OriginCard, ...]:
    """Cards of the origins, in order; the first few with what their error looks like."""
    inputs = {node.key: node.producers for node in comparison.nodes}
    return tuple(
        OriginCard(
            str(origin.key),
            origin.introduced,
            origin.inherited,
            _look(origin.key, inputs.get(origin.key, ()), traces) if place < _MOST else "",
        )
        for place, origin in enumerate(find_origins(comparison, judgement))
    )


def _look(key: NodeKey, producers: tuple[NodeKey, ...], traces: Mapping[str, Trace]) -> str:
    candidate, reference = (_tensor(traces, role, key) for role in ("candidate", "reference"))
    if candidate is None or reference is None or candidate.shape != reference.shape:
        return ""
    read = (_tensor(traces, "candidate", producer) for producer in producers)
    found = diagnose(
        candidate, reference, baseline=_tensor(traces, "baseline", key), inputs=tuple(raw for raw in read if raw)
    )
    if not found or found[0].kind is SignatureKind.NONE_FITS:
        return ""
    return f"{found[0].kind}: {found[0].evidence}"


def _tensor(traces: Mapping[str, Trace], role: str, key: NodeKey) -> RawTensor | None:
    trace = traces.get(role)
    try:
        if trace is None or trace.record(key).storage is not Storage.TENSOR:
            return None
        return trace.read(key)
    except AlignError:
        return None


def growth_notes(comparison: Comparison, outputs: tuple[NodeKey, ...]) -> tuple[str, ...]:
    """How the error of what the steps yield grows, where there are steps enough to tell."""
    shapes = {node.key: node.shape for node in comparison.nodes}
    notes = []
    for first in sorted(key for key in outputs if key.step == 0):
        alike = tuple(node for node in comparison.nodes if node.shape == shapes.get(first))
        growth = growth_of(replace(comparison, nodes=alike), first)
        if growth.law is not Law.UNKNOWN:
            notes.append(f"error of {first} over the steps: {growth.sentence} (residual {figure(growth.residual)})")
    return tuple(notes)
