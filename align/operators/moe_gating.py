"""The gate of a mixture of experts: softmax over the experts, then the k best. Fused on NPUs only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from align.dumpers.model import OpClass
from align.dumpers.survey import CallGraph, CallRecord
from align.operators._npu_call import draw, drawn, refuse_rest, run_npu, widest, written
from align.operators._patterns import argument, close, is_last_axis, maker, take
from align.operators.base import Binding, Bound, Kernel, Match, Operator


def unfused(logits: Tensor, k: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """logits [..., e] -> (weights [..., k], experts [..., k] int64), best first."""
    weights, experts = torch.softmax(logits, dim=-1, dtype=dtype).topk(k, dim=-1)
    return weights, experts


def fused(logits: Tensor, k: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """npu_moe_gating_top_k_softmax: float32 inside, weights in the logits' dtype, experts as int32."""
    weights, experts, _ = run_npu("npu_moe_gating_top_k_softmax", logits.reshape(-1, logits.shape[-1]), None, k)
    shape = (*logits.shape[:-1], k)
    return weights.to(dtype or logits.dtype).reshape(shape), experts.to(torch.int64).reshape(shape)


def refuses(bound: Bound, dtype: torch.dtype) -> str:
    """float16, bfloat16, float32; at most 1024 experts."""
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"no NPU kernel in {str(dtype).removeprefix('torch.')}"
    experts = bound["logits"].shape[-1]
    return f"npu_moe_gating_top_k_softmax takes up to 1024 experts, not {experts}" if experts > 1024 else ""


def as_topk(result: tuple[Tensor, Tensor]) -> Any:
    """What torch.topk returns: a pair with the names `values` and `indices`."""
    return torch.return_types.topk(result)


def find(record: CallRecord, graph: CallGraph) -> Match | None:
    """topk(softmax(logits)) over the last axis, the largest."""
    if record.op != "topk" or not argument(record, 3, "largest", True):
        return None
    values = argument(record, 0, "input")
    softmax = maker(graph, record, 0)
    if softmax is None or softmax.op != "softmax" or not is_last_axis(argument(record, 2, "dim", -1), values):
        return None
    if not is_last_axis(argument(softmax, 1, "dim"), values):
        return None
    binding: dict[str, Binding] = {
        "logits": take(softmax, 0, "input"),
        "k": take(record, 1, "k"),
        "dtype": take(softmax, -1, "dtype"),
    }
    match = close(graph, MOE_GATING, (softmax, record), binding)
    return None if match is None else Match(MOE_GATING, match.calls, match.binding, shape_result=as_topk)


MOE_GATING = Operator(
    name="moe_gating",
    op_class=OpClass.SENSITIVE,
    summary="softmax over experts, then the k best",
    rounding="after the softmax; fused: once, from float32",
    finders=(find,),
    unfused=unfused,
    kernels={"npu": Kernel(fused, "npu_moe_gating_top_k_softmax", refuses)},
    example=drawn((6, 16), names="logits", k=2, dtype=None),
)


# -- torch_npu's own calls ---------------------------------------------------------------------------------------------


def npu_moe_gating_top_k_softmax(
    x: Tensor, finished: Tensor | None = None, k: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """(weights, experts int32, row numbers int32 counted k-major); finished rows get the expert number e."""
    weights, experts = x.to(widest(x)).softmax(dim=-1).topk(k, dim=-1)
    experts = experts.to(torch.int32)
    if finished is not None:
        experts = experts.masked_fill(finished.unsqueeze(-1), x.shape[-1])
    tokens = weights.numel() // k
    rows = torch.arange(tokens * k, dtype=torch.int32, device=x.device).reshape(k, tokens).t().reshape(experts.shape)
    return weights.to(x.dtype), experts, rows.contiguous()


def npu_moe_gating_top_k(
    x: Tensor, k: int, *, bias: Tensor | None = None, k_group: int = 1, group_count: int = 1,
    group_select_mode: int = 0, renorm: int = 0, norm_type: int = 0, out_flag: bool = False,
    routed_scaling_factor: float = 1.0, eps: float = 1e-20, **rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(weights, experts int32, scores float32); norm_type 0 softmax, 1 sigmoid; the bias moves the choice only.

    group_select_mode 0 ranks a group of experts by its best, 1 by the sum of its best two (DeepSeek-V3).
    """
    refuse_rest("npu_moe_gating_top_k", rest)
    wide = x.to(widest(x))
    scores = wide.softmax(dim=-1) if norm_type == 0 else torch.sigmoid(wide)
    ranking = scores if bias is None else scores + bias.to(scores.dtype)
    if group_count > 1:
        ranking = _best_groups(ranking, group_count, k_group, 1 if group_select_mode == 0 else 2)
    experts = ranking.topk(k, dim=-1).indices
    weights = scores.gather(-1, experts)
    if norm_type == 1 or renorm:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + eps)
    shown = scores if out_flag else torch.zeros_like(scores)
    return (weights * routed_scaling_factor).to(x.dtype), experts.to(torch.int32), shown


def _best_groups(ranking: Tensor, count: int, kept: int, best: int) -> Tensor:
    """The ranking with experts outside the `kept` best groups out of reach."""
    groups = ranking.reshape(*ranking.shape[:-1], count, -1)
    chosen = groups.topk(best, dim=-1).values.sum(dim=-1).topk(kept, dim=-1).indices
    outside = torch.ones(groups.shape[:-1], dtype=torch.bool, device=ranking.device).scatter(-1, chosen, False)
    return groups.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(-2)


def _grouped_example(device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    bias = draw((16,), device, dtype, seed + 1) * 0.1
    options = {"k_group": 2, "group_count": 4, "group_select_mode": 1, "norm_type": 1, "routed_scaling_factor": 2.5}
    return {"x": draw((6, 16), device, dtype, seed), "k": 3, "bias": bias, **options}


def _entry(op: str, form: Any, example: Any) -> Operator:
    return written(
        op, form, name="moe_gating", rounding="once, from float32", example=example, op_class=OpClass.SENSITIVE
    )


OPERATORS: tuple[Operator, ...] = (
    MOE_GATING,
    _entry("npu_moe_gating_top_k_softmax", npu_moe_gating_top_k_softmax, drawn((6, 16), names="x", finished=None, k=2)),
    _entry("npu_moe_gating_top_k", npu_moe_gating_top_k, _grouped_example),
)
