"""Attention on [batch, heads, sequence, size] tensors in primitive calls: the core of torch_npu's unfused forms.

A row hidden throughout averages V, as on the device, unless zeros are asked for; nothing here turns into NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from align.operators._npu_call import widest

ROUNDING = (
    "after q k^T, after the scale, after the bias, after the softmax (float32 inside) and after the product with V"
)


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
