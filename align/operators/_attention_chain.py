"""Recognise attention that a model writes out: product, scale, mask, softmax, product.

From the last product upwards: idle calls (casts, dropout that is off), softmax over the last axis, a mask (added,
filled in, or by torch.where), a scale (a number), the first product. A scale on the query or the key stays outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from align.dumpers.survey import CallGraph, CallRecord, Operand
from align.operators._patterns import (
    argument,
    climb_from,
    close,
    inverted,
    is_last_axis,
    is_number,
    is_reflected,
    negated,
    seen,
    take,
    transposed,
)
from align.operators.base import Binding, Fixed, Match, Operator

_FAR_BELOW = -1e4
"""A fill at or below this closes a position in every dtype (float16 models write -65504 or -1e4)."""

_PRODUCTS = frozenset({"matmul", "bmm"})


@dataclass(frozen=True, slots=True)
class _Part:
    """What one stage of the chain contributed, and the call to go on from."""

    calls: tuple[CallRecord, ...]
    binding: Mapping[str, Binding]
    above: CallRecord | None


def find_chain(operator: Operator, record: CallRecord, graph: CallGraph, fixed: Mapping[str, Binding]) -> Match | None:
    """The attention whose last product is `record`."""
    if record.op not in _PRODUCTS:
        return None
    softmax, passed = climb_from(graph, record, 0)
    if (
        softmax is None
        or softmax.op != "softmax"
        or not is_last_axis(argument(softmax, 1, "dim"), argument(softmax, 0, "input"))
    ):
        return None
    calls: tuple[CallRecord, ...] = (record, *passed, softmax)
    binding: dict[str, Binding] = {"mask": Fixed(None), "scale": Fixed(1.0), **fixed}
    top, passed = climb_from(graph, softmax, 0)
    calls += passed
    for stage in (_mask, _scale, _product):
        part = stage(top, graph)
        if part is None:
            continue
        calls, binding, top = calls + part.calls, binding | dict(part.binding), part.above
    if "query" not in binding:
        return None
    binding["value"] = take(record, 1, "other" if record.op == "matmul" else "mat2")
    return close(graph, operator, calls, binding) if _has_batched_shapes(record, graph) else None


def _has_batched_shapes(last: CallRecord, graph: CallGraph) -> bool:
    """Weights [..., m, n] times values [..., n, e] with the same leading axes (a product with a matrix is a layer)."""
    weights, values = argument(last, 0, "input"), argument(last, 1, "other" if last.op == "matmul" else "mat2")
    if not isinstance(weights, Operand) or not isinstance(values, Operand):
        return False
    return len(weights.shape) >= 2 and weights.shape[:-2] == values.shape[:-2]


def _mask(record: CallRecord | None, graph: CallGraph) -> _Part | None:
    if record is None:
        return None
    if record.op in ("add", "add_"):
        return _added(record, graph)
    if record.op in ("masked_fill", "masked_fill_") and _closes(argument(record, 2, "value")):
        return _went_up(record, graph, 0, "input", {"mask": seen(negated, take(record, 1, "mask"))})
    if record.op == "where" and _closes(argument(record, 2, "other")):
        return _went_up(record, graph, 1, "input", {"mask": take(record, 0, "condition")})
    if record.op == "where" and _closes(argument(record, 1, "input")):
        return _went_up(record, graph, 2, "other", {"mask": seen(negated, take(record, 0, "condition"))})
    return None


def _added(record: CallRecord, graph: CallGraph) -> _Part | None:
    """scores + mask, in either order: the scores are the side that leads to a product."""
    if argument(record, 2, "alpha", 1) != 1:
        return None
    for position, name in ((0, "input"), (1, "other")):
        scores, _ = climb_from(graph, record, position, name)
        mask = argument(record, 1 - position, "other" if position == 0 else "input")
        if scores is None or not isinstance(mask, Operand) or not _leads_to_product(scores, graph):
            continue
        if mask.dtype.is_floating_point and record.output is not None and len(mask.shape) <= len(record.output.shape):
            return _went_up(
                record,
                graph,
                position,
                name,
                {"mask": take(record, 1 - position, "other" if position == 0 else "input")},
            )
    return None


def _leads_to_product(record: CallRecord, graph: CallGraph) -> bool:
    part = _scale(record, graph)
    top = part.above if part is not None else record
    return top is not None and (top.op in _PRODUCTS or top.op == "baddbmm")


def _closes(value: object) -> bool:
    return is_number(value) and value <= _FAR_BELOW  # type: ignore[operator]


def _went_up(record: CallRecord, graph: CallGraph, position: int, name: str, binding: Mapping[str, Binding]) -> _Part:
    above, passed = climb_from(graph, record, position, name)
    return _Part((record, *passed), binding, above)


def _scale(record: CallRecord | None, graph: CallGraph) -> _Part | None:
    if record is None or record.op.rstrip("_") not in ("mul", "div") or is_reflected(record):
        return None
    factor = argument(record, 1, "other")
    if not is_number(factor) or factor == 0 or argument(record, -1, "rounding_mode") is not None:
        return None
    factor_taken = take(record, 1, "other")
    scale = seen(inverted, factor_taken) if record.op.startswith("div") else factor_taken
    return _went_up(record, graph, 0, "input", {"scale": scale})


def _product(record: CallRecord | None, graph: CallGraph) -> _Part | None:
    if record is None:
        return None
    if record.op == "baddbmm":
        return _baddbmm(record)
    if record.op not in _PRODUCTS:
        return None
    other = "other" if record.op == "matmul" else "mat2"
    query, key = argument(record, 0, "input"), argument(record, 1, other)
    if (
        not isinstance(query, Operand)
        or not isinstance(key, Operand)
        or query.shape[:-2] != key.shape[:-2]
        or len(query.shape) < 2
    ):
        return None
    return _Part((record,), {"query": take(record, 0, "input"), "key": seen(transposed, take(record, 1, other))}, None)


def _baddbmm(record: CallRecord) -> _Part | None:
    """beta * input + alpha * (q k^T): with beta 0 the input is mere memory, with beta 1 it is a mask."""
    beta = argument(record, -1, "beta", 1)
    if beta not in (0, 1):
        return None
    binding: dict[str, Binding] = {
        "query": take(record, 1, "batch1"),
        "key": seen(transposed, take(record, 2, "batch2")),
        "scale": take(record, -1, "alpha", 1),
    }
    if beta == 1:
        binding["mask"] = take(record, 0, "input")
    return _Part((record,), binding, None)
