"""Quantised arithmetic on an NPU: the fused kernel for the canonical operator, and torch_npu's own calls unfused.

Conventions: values are rounded to nearest even and saturate; an anti-quantisation offset is added BEFORE the scale
(the sign is opposite to a zero point); npu_quantize divides by its scales along axis 1 unless told otherwise; a scale
packed by npu_trans_quant_param keeps the high 19 bits of its float32 only ("FP19").
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from align.operators._npu_call import draw, drawn, refuse_rest, run_npu, written
from align.operators.base import Bound, Kernel, Operator

_FP19_DROPPED = 13  # bits of the float32 mantissa that the packed scale loses
_NUMBERS = {1: torch.int8, 5: torch.float16, 6: torch.float32, 12: torch.int8, 15: torch.bfloat16, 3: torch.int32}
_PLAIN = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}


# -- the canonical operator's kernel -----------------------------------------------------------------------------------


def fused_quant_linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, x_scale: Any = None
) -> Tensor:
    """int8 weight [o, i]: weight-only product, or, with the activation's scale fixed by the model, int8 times int8."""
    rows = x.reshape(-1, x.shape[-1])
    scale = weight_scale.reshape(-1).expand(weight.shape[0]).contiguous()
    if x_scale is None:
        out = run_npu("npu_weight_quant_batchmatmul", rows, weight.t(), scale.to(x.dtype), bias=bias)
    else:
        step = torch.as_tensor(x_scale, dtype=torch.float32, device=x.device).reshape(-1)
        small = run_npu("npu_quantize", rows, step, None, torch.qint8, -1, True)
        # A scale per row spares packing the weight's scale into 19 bits, which float16 results would need otherwise.
        out = run_npu(
            "npu_quant_matmul", small, weight.t(), scale.float(),
            pertoken_scale=step.expand(rows.shape[0]).contiguous(), bias=None if bias is None else bias.float(),
            output_dtype=x.dtype,
        )  # fmt: skip
    result: Tensor = out.reshape(*x.shape[:-1], weight.shape[0])
    return result


def refuses_quant_linear(bound: Bound, dtype: torch.dtype) -> str:
    """The cube unit's integer products give float16 and bfloat16."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"the NPU's int8 products give float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    return ""


NPU_QUANT_LINEAR_KERNEL = Kernel(
    fused_quant_linear,
    "npu_weight_quant_batchmatmul, or npu_quant_matmul where the activation's scale is fixed",
    refuses_quant_linear,
)


# -- unfused forms -----------------------------------------------------------------------------------------------------


def wanted_dtype(value: Any, default: torch.dtype) -> torch.dtype:
    """A dtype argument as torch_npu takes it: torch's, or its number; quantised dtypes mean their plain integers."""
    if value is None:
        return default
    dtype = value if isinstance(value, torch.dtype) else _NUMBERS.get(int(value))
    if dtype is None:
        refuse_rest("quantisation", {f"dtype number {value}": 1})
    assert dtype is not None
    return _PLAIN.get(dtype, dtype)


def saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to nearest even and keep within an integer dtype."""
    limits = torch.iinfo(dtype)
    return torch.round(x).clamp(limits.min, limits.max).to(dtype)


def trans_quant_param(scale: Tensor, offset: Tensor | None = None, round_mode: int | None = 0) -> Tensor:
    """npu_trans_quant_param: float32 bits cut (round_mode 0) or rounded (1) to 19, in the low half of an int64."""
    bits = scale.float().contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    bits = bits + (1 << (_FP19_DROPPED - 1)) if round_mode == 1 else bits
    packed = torch.bitwise_left_shift(torch.bitwise_right_shift(bits, _FP19_DROPPED), _FP19_DROPPED)
    if offset is None:
        return packed
    return packed | ((torch.round(offset).to(torch.int64) & 0x1FF) << 37)


def unpacked_scale(scale: Tensor) -> Tensor:
    """A scale as float32, out of the packed form if it is int64."""
    if scale.dtype != torch.int64:
        return scale.float()
    low = scale & 0xFFFFFFFF
    return torch.where(low >= 1 << 31, low - (1 << 32), low).to(torch.int32).contiguous().view(torch.float32)


def quant_matmul(
    x1: Tensor, x2: Tensor, scale: Tensor, *, offset: Tensor | None = None, pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None, output_dtype: Any = None, **rest: Any,
) -> Tensor:  # fmt: skip
    """npu_quant_matmul: (x1 @ x2 + integer bias) * scale [* row scale] [+ float bias], int8 unless output_dtype."""
    refuse_rest("npu_quant_matmul", rest)
    total = torch.matmul(x1.double(), x2.double())  # exact: int8 products and their sums are integers below 2^53
    total = total + bias.double() if bias is not None and bias.dtype == torch.int32 else total
    out = total.float() * unpacked_scale(scale)
    out = out if pertoken_scale is None else out * pertoken_scale.float().unsqueeze(-1)
    out = out + bias.float() if bias is not None and bias.dtype != torch.int32 else out
    dtype = wanted_dtype(output_dtype, torch.int8)
    if dtype.is_floating_point:
        return out.to(dtype)
    return saturated(out if offset is None else out + offset.float(), dtype)


def weight_quant_batchmatmul(
    x: Tensor, weight: Tensor, antiquant_scale: Tensor, antiquant_offset: Tensor | None = None,
    quant_scale: Tensor | None = None, quant_offset: Tensor | None = None, bias: Tensor | None = None,
    antiquant_group_size: int = 0, inner_precise: int = 0, weight_dtype: int | None = None,
) -> Tensor:  # fmt: skip
    """npu_weight_quant_batchmatmul: x @ ((weight + offset) * scale) + bias, weight [k, n], dequantised in x's dtype."""
    refuse_rest(
        "npu_weight_quant_batchmatmul",
        {"quant_scale": quant_scale, "quant_offset": quant_offset, "weight_dtype": weight_dtype},
    )
    wide = weight.to(x.dtype)
    if antiquant_offset is not None:
        wide = wide + _by_group(antiquant_offset, weight, antiquant_group_size).to(x.dtype)
    out = torch.matmul(x, wide * _by_group(antiquant_scale, weight, antiquant_group_size).to(x.dtype))
    return out if bias is None else out + bias.to(x.dtype)


