"""Attention on an NPU: the fused kernel for the canonical operator, and torch_npu's own attention calls unfused.

Vendor conventions that differ from torch's: True in a mask hides, `scale` is 1 unless given, `sparse_mode` does nothing
without a mask, mode 2 is causal from the top left and mode 3 from the bottom right, a row hidden throughout averages V.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from align.dumpers.errors import UndecidedError
from align.dumpers.model import OpClass
from align.dumpers.survey import Operand
from align.operators._npu_call import draw, refuse_rest, run_npu, widest, written
from align.operators._npu_layout import (
    ALL_TOKENS,
    TOP_LEFT_CAUSAL,
    beyond,
    causal_tile,
    from_heads,
    hidden_positions,
    sequences,
    shared_heads,
    to_heads,
)
from align.operators.base import Bound, Kernel, Operator

ROUNDING = "after QK^T, after the scale, after the bias, after the softmax (float32 inside) and after the product with V"
_LANES = 8  # the softmax statistics come back eight times over, as the vector unit holds them


# -- the canonical operator's kernel ------------------------------------------------------------------------------------


def fusion_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """query [..., h, m, d], key and value [..., g, n, d]; torch's mask (True attends, or additive) in the kernel's terms."""
    q, k, v = (_four_axes(tensor) for tensor in (query, key, value))
    options: dict[str, Any] = {"scale": query.shape[-1] ** -0.5 if scale is None else scale}
    if is_causal:
        options |= {"atten_mask": causal_tile(query.device), "sparse_mode": TOP_LEFT_CAUSAL, "next_tokens": 0}
    if mask is not None:
        full = mask if query.dim() == 4 and mask.dim() <= 4 else _four_axes(mask.expand(*query.shape[:-1], key.shape[-2]))
        options |= _masked(full, q, k)
    result: Tensor = run_npu("npu_fusion_attention_v2", q, k, v, q.shape[1], "BNSD", **options)[0]
    return result.reshape(*query.shape[:-1], value.shape[-1])


def _four_axes(x: Tensor) -> Tensor:
    """[..., h, s, d] -> [n, h, s, d] with n the product of the leading axes."""
    inner = (1,) * (3 - min(x.dim(), 3)) + tuple(x.shape[-3:])
    return x.reshape(math.prod(x.shape[:-3]), *inner)


def _masked(mask: Tensor, query: Tensor, key: Tensor) -> dict[str, Any]:
    """A bool mask turned around; an additive one as bias behind the scale, its floor as hidden positions."""
    shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    # Rows that are hidden throughout: what torch_npu's own SDPA asks for (inner_precise 2) with an explicit mask.
    options: dict[str, Any] = {"inner_precise": 2} if query.shape[2] > 1 else {}
    if mask.dtype == torch.bool:
        return options | {"atten_mask": mask.logical_not().broadcast_to((*shape[:1], 1, *shape[2:]) if _one_head(mask) else shape).contiguous()}
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    bias = mask.masked_fill(hidden, 0.0).to(query.dtype)
    return options | {"atten_mask": hidden.broadcast_to(shape).contiguous(), "pse": bias.broadcast_to(shape).contiguous(), "pse_type": 0}


def _one_head(mask: Tensor) -> bool:
    return mask.dim() < 3 or mask.shape[-3] == 1


def refuses(bound: Bound, dtype: torch.dtype) -> str:
    """What npu_fusion_attention does not take: other dtypes, wide heads, unequal head sizes, dropout."""
    query, key, value = bound["query"], bound["key"], bound["value"]
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"npu_fusion_attention takes float16, bfloat16 and float32, not {str(dtype).removeprefix('torch.')}"
    if not all(isinstance(item, Operand) for item in (query, key, value)):
        return ""
    if query.shape[-1] > 768:
        return f"npu_fusion_attention takes head sizes up to 768, not {query.shape[-1]}"
    if value.shape[-1] != query.shape[-1]:
        return "npu_fusion_attention wants one head size for query and value"
    if query.shape[:-3] != key.shape[:-3]:
        return f"the batches of query {list(query.shape)} and key {list(key.shape)} differ"
    heads = [item.shape[-3] if len(item.shape) > 2 else 1 for item in (query, key)]
    return f"{heads[0]} query heads do not share {heads[1]} key heads evenly" if heads[0] % heads[1] else ""


def native_multi_head(**arguments: Any) -> Any:
    """torch's own call, whose inside torch_npu runs on npu_fusion_attention when no weights are asked for."""
    from align.operators._multi_head import as_called

    return as_called(**arguments)


