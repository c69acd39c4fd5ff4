"""Recognise what follows a convolution: batch norm in evaluation, an activation, an addition before or after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from align.dumpers.survey import CallGraph, CallRecord, Operand
from align.operators._activations import activation_of
from align.operators._patterns import argument, close, maker, take
from align.operators.base import Binding, Fixed, Match, Operator

ADD_THEN_ACT, ACT_THEN_ADD, NO_ADD = "add then act", "act then add", "no add"
_SIDES = ((0, "input"), (1, "other"))
_NOTHING = Fixed(None)
_NO_NORM: dict[str, Binding] = {
    "mean": Fixed(None), "var": Fixed(None), "gamma": Fixed(None), "beta": Fixed(None), "eps": Fixed(0.0),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Tail:
    """What comes behind the convolution and its norm; `above` is the call it hangs on."""

    above: CallRecord | None
    calls: tuple[CallRecord, ...]
    act: str = ""
    residual: Binding = _NOTHING
    order: str = NO_ADD


def find_chain(operator: Operator, record: CallRecord, graph: CallGraph) -> Match | None:
    """The chain whose last call is `record`: an activation, an addition or a batch norm."""
    for tail in _tails(record, graph):
        match = _core(operator, tail, graph)
        if match is not None:
            return match
    return None


def _tails(record: CallRecord, graph: CallGraph) -> Iterator[_Tail]:
    act = activation_of(record)
    if act:
        inner = maker(graph, record, 0)
        yield _Tail(inner, (record,), act)
        if inner is not None:
            for above, residual in _sides_of_add(inner, graph):
                yield _Tail(above, (record, inner), act, residual, ADD_THEN_ACT)
    for above, residual in _sides_of_add(record, graph):
        act = activation_of(above)
        if act:
            yield _Tail(maker(graph, above, 0), (record, above), act, residual, ACT_THEN_ADD)
        yield _Tail(above, (record,), "", residual, ADD_THEN_ACT)
    if record.op == "batch_norm":
        yield _Tail(record, ())


def _sides_of_add(add: CallRecord, graph: CallGraph) -> Iterator[tuple[CallRecord, Binding]]:
    """Each side of an addition, as its maker, with the other side, which must have the very shape of the sum."""
    if add.op not in ("add", "add_") or argument(add, 2, "alpha", 1) != 1 or add.output is None:
        return
    for position, name in _SIDES:
        above, other = maker(graph, add, position, name), _SIDES[1 - position]
        residual = argument(add, *other)
        if above is not None and isinstance(residual, Operand) and residual.shape == add.output.shape:
            yield above, take(add, *other)


def _core(operator: Operator, tail: _Tail, graph: CallGraph) -> Match | None:
    """A norm in evaluation behind a convolution, or a convolution with at least an activation."""
    norm, conv = (tail.above, None) if tail.above is not None and tail.above.op == "batch_norm" else (None, tail.above)
    if norm is not None:
        if argument(norm, 5, "training", False) or argument(norm, 1, "running_mean") is None:
            return None
        conv = maker(graph, norm, 0)
    if conv is None or not _is_plain(conv) or (norm is None and not tail.act):
        return None
    calls = (*tail.calls, conv) if norm is None else (*tail.calls, norm, conv)
    binding = _norm_binding(norm) if norm is not None else _NO_NORM
    extra: dict[str, Binding] = {"act": Fixed(tail.act), "residual": tail.residual, "order": Fixed(tail.order)}
    return close(graph, operator, calls, {**_conv_binding(conv), **binding, **extra})


def _is_plain(conv: CallRecord) -> bool:
    """Whether it is a convolution of a batch of maps whose padding is given in numbers."""
    x = argument(conv, 0, "input")
    is_batch = conv.op == "conv2d" and isinstance(x, Operand) and len(x.shape) == 4
    return is_batch and not isinstance(argument(conv, 4, "padding", 0), str)


def _norm_binding(norm: CallRecord) -> dict[str, Binding]:
    return {
        "mean": take(norm, 1, "running_mean"), "var": take(norm, 2, "running_var"),
        "gamma": take(norm, 3, "weight"), "beta": take(norm, 4, "bias"), "eps": take(norm, 7, "eps", 1e-5),
    }  # fmt: skip


def _conv_binding(conv: CallRecord) -> dict[str, Binding]:
    return {
        "x": take(conv, 0, "input"), "weight": take(conv, 1, "weight"), "bias": take(conv, 2, "bias"),
        "stride": take(conv, 3, "stride", 1), "padding": take(conv, 4, "padding", 0),
        "dilation": take(conv, 5, "dilation", 1), "groups": take(conv, 6, "groups", 1),
    }  # fmt: skip
