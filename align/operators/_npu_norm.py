"""Normalisation on an NPU: fused kernels for the canonical operators, and torch_npu's own norm calls unfused.

Conventions: `epsilon` is 1e-6 for the RMS family and 1e-5 for the others unless given; statistics come back in
float32; npu_deep_norm takes beta before gamma; the two group norms order their arguments differently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from align.dumpers.model import OpClass
from align.operators._npu_call import drawn, run_npu, widest, written
from align.operators.base import Bound, Kernel, Operator

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def refuses_dtype(bound: Bound, dtype: torch.dtype) -> str:
    """The vector kernels take float16, bfloat16 and float32."""
    return "" if dtype in _FLOATS else f"no NPU kernel in {str(dtype).removeprefix('torch.')}"


# -- the canonical operators' kernels ----------------------------------------------------------------------------------


def fused_rms_norm(
    x: Tensor, weight: Tensor | None, eps: float | None, plus_one: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight (or 1 + weight) over the last axis, rounded once; then to `dtype`."""
    assert weight is not None
    small = torch.finfo(x.dtype).eps if eps is None else eps
    result: Tensor = run_npu("npu_gemma_rms_norm" if plus_one else "npu_rms_norm", x, weight.to(x.dtype), small)[0]
    return result.to(dtype or (x.dtype if plus_one else torch.promote_types(x.dtype, weight.dtype)))


def refuses_rms_norm(bound: Bound, dtype: torch.dtype) -> str:
    """npu_rms_norm wants a weight."""
    return "npu_rms_norm wants a weight" if bound["weight"] is None else refuses_dtype(bound, dtype)


def native_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """aclnnLayerNorm, which F.layer_norm is on an NPU: float32 inside, rounded once."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def fused_group_norm_silu(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """silu(group_norm(x)), rounded once."""
    result: Tensor = run_npu("npu_group_norm_silu", x, weight, bias, groups, eps)[0]
    return result


NPU_RMS_NORM_KERNEL = Kernel(fused_rms_norm, "npu_rms_norm (1 + weight: npu_gemma_rms_norm)", refuses_rms_norm)
NPU_LAYER_NORM_KERNEL = Kernel(
    native_layer_norm, "aclnnLayerNorm, which F.layer_norm is on an NPU", refuses_dtype, is_native=True
)
NPU_GROUP_NORM_SILU_KERNEL = Kernel(fused_group_norm_silu, "npu_group_norm_silu", refuses_dtype)


# -- unfused forms -----------------------------------------------------------------------------------------------------


def _axes(x: Tensor, gamma: Tensor) -> tuple[int, ...]:
    return tuple(range(x.dim() - gamma.dim(), x.dim()))


def inverse_rms(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    """1 / sqrt(mean(x^2) + epsilon) over gamma's axes, kept as axes of one, in float32."""
    wide = x.to(widest(x))
    return torch.rsqrt(wide.pow(2).mean(dim=_axes(x, gamma), keepdim=True) + epsilon)


