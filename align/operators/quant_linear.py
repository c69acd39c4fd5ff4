"""A linear layer whose int8 weights are dequantised before use; fused, the product itself is int8.

The int8 product needs an int8 activation. Where the model fixes its scale (quantise-dequantise before the layer), that
scale is used; elsewhere one scale for the whole tensor is taken from its largest value. That second case changes the
model's meaning: a few outlier channels widen the scale until ordinary ones vanish (Dettmers et al., arXiv:2208.07339).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from align.dumpers.model import OpClass
from align.dumpers.survey import CallGraph, CallRecord, Operand
from align.operators._npu_quant import NPU_QUANT_LINEAR_KERNEL
from align.operators._patterns import argument, close, is_number, is_reflected, maker, random_tensor, take
from align.operators._probe import probe
from align.operators.base import Binding, Bound, Fixed, Kernel, Match, Operator

INT8_MAX = 127


def unfused(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, x_scale: Tensor | float | None = None
) -> Tensor:
    """x [..., i], weight int8 [o, i], weight_scale [o, 1] or [] -> [..., o]; the dequantised weight has x's dtype."""
    if x_scale is not None:
        x = torch.round(x / x_scale).clamp(-INT8_MAX - 1, INT8_MAX) * x_scale
    return F.linear(x, weight.to(x.dtype) * weight_scale, bias)


def int8_product(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, x_scale: Tensor | float | None = None
) -> Tensor:
    """int8 times int8 into int32, then both scales and the bias in float32, and one rounding."""
    if x.numel() == 0:
        return unfused(x, weight, weight_scale, bias, x_scale)
    rows = x.reshape(-1, x.shape[-1])
    step = _dynamic_scale(rows) if x_scale is None else torch.as_tensor(x_scale, dtype=torch.float32, device=x.device)
    lowest = -INT8_MAX - 1 if x_scale is not None else -INT8_MAX
    small = (
        torch.round(rows / step.to(rows.dtype) if x_scale is not None else rows.float() / step)
        .clamp_(lowest, INT8_MAX)
        .to(torch.int8)
    )
    product = torch._int_mm(small, weight.t())
    scale = weight_scale.float().reshape(-1) * step
    out = product.float() * scale if bias is None else torch.addcmul(bias.float(), product.float(), scale)
    return out.to(x.dtype).view(*x.shape[:-1], weight.shape[0])


def _dynamic_scale(x: Tensor) -> Tensor:
    """The largest magnitude over 127; a tensor of zeros keeps a scale that divides."""
    return (x.abs().amax().float() / INT8_MAX).clamp_min(torch.finfo(torch.float32).tiny)


def refuses_on_cpu(bound: Bound, dtype: torch.dtype) -> str:
    """Only what torch._int_mm refuses."""
    return probe("cpu", dtype, int8_product, unfused, static_example)


def refuses_on_cuda(bound: Bound, dtype: torch.dtype) -> str:
    """cuBLASLt wants more than 16 rows, and widths that are multiples of 8."""
    *lead, width = bound["x"].shape
    rows, outputs = math.prod(lead), bound["weight"].shape[0]
    if rows <= 16 or width % 8 or outputs % 8:
        return (
            f"cuda's int8 product wants over 16 rows and widths divisible by 8, not {rows} rows, {width} to {outputs}"
        )
    return probe("cuda", dtype, int8_product, unfused, static_example)


