"""Reference kernels of the quantised family.

Rounding is to nearest even, integers saturate. npu_trans_quant_param packs an fp32 scale into an int64 that keeps its
high 19 bits only (FP19), and npu_quant_matmul reads it back so: that loss is part of the operator.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from npu_rig.dtypes import dtype_of
from npu_rig.registry import kernel

_FP19_DROPPED_BITS = 13


def _saturate(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    limits = torch.iinfo(dtype)
    return x.round().clamp(limits.min, limits.max).to(dtype)


@kernel("npu_trans_quant_param")
def trans_quant_param(
    scale: torch.Tensor, offset: torch.Tensor | None = None, round_mode: int | None = 0
) -> torch.Tensor:
    """Pack scales into int64: the fp32 bits, cut (round_mode 0) or rounded (1) to 19, in the low word; offset above."""
    bits = scale.float().contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    if round_mode == 1:
        bits = bits + (1 << (_FP19_DROPPED_BITS - 1))
    packed = bits >> _FP19_DROPPED_BITS << _FP19_DROPPED_BITS
    if offset is not None:
        packed = packed | ((offset.round().to(torch.int64) & 0x1FF) << 37)
    return packed


def _unpacked(scale: torch.Tensor) -> torch.Tensor:
    if scale.dtype is not torch.int64:
        return scale.float()
    low = scale & 0xFFFFFFFF
    signed = torch.where(low >= 1 << 31, low - (1 << 32), low)
    return signed.to(torch.int32).contiguous().view(torch.float32)


@kernel("npu_quant_matmul")
def quant_matmul(
    x1: torch.Tensor,
    x2: torch.Tensor,
    scale: torch.Tensor,
    *,
    offset: torch.Tensor | None = None,
    pertoken_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    output_dtype: int | torch.dtype | None = None,
    **rest: object,
) -> torch.Tensor:
    """Return (x1 @ x2 + integer bias) * scale [* row scale] [+ float bias], in int8 unless output_dtype says else."""
    used = sorted(key for key, value in rest.items() if value is not None)
    if used or x1.dtype is not torch.int8 or x2.dtype is not torch.int8:
        raise NotImplementedError(
            f"npu::npu_quant_matmul: the rig has int8 x int8 only ({used}, {x1.dtype}, {x2.dtype})"
        )
    dtype = dtype_of(output_dtype, torch.int8)
    if dtype is torch.float16 and pertoken_scale is None and scale.dtype is not torch.int64:
        raise RuntimeError("npu_quant_matmul: a float16 result needs scale from npu_trans_quant_param (int64)")
    total = (x1.double() @ x2.double()).to(torch.int64)
    if bias is not None and bias.dtype is torch.int32:
        total = total + bias
    out = total.float() * _unpacked(scale)
    if pertoken_scale is not None:
        out = out * pertoken_scale.float().unsqueeze(-1)
    if bias is not None and bias.dtype is not torch.int32:
        out = out + bias.float()
    if dtype is torch.int8:
        return _saturate(out if offset is None else out + offset.float(), torch.int8)
    return out.to(dtype)


@kernel("npu_weight_quant_batchmatmul")
def weight_quant_batchmatmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    antiquant_scale: torch.Tensor,
    antiquant_offset: torch.Tensor | None = None,
    quant_scale: torch.Tensor | None = None,
    quant_offset: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    antiquant_group_size: int = 0,
    inner_precise: int = 0,
    weight_dtype: int | None = None,
) -> torch.Tensor:
    """Return x @ ((weight + offset) * scale) + bias: the offset is added, before the scale."""
    if quant_scale is not None or weight.dtype is not torch.int8 or weight_dtype is not None:
        raise NotImplementedError("npu::npu_weight_quant_batchmatmul: the rig has int8 weights and float results only")
    scale, offset = (_per_row(tensor, weight, antiquant_group_size) for tensor in (antiquant_scale, antiquant_offset))
    assert scale is not None
    wide = weight.float() if offset is None else weight.float() + offset
    # The weight enters the cube unit in x's dtype.
    out = x.float() @ (wide * scale).to(x.dtype).float()
    return (out if bias is None else out + bias.float()).to(x.dtype)


def _per_row(tensor: torch.Tensor | None, weight: torch.Tensor, group: int) -> torch.Tensor | None:
    """Widen per-group rows [K / group, N] to the weight's [K, N]; per-channel values broadcast as they are."""
    if tensor is None:
        return None
    wide = tensor.float()
    return wide.repeat_interleave(group, 0)[: weight.size(0)] if group > 0 else wide


@kernel("npu_dynamic_quant")
def dynamic_quant(
    x: torch.Tensor,
    *,
    smooth_scales: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    dst_type: int | torch.dtype | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (int8 values, fp32 scale of each row or of all): scale = max|x * smooth| / 127."""
    if group_index is not None or dtype_of(dst_type, torch.int8) is not torch.int8:
        raise NotImplementedError("npu::npu_dynamic_quant: the rig has int8 without groups only")
    wide = x.float() if smooth_scales is None else x.float() * smooth_scales.float()
    peak = wide.abs().amax(-1) if quant_mode == "pertoken" else wide.abs().amax().reshape(1)
    scale = peak / 127.0
    divisor = scale.unsqueeze(-1) if quant_mode == "pertoken" else scale
    return _saturate(torch.where(divisor > 0, wide / divisor, 0.0), torch.int8), scale


@kernel("npu_anti_quant")
def anti_quant(
    x: torch.Tensor,
    scale: torch.Tensor,
    *,
    offset: torch.Tensor | None = None,
    dst_dtype: int | torch.dtype | None = None,
    src_dtype: int | torch.dtype | None = None,
) -> torch.Tensor:
    """Return (x + offset) * scale, in fp16 unless told otherwise."""
    wide = x.float() if offset is None else x.float() + offset.float()
    return (wide * scale.float()).to(dtype_of(dst_dtype, torch.float16))


@kernel("npu_quantize")
def quantize(
    x: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    dtype: int | torch.dtype,
    axis: int = 1,
    div_mode: bool = True,
) -> torch.Tensor:
    """Return round(x / scales + zero_points), or x * scales without div_mode; per channel along `axis` (default 1)."""
    shape: Sequence[int] = [1] * x.dim()
    if scales.numel() > 1:
        shape = [x.size(axis) if place == axis % x.dim() else 1 for place in range(x.dim())]
    factor = scales.float().reshape(tuple(shape))
    scaled = x.float() / factor if div_mode else x.float() * factor
    if zero_points is not None:
        scaled = scaled + zero_points.float().reshape(tuple(shape))
    return _saturate(scaled, dtype_of(dtype, torch.int8))
