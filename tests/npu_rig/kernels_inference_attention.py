"""Reference kernels of the inference attention family: fused infer, prompt flash, incremental flash.

They take half precision only, spell the scale `scale_value` (prompt, incremental), and read plain, not cumulative,
sequence lengths except in layout TND. Bias (`pse_shift`) is added after the scale. No paged cache, no quantisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from npu_rig.attention_core import AttentionCall, attend
from npu_rig.attention_layout import cumulative_pieces, from_bnsd, split_layout, to_bnsd
from npu_rig.attention_mask import ALL_TOKENS, hidden_positions
from npu_rig.registry import kernel

_DTYPES = (torch.float16, torch.bfloat16)
_Lengths = Sequence[int] | None


@dataclass(frozen=True, slots=True)
class _Options:
    name: str
    scale: float
    heads: int
    kv_heads: int
    layout: str
    mask: torch.Tensor | None
    bias: torch.Tensor | None
    sparse_mode: int
    pre_tokens: int
    next_tokens: int
    inner_precise: int
    sink: torch.Tensor | None = None


def _infer(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: _Options, q_lens: _Lengths, kv_lens: _Lengths
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (output, log-sum-exp): [B, N, Sq, 1], or [T, N, 1] for TND."""
    if query.dtype not in _DTYPES:
        raise RuntimeError(f"{options.name} takes float16 and bfloat16 on this device, not {query.dtype}")
    given, _ = split_layout(options.layout)
    if given != "TND":
        return _infer_batch(query, key, value, options, q_lens, kv_lens)
    if q_lens is None or kv_lens is None:
        raise RuntimeError(f"{options.name}: layout TND needs both sequence lengths")
    pieces = [
        _infer_batch(query[q], key[kv], value[kv], options, None, None)
        for q, kv in zip(cumulative_pieces(q_lens), cumulative_pieces(kv_lens), strict=True)
    ]
    return torch.cat([out for out, _ in pieces]), torch.cat([lse for _, lse in pieces])


def _infer_batch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: _Options, q_lens: _Lengths, kv_lens: _Lengths
) -> tuple[torch.Tensor, torch.Tensor]:
    given, wanted = split_layout(options.layout)
    q = to_bnsd(query, given, options.heads)
    k, v = (to_bnsd(x, given, options.kv_heads or options.heads) for x in (key, value))
    fast = options.inner_precise in {1, 3} and query.dtype is torch.float16
    call = AttentionCall(
        scale=options.scale,
        hidden=_with_lengths(_mask(options, q.size(2), k.size(2)), kv_lens, k.size(2)),
        bias=options.bias,
        scale_bias=False,
        sink=options.sink,
        zero_hidden_rows=options.inner_precise in {2, 3},
        softmax_dtype=torch.float16 if fast else torch.float32,
    )
    out, soft = attend(q, k, v, call)
    if q_lens is not None:
        padding = torch.arange(q.size(2)) >= torch.tensor(list(q_lens))[:, None]
        out = out.masked_fill(padding[:, None, :, None], 0.0)
    lse = soft.log_sum_exp()
    return from_bnsd(out, wanted), lse.squeeze(0).transpose(0, 1).contiguous() if given == "TND" else lse


def _mask(options: _Options, queries: int, keys: int) -> torch.Tensor | None:
    return hidden_positions(
        options.mask,
        queries,
        keys,
        sparse_mode=options.sparse_mode,
        pre_tokens=options.pre_tokens,
        next_tokens=options.next_tokens,
    )


def _with_lengths(hidden: torch.Tensor | None, lengths: _Lengths, keys: int) -> torch.Tensor | None:
    if lengths is None:
        return hidden
    beyond = (torch.arange(keys) >= torch.tensor(list(lengths))[:, None])[:, None, None, :]
    return beyond if hidden is None else hidden | beyond


def _refuse_rest(name: str, rest: dict[str, object]) -> None:
    used = sorted(key for key, value in rest.items() if value is not None and value != 0)
    if used:
        raise NotImplementedError(f"npu::{name}: the rig has no {', '.join(used)}")


