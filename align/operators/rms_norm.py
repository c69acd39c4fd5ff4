"""RMS normalisation, written out as in Llama, T5 and Gemma, or F.rms_norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from align.dumpers.model import OpClass
from align.dumpers.survey import CallGraph, CallRecord, Operand
from align.operators import _cpu
from align.operators._normalised import Source, mean_of_squares, scaled, source_of
from align.operators._npu_norm import NPU_RMS_NORM_KERNEL
from align.operators._patterns import (
    CASTS,
    argument,
    climb_from,
    close,
    is_number,
    maker,
    random_tensor,
    same_tensor,
    seen,
    take,
    written_fused,
)
from align.operators._probe import probe
from align.operators.base import Binding, Bound, Fixed, Kernel, Match, Operator

_SIDES = ((0, "input"), (1, "other"))


def unfused(
    x: Tensor, weight: Tensor | None, eps: float | None, plus_one: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    """x [..., d], weight [d] -> [..., d]: float32 inside, rounded to x's dtype before the gain and after it.

    With `plus_one` (Gemma) the gain is 1 + weight, applied in float32 and rounded once to `dtype` (x's own if None).
    """
    wide = x.double() if x.dtype == torch.float64 else x.float()
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if plus_one and weight is not None:
        return (normed * (1.0 + weight.to(wide.dtype))).to(dtype or x.dtype)
    normed = normed.to(x.dtype)
    out = normed if weight is None else weight * normed
    return out if dtype is None else out.to(dtype)


def cuda_kernel(
    x: Tensor, weight: Tensor | None, eps: float | None, plus_one: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    """aten::_fused_rms_norm, one kernel on CUDA since torch 2.9; the gain is applied before the only rounding."""
    gain = 1.0 + weight.float() if plus_one and weight is not None else weight
    gain = gain.to(x.dtype) if gain is not None else None
    result: Tensor = torch.ops.aten._fused_rms_norm(x, [x.shape[-1]], gain, eps)[0]
    return result.to(dtype or (x.dtype if weight is None or plus_one else torch.promote_types(x.dtype, weight.dtype)))


def refuses_on_cuda(bound: Bound, dtype: torch.dtype) -> str:
    """Older torch runs the same name as separate kernels."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_rms_norm", "CUDA"):
        return "torch has no fused RMS norm on cuda before 2.9"
    return probe("cuda", dtype, cuda_kernel, unfused, example)


