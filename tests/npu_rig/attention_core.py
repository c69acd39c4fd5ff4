"""One attention call on [B, N, S, D] tensors, with the device's rounding points.

Invariant: nothing is rounded but the probabilities before the product with V, and the result once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_LANES = 8  # softmax statistics come back eight times over, as the vector unit holds them


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one call asks for beside its three tensors; `hidden` broadcasts to [B, N, Sq, Skv], True hides."""

    scale: float
    hidden: torch.Tensor | None
    bias: torch.Tensor | None
    scale_bias: bool
    sink: torch.Tensor | None
    zero_hidden_rows: bool
    softmax_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class SoftmaxResult:
    """Row maximum and row sum of the softmax in fp32: [B, N, Sq, 1] from `attend`, widened by `spread`."""

    maximum: torch.Tensor
    total: torch.Tensor

    def spread(self, layout: str) -> SoftmaxResult:
        """Return [B, N, Sq, 8] tensors, or [T, N, 8] for layout TND."""
        wide = [x.expand(*x.shape[:-1], _LANES).contiguous() for x in (self.maximum, self.total)]
        if layout == "TND":
            wide = [x.squeeze(0).transpose(0, 1).contiguous() for x in wide]
        return SoftmaxResult(*wide)

    def log_sum_exp(self) -> torch.Tensor:
        """Return the log of the softmax denominator, [B, N, Sq, 1]."""
        return self.maximum + self.total.log()

    @staticmethod
    def concatenate(pieces: list[SoftmaxResult]) -> SoftmaxResult:
        """Join the sequences of a TND call."""
        return SoftmaxResult(torch.cat([p.maximum for p in pieces]), torch.cat([p.total for p in pieces]))


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall
) -> tuple[torch.Tensor, SoftmaxResult]:
    """Return ([B, N, Sq, D] in q's dtype, softmax statistics); K and V may have fewer heads than Q."""
    groups = q.size(1) // k.size(1)
    if groups * k.size(1) != q.size(1):
        raise RuntimeError(f"{q.size(1)} query heads do not share {k.size(1)} key heads evenly")
    k, v = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (k, v))
    scores = _scores(q, k, call)
    maximum = scores.amax(-1, keepdim=True)
    if call.sink is not None:
        maximum = torch.maximum(maximum, call.sink.float().view(1, -1, 1, 1))
    weights = (scores - maximum).to(call.softmax_dtype).exp().float()
    total = weights.sum(-1, keepdim=True)
    if call.sink is not None:
        total = total + (call.sink.float().view(1, -1, 1, 1) - maximum).exp()
    out = (weights.to(q.dtype).float() @ v.float()) / total
    if call.zero_hidden_rows and call.hidden is not None:
        out = out.masked_fill(call.hidden.all(-1, keepdim=True), 0.0)
    return out.to(q.dtype), SoftmaxResult(maximum, total)


def _scores(q: torch.Tensor, k: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    scores = q.float() @ k.float().mT
    if call.bias is not None and call.scale_bias:
        scores = (scores + call.bias.float()) * call.scale
    else:
        scores = scores * call.scale
        if call.bias is not None:
            scores = scores + call.bias.float()
    scores = scores.to(call.softmax_dtype).float()
    if call.hidden is None:
        return scores
    # A finite floor, not -inf: a row that is hidden altogether then averages V, as the device does.
    return scores.masked_fill(call.hidden, torch.finfo(call.softmax_dtype).min)