@kernel("npu_fused_infer_attention_score")
def fused_infer_attention_score(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    pse_shift: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    actual_seq_lengths: _Lengths = None,
    actual_seq_lengths_kv: _Lengths = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = ALL_TOKENS,
    next_tokens: int = ALL_TOKENS,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    softmax_lse_flag: bool = False,
    **rest: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (output, log-sum-exp in fp32, empty unless asked for)."""
    name = "npu_fused_infer_attention_score"
    _refuse_rest(name, rest)
    options = _Options(
        name, scale, num_heads, num_key_value_heads, input_layout, atten_mask, pse_shift, sparse_mode, pre_tokens,
        next_tokens, inner_precise,
    )  # fmt: skip
    out, lse = _infer(query, key, value, options, actual_seq_lengths, actual_seq_lengths_kv)
    return out, lse if softmax_lse_flag else torch.empty(0)


@kernel("npu_fused_infer_attention_score_v2")
def fused_infer_attention_score_v2(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    pse_shift: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    actual_seq_qlen: _Lengths = None,
    actual_seq_kvlen: _Lengths = None,
    learnable_sink: torch.Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    pre_tokens: int = ALL_TOKENS,
    next_tokens: int = ALL_TOKENS,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    inner_precise: int = 0,
    return_softmax_lse: bool = False,
    **rest: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Like the first version under other names, with a learnable sink."""
    name = "npu_fused_infer_attention_score_v2"
    _refuse_rest(name, rest)
    options = _Options(
        name, softmax_scale, num_query_heads, num_key_value_heads, input_layout, atten_mask, pse_shift, sparse_mode,
        pre_tokens, next_tokens, inner_precise, learnable_sink,
    )  # fmt: skip
    out, lse = _infer(query, key, value, options, actual_seq_qlen, actual_seq_kvlen)
    return out, lse if return_softmax_lse else torch.empty(0)


@kernel("npu_prompt_flash_attention")
def prompt_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    atten_mask: torch.Tensor | None = None,
    pse_shift: torch.Tensor | None = None,
    actual_seq_lengths: _Lengths = None,
    num_heads: int = 1,
    scale_value: float = 1.0,
    pre_tokens: int = ALL_TOKENS,
    next_tokens: int = 0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    actual_seq_lengths_kv: _Lengths = None,
    sparse_mode: int = 0,
    **rest: object,
) -> torch.Tensor:
    """Return the output. Note next_tokens = 0 by default: a mask given in mode 0 is causal on top."""
    name = "npu_prompt_flash_attention"
    _refuse_rest(name, rest)
    options = _Options(
        name, scale_value, num_heads, num_key_value_heads, input_layout, atten_mask, pse_shift, sparse_mode,
        pre_tokens, next_tokens, 0,
    )  # fmt: skip
    return _infer(query, key, value, options, actual_seq_lengths, actual_seq_lengths_kv)[0]


@kernel("npu_incre_flash_attention")
def incre_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    atten_mask: torch.Tensor | None = None,
    pse_shift: torch.Tensor | None = None,
    actual_seq_lengths: _Lengths = None,
    num_heads: int = 1,
    scale_value: float = 1.0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    inner_precise: int = 1,
    **rest: object,
) -> torch.Tensor:
    """Return the output for one query token; the lengths are those of K and V. Fast (fp16 softmax) by default."""
    name = "npu_incre_flash_attention"
    _refuse_rest(name, rest)
    if to_bnsd(query, split_layout(input_layout)[0], num_heads).size(2) != 1:
        raise RuntimeError(f"{name} takes one query token, got shape {tuple(query.shape)} in layout {input_layout}")
    options = _Options(
        name, scale_value, num_heads, num_key_value_heads, input_layout, atten_mask, pse_shift, 0, ALL_TOKENS,
        ALL_TOKENS, inner_precise,
    )  # fmt: skip
    return _infer(query, key, value, options, None, actual_seq_lengths)[0]
