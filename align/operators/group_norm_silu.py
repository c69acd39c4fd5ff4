"""Group normalisation followed by SiLU, the opening of every residual block of a diffusion network.

torch has no kernel that does both: its group norm is one kernel and SiLU another. On a CPU we have our own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from align.dumpers.model import OpClass
from align.dumpers.survey import CallGraph, CallRecord
from align.operators import _cpu
from align.operators._npu_norm import NPU_GROUP_NORM_SILU_KERNEL
from align.operators._patterns import argument, close, maker, random_tensor, same_tensor, take
from align.operators.base import Kernel, Match, Operator


def unfused(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """x [n, c, ...] -> [n, c, ...]: rounded after the norm (float32 inside) and after SiLU."""
    return F.silu(F.group_norm(x, groups, weight, bias, eps))


def example(device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """A small map in four groups."""
    return {
        "x": random_tensor((2, 16, 6, 5), device, dtype, seed),
        "groups": 4,
        "weight": random_tensor((16,), device, dtype, seed + 1),
        "bias": random_tensor((16,), device, dtype, seed + 2),
        "eps": 1e-5,
    }


def find(record: CallRecord, graph: CallGraph) -> Match | None:
    """F.silu, or h * sigmoid(h), right behind F.group_norm."""
    if record.op in ("silu", "silu_"):
        return _behind(maker(graph, record, 0), graph, (record,))
    if record.op == "mul":
        for position, name in ((0, "input"), (1, "other")):
            gate = maker(graph, record, position, name)
            other = argument(record, 1 - position, "other" if position == 0 else "input")
            if gate is not None and gate.op == "sigmoid" and same_tensor(argument(gate, 0, "input"), other):
                return _behind(maker(graph, gate, 0), graph, (gate, record))
    return None


def _behind(norm: CallRecord | None, graph: CallGraph, calls: tuple[CallRecord, ...]) -> Match | None:
    if norm is None or norm.op != "group_norm":
        return None
    binding = {
        "x": take(norm, 0, "input"), "groups": take(norm, 1, "num_groups"), "weight": take(norm, 2, "weight"),
        "bias": take(norm, 3, "bias"), "eps": take(norm, 4, "eps", 1e-5),
    }  # fmt: skip
    return close(graph, GROUP_NORM_SILU, (norm, *calls), binding)


GROUP_NORM_SILU = Operator(
    name="group_norm_silu",
    op_class=OpClass.SENSITIVE,
    summary="group normalisation followed by SiLU",
    rounding="after the norm (float32 inside) and after SiLU; fused: once",
    finders=(find,),
    unfused=unfused,
    kernels={
        "cpu": Kernel(
            _cpu.group_norm_silu,
            "statistics, then one pass over each group, float32 inside, one rounding (numba)",
            _cpu.refusal(_cpu.group_norm_silu, unfused, example),
        ),
        "npu": NPU_GROUP_NORM_SILU_KERNEL,
    },
    example=example,
)
OPERATORS: tuple[Operator, ...] = (GROUP_NORM_SILU,)
