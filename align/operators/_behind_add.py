"""Extend the site of a normalisation by the addition that makes its input: residual sum and norm in one kernel."""

from __future__ import annotations

from dataclasses import replace

from align.dumpers.survey import CallGraph, CallRecord, Operand
from align.operators._patterns import argument, close, take
from align.operators.base import Match, Operator, Take


def behind_add(operator: Operator, norm: Match, record: CallRecord, graph: CallGraph) -> Match | None:
    """The norm's match with `x` replaced by `x1` and `x2`, if its input is a plain sum of two tensors of one shape."""
    place = norm.binding["x"]
    reader = graph.record(record.step, place.call) if isinstance(place, Take) else None
    add = graph.maker(Take.of(place, reader)) if isinstance(place, Take) and reader is not None else None
    if add is None or add.op != "add" or add.step != record.step or not _is_plain_sum(add):
        return None
    binding = {name: bound for name, bound in norm.binding.items() if name != "x"}
    binding |= {"x1": take(add, 0, "input"), "x2": take(add, 1, "other")}
    inside = {(record.step, ident) for ident in norm.calls}
    if graph.reader_ids(add) - inside:  # the residual stream reads the sum too: it stays a call of its own
        return replace(norm, operator=operator, binding=binding, kept=(add.ident,))
    calls = (graph.record(record.step, ident) for ident in norm.calls)
    match = close(graph, operator, (add, *(call for call in calls if call is not None)), binding)
    return None if match is None else replace(match, is_written_fused=norm.is_written_fused)


def _is_plain_sum(add: CallRecord) -> bool:
    left, right = argument(add, 0, "input"), argument(add, 1, "other")
    if not isinstance(left, Operand) or not isinstance(right, Operand) or argument(add, 2, "alpha", 1) != 1:
        return False
    return left.shape == right.shape and left.dtype == right.dtype
