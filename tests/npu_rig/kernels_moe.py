"""Reference kernels of mixture-of-experts gating."""

from __future__ import annotations

import torch
from npu_rig.registry import kernel


@kernel("npu_moe_gating_top_k_softmax")
def gating_top_k_softmax(
    x: torch.Tensor, finished: torch.Tensor | None = None, k: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (weights, expert, row) of the k best experts of each token; row counts in k-major order."""
    weights, experts = x.float().softmax(-1).topk(k, -1)
    experts = experts.to(torch.int32)
    if finished is not None:
        experts = experts.masked_fill(finished.unsqueeze(-1), x.size(-1))
    tokens = weights.numel() // k
    rows = torch.arange(tokens * k, dtype=torch.int32).view(k, tokens).t().reshape(experts.shape)
    return weights.to(x.dtype), experts, rows.contiguous()


@kernel("npu_moe_gating_top_k")
def gating_top_k(
    x: torch.Tensor,
    k: int,
    *,
    bias: torch.Tensor | None = None,
    input_ids: torch.Tensor | None = None,
    tid2eid: torch.Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (weights, experts, normalised scores if asked for); norm_type 0 is softmax, 1 sigmoid.

    The bias moves the choice, not the weights. group_select_mode 0 ranks a group by its best, 1 by its best two.
    """
    if input_ids is not None or tid2eid is not None:
        raise NotImplementedError("npu::npu_moe_gating_top_k: the rig has no input_ids")
    scores = x.float().softmax(-1) if norm_type == 0 else x.float().sigmoid()
    ranking = scores if bias is None else scores + bias.float()
    if group_count > 1:
        ranking = _only_best_groups(ranking, group_count, k_group, best=1 if group_select_mode == 0 else 2)
    experts = ranking.topk(k, -1).indices
    weights = scores.gather(-1, experts)
    if norm_type == 1 or renorm:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    shown = scores if out_flag else torch.zeros_like(scores)
    return (weights * routed_scaling_factor).to(x.dtype), experts.to(torch.int32), shown


def _only_best_groups(ranking: torch.Tensor, groups: int, kept: int, *, best: int) -> torch.Tensor:
    parts = ranking.reshape(*ranking.shape[:-1], groups, -1)
    chosen = parts.topk(best, -1).values.sum(-1).topk(kept, -1).indices
    keep = torch.zeros(parts.shape[:-1], dtype=torch.bool).scatter(-1, chosen, True)
    return parts.masked_fill(~keep.unsqueeze(-1), float("-inf")).flatten(-2)