def example(device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """Weights of 8 bits with one scale an output channel; the activation's scale is found as it comes."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": random_tensor((3, 8, 32), device, dtype, seed + 1),
        "weight": torch.randint(-127, 128, (48, 32), dtype=torch.int8, generator=generator).to(device),
        "weight_scale": (random_tensor((48, 1), device, torch.float32, seed + 2).abs() * 0.003 + 0.001).to(dtype),
        "bias": random_tensor((48,), device, dtype, seed + 3),
        "x_scale": None,
    }


def static_example(device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """The activation on a grid of powers of two, where the int8 form is exact but for the last rounding."""
    arguments = example(device, dtype, seed)
    return arguments | {"x_scale": 2.0**-5}


# -- finding ----------------------------------------------------------------------------------------------------------


def find(record: CallRecord, graph: CallGraph) -> Match | None:
    """F.linear whose weight is int8, cast and scaled on the way; an input quantised and dequantised joins the site."""
    weight = _dequantised(record, graph, 1, "weight") if record.op == "linear" else None
    if weight is None:
        return None
    calls, binding = weight
    binding |= {"bias": take(record, 2, "bias")}
    inner = _requantised(record, graph)
    if inner is None:
        binding |= {"x": take(record, 0, "input"), "x_scale": Fixed(None)}
        return close(graph, QUANT_LINEAR, (*calls, record), binding)
    return close(graph, QUANT_LINEAR, (*calls, *inner[0], record), binding | inner[1])


_SIDES = ((0, "input"), (1, "other"))


def _dequantised(
    record: CallRecord, graph: CallGraph, position: int, name: str
) -> tuple[tuple[CallRecord, ...], dict[str, Binding]] | None:
    """cast(int8 weight) * scale, in either order, with one scale in all or one an output channel."""
    product = maker(graph, record, position, name)
    if product is None or product.op != "mul":
        return None
    for side, place in enumerate(_SIDES):
        cast = maker(graph, product, *place)
        weight = (
            argument(cast, 0, "input") if cast is not None and cast.op in ("to", "float", "half", "bfloat16") else None
        )
        scale = argument(product, *_SIDES[1 - side])
        if cast is None or not isinstance(weight, Operand) or weight.dtype != torch.int8 or len(weight.shape) != 2:
            continue
        if isinstance(scale, Operand) and scale.shape in ((weight.shape[0], 1), (1, 1), (1,), ()):
            return (cast, product), {"weight": take(cast, 0, "input"), "weight_scale": take(product, *_SIDES[1 - side])}
    return None


def _requantised(record: CallRecord, graph: CallGraph) -> tuple[tuple[CallRecord, ...], dict[str, Binding]] | None:
    """clamp(round(x / s), -128, 127) * s before the layer, with the very same s."""
    times = maker(graph, record, 0)
    clamp = maker(graph, times, 0) if times is not None and times.op == "mul" else None
    turn = maker(graph, clamp, 0) if clamp is not None and clamp.op.rstrip("_") == "clamp" else None
    over = maker(graph, turn, 0) if turn is not None and turn.op.rstrip("_") == "round" else None
    if times is None or clamp is None or turn is None or over is None or over.op != "div" or is_reflected(over):
        return None
    if argument(clamp, 1, "min") != -INT8_MAX - 1 or argument(clamp, 2, "max") != INT8_MAX:
        return None
    divisor, factor = argument(over, 1, "other"), argument(times, 1, "other")
    is_single = is_number(divisor) or (isinstance(divisor, Operand) and divisor.shape in ((), (1,)))
    if divisor != factor or not is_single:
        return None
    return (over, turn, clamp, times), {"x": take(over, 0, "input"), "x_scale": take(over, 1, "other")}


QUANT_LINEAR = Operator(
    name="quant_linear",
    op_class=OpClass.ORDINARY,
    summary="linear layer with int8 weights (and, fused, an int8 activation)",
    rounding="the dequantised weight, then the product; fused: the activation to 8 bits, then the product once",
    finders=(find,),
    unfused=unfused,
    kernels={
        "npu": NPU_QUANT_LINEAR_KERNEL,
        "cpu": Kernel(int8_product, "int8 matrix product with a scale for the whole activation", refuses_on_cpu),
        "cuda": Kernel(
            int8_product, "cuBLASLt int8 matrix product with a scale for the whole activation", refuses_on_cuda
        ),
    },
    example=example,
)
OPERATORS: tuple[Operator, ...] = (QUANT_LINEAR,)
