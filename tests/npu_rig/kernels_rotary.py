"""Reference kernels of rotary position embedding.

"half" pairs element i with i + D/2, "interleave" pairs 2i with 2i+1. npu_apply_rotary_pos_emb overwrites its inputs
although its schema does not say so.
"""

from __future__ import annotations

import torch
from npu_rig.registry import kernel


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat((-right, left), -1)


def _rotate_every_two(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mode: str) -> torch.Tensor:
    if mode not in {"half", "interleave"}:
        raise RuntimeError(f"rotary_mode must be 'half' or 'interleave', got {mode!r}")
    turn = _rotate_half if mode == "half" else _rotate_every_two
    wide = x.float()
    return (wide * cos.float() + turn(wide) * sin.float()).to(x.dtype)


@kernel("npu_rotary_mul")
def rotary_mul(
    x: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, rotary_mode: str = "half", rotate: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x * r1 + rotate(x) * r2; r1 and r2 are first cast to x's dtype."""
    if rotate is not None:
        raise NotImplementedError("npu::npu_rotary_mul: the rig has no rotate matrix")
    if x.size(-1) % 2 or x.size(-1) >= 896:
        raise RuntimeError(f"npu_rotary_mul: the head size must be even and below 896, got {x.size(-1)}")
    return _rotated(x, r1.to(x.dtype), r2.to(x.dtype), rotary_mode)


@kernel("npu_apply_rotary_pos_emb")
def apply_rotary_pos_emb(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: str = "BSND",
    rotary_mode: str = "half",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Overwrite query and key by their rotated values and return them."""
    if layout not in {"BSND", "TND"} or rotary_mode != "half":
        raise RuntimeError(f"npu_apply_rotary_pos_emb takes BSND or TND and 'half', not {layout!r}, {rotary_mode!r}")
    if query.size(-1) not in {64, 128}:
        raise RuntimeError(f"npu_apply_rotary_pos_emb: the head size must be 64 or 128, got {query.size(-1)}")
    if {key.dtype, cos.dtype, sin.dtype} != {query.dtype}:
        raise RuntimeError("npu_apply_rotary_pos_emb: query, key, cos and sin must have one dtype")
    for tensor in (query, key):
        tensor.copy_(_rotated(tensor, cos, sin, rotary_mode))
    return query, key


@kernel("npu_interleave_rope")
def interleave_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Gather the even places before the odd ones, then rotate by halves (DeepSeek's order)."""
    gathered = torch.cat((x[..., ::2], x[..., 1::2]), -1)
    return _rotated(gathered, cos, sin, "half")
