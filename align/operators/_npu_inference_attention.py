"""Unfused forms of the inference kernels: fused infer (two versions), prompt flash, incremental flash.

They spell the scale `scale`, `softmax_scale` or `scale_value` (1 by default), read plain lengths but for layout TND,
where lengths are cumulative, and add their bias behind the scale. Paged caches and quantised inputs are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from align.operators._npu_attend import Request, attend
from align.operators._npu_call import refuse_rest
from align.operators._npu_layout import ALL_TOKENS, beyond, from_heads, hidden_positions, sequences, to_heads


@dataclass(frozen=True, slots=True)
class _Inference:
    """What the inference kernels ask for, under one spelling."""

    scale: float
    heads: int
    kv_heads: int
    layout: str
    window: dict[str, Any]
    lengths: tuple[Any, Any]
    bias: Tensor | None = None
    sink: Tensor | None = None
    zero_hidden_rows: bool = False


def _infer(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, asked: _Inference) -> tuple[Tensor, Tensor]:
    """(result, log of the softmax's denominator: [B, N, Sq, 1], or [T, N, 1] in layout TND)."""
    given, _, wanted = asked.layout.partition("_")
    if given != "TND":
        return _infer_batch(query, key, value, mask, asked, asked.lengths)
    parts = [
        _infer_batch(query[q], key[kv], value[kv], mask, asked, (None, None))
        for q, kv in zip(sequences(asked.lengths[0]), sequences(asked.lengths[1]), strict=True)
    ]
    return torch.cat([part[0] for part in parts], dim=1 if wanted == "NTD" else 0), torch.cat(
        [part[1] for part in parts]
    )


def _infer_batch(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, asked: _Inference, lengths: tuple[Any, Any]
) -> tuple[Tensor, Tensor]:
    given, _, wanted = asked.layout.partition("_")
    q = to_heads(query, given, asked.heads)
    k, v = (to_heads(item, given, asked.kv_heads or asked.heads) for item in (key, value))
    hidden = hidden_positions(mask, q.shape[2], k.shape[2], **asked.window)
    if lengths[1] is not None:
        behind = beyond(lengths[1], k.shape[2], q.device)
        hidden = behind if hidden is None else hidden | behind
    request = Request(asked.scale, hidden, asked.bias, False, asked.sink, asked.zero_hidden_rows)
    result, maximum, total = attend(q, k, v, request)
    if lengths[0] is not None:
        result = result.masked_fill(beyond(lengths[0], q.shape[2], q.device).transpose(-2, -1), 0.0)
    log_sum = maximum + total.log()
    return from_heads(result, wanted or given), from_heads(log_sum, "TND") if given == "TND" else log_sum


def fused_infer(
    query: Tensor, key: Tensor, value: Tensor, *, pse_shift: Tensor | None = None, atten_mask: Tensor | None = None,
    actual_seq_lengths: Any = None, actual_seq_lengths_kv: Any = None, num_heads: int = 1, scale: float = 1.0,
    pre_tokens: int = ALL_TOKENS, next_tokens: int = ALL_TOKENS, input_layout: str = "BSH",
    num_key_value_heads: int = 0, sparse_mode: int = 0, inner_precise: int = 0, softmax_lse_flag: bool = False,
    **rest: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """npu_fused_infer_attention_score without paging or quantisation; TND lengths are cumulative."""
    refuse_rest("npu_fused_infer_attention_score", rest)
    window = {"sparse_mode": sparse_mode, "before": pre_tokens, "after": next_tokens}
    asked = _Inference(
        scale, num_heads, num_key_value_heads, input_layout, window, (actual_seq_lengths, actual_seq_lengths_kv),
        pse_shift, None, inner_precise in (2, 3),
    )  # fmt: skip
    result, log_sum = _infer(query, key, value, atten_mask, asked)
    return result, log_sum if softmax_lse_flag else log_sum.new_empty(0)


def fused_infer_v2(
    query: Tensor, key: Tensor, value: Tensor, *, pse_shift: Tensor | None = None, atten_mask: Tensor | None = None,
    actual_seq_qlen: Any = None, actual_seq_kvlen: Any = None, learnable_sink: Tensor | None = None,
    num_query_heads: int = 1, num_key_value_heads: int = 0, softmax_scale: float = 1.0, pre_tokens: int = ALL_TOKENS,
    next_tokens: int = ALL_TOKENS, input_layout: str = "BSH", sparse_mode: int = 0, inner_precise: int = 0,
    return_softmax_lse: bool = False, **rest: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """npu_fused_infer_attention_score_v2: the first one under other names, with a learnable sink."""
    refuse_rest("npu_fused_infer_attention_score_v2", rest)
    window = {"sparse_mode": sparse_mode, "before": pre_tokens, "after": next_tokens}
    asked = _Inference(
        softmax_scale, num_query_heads, num_key_value_heads, input_layout, window, (actual_seq_qlen, actual_seq_kvlen),
        pse_shift, learnable_sink, inner_precise in (2, 3),
    )  # fmt: skip
    result, log_sum = _infer(query, key, value, atten_mask, asked)
    return result, log_sum if return_softmax_lse else log_sum.new_empty(0)


def prompt_flash(
    query: Tensor, key: Tensor, value: Tensor, *, atten_mask: Tensor | None = None, pse_shift: Tensor | None = None,
    actual_seq_lengths: Any = None, num_heads: int = 1, scale_value: float = 1.0, pre_tokens: int = ALL_TOKENS,
    next_tokens: int = 0, input_layout: str = "BSH", num_key_value_heads: int = 0, actual_seq_lengths_kv: Any = None,
    sparse_mode: int = 0, **rest: Any,
) -> Tensor:  # fmt: skip
    """npu_prompt_flash_attention: next_tokens is 0 by default, so a mask given in mode 0 hides the future on top."""
    refuse_rest("npu_prompt_flash_attention", rest)
    window = {"sparse_mode": sparse_mode, "before": pre_tokens, "after": next_tokens}
    lengths = (actual_seq_lengths, actual_seq_lengths_kv)
    asked = _Inference(scale_value, num_heads, num_key_value_heads, input_layout, window, lengths, pse_shift)
    return _infer(query, key, value, atten_mask, asked)[0]


def incremental_flash(
    query: Tensor, key: Tensor, value: Tensor, *, atten_mask: Tensor | None = None, pse_shift: Tensor | None = None,
    actual_seq_lengths: Any = None, num_heads: int = 1, scale_value: float = 1.0, input_layout: str = "BSH",
    num_key_value_heads: int = 0, inner_precise: int = 1, **rest: Any,
) -> Tensor:  # fmt: skip
    """npu_incre_flash_attention: one query token; the lengths are those of the keys."""
    refuse_rest("npu_incre_flash_attention", rest)
    asked = _Inference(
        scale_value, num_heads, num_key_value_heads, input_layout, {}, (None, actual_seq_lengths), pse_shift
    )
    return _infer(query, key, value, atten_mask, asked)[0]
