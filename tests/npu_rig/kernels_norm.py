"""Reference kernels of the normalisation family.

Rounding points: fp32 inside and one cast, except npu_add_rms_norm, whose fp16 and bf16 forms round between (the
"normal" tiling of a 910B is imitated; a device chooses its tiling by shape). Statistics are fp32.
"""

from __future__ import annotations

import math

import torch
from npu_rig.registry import kernel
from torch.nn import functional as F


def _row_dims(x: torch.Tensor, gamma: torch.Tensor) -> tuple[int, ...]:
    return tuple(range(x.dim() - gamma.dim(), x.dim()))


def _inverse_rms(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> torch.Tensor:
    return 1.0 / (x.square().mean(_row_dims(x, gamma), keepdim=True) + epsilon).sqrt()


def _layer_norm(
    x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (y, mean, 1 / standard deviation) in fp32, from fp32 x."""
    dims = _row_dims(x, gamma)
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    rstd = 1.0 / (centred.square().mean(dims, keepdim=True) + epsilon).sqrt()
    return centred * rstd * gamma.float() + beta.float(), mean, rstd


@kernel("npu_rms_norm")
def rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (y, 1 / root mean square in fp32)."""
    rstd = _inverse_rms(x.float(), gamma, epsilon)
    return (x.float() * rstd * gamma.float()).to(x.dtype), rstd


@kernel("npu_gemma_rms_norm")
def gemma_rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """Like npu_rms_norm with a factor of 1 + gamma."""
    rstd = _inverse_rms(x.float(), gamma, epsilon)
    return (x.float() * rstd * (1.0 + gamma.float())).to(x.dtype), rstd


@kernel("npu_add_rms_norm")
def add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (y, rstd in fp32, x1 + x2 in the input dtype)."""
    exact = x1.float() + x2.float()
    total = exact.to(x1.dtype)
    # fp16 normalises the rounded sum, bf16 the exact one.
    basis = total.float() if x1.dtype is torch.float16 else exact
    rstd = _inverse_rms(basis, gamma, epsilon)
    y = (basis * rstd).to(x1.dtype) * gamma.to(x1.dtype)
    return y, rstd, total


@kernel("npu_add_rms_norm_cast")
def add_rms_norm_cast(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (y in fp32, y, rstd, x1 + x2)."""
    y, rstd, total = add_rms_norm(x1, x2, gamma, epsilon)
    return y.float(), y, rstd, total


@kernel("npu_add_layer_norm")
def add_layer_norm(
    x1: torch.Tensor,
    x2: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    epsilon: float = 1e-5,
    additional_output: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (y, mean, rstd, x1 + x2); y and the sum are fp32 if the dtypes of x1, x2, gamma differ."""
    dtype = x1.dtype if x1.dtype == x2.dtype == gamma.dtype else torch.float32
    total = x1.float() + x2.float()
    y, mean, rstd = _layer_norm(total, gamma, beta, epsilon)
    # Without additional_output the device leaves the fourth output unwritten.
    return y.to(dtype), mean, rstd, total.to(dtype) if additional_output else torch.full_like(y, math.nan).to(dtype)


@kernel("npu_layer_norm_eval")
def layer_norm_eval(
    x: torch.Tensor,
    normalized_shape: list[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Return the layer norm."""
    weight, bias = (None if tensor is None else tensor.float() for tensor in (weight, bias))
    return F.layer_norm(x.float(), normalized_shape, weight, bias, eps).to(x.dtype)


@kernel("npu_deep_norm")
def deep_norm(
    x: torch.Tensor,
    gx: torch.Tensor,
    beta: torch.Tensor,
    gamma: torch.Tensor,
    alpha: float = 0.3,
    epsilon: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (mean, rstd, layer_norm(alpha * x + gx)); note beta before gamma."""
    y, mean, rstd = _layer_norm(alpha * x.float() + gx.float(), gamma, beta, epsilon)
    return mean, rstd, y.to(x.dtype)


def _group_norm(
    x: torch.Tensor, groups: int, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (y, mean [B, groups], rstd [B, groups]) in fp32."""
    rows = x.float().reshape(x.size(0), groups, -1)
    mean = rows.mean(-1, keepdim=True)
    rstd = 1.0 / ((rows - mean).square().mean(-1, keepdim=True) + eps).sqrt()
    y = ((rows - mean) * rstd).reshape(x.shape)
    per_channel = (1, -1, *[1] * (x.dim() - 2))
    if weight is not None:
        y = y * weight.float().reshape(per_channel)
    if bias is not None:
        y = y + bias.float().reshape(per_channel)
    return y, mean.squeeze(-1), rstd.squeeze(-1)


@kernel("npu_group_norm_silu")
def group_norm_silu(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, group: int, eps: float = 1e-5
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (silu(group_norm(x)), mean, rstd); the statistics have the weight's dtype."""
    y, mean, rstd = _group_norm(x, group, weight, bias, eps)
    dtype = x.dtype if weight is None else weight.dtype
    return (y * y.sigmoid()).to(x.dtype), mean.to(dtype), rstd.to(dtype)


@kernel("npu_group_norm_swish")
def group_norm_swish(
    x: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float | None = 1e-5,
    swish_scale: float | None = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (t * sigmoid(swish_scale * t), mean, rstd) for t = group_norm(x); groups come second here."""
    y, mean, rstd = _group_norm(x, num_groups, weight, bias, 1e-5 if eps is None else eps)
    factor = 1.0 if swish_scale is None else swish_scale
    return (y * (factor * y).sigmoid()).to(x.dtype), mean.to(x.dtype), rstd.to(x.dtype)