def refuses_multi_head(bound: Bound, dtype: torch.dtype) -> str:
    """A fused kernel never forms the weights, so it cannot return them."""
    return "the call returns the attention weights, which no fused kernel forms" if bound["need_weights"] else ""


NPU_MULTI_HEAD_KERNEL = Kernel(
    native_multi_head, "torch multi_head_attention_forward on npu_fusion_attention", refuses_multi_head, is_native=True
)
NPU_ATTENTION_KERNEL = Kernel(
    fusion_attention, "npu_fusion_attention (F.scaled_dot_product_attention is left to torch_npu's own choice)", refuses, is_native=True
)


# -- unfused forms ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Request:
    """What one attention call asks for beside its tensors; `hidden` is True where nothing is attended."""

    scale: float
    hidden: Tensor | None = None
    bias: Tensor | None = None
    scales_bias: bool = False
    sink: Tensor | None = None
    zero_hidden_rows: bool = False


def attend(query: Tensor, key: Tensor, value: Tensor, request: Request) -> tuple[Tensor, Tensor, Tensor]:
    """[B, N, S, D] tensors -> (result, row maximum, row sum of exponentials [B, N, Sq, 1] in float32)."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = torch.matmul(query, key.transpose(-2, -1))
    if request.bias is not None and request.scales_bias:
        scores = (scores + request.bias) * request.scale
    else:
        scores = scores * request.scale
        scores = scores if request.bias is None else scores + request.bias
    if request.hidden is not None:
        # A finite floor as on the device: a row hidden throughout averages V instead of turning into NaN.
        scores = scores.masked_fill(request.hidden, torch.finfo(scores.dtype).min)
    wide = scores.to(widest(scores))
    weights = _softmax(wide, request.sink).to(value.dtype)
    result = torch.matmul(weights, value).to(query.dtype)
    if request.zero_hidden_rows and request.hidden is not None:
        result = result.masked_fill(request.hidden.all(dim=-1, keepdim=True), 0.0)
    return result, *_statistics(wide, request.sink)


def _with_sink(scores: Tensor, sink: Tensor) -> Tensor:
    column = sink.to(scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), dim=-1)


def _softmax(scores: Tensor, sink: Tensor | None) -> Tensor:
    """Softmax over the keys; a sink is one more score a head that takes its share and yields nothing."""
    if sink is None:
        return scores.softmax(dim=-1)
    return _with_sink(scores, sink).softmax(dim=-1)[..., :-1]


def _statistics(scores: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    scores = scores if sink is None else _with_sink(scores, sink)
    maximum = scores.amax(dim=-1, keepdim=True)
    return maximum, (scores - maximum).exp().sum(dim=-1, keepdim=True)


def _fused_call(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, layout: str, mask: Tensor | None, request: Request, window: dict[str, Any],
    ends: tuple[Any, Any],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """npu_fusion_attention in any layout: (result, maximum, sum), statistics [B, N, Sq, 8] or [T, N, 8]."""
    if layout != "TND":
        result, maximum, total = _one_batch(query, key, value, head_num, layout, mask, request, window)
        return result, _lanes(maximum), _lanes(total)
    if ends[0] is None or ends[1] is None:
        raise UndecidedError("npu_fusion_attention in layout TND needs actual_seq_qlen and actual_seq_kvlen", "pass the cumulative ends")
    parts = [
        _one_batch(query[q], key[kv], value[kv], head_num, "TND", mask, request, window)
        for q, kv in zip(sequences(ends[0]), sequences(ends[1]), strict=True)
    ]
    return torch.cat([part[0] for part in parts]), *(_lanes(torch.cat([from_heads(part[at], "TND") for part in parts])) for at in (1, 2))


def _lanes(statistic: Tensor) -> Tensor:
    return statistic.expand(*statistic.shape[:-1], _LANES).contiguous()


def _one_batch(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, layout: str, mask: Tensor | None, request: Request, window: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    q = to_heads(query, layout, head_num)
    k, v = (to_heads(item, layout, shared_heads(item, layout, q.shape[-1])) for item in (key, value))
    hidden = hidden_positions(mask, q.shape[2], k.shape[2], **window)
    asked = Request(request.scale, hidden, request.bias, request.scales_bias, request.sink, request.zero_hidden_rows)
    result, maximum, total = attend(q, k, v, asked)
    return from_heads(result, layout), maximum, total


def _no_dropout(keep_prob: float) -> None:
    if keep_prob != 1.0:
        raise UndecidedError(f"attention dropout inside a fused kernel (keep_prob {keep_prob}) cannot be repeated", "call model.eval() first")


def fusion_v1(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, pse: Tensor | None = None,
    padding_mask: Tensor | None = None, atten_mask: Tensor | None = None, scale: float = 1.0, keep_prob: float = 1.0,
    pre_tockens: int = ALL_TOKENS, next_tockens: int = ALL_TOKENS, inner_precise: int = 0, prefix: Any = None,
    actual_seq_qlen: Any = None, actual_seq_kvlen: Any = None, sparse_mode: int = 0, gen_mask_parallel: bool = True,
    sync: bool = False, softmax_layout: str = "", sink: Tensor | None = None, dropout_mask: Tensor | None = None, seed: int = 0,
    offset: int = 0,
) -> tuple[Any, ...]:  # fmt: skip
    """npu_fusion_attention: softmax(mask(scale * (q k^T + pse))) v and the softmax's statistics."""
    _no_dropout(keep_prob)
    refuse_rest("npu_fusion_attention", {"padding_mask": padding_mask, "dropout_mask": dropout_mask, "softmax_layout": softmax_layout})
    request = Request(scale, None, pse, True, sink, inner_precise == 2)
    window = {"sparse_mode": sparse_mode, "before": pre_tockens, "after": next_tockens, "prefix": prefix}
    found = _fused_call(query, key, value, head_num, input_layout, atten_mask, request, window, (actual_seq_qlen, actual_seq_kvlen))
    return *found, query.new_empty(0), 0, 0, 0


