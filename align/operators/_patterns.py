"""Small steps for finders: climb from a call to what made its arguments, bind arguments, close a match safely."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from align.dumpers.survey import CallGraph, CallRecord, Operand
from align.operators.base import Binding, Match, Take, as_is

if TYPE_CHECKING:
    from align.dumpers.wire import Call
    from align.operators.base import Operator

CASTS = frozenset({"to", "float", "double", "half", "bfloat16", "type_as"})
_REFLECTED = ("__rdiv__", "__rtruediv__", "__rsub__", "__rpow__")


@dataclass(frozen=True, slots=True)
class Seen(Take):
    """An argument of a call, seen through a change: transposed, inverted, negated. Works on tensors and operands."""

    change: Callable[[Any], Any] = as_is

    def of(self, call: Call | CallRecord) -> Any:
        """The changed value."""
        return self.change(Take.of(self, call))


def take(record: CallRecord, position: int, name: str, default: Any = None) -> Take:
    """Bind argument `position` (or keyword `name`) of a call."""
    return Take(record.ident, position, name, default)


def seen(change: Callable[[Any], Any], binding: Take) -> Seen:
    """The same argument, changed."""
    return Seen(binding.call, binding.position, binding.name, binding.default, change)


def transposed(value: Any) -> Any:
    """Swap the last two axes of a tensor or of an operand."""
    if isinstance(value, Operand):
        return replace(value, shape=(*value.shape[:-2], value.shape[-1], value.shape[-2]))
    return value.transpose(-2, -1)


def inverted(value: Any) -> Any:
    """The multiplicative inverse of a number."""
    return 1.0 / value


def negated(value: Any) -> Any:
    """Turn a bool mask around: what was kept is masked."""
    return value if isinstance(value, Operand) else value.logical_not()


def argument(record: CallRecord, position: int, name: str, default: Any = None) -> Any:
    """An argument given by position or by name."""
    return take(record, position, name, default).of(record)


def maker(graph: CallGraph, record: CallRecord, position: int, name: str = "input") -> CallRecord | None:
    """The call of the same step that made an argument."""
    made = graph.maker(argument(record, position, name))
    return made if made is not None and made.step == record.step else None


def is_number(value: Any) -> bool:
    """Whether an argument is a Python number (which a site may pass to a kernel as it is)."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_reflected(record: CallRecord) -> bool:
    """Whether the call is `number / x`, `number - x` or `number ** x`, whose names are those of `x / number`."""
    return record.qualified.endswith(_REFLECTED)


def is_last_axis(axis: Any, value: Any) -> bool:
    """Whether `axis` (a number, or a list of one) means the last axis of an operand."""
    if isinstance(axis, (tuple, list)) and len(axis) == 1:
        axis = axis[0]
    return isinstance(value, Operand) and is_number(axis) and axis in (-1, len(value.shape) - 1)


def is_idle(record: CallRecord) -> bool:
    """Whether a call changes no value but perhaps the dtype: a cast between floats, or a dropout that is off."""
    if record.op == "dropout":
        return argument(record, 1, "p", 0.5) == 0 or not argument(record, 2, "training", True)
    return record.op in CASTS and record.output is not None and record.output.dtype.is_floating_point


def climb(graph: CallGraph, record: CallRecord | None) -> tuple[CallRecord | None, tuple[CallRecord, ...]]:
    """Go up past idle calls: the first call that does something, and the idle ones passed."""
    passed: list[CallRecord] = []
    while record is not None and is_idle(record):
        passed.append(record)
        record = maker(graph, record, 0)
    return record, tuple(passed)


def climb_from(
    graph: CallGraph, record: CallRecord, position: int, name: str = "input"
) -> tuple[CallRecord | None, tuple[CallRecord, ...]]:
    """Go up from an argument of a call past idle calls."""
    return climb(graph, maker(graph, record, position, name))


def same_tensor(one: Any, other: Any) -> bool:
    """Whether two operands are one tensor for sure (of a known maker)."""
    return (
        isinstance(one, Operand)
        and isinstance(other, Operand)
        and one.origin is not None
        and one.origin == other.origin
    )


def close(
    graph: CallGraph, operator: Operator, calls: Iterable[CallRecord], binding: Mapping[str, Binding]
) -> Match | None:
    """Make the match, unless the kernel would need an interior value, or an interior call writes outside."""
    ordered = sorted(calls, key=lambda record: record.order)
    inside = {record.ident for record in ordered[:-1]}
    for bound in binding.values():
        if isinstance(bound, Take):
            record = graph.record(ordered[-1].step, bound.call)
            source = graph.maker(Take.of(bound, record)) if record is not None else None
            if source is not None and source.step == ordered[-1].step and source.ident in inside:
                return None
    if any(_writes_outside(graph, record, inside) for record in ordered[:-1]):
        return None
    if _is_overwritten(graph, ordered, binding):
        return None
    return Match(operator, tuple(record.ident for record in ordered), binding)


def _writes_outside(graph: CallGraph, record: CallRecord, inside: set[Any]) -> bool:
    if not (record.op.endswith("_") or record.kwargs.get("inplace") is True):
        return False
    target = graph.maker(argument(record, 0, "input"))
    return target is None or target.ident not in inside


_VIEWS = frozenset({
    "getitem", "view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "chunk", "split", "unbind", "narrow",
    "select", "T", "mT", "expand", "flatten", "unflatten", "movedim", "contiguous", "detach", "view_as",
})  # fmt: skip
_in_place_calls: WeakKeyDictionary[CallGraph, tuple[int, list[CallRecord]]] = WeakKeyDictionary()


def _is_overwritten(graph: CallGraph, ordered: list[CallRecord], binding: Mapping[str, Binding]) -> bool:
    """Whether a call in between, of the site or not, writes into what the kernel reads only at the site's last call."""
    first, last = ordered[0], ordered[-1]
    between = [call for call in _in_place(graph) if call.step == last.step and first.order < call.order < last.order]
    if not between:
        return False
    written = {_root(graph, argument(call, 0, "input")) for call in between}
    taken = [(graph.record(last.step, bound.call), bound) for bound in binding.values() if isinstance(bound, Take)]
    return any(record is not None and _root(graph, Take.of(bound, record)) in written for record, bound in taken)


def _in_place(graph: CallGraph) -> list[CallRecord]:
    known = _in_place_calls.get(graph)
    if known is None or known[0] != len(graph):
        known = (
            len(graph),
            [call for call in graph if call.op.endswith("_") or call.op == "setitem" or "out" in call.kwargs],
        )
        _in_place_calls[graph] = known
    return known[1]


def _root(graph: CallGraph, value: Any) -> Any:
    """What a tensor is a view of: a call's output, else the likeness of a parameter or input."""
    made = graph.maker(value)
    while made is not None and made.op in _VIEWS:
        value = argument(made, 0, "input")
        made = graph.maker(value)
    return (value.origin or value) if isinstance(value, Operand) else object()


def written_fused(operator: Operator, record: CallRecord, binding: Mapping[str, Binding]) -> Match:
    """A match of one call that the model itself writes in its fused form."""
    return Match(operator, (record.ident,), binding, is_written_fused=True)


def random_tensor(shape: tuple[int, ...], device: str, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Normal numbers for examples, the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device=device, dtype=dtype)
