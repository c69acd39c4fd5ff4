"""Unfused forms of npu_fusion_attention, its second and third version, in every layout.

The versions differ in spelling (`pre_tockens` and `pre_tokens`), in where the bias is scaled, and in their outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from align.dumpers.errors import UndecidedError
from align.operators._npu_attend import Request, attend
from align.operators._npu_call import refuse_rest
from align.operators._npu_layout import ALL_TOKENS, from_heads, hidden_positions, sequences, shared_heads, to_heads

_LANES = 8  # the softmax statistics come back eight times over, as the vector unit holds them


def _fused_call(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, layout: str, mask: Tensor | None, request: Request,
    window: dict[str, Any], ends: tuple[Any, Any],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """npu_fusion_attention in any layout: (result, maximum, sum), statistics [B, N, Sq, 8] or [T, N, 8]."""
    if layout != "TND":
        result, maximum, total = _one_batch(query, key, value, head_num, layout, mask, request, window)
        return result, _lanes(maximum), _lanes(total)
    if ends[0] is None or ends[1] is None:
        raise UndecidedError(
            "npu_fusion_attention in layout TND needs actual_seq_qlen and actual_seq_kvlen", "pass the cumulative ends"
        )
    parts = [
        _one_batch(query[q], key[kv], value[kv], head_num, "TND", mask, request, window)
        for q, kv in zip(sequences(ends[0]), sequences(ends[1]), strict=True)
    ]
    result = torch.cat([part[0] for part in parts])
    maximum, total = (_lanes(torch.cat([from_heads(part[at], "TND") for part in parts])) for at in (1, 2))
    return result, maximum, total


def _lanes(statistic: Tensor) -> Tensor:
    return statistic.expand(*statistic.shape[:-1], _LANES).contiguous()


def _one_batch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    layout: str,
    mask: Tensor | None,
    request: Request,
    window: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    q = to_heads(query, layout, head_num)
    k, v = (to_heads(item, layout, shared_heads(item, layout, q.shape[-1])) for item in (key, value))
    hidden = hidden_positions(mask, q.shape[2], k.shape[2], **window)
    asked = Request(request.scale, hidden, request.bias, request.scales_bias, request.sink, request.zero_hidden_rows)
    result, maximum, total = attend(q, k, v, asked)
    return from_heads(result, layout), maximum, total


def _no_dropout(keep_prob: float) -> None:
    if keep_prob != 1.0:
        raise UndecidedError(
            f"attention dropout inside a fused kernel (keep_prob {keep_prob}) cannot be repeated",
            "call model.eval() first",
        )


def fusion_v1(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, pse: Tensor | None = None,
    padding_mask: Tensor | None = None, atten_mask: Tensor | None = None, scale: float = 1.0, keep_prob: float = 1.0,
    pre_tockens: int = ALL_TOKENS, next_tockens: int = ALL_TOKENS, inner_precise: int = 0, prefix: Any = None,
    actual_seq_qlen: Any = None, actual_seq_kvlen: Any = None, sparse_mode: int = 0, gen_mask_parallel: bool = True,
    sync: bool = False, softmax_layout: str = "", sink: Tensor | None = None, dropout_mask: Tensor | None = None,
    seed: int = 0, offset: int = 0,
) -> tuple[Any, ...]:  # fmt: skip
    """npu_fusion_attention: softmax(mask(scale * (q k^T + pse))) v and the softmax's statistics."""
    _no_dropout(keep_prob)
    refuse_rest(
        "npu_fusion_attention",
        {"padding_mask": padding_mask, "dropout_mask": dropout_mask, "softmax_layout": softmax_layout},
    )
    request = Request(scale, None, pse, True, sink, inner_precise == 2)
    window = {"sparse_mode": sparse_mode, "before": pre_tockens, "after": next_tockens, "prefix": prefix}
    found = _fused_call(
        query, key, value, head_num, input_layout, atten_mask, request, window, (actual_seq_qlen, actual_seq_kvlen)
    )
    return *found, query.new_empty(0), 0, 0, 0


def fusion_v2(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, *, pse: Tensor | None = None,
    atten_mask: Tensor | None = None, scale: float = 1.0, keep_prob: float = 1.0, pre_tokens: int = ALL_TOKENS,
    next_tokens: int = ALL_TOKENS, inner_precise: int = 0, prefix: Any = None, actual_seq_qlen: Any = None,
    actual_seq_kvlen: Any = None, sparse_mode: int = 0, gen_mask_parallel: bool = True, sync: bool = False,
    pse_type: int = 1, sink: Tensor | None = None, seed: int = 0, offset: int = 0, **rest: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """npu_fusion_attention_v2: pse_type 1 as v1; 0 adds pse behind the scale, as torch adds its bias."""
    _no_dropout(keep_prob)
    refuse_rest("npu_fusion_attention_v2", rest | {"pse_type (ALiBi)": pse_type not in (0, 1)})
    request = Request(scale, None, pse, pse_type == 1, sink, inner_precise == 2)
    window = {"sparse_mode": sparse_mode, "before": pre_tokens, "after": next_tokens, "prefix": prefix}
    found = _fused_call(
        query, key, value, head_num, input_layout, atten_mask, request, window, (actual_seq_qlen, actual_seq_kvlen)
    )
    return *found, query.new_empty(0), 0, 0, 0


def fusion_v3(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, pse: Tensor | None = None,
    padding_mask: Tensor | None = None, atten_mask: Tensor | None = None, scale: float = 1.0, keep_prob: float = 1.0,
    pre_tockens: int = ALL_TOKENS, next_tockens: int = ALL_TOKENS, inner_precise: int = 0, prefix: Any = None,
    actual_seq_qlen: Any = None, actual_seq_kvlen: Any = None, sparse_mode: int = 0, gen_mask_parallel: bool = True,
    sync: bool = False, softmax_layout: str = "", sink: Tensor | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """npu_fusion_attention_v3: v1 with the sequence ends, seed and offset as tensors."""
    found = fusion_v1(
        query, key, value, head_num, input_layout, pse, padding_mask, atten_mask, scale, keep_prob, pre_tockens,
        next_tockens, inner_precise, prefix, actual_seq_qlen, actual_seq_kvlen, sparse_mode, gen_mask_parallel, sync,
        softmax_layout, sink,
    )  # fmt: skip
    zeros = torch.zeros(2, dtype=torch.int64, device=query.device)
    return *found[:4], zeros[:1], zeros[1:]
