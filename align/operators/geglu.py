"""GEGLU: up * gelu(gate), with the halves apart or in one tensor. torch has no fused kernel; a CPU runs our own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from align.dumpers.model import OpClass
from align.dumpers.survey import CallGraph, CallRecord
from align.operators import _cpu
from align.operators._activations import apply
from align.operators._gated import find_gated, halves
from align.operators._npu_activation import NPU_GEGLU_KERNEL
from align.operators._patterns import random_tensor
from align.operators.base import Kernel, Match, Operator


def unfused(
    gate: Tensor | None, up: Tensor | None, packed: Tensor | None, gate_first: bool, act: str = "gelu"
) -> Tensor:
    """gate, up [..., d] or packed [..., 2 d] -> [..., d], rounded after GELU (erf, or tanh) and after the product."""
    gate, up = halves(gate, up, packed, gate_first)
    return up * apply(act, gate)


def cpu(gate: Tensor | None, up: Tensor | None, packed: Tensor | None, gate_first: bool, act: str = "gelu") -> Tensor:
    """Our own loop, by Phi or by the tanh formula: float32 inside, rounded once."""
    return _cpu.gated("geglu_tanh" if act == "gelu_tanh" else "geglu", *halves(gate, up, packed, gate_first))


def example(device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """Both halves in one tensor, the gate behind."""
    return {
        "gate": None,
        "up": None,
        "packed": random_tensor((2, 5, 64), device, dtype, seed),
        "gate_first": False,
        "act": "gelu",
    }


def find(record: CallRecord, graph: CallGraph) -> Match | None:
    """up * gelu(gate) in either order."""
    return find_gated(GEGLU, record, graph, ("gelu", "gelu_tanh"))


GEGLU = Operator(
    name="geglu",
    op_class=OpClass.ORDINARY,
    summary="GELU-gated linear unit: up * gelu(gate)",
    rounding="after GELU and after the product; fused: once",
    finders=(find,),
    unfused=unfused,
    kernels={
        "cpu": Kernel(cpu, "single pass, float32 inside, one rounding (numba)", _cpu.refusal(cpu, unfused, example)),
        "npu": NPU_GEGLU_KERNEL,
    },
    example=example,
    fused_anyway=frozenset({"npu"}),
)
OPERATORS: tuple[Operator, ...] = (GEGLU,)
