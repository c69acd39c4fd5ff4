"""What an operator of the catalog is: how to recognise it in a call graph, its unfused form, its fused kernels.

A match lists the calls of one site in order; the last yields the output, the others are interior. Every argument of
the operator's canonical signature is *bound* to an argument of one of these calls, so that at run time it is taken
from the call under way, never from the survey. Unfused form and kernels share that one signature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from align.dumpers.model import OpClass
from align.dumpers.survey import CallGraph, CallRecord, Operand
from align.dumpers.wire import Call, CallId


@dataclass(frozen=True, slots=True)
class Take:
    """A canonical argument is argument `position` (or keyword `name`) of a call, else `default`."""

    call: CallId
    position: int
    name: str = ""
    default: Any = None

    def of(self, call: Call | CallRecord) -> Any:
        """The argument's value in a call (at run time) or in its record (at survey time)."""
        if 0 <= self.position < len(call.args):
            return call.args[self.position]
        return call.kwargs.get(self.name, self.default)


@dataclass(frozen=True, slots=True)
class Fixed:
    """A canonical argument that follows from the pattern itself (which activation, whether the add comes last)."""

    value: Any


Binding = Take | Fixed
Bound = Mapping[str, Any]
"""Canonical arguments by name: `Operand` in place of tensors when taken from a survey."""


def as_is(result: Any) -> Any:
    """Return the kernel's result unchanged."""
    return result


@dataclass(frozen=True, slots=True)
class Match:
    """One place where an operator was recognised.

    calls            identifiers in execution order; the last one yields the output
    binding          where each canonical argument comes from
    is_written_fused the model itself calls a fused kernel here (F.scaled_dot_product_attention, torch_npu.npu_*)
    kept             calls that run as written though the kernel takes arguments of them: others read their results too
    shape_result     turns the canonical result into what the last call returns (a tuple, say)
    """

    operator: Operator
    calls: tuple[CallId, ...]
    binding: Mapping[str, Binding]
    is_written_fused: bool = False
    shape_result: Callable[[Any], Any] = as_is
    kept: tuple[CallId, ...] = ()

    def bound(self, graph: CallGraph, step: int) -> dict[str, Any]:
        """The canonical arguments as the survey saw them."""
        values = {}
        for name, binding in self.binding.items():
            if isinstance(binding, Fixed):
                values[name] = binding.value
            else:
                record = graph.record(step, binding.call)
                values[name] = binding.of(record) if record is not None else binding.default
        return values


def accepts_all(bound: Bound, dtype: torch.dtype) -> str:
    """No objection."""
    return ""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A real fused kernel on one kind of device.

    run       called with the canonical arguments; returns the canonical result
    label     what it is, in words: `oneDNN convolution with fused ReLU and add`
    refuses   the reason why it cannot run with these operands in this dtype, or "" (asked before anything is fused)
    is_native the kernel is what the model's own fused call does on this device, so the call is left as written
    """

    run: Callable[..., Any]
    label: str
    refuses: Callable[[Bound, torch.dtype], str] = accepts_all
    is_native: bool = False


Finder = Callable[["CallRecord", CallGraph], "Match | None"]


@dataclass(frozen=True, slots=True)
class ByName:
    """A finder that need only be asked of calls of one function, by its short name."""

    op: str
    find: Finder

    def __call__(self, record: CallRecord, graph: CallGraph) -> Match | None:
        """The match, if the call is of that function."""
        return self.find(record, graph) if record.op == self.op else None


@dataclass(frozen=True, slots=True)
class Operator:
    """An entry of the catalog. Each finder is asked of every call whether it is the last call of a site.

    name          the field's name for it
    op_class      SENSITIVE (attention, normalisation, softmax) or ORDINARY
    summary       one line for `align ops`
    rounding      the unfused form's rounding points, in words
    example       makes canonical arguments for tests and `align ops`: (device, dtype, seed) -> Bound
    fused_anyway  kinds of device on which even the *written-out* form runs fused, so that the baseline must use
                  `unfused` there (aten GELU on an NPU)
    """

    name: str
    op_class: OpClass
    summary: str
    rounding: str
    finders: tuple[Finder, ...]
    unfused: Callable[..., Any]
    kernels: Mapping[str, Kernel]
    example: Callable[[str, torch.dtype, int], dict[str, Any]]
    fused_anyway: frozenset[str] = field(default_factory=frozenset)


def source(graph: CallGraph, record: CallRecord, position: int, *names: str) -> CallRecord | None:
    """The call that made argument `position`, if it is one of the named functions."""
    maker = graph.maker(record.argument(position, ""))
    return maker if maker is not None and (not names or maker.op in names) else None


def operand(value: Any) -> Operand | None:
    """The value if it is a tensor operand."""
    return value if isinstance(value, Operand) else None
