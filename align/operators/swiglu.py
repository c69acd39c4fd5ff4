"""SwiGLU: silu(gate) * up, with the halves apart or in one tensor. torch has no fused kernel; a CPU runs our own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from align.dumpers.model import OpClass
from align.dumpers.survey import CallGraph, CallRecord
from align.operators import _cpu
from align.operators._gated import find_gated, halves
from align.operators._npu_activation import NPU_SWIGLU_KERNEL
from align.operators._patterns import random_tensor
from align.operators.base import Kernel, Match, Operator


def unfused(
    gate: Tensor | None, up: Tensor | None, packed: Tensor | None, gate_first: bool, act: str = "silu"
) -> Tensor:
    """gate, up [..., d] or packed [..., 2 d] -> [..., d], rounded after SiLU and after the product."""
    gate, up = halves(gate, up, packed, gate_first)
    return F.silu(gate) * up


def cpu(gate: Tensor | None, up: Tensor | None, packed: Tensor | None, gate_first: bool, act: str = "silu") -> Tensor:
    """Our own loop: float32 inside, rounded once."""
    return _cpu.gated("swiglu", *halves(gate, up, packed, gate_first))


def example(device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """Both halves in one tensor."""
    return {
        "gate": None,
        "up": None,
        "packed": random_tensor((2, 5, 64), device, dtype, seed),
        "gate_first": True,
        "act": "silu",
    }


def find(record: CallRecord, graph: CallGraph) -> Match | None:
    """silu(gate) * up in either order."""
    return find_gated(SWIGLU, record, graph, ("silu",))


SWIGLU = Operator(
    name="swiglu",
    op_class=OpClass.ORDINARY,
    summary="SiLU-gated linear unit: silu(gate) * up",
    rounding="after SiLU and after the product; fused: once",
    finders=(find,),
    unfused=unfused,
    kernels={
        "cpu": Kernel(cpu, "single pass, float32 inside, one rounding (numba)", _cpu.refusal(cpu, unfused, example)),
        "npu": NPU_SWIGLU_KERNEL,
    },
    example=example,
)
OPERATORS: tuple[Operator, ...] = (SWIGLU,)