def fusion_v2(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, *, pse: Tensor | None = None,
    atten_mask: Tensor | None = None, scale: float = 1.0, keep_prob: float = 1.0, pre_tokens: int = ALL_TOKENS,
    next_tokens: int = ALL_TOKENS, inner_precise: int = 0, prefix: Any = None, actual_seq_qlen: Any = None,
    actual_seq_kvlen: Any = None, sparse_mode: int = 0, gen_mask_parallel: bool = True, sync: bool = False, pse_type: int = 1,
    sink: Tensor | None = None, seed: int = 0, offset: int = 0, **rest: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """npu_fusion_attention_v2: pse_type 1 as v1; 0 adds pse behind the scale, as torch adds its bias."""
    _no_dropout(keep_prob)
    refuse_rest("npu_fusion_attention_v2", rest | {"pse_type (ALiBi)": pse_type not in (0, 1)})
    request = Request(scale, None, pse, pse_type == 1, sink, inner_precise == 2)
    window = {"sparse_mode": sparse_mode, "before": pre_tokens, "after": next_tokens, "prefix": prefix}
    found = _fused_call(query, key, value, head_num, input_layout, atten_mask, request, window, (actual_seq_qlen, actual_seq_kvlen))
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
        query, key, value, head_num, input_layout, pse, padding_mask, atten_mask, scale, keep_prob, pre_tockens, next_tockens,
        inner_precise, prefix, actual_seq_qlen, actual_seq_kvlen, sparse_mode, gen_mask_parallel, sync, softmax_layout, sink,
    )  # fmt: skip
    zeros = torch.zeros(2, dtype=torch.int64, device=query.device)
    return *found[:4], zeros[:1], zeros[1:]


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
    return torch.cat([part[0] for part in parts], dim=1 if wanted == "NTD" else 0), torch.cat([part[1] for part in parts])


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
    pre_tokens: int = ALL_TOKENS, next_tokens: int = ALL_TOKENS, input_layout: str = "BSH", num_key_value_heads: int = 0,
    sparse_mode: int = 0, inner_precise: int = 0, softmax_lse_flag: bool = False, **rest: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """npu_fused_infer_attention_score without paging or quantisation; TND lengths are cumulative."""
    refuse_rest("npu_fused_infer_attention_score", rest)
    window = {"sparse_mode": sparse_mode, "before": pre_tokens, "after": next_tokens}
    asked = _Inference(
        scale, num_heads, num_key_value_heads, input_layout, window, (actual_seq_lengths, actual_seq_lengths_kv), pse_shift, None,
        inner_precise in (2, 3),
    )  # fmt: skip
    result, log_sum = _infer(query, key, value, atten_mask, asked)
    return result, log_sum if softmax_lse_flag else log_sum.new_empty(0)


