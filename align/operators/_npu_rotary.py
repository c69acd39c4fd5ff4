"""Rotary embedding on an NPU: the fused kernel for the canonical operator, and torch_npu's own rotary calls unfused.

"half" turns the pairs (x_i, x_{i + d/2}), "interleave" (x_{2i}, x_{2i+1}); npu_interleave_rope first gathers the even
places before the odd ones and then turns halves, so it is neither. npu_apply_rotary_pos_emb overwrites query and key
although its schema does not say so, and the unfused form does too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from align.dumpers.errors import UndecidedError
from align.operators._npu_call import draw, refuse_rest, run_npu, written
from align.operators._npu_norm import refuses_dtype
from align.operators.base import Bound, Kernel, Operator

# -- the canonical operator's kernel -----------------------------------------------------------------------------------


def fused_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """npu_rotary_mul wants four axes, and casts cos and sin to x's dtype."""
    lead = (1,) * (4 - x.dim())
    wide = [tensor.reshape((1,) * (4 - tensor.dim()) + tuple(tensor.shape)) for tensor in (cos, sin)]
    result: Tensor = run_npu(
        "npu_rotary_mul", x.reshape(lead + tuple(x.shape)), *wide, "interleave" if interleaved else "half"
    )
    return result.reshape(x.shape)


def refuses_rotary(bound: Bound, dtype: torch.dtype) -> str:
    """At most four axes; an even head size below 896, cos and sin at full size."""
    shape = tuple(bound["x"].shape)
    if len(shape) > 4:
        return f"npu_rotary_mul takes up to four axes, not {len(shape)}"
    if shape[-1] % 2 or shape[-1] >= 896:
        return f"npu_rotary_mul wants an even head size below 896, not {shape[-1]}"
    if any(tuple(bound[name].shape)[-1:] != shape[-1:] for name in ("cos", "sin")):
        return "npu_rotary_mul wants cos and sin at the full head size"
    return refuses_dtype(bound, dtype)


NPU_ROTARY_KERNEL = Kernel(fused_rotary, "npu_rotary_mul (cos and sin in x's dtype)", refuses_rotary)


# -- unfused forms -----------------------------------------------------------------------------------------------------


def turned_half(x: Tensor) -> Tensor:
    """(x1, x2) -> (-x2, x1) by halves."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def turned_pairs(x: Tensor) -> Tensor:
    """(x1, x2) -> (-x2, x1) by neighbours."""
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


def rotary_mul(
    input_: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """npu_rotary_mul: x * r1 + turned(x) * r2, with r1 = cos and r2 = sin cast to x's dtype."""
    refuse_rest("npu_rotary_mul", {"rotate": rotate})
    if rotary_mode not in ("half", "interleave"):
        raise UndecidedError(
            f"npu_rotary_mul has no rotary_mode {rotary_mode!r} in the catalog", "use 'half' or 'interleave'"
        )
    turn = turned_half if rotary_mode == "half" else turned_pairs
    return input_ * r1.to(input_.dtype) + turn(input_) * r2.to(input_.dtype)


def apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str = "BSND", rotary_mode: str = "half"
) -> tuple[Tensor, Tensor]:
    """npu_apply_rotary_pos_emb: overwrites query and key, as the kernel does, and returns them."""
    return query.copy_(rotary_mul(query, cos, sin, rotary_mode)), key.copy_(rotary_mul(key, cos, sin, rotary_mode))


def interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """npu_interleave_rope: even places before odd ones, then turned by halves (DeepSeek)."""
    gathered = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
    return gathered * cos + turned_half(gathered) * sin


# -- entries -----------------------------------------------------------------------------------------------------------


def _angles(rows: int, size: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [1, rows, 1, size] of a half-style table."""
    frequency = 100.0 ** (-torch.arange(size // 2) / (size // 2))
    angle = torch.outer(torch.arange(float(rows)), frequency)
    table = torch.cat((angle, angle), dim=-1)[None, :, None, :]
    return table.cos().to(device, dtype), table.sin().to(device, dtype)


def _mul_example(device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    cos, sin = _angles(6, 64, device, dtype)
    return {"input_": draw((2, 6, 3, 64), device, dtype, seed), "r1": cos, "r2": sin}


def _apply_example(device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    cos, sin = _angles(6, 64, device, dtype)
    query, key = draw((2, 6, 4, 64), device, dtype, seed), draw((2, 6, 2, 64), device, dtype, seed + 1)
    return {
        "query": query,
        "key": key,
        "cos": cos.expand(2, 6, 1, 64).contiguous(),
        "sin": sin.expand(2, 6, 1, 64).contiguous(),
    }


def _interleave_example(device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    cos, sin = (table.transpose(1, 2).contiguous() for table in _angles(6, 64, device, dtype))
    return {"x": draw((1, 3, 6, 64), device, dtype, seed), "cos": cos, "sin": sin}


_ROUNDING = "after each product and after the sum"

NPU_OPERATORS: tuple[Operator, ...] = (
    written("npu_rotary_mul", rotary_mul, name="rotary", rounding=_ROUNDING, example=_mul_example),
    written(
        "npu_apply_rotary_pos_emb", apply_rotary_pos_emb, name="rotary", rounding=_ROUNDING, example=_apply_example
    ),
    written("npu_interleave_rope", interleave_rope, name="rotary", rounding=_ROUNDING, example=_interleave_example),
)
