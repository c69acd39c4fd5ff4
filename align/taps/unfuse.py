"""Run every fused call that the model itself makes in its unfused form, recognised call by call.

The reference run needs this before any survey exists: on the CPU a `torch_npu.npu_*` call has no kernel at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from align.dumpers.errors import UndecidedError
from align.dumpers.naming import map_tensors
from align.dumpers.survey import CallGraph, CallRecord, Operand
from align.dumpers.wire import PASS, Call, Tap
from align.operators.base import Fixed, Match, Operator
from align.operators.registry import FinderIndex


class UnfuseCalls(Tap):
    """Replace calls of fused kernels by the catalog's unfused forms; an unknown `npu_*` call is an error naming it."""

    def __init__(self, operators: Sequence[Operator]) -> None:
        self._index = FinderIndex(operators)
        self._nothing = CallGraph()

    def execute(self, call: Call) -> Any:
        match = self._recognise(call)
        if match is not None:
            arguments = {
                name: binding.value if isinstance(binding, Fixed) else binding.of(call)
                for name, binding in match.binding.items()
            }
            return match.shape_result(match.operator.unfused(**arguments))
        if call.name is not None and call.name.qualified.startswith("npu::"):
            raise UndecidedError(
                f"{call}: {call.op} runs on an NPU only and is not in the catalog",
                f"register its unfused form with @align.replaces_call({call.op!r}); how: end of docs/operators.md",
            )
        return PASS

    def _recognise(self, call: Call) -> Match | None:
        record = None
        for find in self._index.of(call.op):
            record = record or _record_of(call)
            match = find(record, self._nothing)
            if match is not None and match.is_written_fused and len(match.calls) == 1:
                return match
        return None


def _record_of(call: Call) -> CallRecord:
    args = tuple(map_tensors(item, _operand) for item in call.args)
    kwargs = {name: map_tensors(item, _operand) for name, item in call.kwargs.items()}
    return CallRecord(call.ident, call.step, 0, call.type_name, args, kwargs, ())


def _operand(tensor: torch.Tensor) -> Operand:
    return Operand(None, tuple(tensor.shape), tensor.dtype, isinstance(tensor, torch.nn.Parameter))
