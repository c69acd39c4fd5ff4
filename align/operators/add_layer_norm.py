"""A residual sum and the layer normalisation of it, as in BERT. Fused on NPUs only."""

from __future__ import annotations

import torch
from torch import Tensor

from align.dumpers.model import OpClass
from align.dumpers.survey import CallGraph, CallRecord
from align.operators import layer_norm
from align.operators._behind_add import behind_add
from align.operators._npu_call import drawn, run_npu, written
from align.operators._npu_norm import refuses_dtype, standardised
from align.operators.base import Bound, Kernel, Match, Operator


def unfused(x1: Tensor, x2: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """x1, x2 [..., d], weight and bias [d] -> [..., d]: the sum is rounded, then normalised as `layer_norm` says."""
    return layer_norm.unfused(x1 + x2, weight, bias, eps)


def fused(x1: Tensor, x2: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """npu_add_layer_norm, whose result is float32 if the weight has another dtype than the sum."""
    assert weight is not None
    assert bias is not None
    result: Tensor = run_npu("npu_add_layer_norm", x1, x2, weight.to(x1.dtype), bias.to(x1.dtype), eps, False)[0]
    return result


def refuses(bound: Bound, dtype: torch.dtype) -> str:
    """npu_add_layer_norm wants weight and bias."""
    if bound["weight"] is None or bound["bias"] is None:
        return "npu_add_layer_norm wants a weight and a bias"
    return refuses_dtype(bound, dtype)


def find(record: CallRecord, graph: CallGraph) -> Match | None:
    """Any layer normalisation whose input is a sum that nothing else reads."""
    for finder in layer_norm.LAYER_NORM.finders:
        norm = finder(record, graph)
        if norm is not None:
            return behind_add(ADD_LAYER_NORM, norm, record, graph)
    return None


ADD_LAYER_NORM = Operator(
    name="add_layer_norm",
    op_class=OpClass.SENSITIVE,
    summary="residual sum followed by layer normalisation",
    rounding="after the sum, the mean, the centring, the square, the variance, the scaling, the gain and the bias",
    finders=(find,),
    unfused=unfused,
    kernels={"npu": Kernel(fused, "npu_add_layer_norm", refuses)},
    example=drawn((2, 5, 64), (2, 5, 64), (64,), (64,), names="x1 x2 weight bias", eps=1e-5),
)


# -- torch_npu's own call ----------------------------------------------------------------------------------------------


def npu_add_layer_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor, epsilon: float = 1e-5, additional_output: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, mean, 1 / deviation, x1 + x2); y and the sum are float32 if the dtypes of x1, x2 and gamma differ.

    The device leaves the sum unwritten without additional_output; here it is there.
    """
    dtype = x1.dtype if x1.dtype == x2.dtype == gamma.dtype else torch.float32
    total = x1.to(dtype) + x2.to(dtype)
    y, mean, rstd = standardised(total, tuple(range(total.dim() - gamma.dim(), total.dim())), epsilon)
    return y.to(dtype) * gamma.to(dtype) + beta.to(dtype), mean, rstd, total


OPERATORS: tuple[Operator, ...] = (
    ADD_LAYER_NORM,
    written(
        "npu_add_layer_norm",
        npu_add_layer_norm,
        name="add_layer_norm",
        op_class=OpClass.SENSITIVE,
        rounding="after the sum, after the normalisation in float32, after gamma, after beta",
        example=drawn((3, 5, 64), (3, 5, 64), (64,), (64,), names="x1 x2 gamma beta", additional_output=True),
    ),
)
