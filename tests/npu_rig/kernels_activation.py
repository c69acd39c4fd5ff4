"""Reference kernels of activations, gated units and masked softmax: fp32 inside, one cast at the end."""

from __future__ import annotations

import torch
from npu_rig.registry import kernel
from torch.nn import functional as F


def _halves(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    if x.size(dim) % 2:
        raise RuntimeError(f"dim {dim} of shape {tuple(x.shape)} must be even")
    left, right = x.float().chunk(2, dim)
    return left, right


@kernel("npu_swiglu")
def swiglu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Return silu(left) * right."""
    left, right = _halves(x, dim)
    return (F.silu(left) * right).to(x.dtype)


@kernel("npu_geglu")
def geglu(
    x: torch.Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (left * gelu(right), gelu(right)): the RIGHT half is activated unless activate_left; 1 means tanh."""
    left, right = _halves(x, dim)
    active, other = (left, right) if activate_left else (right, left)
    gelu = F.gelu(active, approximate="tanh" if approximate == 1 else "none")
    return (other * gelu).to(x.dtype), gelu.to(x.dtype)


@kernel("npu_gelu")
def gelu(x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """Return gelu(x), by erf ("none") or tanh."""
    return F.gelu(x.float(), approximate=approximate).to(x.dtype)


@kernel("npu_gelu_mul")
def gelu_mul(x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """Return gelu(left) * right over the last dimension, which is at most 1024."""
    if x.size(-1) > 1024:
        raise RuntimeError(f"npu_gelu_mul: the last dimension is at most 1024, got {x.size(-1)}")
    left, right = _halves(x, -1)
    return (F.gelu(left, approximate=approximate) * right).to(x.dtype)


@kernel("npu_fast_gelu", "fast_gelu")
def fast_gelu(x: torch.Tensor) -> torch.Tensor:
    """Return x * sigmoid(1.702 x)."""
    wide = x.float()
    return (wide / (1.0 + (-1.702 * wide).exp())).to(x.dtype)


@kernel("npu_silu")
def silu(x: torch.Tensor) -> torch.Tensor:
    """Return x * sigmoid(x)."""
    return F.silu(x.float()).to(x.dtype)


@kernel("npu_silu_")
def silu_in_place(x: torch.Tensor) -> torch.Tensor:
    """Overwrite x by silu(x)."""
    return x.copy_(silu(x))


@kernel("npu_mish")
def mish(x: torch.Tensor) -> torch.Tensor:
    """Return x * tanh(softplus(x))."""
    return F.mish(x.float()).to(x.dtype)


@kernel("npu_clipped_swiglu")
def clipped_swiglu(
    x: torch.Tensor,
    *,
    group_index: torch.Tensor | None = None,
    dim: int = -1,
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: float = 1.0,
    interleaved: bool = True,
) -> torch.Tensor:
    """Return gate * sigmoid(alpha * gate) * (linear + bias), both clamped; even and odd places by default."""
    if group_index is not None:
        raise NotImplementedError("npu::npu_clipped_swiglu: the rig has no group_index")
    wide = x.float().movedim(dim, -1)
    gate, linear = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    gate, linear = gate.clamp(max=limit), linear.clamp(-limit, limit)
    return (gate * (alpha * gate).sigmoid() * (linear + bias)).movedim(-1, dim).contiguous().to(x.dtype)


@kernel("npu_scaled_masked_softmax")
def scaled_masked_softmax(
    x: torch.Tensor, mask: torch.Tensor, scale: float = 1, fixed_triu_mask: bool = False
) -> torch.Tensor:
    """Return softmax over the last dimension; hidden scores become -10000, so a row hidden throughout is uniform."""
    sides = x.shape[-2:]
    if x.dim() != 4 or any(side % 32 or not 32 <= side <= 4096 for side in sides):
        raise RuntimeError(
            f"npu_scaled_masked_softmax: last two dimensions must be multiples of 32, got {tuple(x.shape)}"
        )
    hidden = torch.ones(sides, dtype=torch.bool).triu(1) if fixed_triu_mask else mask.bool()
    return (x.float() * float(scale)).masked_fill(hidden, -10000.0).softmax(-1).to(x.dtype)


@kernel("npu_masked_softmax_with_rel_pos_bias")
def masked_softmax_with_rel_pos_bias(
    x: torch.Tensor,
    atten_mask: torch.Tensor | None,
    relative_pos_bias: torch.Tensor,
    scale_value: float = 1.0,
    inner_precision_mode: int = 0,
) -> torch.Tensor:
    """Return softmax(scale * x + mask + bias); the mask is additive here."""
    scores = x.float() * scale_value + relative_pos_bias.float()
    if atten_mask is not None:
        scores = scores + atten_mask.float()
    return scores.softmax(-1).to(x.dtype)
