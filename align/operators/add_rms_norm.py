"""A residual sum and the RMS normalisation of it. torch has no kernel for it; on a CPU we have our own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from align.dumpers.model import OpClass
from align.dumpers.survey import CallGraph, CallRecord
from align.operators import _cpu, rms_norm
from align.operators._behind_add import behind_add
from align.operators._npu_call import drawn, run_npu, written
from align.operators._npu_norm import inverse_rms, refuses_dtype
from align.operators.base import Bound, Kernel, Match, Operator


def unfused(
    x1: Tensor,
    x2: Tensor,
    weight: Tensor | None,
    eps: float | None,
    plus_one: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """x1, x2 [..., d], weight [d] -> [..., d]: the sum is rounded, then normalised as `rms_norm` says."""
    return rms_norm.unfused(x1 + x2, weight, eps, plus_one, dtype)


def fused(
    x1: Tensor,
    x2: Tensor,
    weight: Tensor | None,
    eps: float | None,
    plus_one: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """npu_add_rms_norm; where it rounds depends on dtype, shape and chip (bfloat16 may normalise the unrounded sum)."""
    assert weight is not None
    small = torch.finfo(x1.dtype).eps if eps is None else eps
    result: Tensor = run_npu("npu_add_rms_norm", x1, x2, weight.to(x1.dtype), small)[0]
    return result.to(dtype or torch.promote_types(x1.dtype, weight.dtype))


def refuses(bound: Bound, dtype: torch.dtype) -> str:
    """npu_add_rms_norm wants a weight, and knows no 1 + weight."""
    if bound["weight"] is None:
        return "npu_add_rms_norm wants a weight"
    return "npu_add_rms_norm has no form with 1 + weight" if bound["plus_one"] else refuses_dtype(bound, dtype)


def find(record: CallRecord, graph: CallGraph) -> Match | None:
    """Any RMS normalisation whose input is a sum that nothing else reads."""
    for finder in rms_norm.RMS_NORM.finders:
        norm = finder(record, graph)
        if norm is not None:
            return behind_add(ADD_RMS_NORM, norm, record, graph)
    return None


_EXAMPLE = drawn((2, 5, 64), (2, 5, 64), (64,), names="x1 x2 weight", eps=1e-6, plus_one=False, dtype=None)

ADD_RMS_NORM = Operator(
    name="add_rms_norm",
    op_class=OpClass.SENSITIVE,
    summary="residual sum followed by root-mean-square normalisation",
    rounding="after the sum, then float32 inside, before and after the gain",
    finders=(find,),
    unfused=unfused,
    kernels={
        "cpu": Kernel(
            _cpu.add_rms_norm,
            "single pass over rows, the sum unrounded, float32 inside, one rounding (numba)",
            _cpu.refusal(_cpu.add_rms_norm, unfused, _EXAMPLE),
        ),
        "npu": Kernel(fused, "npu_add_rms_norm", refuses),
    },
    example=_EXAMPLE,
)


# -- torch_npu's own calls ---------------------------------------------------------------------------------------------


def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """(y, 1 / root mean square in float32, x1 + x2); the rounded sum is normalised."""
    total = x1 + x2
    rstd = inverse_rms(total, gamma, epsilon)
    return (total * rstd).to(total.dtype) * gamma, rstd, total


def npu_add_rms_norm_cast(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y in float32, y, 1 / root mean square, x1 + x2)."""
    y, rstd, total = npu_add_rms_norm(x1, x2, gamma, epsilon)
    return y.float(), y, rstd, total


def _entry(op: str, form: Any) -> Operator:
    rounding = "after the sum, after the normalisation in float32 and after gamma"
    example = drawn((3, 5, 64), (3, 5, 64), (64,), names="x1 x2 gamma")
    return written(op, form, name="add_rms_norm", rounding=rounding, example=example, op_class=OpClass.SENSITIVE)


OPERATORS: tuple[Operator, ...] = (
    ADD_RMS_NORM,
    _entry("npu_add_rms_norm", npu_add_rms_norm),
    _entry("npu_add_rms_norm_cast", npu_add_rms_norm_cast),
)