def example(device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """A few rows."""
    return {
        "x": random_tensor((2, 5, 64), device, dtype, seed), "weight": random_tensor((64,), device, dtype, seed + 1),
        "eps": 1e-6, "plus_one": False, "dtype": None,
    }  # fmt: skip


def find_call(record: CallRecord, graph: CallGraph) -> Match | None:
    """F.rms_norm over the last axis."""
    shape = argument(record, 1, "normalized_shape")
    if record.op != "rms_norm" or not isinstance(shape, (tuple, list)) or len(shape) != 1:
        return None
    binding: dict[str, Binding] = {
        "x": take(record, 0, "input"), "weight": take(record, 2, "weight"), "eps": take(record, 3, "eps"),
        "plus_one": Fixed(False), "dtype": Fixed(None),
    }  # fmt: skip
    return written_fused(RMS_NORM, record, binding)


def _as_dtype(value: Any) -> torch.dtype:
    found = getattr(value, "dtype", value)
    assert isinstance(found, torch.dtype)
    return found


def find_written_out(record: CallRecord, graph: CallGraph) -> Match | None:
    """[cast(] gain * [cast(] x * rsqrt(mean(x^2) + eps) [)] [)]."""
    if record.op not in CASTS:
        return _with_gain(record, graph, (), {"dtype": Fixed(None)}, is_cast=False)
    target = argument(record, 1, "other" if record.op == "type_as" else "dtype")
    if record.op not in ("to", "type_as") or not isinstance(target, (torch.dtype, Operand)):
        return None
    binding: dict[str, Binding] = {
        "dtype": seen(_as_dtype, take(record, 1, "other" if record.op == "type_as" else "dtype"))
    }
    inner = maker(graph, record, 0)
    return _with_gain(inner, graph, (record,), binding, is_cast=True) if inner is not None else None


def _with_gain(
    record: CallRecord, graph: CallGraph, outer: tuple[CallRecord, ...], binding: dict[str, Binding], *, is_cast: bool
) -> Match | None:
    """A gain on either side of a product, or no gain at all."""
    if record.op == "mul":
        for position, name in _SIDES:
            normed, passed = climb_from(graph, record, position, name)
            gain = _gain(graph, record, _SIDES[1 - position])
            if normed is not None and gain is not None:
                calls, extra = gain
                match = _norm(
                    normed, graph, (*outer, record, *passed, *calls), binding | extra, is_cast=is_cast or bool(passed)
                )
                if match is not None:
                    return match
    return _norm(record, graph, outer, binding | {"weight": Fixed(None), "plus_one": Fixed(False)}, is_cast=is_cast)


def _gain(
    graph: CallGraph, record: CallRecord, side: tuple[int, str]
) -> tuple[tuple[CallRecord, ...], dict[str, Binding]] | None:
    """A row of weights, or 1 + such a row; casts of it are left out of what the kernel gets."""
    add, passed = climb_from(graph, record, *side)
    if add is not None and add.op == "add" and is_number(argument(add, 1, "other")) and argument(add, 1, "other") == 1:
        source, plus_one = source_of(graph, (add, 0, "input")), True
        calls = (*passed, add)
    else:
        source, plus_one, calls = source_of(graph, (record, *side)), False, ()
    if source is None or len(source.operand.shape) != 1 or source.operand.origin is not None:
        return None
    return (*calls, *source.calls), {"weight": source.binding, "plus_one": Fixed(plus_one)}


def _norm(
    record: CallRecord, graph: CallGraph, outer: tuple[CallRecord, ...], binding: dict[str, Binding], *, is_cast: bool
) -> Match | None:
    """x * rsqrt(mean(x^2) + eps) of one x; what was widened must be narrowed again inside the site."""
    core = scaled(record, graph)
    squares = mean_of_squares(core.statistic, graph) if core is not None else None
    if core is None or squares is None:
        return None
    value, squared = source_of(graph, core.value), source_of(graph, squares[1])
    if value is None or squared is None or not _is_same(value, squared):
        return None
    casts = {call.ident: call for call in (*value.calls, *squared.calls)}
    if casts and not is_cast:
        return None
    binding = binding | {"x": value.binding, "eps": core.eps}
    return close(graph, RMS_NORM, (*outer, *core.calls, *squares[0], *casts.values()), binding)


def _is_same(one: Source, other: Source) -> bool:
    """One tensor: of one maker, read at one place, or both the model's input as far as can be seen."""
    if one.binding == other.binding or same_tensor(one.operand, other.operand):
        return True
    return one.operand.origin is None and one.operand == other.operand


RMS_NORM = Operator(
    name="rms_norm",
    op_class=OpClass.SENSITIVE,
    summary="root-mean-square normalisation over the last axis, with a gain (or 1 + gain)",
    rounding="float32 inside; before and after the gain (1 + gain: once, after it); fused: once",
    finders=(find_call, find_written_out),
    unfused=unfused,
    kernels={
        "cpu": Kernel(
            _cpu.rms_norm,
            "single pass over rows, float32 inside, one rounding (numba)",
            _cpu.refusal(_cpu.rms_norm, unfused, example),
        ),
        "npu": NPU_RMS_NORM_KERNEL,
        "cuda": Kernel(cuda_kernel, "aten fused RMS norm", refuses_on_cuda, is_native=True),
    },
    example=example,
)
OPERATORS: tuple[Operator, ...] = (RMS_NORM,)
