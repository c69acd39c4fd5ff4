"""A linear layer with its activation applied before the result is rounded and stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from align.dumpers.model import OpClass
from align.dumpers.survey import CallGraph, CallRecord
from align.operators import _onednn
from align.operators._activations import ACTIVATIONS, activation_of, apply
from align.operators._patterns import close, maker, random_tensor, take
from align.operators._probe import probe
from align.operators.base import Binding, Bound, Fixed, Kernel, Match, Operator


def unfused(x: Tensor, weight: Tensor, bias: Tensor | None, act: str) -> Tensor:
    """x [..., i], weight [o, i], bias [o] -> [..., o], rounded after the linear layer and after the activation."""
    return apply(act, F.linear(x, weight, bias))


def onednn(x: Tensor, weight: Tensor, bias: Tensor | None, act: str) -> Tensor:
    """oneDNN inner product with the activation as post-operation."""
    return _onednn.linear(x, weight, bias, act)


def cublas(x: Tensor, weight: Tensor, bias: Tensor, act: str) -> Tensor:
    """cuBLASLt matrix product with bias and ReLU or tanh-GELU as epilogue."""
    rows = x.reshape(-1, x.shape[-1])
    result: Tensor = torch._addmm_activation(bias, rows, weight.t(), use_gelu=act == "gelu_tanh")
    return result.view(*x.shape[:-1], weight.shape[0])


def refuses_on_cpu(bound: Bound, dtype: torch.dtype) -> str:
    """Ask oneDNN for the very activation, once per dtype."""
    return probe("cpu", dtype, onednn, unfused, _EXAMPLES[bound["act"]])


def refuses_on_cuda(bound: Bound, dtype: torch.dtype) -> str:
    """cuBLASLt has two epilogues, both with a bias."""
    if bound["act"] not in ("relu", "gelu_tanh"):
        return f"cuBLASLt has no epilogue for {bound['act']}"
    if bound["bias"] is None:
        return "cuBLASLt fuses an activation only together with a bias"
    return probe("cuda", dtype, cublas, unfused, _EXAMPLES[bound["act"]])


def _make_example(act: str) -> Callable[[str, torch.dtype, int], dict[str, Any]]:
    def example(device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
        return {
            "x": random_tensor((2, 9, 32), device, dtype, seed),
            "weight": random_tensor((48, 32), device, dtype, seed + 1) * 0.2,
            "bias": random_tensor((48,), device, dtype, seed + 2),
            "act": act,
        }

    return example


_EXAMPLES = {act: _make_example(act) for act in ACTIVATIONS}


def find(record: CallRecord, graph: CallGraph) -> Match | None:
    """An activation right behind F.linear."""
    act = activation_of(record)
    inner = maker(graph, record, 0) if act else None
    if inner is None or inner.op != "linear" or inner.output is None or len(inner.output.shape) < 2:
        return None
    binding: dict[str, Binding] = {
        "x": take(inner, 0, "input"),
        "weight": take(inner, 1, "weight"),
        "bias": take(inner, 2, "bias"),
        "act": Fixed(act),
    }
    return close(graph, LINEAR_ACT, (inner, record), binding)


LINEAR_ACT = Operator(
    name="linear_act",
    op_class=OpClass.ORDINARY,
    summary="linear layer followed by ReLU, GELU, SiLU, sigmoid, tanh or hardswish",
    rounding="after the linear layer and after the activation; fused: once",
    finders=(find,),
    unfused=unfused,
    kernels={
        "cpu": Kernel(onednn, "oneDNN inner product with fused activation", refuses_on_cpu),
        "cuda": Kernel(cublas, "cuBLASLt matrix product with bias and activation epilogue", refuses_on_cuda),
    },
    example=_EXAMPLES["gelu"],
    fused_anyway=frozenset({"npu"}),
)
OPERATORS: tuple[Operator, ...] = (LINEAR_ACT,)