def _by_group(value: Tensor, weight: Tensor, size: int) -> Tensor:
    """Values [k / size, n] of each group of rows, one row a row of the weight."""
    return value.repeat_interleave(size, dim=0)[: weight.shape[0]] if size > 0 else value


def dynamic_quant(
    input_: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    dst_type: Any = None,
    quant_mode: str = "pertoken",
    **rest: Any,
) -> tuple[Tensor, Tensor]:
    """npu_dynamic_quant: (int8 values, float32 scale of each row): scale = max|x * smooth| / 127."""
    refuse_rest(
        "npu_dynamic_quant", rest | {"dst_type other than int8": wanted_dtype(dst_type, torch.int8) != torch.int8}
    )
    wide = input_.float() if smooth_scales is None else input_.float() * smooth_scales.float()
    peak = wide.abs().amax(dim=-1, keepdim=True) if quant_mode == "pertoken" else wide.abs().amax().reshape(1)
    scale = peak / 127.0
    values = saturated(torch.where(scale > 0, wide / scale, torch.zeros_like(wide)), torch.int8)
    return values, scale.squeeze(-1) if quant_mode == "pertoken" else scale


def anti_quant(x: Tensor, scale: Tensor, *, offset: Tensor | None = None, dst_dtype: Any = None, **rest: Any) -> Tensor:
    """npu_anti_quant: (x + offset) * scale, float16 unless told otherwise."""
    refuse_rest("npu_anti_quant", rest)
    wide = x.float() if offset is None else x.float() + offset.float()
    return (wide * scale.float()).to(wanted_dtype(dst_dtype, torch.float16))


def quantize(
    input_: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: Any, axis: int = 1, div_mode: bool = True
) -> Tensor:
    """npu_quantize: round(x / scales + zero_points), or x * scales with div_mode off; one scale an entry of `axis`."""
    shape = [1] * input_.dim()
    if scales.numel() > 1:
        shape[axis] = input_.shape[axis]
    wide, factor = input_.float(), scales.float().reshape(shape)
    scaled = wide / factor if div_mode else wide * factor
    scaled = scaled if zero_points is None else scaled + zero_points.float().reshape(shape)
    return saturated(scaled, wanted_dtype(dtype, torch.int8))


# -- entries -----------------------------------------------------------------------------------------------------------


def _int8(shape: tuple[int, ...], device: str, seed: int) -> Tensor:
    return torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(seed)).to(device, torch.int8)


def _positive(shape: tuple[int, ...], device: str, seed: int) -> Tensor:
    return draw(shape, device, torch.float32, seed).abs() * 0.01 + 0.005


def _matmul_example(device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    return {
        "x1": _int8((6, 64), device, seed), "x2": _int8((64, 32), device, seed + 1), "scale": _positive((32,), device,
        seed + 2), "pertoken_scale": _positive((6,), device, seed + 3), "output_dtype": torch.bfloat16,
    }  # fmt: skip


def _weight_example(device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    return {
        "x": draw((6, 64), device, dtype, seed), "weight": _int8((64, 32), device, seed + 1),
        "antiquant_scale": _positive((32,), device, seed + 2).to(dtype), "antiquant_offset": draw((32,), device, dtype,
        seed + 3), "bias": draw((32,), device, dtype, seed + 4),
    }  # fmt: skip


def _anti_example(device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    scale, offset = _positive((32,), device, seed + 1), draw((32,), device, torch.float32, seed + 2)
    return {"x": _int8((6, 32), device, seed), "scale": scale, "offset": offset, "dst_dtype": torch.float16}


def _quantize_example(device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    # Powers of two: the division is exact, so both sides round the very same number.
    scales = 2.0 ** -torch.arange(3.0, 6.0).repeat(4)
    return {
        "input_": draw((5, 12), device, dtype, seed),
        "scales": scales.to(device),
        "zero_points": None,
        "dtype": torch.qint8,
    }


def _scale_example(device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    return {"scale": _positive((32,), device, seed)}


def _entry(op: str, unfused: Any, rounding: str, example: Any) -> Operator:
    return written(op, unfused, name="quant_linear", rounding=rounding, example=example)


NPU_OPERATORS: tuple[Operator, ...] = (
    _entry(
        "npu_quant_matmul",
        quant_matmul,
        "none in the integer product; float32 after each scale and the bias; once at the end",
        _matmul_example,
    ),
    _entry(
        "npu_weight_quant_batchmatmul",
        weight_quant_batchmatmul,
        "the dequantised weight, the product, the bias",
        _weight_example,
    ),
    _entry("npu_dynamic_quant", dynamic_quant, "to 8 bits", drawn((5, 64), names="input_")),
    _entry("npu_anti_quant", anti_quant, "once", _anti_example),
    _entry("npu_quantize", quantize, "to 8 bits", _quantize_example),
    _entry("npu_trans_quant_param", trans_quant_param, "the scale to 19 bits", _scale_example),
)
