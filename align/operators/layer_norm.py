"""Layer normalisation over the last axis, written out or F.layer_norm."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from align.dumpers.model import OpClass
from align.dumpers.survey import CallGraph, CallRecord, Operand
from align.operators._normalised import is_mean_of_rows, mean_of_squares, scaled
from align.operators._npu_norm import NPU_LAYER_NORM_KERNEL
from align.operators._patterns import argument, close, maker, random_tensor, take, written_fused
from align.operators._probe import probe
from align.operators.base import Binding, Bound, Fixed, Kernel, Match, Operator

_SIDES = ((0, "input"), (1, "other"))


def unfused(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """x [..., d], weight and bias [d] -> [..., d]; every step is stored in x's dtype."""
    centred = x - x.mean(-1, keepdim=True)
    out = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


def native(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """torch's own kernel: float32 inside, rounded once."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def refuses_on_cpu(bound: Bound, dtype: torch.dtype) -> str:
    """Only what torch refuses."""
    return probe("cpu", dtype, native, unfused, example)


def refuses_on_cuda(bound: Bound, dtype: torch.dtype) -> str:
    """Only what torch refuses."""
    return probe("cuda", dtype, native, unfused, example)


def example(device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """A few rows off zero."""
    return {
        "x": random_tensor((2, 5, 64), device, dtype, seed) + 0.5,
        "weight": random_tensor((64,), device, dtype, seed + 1),
        "bias": random_tensor((64,), device, dtype, seed + 2),
        "eps": 1e-5,
    }


def find_call(record: CallRecord, graph: CallGraph) -> Match | None:
    """F.layer_norm over the last axis."""
    shape = argument(record, 1, "normalized_shape")
    if record.op != "layer_norm" or not isinstance(shape, (tuple, list)) or len(shape) != 1:
        return None
    binding = {
        "x": take(record, 0, "input"),
        "weight": take(record, 2, "weight"),
        "bias": take(record, 3, "bias"),
        "eps": take(record, 4, "eps", 1e-5),
    }
    return written_fused(LAYER_NORM, record, binding)


def find_written_out(record: CallRecord, graph: CallGraph) -> Match | None:
    """(x - mean(x)) / sqrt(var(x) + eps) [* weight [+ bias]]."""
    binding: dict[str, Binding] = {"weight": Fixed(None), "bias": Fixed(None)}
    calls: tuple[CallRecord, ...] = ()
    top: CallRecord | None = record
    for op, name in (("add", "bias"), ("mul", "weight")):
        side = _row_side(top, op)
        if top is not None and side is not None:
            calls = (*calls, top)
            binding[name] = take(top, *_SIDES[side])
            top = maker(graph, top, *_SIDES[1 - side])
    return _core(top, graph, calls, binding)


def _row_side(record: CallRecord | None, op: str) -> int | None:
    """Which side of a call is a parameter or buffer of one axis."""
    if record is None or record.op != op:
        return None
    for position, name in _SIDES:
        value = argument(record, position, name)
        if isinstance(value, Operand) and len(value.shape) == 1 and value.origin is None:
            return position
    return None


def _core(
    top: CallRecord | None, graph: CallGraph, outer: tuple[CallRecord, ...], binding: dict[str, Binding]
) -> Match | None:
    core = scaled(top, graph)
    centre = maker(graph, *core.value) if core is not None else None
    if core is None or centre is None or centre.op != "sub" or centre.qualified.endswith("__rsub__"):
        return None
    x, mean = argument(centre, 0, "input"), maker(graph, centre, 1, "other")
    if mean is None or mean.op != "mean" or not is_mean_of_rows(mean) or argument(mean, 0, "input") != x:
        return None
    variance = _variance(core.statistic, graph, centre, x)
    if variance is None:
        return None
    binding = binding | {"x": take(centre, 0, "input"), "eps": core.eps}
    return close(
        graph, LAYER_NORM, {c.ident: c for c in (*outer, *core.calls, centre, mean, *variance)}.values(), binding
    )


def _variance(record: CallRecord, graph: CallGraph, centre: CallRecord, x: Any) -> tuple[CallRecord, ...] | None:
    """mean((x - mean)^2), or the variance of x without Bessel's correction."""
    if record.op == "var" and is_mean_of_rows_variance(record):
        return (record,) if argument(record, 0, "input") == x else None
    squares = mean_of_squares(record, graph)
    if squares is None:
        return None
    inner = maker(graph, *squares[1])
    if inner is None or inner.op != "sub" or inner.args != centre.args:
        return None
    again = maker(graph, inner, 1, "other")
    return (*squares[0], inner, *((again,) if again is not None else ()))


def is_mean_of_rows_variance(record: CallRecord) -> bool:
    """Whether a variance goes over the last axis, keeps it, and divides by the count."""
    biased = argument(record, 2, "unbiased", True) is False or record.kwargs.get("correction") == 0
    kept = argument(record, 3, "keepdim", False) is True
    axis = argument(record, 1, "dim")
    value = argument(record, 0, "input")
    return biased and kept and isinstance(value, Operand) and axis in (-1, [-1], (-1,), len(value.shape) - 1)


LAYER_NORM = Operator(
    name="layer_norm",
    op_class=OpClass.SENSITIVE,
    summary="layer normalisation over the last axis, with or without gain and bias",
    rounding="after the mean, the centring, the square, the variance, the scaling, the gain and the bias; fused: once",
    finders=(find_call, find_written_out),
    unfused=unfused,
    kernels={
        "cpu": Kernel(native, "torch native layer norm", refuses_on_cpu, is_native=True),
        "npu": NPU_LAYER_NORM_KERNEL,
        "cuda": Kernel(native, "torch native layer norm", refuses_on_cuda, is_native=True),
    },
    example=example,
)
OPERATORS: tuple[Operator, ...] = (LAYER_NORM,)
