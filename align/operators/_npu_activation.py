"""Activations on an NPU: fused kernels for the canonical operators, and torch_npu's own activation calls unfused.

Conventions: npu_swiglu activates the left half, npu_geglu the right one unless `activate_left`, by tanh unless
`approximate` is 0; npu_gelu_mul the left one by erf; the masked softmax hides where the mask is True, with -10000.
aten's own GELU ignores `approximate` on an NPU, so the forms here are written out in primitive calls.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from align.dumpers.model import OpClass
from align.operators._gated import joined
from align.operators._gelu import gelu_primitive, gelu_sigmoid
from align.operators._npu_call import draw, drawn, refuse_rest, run_npu, widest, written
from align.operators._npu_norm import refuses_dtype
from align.operators.base import Bound, Kernel, Operator

HIDDEN = -10000.0  # what npu_scaled_masked_softmax puts in place of hidden scores: finite, so a full row is uniform


# -- the canonical operators' kernels ----------------------------------------------------------------------------------


def fused_swiglu(
    gate: Tensor | None, up: Tensor | None, packed: Tensor | None, gate_first: bool, act: str = "silu"
) -> Tensor:
    """silu(gate) * up, computed in float32 and rounded once; the gate lies left in what npu_swiglu takes."""
    result: Tensor = run_npu("npu_swiglu", joined(gate, up, packed, gate_first, want_gate_first=True), -1)
    return result


def fused_geglu(
    gate: Tensor | None, up: Tensor | None, packed: Tensor | None, gate_first: bool, act: str = "gelu"
) -> Tensor:
    """gelu(gate) * up: npu_geglu activates the right half unless told to activate the left one."""
    is_left = packed is not None and gate_first
    both = joined(gate, up, packed, gate_first, want_gate_first=is_left)
    result: Tensor = run_npu("npu_geglu", both, -1, int(act == "gelu_tanh"), is_left)[0]
    return result


def fused_masked_softmax(scores: Tensor, mask: Tensor, scale: float) -> Tensor:
    """softmax over the last axis of scale * scores, True in the mask hides."""
    result: Tensor = run_npu("npu_scaled_masked_softmax", scores, mask, scale, False)
    return result


def refuses_masked_softmax(bound: Bound, dtype: torch.dtype) -> str:
    """Four axes, the last two multiples of 32 up to 4096."""
    shape = tuple(getattr(bound["scores"], "shape", ()))
    if len(shape) != 4 or any(extent % 32 or not 32 <= extent <= 4096 for extent in shape[-2:]):
        return (
            f"npu_scaled_masked_softmax takes [B, N, H, W] with H and W multiples of 32 up to 4096, not {list(shape)}"
        )
    return refuses_dtype(bound, dtype)


NPU_SWIGLU_KERNEL = Kernel(fused_swiglu, "npu_swiglu", refuses_dtype)
NPU_GEGLU_KERNEL = Kernel(fused_geglu, "npu_geglu", refuses_dtype)


# -- unfused forms -----------------------------------------------------------------------------------------------------


def swiglu(input_: Tensor, dim: int = -1) -> Tensor:
    """npu_swiglu: silu of the left half, times the right half."""
    left, right = input_.chunk(2, dim=dim)
    return F.silu(left) * right


def geglu(input_: Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False) -> tuple[Tensor, Tensor]:
    """npu_geglu: (other half * gelu, gelu), of the right half unless activate_left; approximate 1 means tanh, 0 erf."""
    left, right = input_.chunk(2, dim=dim)
    active, other = (left, right) if activate_left else (right, left)
    activated = gelu_primitive(active, "tanh" if approximate == 1 else "none")
    return other * activated, activated


def gelu(input_: Tensor, *, approximate: str = "none") -> Tensor:
    """npu_gelu."""
    return gelu_primitive(input_, approximate)


def gelu_mul(input_: Tensor, *, approximate: str = "none") -> Tensor:
    """npu_gelu_mul: gelu of the left half of the last axis, times the right half."""
    left, right = input_.chunk(2, dim=-1)
    return gelu_primitive(left, approximate) * right


def fast_gelu(input_: Tensor) -> Tensor:
    """npu_fast_gelu and fast_gelu: x / (1 + exp(-1.702 x))."""
    return gelu_sigmoid(input_)


def silu(input_: Tensor) -> Tensor:
    """npu_silu."""
    return input_ * torch.sigmoid(input_)


def silu_in_place(input_: Tensor) -> Tensor:
    """npu_silu_, which overwrites its input."""
    return input_.copy_(silu(input_))


def mish(input_: Tensor) -> Tensor:
    """npu_mish: x * tanh(softplus(x))."""
    return input_ * torch.tanh(F.softplus(input_))


def clipped_swiglu(
    x: Tensor,
    *,
    dim: int = -1,
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: float = 1.0,
    interleaved: bool = True,
    **rest: Any,
) -> Tensor:
    """npu_clipped_swiglu (gpt-oss): gate * sigmoid(alpha * gate) * (up + bias), both clamped; even and odd places."""
    refuse_rest("npu_clipped_swiglu", rest)
    last = x.movedim(dim, -1)
    gate, up = (last[..., ::2], last[..., 1::2]) if interleaved else last.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return (gate * torch.sigmoid(gate * alpha) * (up + bias)).movedim(-1, dim).contiguous()


def scaled_masked_softmax(x: Tensor, mask: Tensor, scale: float = 1, fixed_triu_mask: bool = False) -> Tensor:
    """npu_scaled_masked_softmax: hidden scores become -10000; fixed_triu_mask hides above the diagonal instead."""
    hidden = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1) if fixed_triu_mask else mask.bool()
    return (x * scale).masked_fill(hidden, HIDDEN).to(widest(x)).softmax(dim=-1).to(x.dtype)


def softmax_with_bias(
    x: Tensor,
    atten_mask: Tensor | None,
    relative_pos_bias: Tensor,
    scale_value: float = 1.0,
    inner_precision_mode: int = 0,
) -> Tensor:
    """npu_masked_softmax_with_rel_pos_bias: softmax(scale * x + mask + bias); this mask is additive."""
    scores = x * scale_value
    scores = scores if atten_mask is None else scores + atten_mask
    return (scores + relative_pos_bias).to(widest(x)).softmax(dim=-1).to(x.dtype)


# -- entries -----------------------------------------------------------------------------------------------------------

_WIDE = (3, 5, 64)
_ONE = drawn(_WIDE, names="input_")
_STEPS = "after every primitive call"


def _masked_example(device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    return {
        "x": draw((2, 2, 32, 64), device, dtype, seed),
        "mask": draw((2, 1, 32, 64), device, torch.float32, seed + 1) > 0.5,
        "scale": 0.25,
    }


def _softmax_entry(op: str, unfused: Any, example: Any) -> Operator:
    rounding = "after the scale, after the mask or bias, after the softmax (float32 inside)"
    return written(op, unfused, name="masked_softmax", rounding=rounding, example=example, op_class=OpClass.SENSITIVE)


NPU_OPERATORS: tuple[Operator, ...] = (
    written("npu_swiglu", swiglu, name="swiglu", rounding="after SiLU and after the product", example=_ONE),
    written(
        "npu_clipped_swiglu",
        clipped_swiglu,
        name="swiglu",
        rounding=_STEPS,
        example=drawn(_WIDE, names="x", interleaved=False),
    ),
    written("npu_geglu", geglu, name="geglu", rounding=_STEPS, example=_ONE),
    written("npu_gelu_mul", gelu_mul, name="geglu", rounding=_STEPS, example=_ONE),
    written("npu_gelu", gelu, name="gelu", rounding=_STEPS, example=_ONE),
    written("npu_fast_gelu", fast_gelu, name="gelu", rounding=_STEPS, example=_ONE),
    written("fast_gelu", fast_gelu, name="gelu", rounding=_STEPS, example=_ONE),
    written("npu_silu", silu, name="silu", rounding=_STEPS, example=_ONE),
    written("npu_silu_", silu_in_place, name="silu", rounding=_STEPS, example=_ONE),
    written("npu_mish", mish, name="mish", rounding=_STEPS, example=_ONE),
    _softmax_entry("npu_scaled_masked_softmax", scaled_masked_softmax, _masked_example),
    _softmax_entry(
        "npu_masked_softmax_with_rel_pos_bias",
        softmax_with_bias,
        drawn((2, 2, 4, 16, 16), (2, 1, 16, 16), (1, 1, 4, 16, 16), names="x atten_mask relative_pos_bias"),
    ),
)
