"""Attention on an NPU: the fused kernel for the canonical operator, and the entries of torch_npu's own attention calls.

Vendor conventions that differ from torch's: True in a mask hides, `scale` is 1 unless given, `sparse_mode` does nothing
without a mask, mode 2 is causal from the top left and mode 3 from the bottom right, a row hidden throughout averages V.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from align.dumpers.model import OpClass
from align.dumpers.survey import Operand
from align.operators._npu_attend import ROUNDING
from align.operators._npu_call import draw, run_npu, written
from align.operators._npu_inference_attention import fused_infer, fused_infer_v2, incremental_flash, prompt_flash
from align.operators._npu_layout import TOP_LEFT_CAUSAL, causal_tile
from align.operators._npu_training_attention import fusion_v1, fusion_v2, fusion_v3
from align.operators.base import Bound, Kernel, Operator

# -- the canonical operator's kernel -----------------------------------------------------------------------------------


def fusion_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """query [..., h, m, d], key and value [..., g, n, d]; torch's mask (True attends, or added), here turned around."""
    q, k, v = (_four_axes(tensor) for tensor in (query, key, value))
    options: dict[str, Any] = {"scale": query.shape[-1] ** -0.5 if scale is None else scale}
    if is_causal:
        options |= {"atten_mask": causal_tile(query.device), "sparse_mode": TOP_LEFT_CAUSAL, "next_tokens": 0}
    if mask is not None:
        full = (
            mask if query.dim() == 4 and mask.dim() <= 4 else _four_axes(mask.expand(*query.shape[:-1], key.shape[-2]))
        )
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
        return options | {
            "atten_mask": mask.logical_not()
            .broadcast_to((*shape[:1], 1, *shape[2:]) if _one_head(mask) else shape)
            .contiguous()
        }
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    bias = mask.masked_fill(hidden, 0.0).to(query.dtype)
    return options | {
        "atten_mask": hidden.broadcast_to(shape).contiguous(),
        "pse": bias.broadcast_to(shape).contiguous(),
        "pse_type": 0,
    }


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
    fusion_attention,
    "npu_fusion_attention (F.scaled_dot_product_attention is left to torch_npu's own choice)",
    refuses,
    is_native=True,
)


# -- entries -----------------------------------------------------------------------------------------------------------


def _training_example(device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    q, k, v = (draw((2, 4, rows, 16), device, dtype, seed + rows) for rows in (6, 9, 9))
    hidden = draw((2, 1, 6, 9), device, torch.float32, seed) > 0.7
    return {
        "query": q,
        "key": k,
        "value": v,
        "head_num": 4,
        "input_layout": "BNSD",
        "atten_mask": hidden,
        "scale": 0.25,
    }


def _prompt_example(device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    q, k, v = (draw((2, 6, heads * 16), device, dtype, seed + heads) for heads in (4, 2, 2))
    return {
        "query": q,
        "key": k,
        "value": v,
        "num_heads": 4,
        "num_key_value_heads": 2,
        "scale_value": 0.25,
        "input_layout": "BSH",
    }


def _decode_example(device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    return _prompt_example(device, dtype, seed) | {"query": draw((2, 1, 64), device, dtype, seed)}


def _infer_example(device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    values = _prompt_example(device, dtype, seed)
    return values | {"scale": values.pop("scale_value"), "softmax_lse_flag": True}


def _infer_v2_example(device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    values = _prompt_example(device, dtype, seed)
    return values | {
        "softmax_scale": values.pop("scale_value"),
        "num_query_heads": values.pop("num_heads"),
        "return_softmax_lse": True,
    }


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
