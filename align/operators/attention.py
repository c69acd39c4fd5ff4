"""Scaled dot-product attention: softmax(scale * q k^T + mask) v, written out or as one call.

Masks follow F.scaled_dot_product_attention: bool means True = attend, a float mask is added. `is_causal` aligns the
triangle top-left also where the lengths differ. The scale defaults to 1 / sqrt(head width).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from align.dumpers.model import OpClass
from align.dumpers.survey import CallGraph, CallRecord, Operand
from align.operators._attention_chain import find_chain
from align.operators._multi_head import MULTI_HEAD_ATTENTION
from align.operators._npu_attention import NPU_ATTENTION_KERNEL
from align.operators._patterns import argument, random_tensor, take, written_fused
from align.operators._probe import probe
from align.operators.base import Binding, Bound, Fixed, Kernel, Match, Operator


def unfused(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """query [..., h, m, d], key [..., g, n, d], value [..., g, n, e] -> [..., h, m, e]; scores are stored in the dtype.

    Rows that a bool mask closes altogether give zeros, as F.scaled_dot_product_attention does since torch 2.5.
    """
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = torch.matmul(query, key.transpose(-2, -1))
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is None:
        return torch.matmul(torch.softmax(scores, dim=-1), value)
    if mask.dtype != torch.bool:
        return torch.matmul(torch.softmax(scores + mask.to(scores.dtype), dim=-1), value)
    weights = torch.softmax(scores.masked_fill(mask.logical_not(), -math.inf), dim=-1)
    return torch.matmul(weights.masked_fill(mask.any(-1, keepdim=True).logical_not(), 0.0), value)


def flash(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """torch's fused attention; other than four axes are brought to four and back."""
    if mask is not None and mask.dtype not in (torch.bool, query.dtype):
        mask = mask.to(query.dtype)
    if query.dim() == 4 and (mask is None or mask.dim() in (2, 4)):
        return _sdpa(query, key, value, mask, is_causal, scale=scale, enable_gqa=enable_gqa)
    four = partial(_four_axes, lead=query.shape[:-3])
    mask = None if mask is None else four(mask.expand(*query.shape[:-1], key.shape[-2]))
    out = _sdpa(four(query), four(key), four(value), mask, is_causal, scale=scale, enable_gqa=enable_gqa)
    return out.reshape(*query.shape[:-1], value.shape[-1])


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, mask, 0.0, is_causal, **options)


def _four_axes(x: Tensor, lead: tuple[int, ...]) -> Tensor:
    """[..., h, s, d] -> [n, h, s, d] with n the product of the leading axes."""
    return x.reshape(math.prod(lead), *((1,) * (3 - min(x.dim(), 3))), *x.shape[-3:])


# -- what a kernel refuses --------------------------------------------------------------------------------------------

_MATH = 0  # torch.nn.attention.SDPBackend.MATH


def _refuses(device: str, bound: Bound, dtype: torch.dtype) -> str:
    """Ask torch's own dispatch which path it would take for these shapes in this dtype."""
    query, key, value, mask = (bound[name] for name in ("query", "key", "value", "mask"))
    if len(query.shape) < 2 or query.shape[:-3] != key.shape[:-3] or key.shape[:-3] != value.shape[:-3]:
        return f"the batches of query {list(query.shape)} and key {list(key.shape)} differ"
    if mask is not None and not isinstance(mask, (Operand, Tensor)):
        return "the mask is not a tensor"
    if mask is not None and bound["is_causal"]:
        return "a mask and is_causal cannot go together"
    try:
        choice = _choice(device, bound, dtype)
    except RuntimeError as error:
        return f"torch refuses these shapes: {str(error).splitlines()[0][:120]}"
    if choice == _MATH:
        shapes = " ".join(str(list(item.shape)) for item in (query, key, value))
        return f"torch has no fused path for query, key, value {shapes} in {str(dtype).removeprefix('torch.')}"
    return probe(device, dtype, flash, unfused, example)


def _choice(device: str, bound: Bound, dtype: torch.dtype) -> int:
    lead = math.prod(bound["query"].shape[:-3])
    four = [
        torch.empty((lead, *_last_three(bound[name].shape)), dtype=dtype, device=device)
        for name in ("query", "key", "value")
    ]
    mask = bound["mask"]
    if mask is not None:
        kept = torch.bool if mask.dtype == torch.bool else dtype
        mask = torch.empty((four[0].shape[-2], four[1].shape[-2]), dtype=kept, device=device)
    query, key, value = four
    options = {"scale": bound["scale"], "enable_gqa": bound["enable_gqa"]}
    return int(torch._fused_sdp_choice(query, key, value, mask, 0.0, bound["is_causal"], **options))


def _last_three(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (1,) * (3 - min(len(shape), 3)) + shape[-3:]


def refuses_on(device: str) -> Callable[[Bound, torch.dtype], str]:
    """The kernel's objections on one kind of device."""
    return partial(_refuses, device)


def example(device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """Two heads over sequences of different length, with a float mask."""
    draw = partial(random_tensor, device=device, dtype=dtype)
    return {
        "query": draw((2, 2, 12, 16), seed=seed), "key": draw((2, 2, 20, 16), seed=seed + 1),
        "value": draw((2, 2, 20, 16), seed=seed + 2), "mask": draw((12, 20), seed=seed + 3),
        "is_causal": False, "scale": None, "enable_gqa": False,
    }  # fmt: skip


# -- finding ----------------------------------------------------------------------------------------------------------


def find_call(record: CallRecord, graph: CallGraph) -> Match | None:
    """F.scaled_dot_product_attention without dropout."""
    if record.op != "scaled_dot_product_attention" or argument(record, 4, "dropout_p", 0.0) != 0.0:
        return None
    binding: dict[str, Binding] = {
        "query": take(record, 0, "query"),
        "key": take(record, 1, "key"),
        "value": take(record, 2, "value"),
        "mask": take(record, 3, "attn_mask"),
        "is_causal": take(record, 5, "is_causal", False),
        "scale": take(record, -1, "scale"),
        "enable_gqa": take(record, -1, "enable_gqa", False),
    }
    return written_fused(ATTENTION, record, binding)


def find_written_out(record: CallRecord, graph: CallGraph) -> Match | None:
    """softmax(q k^T [* scale] [+ mask]) v in separate calls."""
    return find_chain(ATTENTION, record, graph, {"is_causal": Fixed(False), "enable_gqa": Fixed(False)})


_LABEL = "torch scaled_dot_product_attention (flash or memory-efficient kernel)"
ATTENTION = Operator(
    name="attention",
    op_class=OpClass.SENSITIVE,
    summary="scaled dot-product attention with masks, causal, grouped heads",
    rounding="after q k^T, scale, mask, softmax (float32 inside) and the last product; fused: the weights, the result",
    finders=(find_call, find_written_out),
    unfused=unfused,
    kernels={
        "cpu": Kernel(flash, "torch flash attention for CPU", refuses_on("cpu"), is_native=True),
        "npu": NPU_ATTENTION_KERNEL,
        "cuda": Kernel(flash, _LABEL, refuses_on("cuda"), is_native=True),
    },
    example=example,
)
OPERATORS: tuple[Operator, ...] = (ATTENTION, MULTI_HEAD_ATTENTION)