def rms_norm(input_: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """npu_rms_norm: normalised in float32, rounded, then times gamma; and 1 / root mean square."""
    rstd = inverse_rms(input_, gamma, epsilon)
    return (input_ * rstd).to(input_.dtype) * gamma, rstd


def gemma_rms_norm(input_: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """npu_gemma_rms_norm: the factor is 1 + gamma, applied in float32."""
    rstd = inverse_rms(input_, gamma, epsilon)
    return (input_ * rstd * (1.0 + gamma.to(rstd.dtype))).to(input_.dtype), rstd


def standardised(x: Tensor, axes: tuple[int, ...], epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """((x - mean) / deviation, mean, 1 / deviation) in float32."""
    wide = x.to(widest(x))
    mean = wide.mean(dim=axes, keepdim=True)
    centred = wide - mean
    rstd = torch.rsqrt(centred.pow(2).mean(dim=axes, keepdim=True) + epsilon)
    return centred * rstd, mean, rstd


def layer_norm_eval(
    input_: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """npu_layer_norm_eval: rounded before the weight and again after weight and bias."""
    y = standardised(input_, tuple(range(-len(normalized_shape), 0)), eps)[0].to(input_.dtype)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def deep_norm(
    x: Tensor, gx: Tensor, beta: Tensor, gamma: Tensor, alpha: float = 0.3, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """npu_deep_norm: (mean, 1 / deviation, layer_norm(alpha * x + gx)); beta comes before gamma."""
    total = x * alpha + gx
    y, mean, rstd = standardised(total, _axes(total, gamma), epsilon)
    return mean, rstd, y.to(x.dtype) * gamma + beta


def _group_statistics(x: Tensor, groups: int, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    _, mean, rstd = standardised(x.reshape(x.shape[0], groups, -1), (-1,), eps)
    return mean[..., 0].to(dtype), rstd[..., 0].to(dtype)


def group_norm_silu(
    input_: Tensor, weight: Tensor | None, bias: Tensor | None, group: int, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """npu_group_norm_silu: (silu(group_norm(x)), mean, 1 / deviation [B, groups])."""
    y = F.silu(F.group_norm(input_, group, weight, bias, eps))
    return y, *_group_statistics(input_, group, eps, input_.dtype if weight is None else weight.dtype)


def group_norm_swish(
    input_: Tensor,
    num_groups: int,
    weight: Tensor,
    bias: Tensor,
    eps: float | None = 1e-5,
    swish_scale: float | None = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """npu_group_norm_swish: t * sigmoid(swish_scale * t) of t = group_norm(x); the groups come second."""
    small, factor = 1e-5 if eps is None else eps, 1.0 if swish_scale is None else swish_scale
    normed = F.group_norm(input_, num_groups, weight, bias, small)
    return normed * torch.sigmoid(normed * factor), *_group_statistics(input_, num_groups, small, input_.dtype)


# -- entries -----------------------------------------------------------------------------------------------------------

_ROWS, _ROW, _MAP, _CHANNELS = (3, 5, 64), (64,), (2, 8, 6, 6), (8,)


def _entry(op: str, unfused: Any, name: str, rounding: str, example: Any) -> Operator:
    return written(op, unfused, name=name, rounding=rounding, example=example, op_class=OpClass.SENSITIVE)


_BEFORE_GAMMA = "after the normalisation in float32 and after gamma"

_STAGES = "after the normalisation in float32, after the weight, after the bias"

NPU_OPERATORS: tuple[Operator, ...] = (
    _entry("npu_rms_norm", rms_norm, "rms_norm", _BEFORE_GAMMA, drawn(_ROWS, _ROW, names="input_ gamma")),
    _entry(
        "npu_gemma_rms_norm",
        gemma_rms_norm,
        "rms_norm",
        "once, after 1 + gamma",
        drawn(_ROWS, _ROW, names="input_ gamma"),
    ),
    _entry(
        "npu_layer_norm_eval",
        layer_norm_eval,
        "layer_norm",
        _STAGES,
        drawn(_ROWS, _ROW, _ROW, names="input_ weight bias", normalized_shape=[64]),
    ),
    _entry(
        "npu_deep_norm",
        deep_norm,
        "add_layer_norm",
        "after alpha * x, the sum, the normalisation in float32, gamma and beta",
        drawn(_ROWS, _ROWS, _ROW, _ROW, names="x gx beta gamma", alpha=math.sqrt(0.5)),
    ),
    _entry(
        "npu_group_norm_silu",
        group_norm_silu,
        "group_norm_silu",
        "after the norm and after SiLU",
        drawn(_MAP, _CHANNELS, _CHANNELS, names="input_ weight bias", group=4),
    ),
    _entry(
        "npu_group_norm_swish",
        group_norm_swish,
        "group_norm_silu",
        "after the norm, the factor, the sigmoid and the product",
        drawn(_MAP, _CHANNELS, _CHANNELS, names="input_ weight bias", num_groups=4, swish_scale=1.5),
    ),
)
