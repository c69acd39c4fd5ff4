"""F.multi_head_attention_forward, the one call that nn.MultiheadAttention makes: projections around attention."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from align.dumpers.model import OpClass
from align.dumpers.survey import CallGraph, CallRecord
from align.operators._npu_attention import NPU_MULTI_HEAD_KERNEL
from align.operators._patterns import argument, random_tensor, take, written_fused
from align.operators._probe import UNIT
from align.operators.base import Bound, Kernel, Match, Operator

Result = tuple[Tensor, Tensor | None]


def unfused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_heads: int,
    in_weight: Tensor,
    in_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    key_padding_mask: Tensor | None,
    need_weights: bool,
    attn_mask: Tensor | None,
    average_weights: bool,
) -> Result:
    """query [m, n, e], key and value [s, n, e] (or without n) -> ([m, n, e], weights [n, m, s] or None).

    Masks follow the call: True = do not attend; a float mask is added.
    """
    is_batched = query.dim() == 3
    if not is_batched:
        query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    length, batch, width = query.shape
    heads = [_split(part, num_heads) for part in _project(query, key, value, in_weight, in_bias)]
    mask = _additive(attn_mask, key_padding_mask, heads[0], heads[1])
    scores = torch.matmul(heads[0], heads[1].transpose(-2, -1)) * math.sqrt(num_heads / width)
    weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
    mixed = torch.matmul(weights, heads[2]).permute(2, 0, 1, 3).reshape(length, batch, width)
    out = F.linear(mixed, out_weight, out_bias)
    shown = weights.mean(dim=1) if average_weights else weights
    if not is_batched:
        out, shown = out.squeeze(1), shown.squeeze(0)
    return out, shown if need_weights else None


def _project(query: Tensor, key: Tensor, value: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    biases = (None, None, None) if bias is None else bias.chunk(3)
    inputs = (query, key, value)
    return tuple(F.linear(x, w, b) for x, w, b in zip(inputs, weight.chunk(3), biases, strict=True))


def _split(x: Tensor, heads: int) -> Tensor:
    """[s, n, e] -> [n, heads, s, e / heads]."""
    return x.view(x.shape[0], x.shape[1], heads, -1).permute(1, 2, 0, 3)


def _additive(attn_mask: Tensor | None, padding: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """One float mask that broadcasts to [n, heads, m, s]."""
    total: Tensor | None = None
    if attn_mask is not None:
        total = _as_float(attn_mask, query.dtype)
        total = (
            total.view(query.shape[0], query.shape[1], *total.shape[-2:])
            if total.dim() == 3 and total.shape[0] > 1
            else total
        )
    if padding is not None:
        closed = _as_float(padding, query.dtype).view(query.shape[0], 1, 1, key.shape[2])
        total = closed if total is None else total + closed
    return total


def _as_float(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)


def as_called(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_heads: int,
    in_weight: Tensor,
    in_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    key_padding_mask: Tensor | None,
    need_weights: bool,
    attn_mask: Tensor | None,
    average_weights: bool,
) -> Result:
    """torch's own call, whose inside is the fused attention kernel when no weights are asked for."""
    result: Result = F.multi_head_attention_forward(
        query,
        key,
        value,
        query.shape[-1],
        num_heads,
        in_weight,
        in_bias,
        None,
        None,
        False,
        0.0,
        out_weight,
        out_bias,
        training=False,
        key_padding_mask=key_padding_mask,
        need_weights=need_weights,
        attn_mask=attn_mask,
        average_attn_weights=average_weights,
    )
    return result


def refuses(bound: Bound, dtype: torch.dtype) -> str:
    """A fused kernel never forms the weights, so it cannot return them."""
    if bound["need_weights"]:
        return "the call returns the attention weights (need_weights=True), which no fused kernel forms"
    return "" if dtype in UNIT else f"no kernel in {str(dtype).removeprefix('torch.')}"


def example(device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """Three positions, four heads."""
    return {
        "query": random_tensor((5, 2, 16), device, dtype, seed),
        "key": random_tensor((7, 2, 16), device, dtype, seed + 1),
        "value": random_tensor((7, 2, 16), device, dtype, seed + 2),
        "num_heads": 4,
        "in_weight": random_tensor((48, 16), device, dtype, seed + 3) * 0.25,
        "in_bias": random_tensor((48,), device, dtype, seed + 4),
        "out_weight": random_tensor((16, 16), device, dtype, seed + 5) * 0.25,
        "out_bias": random_tensor((16,), device, dtype, seed + 6),
        "key_padding_mask": None,
        "need_weights": False,
        "attn_mask": None,
        "average_weights": True,
    }


_UNUSUAL = (
    (7, "bias_k"),
    (8, "bias_v"),
    (9, "add_zero_attn"),
    (16, "use_separate_proj_weight"),
    (20, "static_k"),
    (21, "static_v"),
)


def find(record: CallRecord, graph: CallGraph) -> Match | None:
    """The call without dropout and without the options hardly anybody uses."""
    if record.op != "multi_head_attention_forward" or any(
        argument(record, *place) not in (None, False) for place in _UNUSUAL
    ):
        return None
    if argument(record, 10, "dropout_p", 0.0) and argument(record, 13, "training", True):
        return None
    binding = {
        "query": take(record, 0, "query"),
        "key": take(record, 1, "key"),
        "value": take(record, 2, "value"),
        "num_heads": take(record, 4, "num_heads"),
        "in_weight": take(record, 5, "in_proj_weight"),
        "in_bias": take(record, 6, "in_proj_bias"),
        "out_weight": take(record, 11, "out_proj_weight"),
        "out_bias": take(record, 12, "out_proj_bias"),
        "key_padding_mask": take(record, 14, "key_padding_mask"),
        "need_weights": take(record, 15, "need_weights", True),
        "attn_mask": take(record, 16, "attn_mask"),
        "average_weights": take(record, 23, "average_attn_weights", True),
    }
    return written_fused(MULTI_HEAD_ATTENTION, record, binding)


MULTI_HEAD_ATTENTION = Operator(
    name="multi_head_attention",
    op_class=OpClass.SENSITIVE,
    summary="nn.MultiheadAttention: projections around attention, in one call",
    rounding="after each projection, q k^T, the scale, the mask, the softmax (float32 inside) and the last product",
    finders=(find,),
    unfused=unfused,
    kernels={
        "cpu": Kernel(as_called, "torch multi_head_attention_forward on the flash kernel", refuses, is_native=True),
        "npu": NPU_MULTI_HEAD_KERNEL,
        "cuda": Kernel(as_called, "torch multi_head_attention_forward on the flash kernel", refuses, is_native=True),
    },
    example=example,
)
