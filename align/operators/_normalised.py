"""Recognise written-out normalisation over the last axis: x times (mean(x^2) + eps)^-1/2, and the gain behind it."""

from __future__ import annotations

from dataclasses import dataclass

from align.dumpers.survey import CallGraph, CallRecord, Operand
from align.operators._patterns import argument, climb, climb_from, is_last_axis, is_number, is_reflected, maker, take
from align.operators.base import Take

_SIDES = ((0, "input"), (1, "other"))


@dataclass(frozen=True, slots=True)
class Scaled:
    """x / sqrt(statistic + eps): its calls, where eps is, and x on both ways (times and into the statistic)."""

    calls: tuple[CallRecord, ...]
    eps: Take
    value: tuple[CallRecord, int, str]
    statistic: CallRecord


def scaled(record: CallRecord | None, graph: CallGraph) -> Scaled | None:
    """x * rsqrt(s + eps), x / sqrt(s + eps) or x / (s + eps) ** 0.5; `s` is left to the caller."""
    if record is None or is_reflected(record):
        return None
    sides = _SIDES if record.op in ("mul", "mul_") else _SIDES[1:] if record.op in ("div", "div_") else ()
    for position, name in sides:
        root, passed = climb_from(graph, record, position, name)
        if root is None or not _is_root(root, inverse=record.op.startswith("mul")):
            continue
        add, more = climb_from(graph, root, 0)
        if add is None or add.op not in ("add", "add_") or not is_number(argument(add, 1, "other")):
            continue
        statistic, rest = climb_from(graph, add, 0)
        if statistic is not None:
            other = _SIDES[1 - position]
            return Scaled(
                (record, *passed, root, *more, add, *rest), take(add, 1, "other"), (record, *other), statistic
            )
    return None


def _is_root(record: CallRecord, *, inverse: bool) -> bool:
    if record.op == "pow":
        return not is_reflected(record) and argument(record, 1, "exponent") == (-0.5 if inverse else 0.5)
    return record.op in (("rsqrt", "rsqrt_") if inverse else ("sqrt", "sqrt_"))


def mean_of_squares(
    record: CallRecord, graph: CallGraph
) -> tuple[tuple[CallRecord, ...], tuple[CallRecord, int, str]] | None:
    """mean(v^2) over the last axis, kept: its calls and the place of v."""
    if record.op != "mean" or not is_mean_of_rows(record):
        return None
    square, passed = climb_from(graph, record, 0)
    if square is None:
        return None
    is_power = square.op == "pow" and not is_reflected(square) and argument(square, 1, "exponent") == 2
    is_product = (
        square.op == "mul"
        and isinstance(argument(square, 1, "other"), Operand)
        and argument(square, 0, "input") == argument(square, 1, "other")
    )
    if not (is_power or is_product or square.op == "square"):
        return None
    return (record, *passed, square), (square, 0, "input")


def is_mean_of_rows(record: CallRecord) -> bool:
    """Whether a mean or variance goes over the last axis and keeps it."""
    return (
        is_last_axis(argument(record, 1, "dim"), argument(record, 0, "input"))
        and argument(record, 2, "keepdim", False) is True
    )


@dataclass(frozen=True, slots=True)
class Source:
    """Where a value enters the site: past casts, so that the kernel gets the model's own tensor."""

    calls: tuple[CallRecord, ...]
    binding: Take
    operand: Operand


def source_of(graph: CallGraph, place: tuple[CallRecord, int, str]) -> Source | None:
    """Climb from an argument past casts to the tensor it was."""
    record, position, name = place
    made = maker(graph, record, position, name)
    _, passed = climb(graph, made)
    casts = []
    for call in passed:
        if call.op == "dropout":
            break
        casts.append(call)
    if casts:
        record, position, name = casts[-1], 0, "input"
    value = argument(record, position, name)
    return Source(tuple(casts), take(record, position, name), value) if isinstance(value, Operand) else None
