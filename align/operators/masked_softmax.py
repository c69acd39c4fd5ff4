"""A scaled, masked softmax outside an attention that fuses as a whole. True in the mask hides.

Models fill with -inf or with a large negative number. The two differ only where a row is hidden altogether: NaN, or
uniform. torch's kernel is the first kind and the NPU's the second, so each is offered only where the model means it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from align.dumpers.model import OpClass
from align.dumpers.survey import CallGraph, CallRecord, Operand
from align.operators._npu_activation import HIDDEN, fused_masked_softmax, refuses_masked_softmax
from align.operators._npu_call import draw
from align.operators._patterns import (
    argument,
    close,
    inverted,
    is_last_axis,
    is_number,
    is_reflected,
    maker,
    seen,
    take,
)
from align.operators._probe import probe
from align.operators.base import Binding, Bound, Fixed, Kernel, Match, Operator


def unfused(scores: Tensor, mask: Tensor, scale: float = 1.0, fill: float = -math.inf) -> Tensor:
    """scores [..., m, n], mask that broadcasts to it -> [..., m, n], rounded after the scale and after the softmax."""
    return (scores * scale if scale != 1.0 else scores).masked_fill(mask, fill).softmax(dim=-1)


def torch_kernel(scores: Tensor, mask: Tensor, scale: float = 1.0, fill: float = -math.inf) -> Tensor:
    """aten::_masked_softmax with a mask of the scores' shape (kind 2); the scale stays a call of its own."""
    scores = scores * scale if scale != 1.0 else scores
    result: Tensor = torch.ops.aten._masked_softmax(scores, mask.expand_as(scores).contiguous(), scores.dim() - 1, 2)
    return result


def npu_kernel(scores: Tensor, mask: Tensor, scale: float = 1.0, fill: float = HIDDEN) -> Tensor:
    """npu_scaled_masked_softmax with the mask of the scores' shape but for the heads."""
    rows = mask if mask.dim() == 4 else mask.expand(scores.shape[0], 1, *scores.shape[-2:])
    return fused_masked_softmax(scores, rows.contiguous(), scale)


def _refuses_on(device: str, bound: Bound, dtype: torch.dtype) -> str:
    if bound["fill"] != -math.inf:
        return f"torch's kernel hides with -inf, the model with {bound['fill']}: rows hidden altogether would differ"
    return probe(device, dtype, torch_kernel, unfused, example)


def refuses_on_cpu(bound: Bound, dtype: torch.dtype) -> str:
    """Only -inf, and what torch refuses."""
    return _refuses_on("cpu", bound, dtype)


def refuses_on_cuda(bound: Bound, dtype: torch.dtype) -> str:
    """Only -inf, and what torch refuses."""
    return _refuses_on("cuda", bound, dtype)


def refuses_on_npu(bound: Bound, dtype: torch.dtype) -> str:
    """The device hides with a finite number."""
    if bound["fill"] == -math.inf:
        return "npu_scaled_masked_softmax hides with -10000, the model with -inf: rows hidden altogether would differ"
    mask = bound["mask"]
    if isinstance(mask, Operand) and len(mask.shape) not in (2, 4):
        return f"npu_scaled_masked_softmax takes a mask of four axes, not {len(mask.shape)}"
    return refuses_masked_softmax(bound, dtype)


def example(device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """A third hidden, no row altogether."""
    mask = draw((2, 1, 32, 64), device, torch.float32, seed + 1) > 0.5
    return {"scores": draw((2, 2, 32, 64), device, dtype, seed), "mask": mask, "scale": 0.25, "fill": -math.inf}


def find(record: CallRecord, graph: CallGraph) -> Match | None:
    """softmax(masked_fill(scores [* scale], mask, far below)) over the last axis, in one dtype."""
    if record.op != "softmax" or argument(record, -1, "dtype") is not None:
        return None
    fill = maker(graph, record, 0)
    if (
        fill is None
        or fill.op != "masked_fill"
        or not is_last_axis(argument(record, 1, "dim"), argument(record, 0, "input"))
    ):
        return None
    value = argument(fill, 2, "value")
    if not is_number(value) or value > HIDDEN:
        return None
    binding: dict[str, Binding] = {"mask": take(fill, 1, "mask"), "fill": take(fill, 2, "value")}
    scaled = _scaled(maker(graph, fill, 0))
    if scaled is None:
        binding |= {"scores": take(fill, 0, "input"), "scale": Fixed(1.0)}
        return close(graph, MASKED_SOFTMAX, (fill, record), binding)
    factor = take(scaled, 1, "other")
    binding |= {"scores": take(scaled, 0, "input"), "scale": seen(inverted, factor) if scaled.op == "div" else factor}
    return close(graph, MASKED_SOFTMAX, (scaled, fill, record), binding)


def _scaled(record: CallRecord | None) -> CallRecord | None:
    if record is None or record.op not in ("mul", "div") or is_reflected(record):
        return None
    number = argument(record, 1, "other")
    return record if is_number(number) and number != 0 else None


MASKED_SOFTMAX = Operator(
    name="masked_softmax",
    op_class=OpClass.SENSITIVE,
    summary="softmax of scaled scores with hidden positions",
    rounding="after the scale and after the softmax (float32 inside); fused on an NPU: once",
    finders=(find,),
    unfused=unfused,
    kernels={
        "cpu": Kernel(torch_kernel, "aten masked softmax", refuses_on_cpu),
        "cuda": Kernel(torch_kernel, "aten masked softmax", refuses_on_cuda),
        "npu": Kernel(npu_kernel, "npu_scaled_masked_softmax (hides with -10000)", refuses_on_npu),
    },
    example=example,
)
OPERATORS: tuple[Operator, ...] = (MASKED_SOFTMAX,)