def fused_infer_v2(
    query: Tensor, key: Tensor, value: Tensor, *, pse_shift: Tensor | None = None, atten_mask: Tensor | None = None,
    actual_seq_qlen: Any = None, actual_seq_kvlen: Any = None, learnable_sink: Tensor | None = None, num_query_heads: int = 1,
    num_key_value_heads: int = 0, softmax_scale: float = 1.0, pre_tokens: int = ALL_TOKENS, next_tokens: int = ALL_TOKENS,
    input_layout: str = "BSH", sparse_mode: int = 0, inner_precise: int = 0, return_softmax_lse: bool = False, **rest: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """npu_fused_infer_attention_score_v2: the first one under other names, with a learnable sink."""
    refuse_rest("npu_fused_infer_attention_score_v2", rest)
    window = {"sparse_mode": sparse_mode, "before": pre_tokens, "after": next_tokens}
    asked = _Inference(
        softmax_scale, num_query_heads, num_key_value_heads, input_layout, window, (actual_seq_qlen, actual_seq_kvlen), pse_shift,
        learnable_sink, inner_precise in (2, 3),
    )  # fmt: skip
    result, log_sum = _infer(query, key, value, atten_mask, asked)
    return result, log_sum if return_softmax_lse else log_sum.new_empty(0)


def prompt_flash(
    query: Tensor, key: Tensor, value: Tensor, *, atten_mask: Tensor | None = None, pse_shift: Tensor | None = None,
    actual_seq_lengths: Any = None, num_heads: int = 1, scale_value: float = 1.0, pre_tokens: int = ALL_TOKENS, next_tokens: int = 0,
    input_layout: str = "BSH", num_key_value_heads: int = 0, actual_seq_lengths_kv: Any = None, sparse_mode: int = 0, **rest: Any,
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
    asked = _Inference(scale_value, num_heads, num_key_value_heads, input_layout, {}, (None, actual_seq_lengths), pse_shift)
    return _infer(query, key, value, atten_mask, asked)[0]


# -- entries ------------------------------------------------------------------------------------------------------------


def _training_example(device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    q, k, v = (draw((2, 4, rows, 16), device, dtype, seed + rows) for rows in (6, 9, 9))
    hidden = draw((2, 1, 6, 9), device, torch.float32, seed) > 0.7
    return {"query": q, "key": k, "value": v, "head_num": 4, "input_layout": "BNSD", "atten_mask": hidden, "scale": 0.25}


def _prompt_example(device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    q, k, v = (draw((2, 6, heads * 16), device, dtype, seed + heads) for heads in (4, 2, 2))
    return {"query": q, "key": k, "value": v, "num_heads": 4, "num_key_value_heads": 2, "scale_value": 0.25, "input_layout": "BSH"}


def _decode_example(device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    return _prompt_example(device, dtype, seed) | {"query": draw((2, 1, 64), device, dtype, seed)}


def _infer_example(device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    values = _prompt_example(device, dtype, seed)
    return values | {"scale": values.pop("scale_value"), "softmax_lse_flag": True}


def _infer_v2_example(device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    values = _prompt_example(device, dtype, seed)
    return values | {"softmax_scale": values.pop("scale_value"), "num_query_heads": values.pop("num_heads"), "return_softmax_lse": True}


def _entry(op: str, unfused: Any, example: Any) -> Operator:
    return written(op, unfused, name="attention", rounding=ROUNDING, example=example, op_class=OpClass.SENSITIVE)


NPU_OPERATORS: tuple[Operator, ...] = (
    _entry("npu_fusion_attention", fusion_v1, _training_example),
    _entry("npu_fusion_attention_v2", fusion_v2, _training_example),
    _entry("npu_fusion_attention_v3", fusion_v3, _training_example),
    _entry("npu_fused_infer_attention_score", fused_infer, _infer_example),
    _entry("npu_fused_infer_attention_score_v2", fused_infer_v2, _infer_v2_example),
    _entry("npu_prompt_flash_attention", prompt_flash, _prompt_example),
    _entry("npu_incre_flash_attention", incremental_flash, _decode_example),
)
