"""Reference kernels of the attention family: fusion attention v1-v3, the inference kernels.

Conventions of the device, not of torch: a mask's True hides, scale defaults to 1, sparse_mode means nothing without a
mask. Rounding points: products accumulate in fp32, softmax in fp32, the unnormalised probabilities are rounded to the
input dtype before the product with V, the division by their sum comes last, one cast at the end. A device works in
tiles and so rounds more often; this kernel has one tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from npu_rig.attention_core import AttentionCall, SoftmaxResult, attend
from npu_rig.attention_layout import cumulative_pieces, from_bnsd, to_bnsd
from npu_rig.attention_mask import ALL_TOKENS, hidden_positions
from npu_rig.registry import kernel

_FUSION_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_INFERENCE_DTYPES = (torch.float16, torch.bfloat16)


def _check_dtype(name: str, tensor: torch.Tensor, allowed: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in allowed:
        raise RuntimeError(f"{name} takes {', '.join(map(str, allowed))} on this device, not {tensor.dtype}")


def _refuse(name: str, **given: object) -> None:
    """Say that the rig does not imitate an argument, rather than ignore it."""
    used = sorted(key for key, value in given.items() if value is not None and value != 0)
    if used:
        raise NotImplementedError(f"npu::{name}: the rig has no {', '.join(used)}")


def _fusion(
    name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: int, layout: str, **options: Any
) -> tuple[torch.Tensor, SoftmaxResult]:
    """Run training attention in any layout; options are those of v1 under v2's spelling."""
    _check_dtype(name, query, _FUSION_DTYPES)
    _refuse(name, padding_mask=options.pop("padding_mask", None), dropout_mask=options.pop("dropout_mask", None))
    if options.pop("keep_prob", 1.0) != 1.0:
        raise NotImplementedError(f"npu::{name}: the rig has no dropout")
    q_ends, kv_ends = options.pop("q_ends", None), options.pop("kv_ends", None)
    if layout != "TND":
        return _fusion_bnsd(query, key, value, heads, layout, **options)
    if q_ends is None or kv_ends is None:
        raise RuntimeError(f"{name}: layout TND needs actual_seq_qlen and actual_seq_kvlen")
    pieces = [
        _fusion_bnsd(query[q], key[kv], value[kv], heads, "TND", **options)
        for q, kv in zip(cumulative_pieces(q_ends), cumulative_pieces(kv_ends), strict=True)
    ]
    return torch.cat([out for out, _ in pieces]), SoftmaxResult.concatenate([soft for _, soft in pieces])


def _fusion_bnsd(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: int, layout: str, **options: Any
) -> tuple[torch.Tensor, SoftmaxResult]:
    q = to_bnsd(query, layout, heads)
    head_dim = q.size(3)
    k, v = (to_bnsd(x, layout, _kv_heads(x, layout, head_dim)) for x in (key, value))
    hidden = hidden_positions(
        options["atten_mask"],
        q.size(2),
        k.size(2),
        sparse_mode=options["sparse_mode"],
        pre_tokens=options["pre_tokens"],
        next_tokens=options["next_tokens"],
        prefix=options["prefix"],
    )
    call = AttentionCall(
        scale=options["scale"],
        hidden=hidden,
        bias=options["pse"],
        scale_bias=options["pse_type"] == 1,
        sink=options["sink"],
        zero_hidden_rows=options["inner_precise"] == 2,
        softmax_dtype=torch.float32,
    )
    out, soft = attend(q, k, v, call)
    return from_bnsd(out, layout), soft.spread(layout)


def _kv_heads(tensor: torch.Tensor, layout: str, head_dim: int) -> int:
    return tensor.size(-1) // head_dim if layout in {"BSH", "SBH"} else 0


def _pse_type(pse_type: int) -> int:
    if pse_type not in {0, 1}:
        raise NotImplementedError("the rig has no generated ALiBi (pse_type 2, 3)")
    return pse_type


@kernel("npu_fusion_attention")
def fusion_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    pse: torch.Tensor | None = None,
    padding_mask: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = ALL_TOKENS,
    next_tockens: int = ALL_TOKENS,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: torch.Tensor | None = None,
    dropout_mask: torch.Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:
    """Return (out, softmax max, softmax sum, empty, seed, offset, numels); pse is added before the scale."""
    out, soft = _fusion(
        "npu_fusion_attention", query, key, value, head_num, input_layout,
        pse=pse, pse_type=1, padding_mask=padding_mask, atten_mask=atten_mask, scale=scale, keep_prob=keep_prob,
        pre_tokens=pre_tockens, next_tokens=next_tockens, inner_precise=inner_precise, prefix=prefix,
        q_ends=actual_seq_qlen, kv_ends=actual_seq_kvlen, sparse_mode=sparse_mode, sink=sink,
        dropout_mask=dropout_mask,
    )  # fmt: skip
    return out, soft.maximum, soft.total, query.new_empty(0), 0, 0, 0


@kernel("npu_fusion_attention_v2")
def fusion_attention_v2(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: torch.Tensor | None = None,
    padding_mask: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tokens: int = ALL_TOKENS,
    next_tokens: int = ALL_TOKENS,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    pse_type: int = 1,
    q_start_idx: Sequence[int] | None = None,
    kv_start_idx: Sequence[int] | None = None,
    softmax_layout: str = "",
    sink: torch.Tensor | None = None,
    dropout_mask: torch.Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:
    """Like v1; pse_type 0 adds pse after the scale (torch's additive bias), 1 before it."""
    _refuse("npu_fusion_attention_v2", query_rope=query_rope, key_rope=key_rope)
    out, soft = _fusion(
        "npu_fusion_attention_v2", query, key, value, head_num, input_layout,
        pse=pse, pse_type=_pse_type(pse_type), padding_mask=padding_mask, atten_mask=atten_mask, scale=scale,
        keep_prob=keep_prob, pre_tokens=pre_tokens, next_tokens=next_tokens, inner_precise=inner_precise,
        prefix=prefix, q_ends=actual_seq_qlen, kv_ends=actual_seq_kvlen, sparse_mode=sparse_mode, sink=sink,
        dropout_mask=dropout_mask,
    )  # fmt: skip
    return out, soft.maximum, soft.total, query.new_empty(0), 0, 0, 0


@kernel("npu_fusion_attention_v3")
def fusion_attention_v3(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    pse: torch.Tensor | None = None,
    padding_mask: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = ALL_TOKENS,
    next_tockens: int = ALL_TOKENS,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: torch.Tensor | None = None,
    actual_seq_kvlen: torch.Tensor | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return six tensors; the sequence ends are tensors too. This is what aten SDPA becomes on the device."""
    out, soft = _fusion(
        "npu_fusion_attention_v3", query, key, value, head_num, input_layout,
        pse=pse, pse_type=1, padding_mask=padding_mask, atten_mask=atten_mask, scale=scale, keep_prob=keep_prob,
        pre_tokens=pre_tockens, next_tokens=next_tockens, inner_precise=inner_precise, prefix=prefix,
        q_ends=None if actual_seq_qlen is None else actual_seq_qlen.tolist(),
        kv_ends=None if actual_seq_kvlen is None else actual_seq_kvlen.tolist(),
        sparse_mode=sparse_mode, sink=sink,
    )  # fmt: skip
    seed, offset = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    return out, soft.maximum, soft.total, query.new_empty(0), seed, offset
