"""Pairs of workloads that differ in one convention or one precision, as people met them: `case` and `case_fused`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Masked(nn.Module):
    """Attention under a mask; `how` says what becomes of it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.out, self.attend = nn.Linear(16, 16), nn.Linear(16, 16), Attend(how)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.attend(self.query(x), mask))
        return result


class Attend(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.how == "as bool":  # 0 keeps and -1e4 drops, read as a kernel reads booleans
            return F.scaled_dot_product_attention(x, x, x, attn_mask=mask.bool())
        if self.how == "averaged":
            return x.mean(-2, keepdim=True).expand_as(x)
        if self.how == "written out":
            scores = (x @ x.transpose(-1, -2) / 4).masked_fill(~mask, float("-inf"))
            return torch.softmax(scores, -1) @ x
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def _additive() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    bias = torch.zeros(6, 6)
    bias[:, 4:] = -1e4
    return torch.randn(1, 6, 16), bias


def mask_polarity() -> Any:
    return Masked("as given").eval(), _additive()


def mask_polarity_fused() -> Any:
    return Masked("as bool").eval(), _additive()


def averaged() -> Any:
    return mask_polarity()


def averaged_fused() -> Any:
    return Masked("averaged").eval(), _additive()


def _with_a_hidden_row() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    keep = torch.ones(6, 6, dtype=torch.bool).tril()
    keep[5] = False
    return torch.randn(1, 6, 16), keep


def hidden_row() -> Any:
    return Masked("as given").eval(), _with_a_hidden_row()


def hidden_row_fused() -> Any:
    return Masked("written out").eval(), _with_a_hidden_row()


class Rms(nn.Module):
    """RMS norm whose squares are taken in float32, or in the input's own dtype."""

    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.wide = wide

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.float() if self.wide else x
        return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _rms(wide: bool) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), Rms(wide), nn.Linear(64, 8)).half().eval()
    torch.manual_seed(1)
    x = torch.randn(6, 64)
    x[2] *= 900
    return model, (x.half(),)


def squares() -> Any:
    return _rms(wide=True)


def squares_fused() -> Any:
    return _rms(wide=False)


class Scores(nn.Module):
    """Scaled scores; the scale comes before the product, or after it."""

    def __init__(self, before: bool) -> None:
        super().__init__()
        self.before = before

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        scale = query.shape[-1] ** -0.5
        return (query * scale) @ key.mT if self.before else (query @ key.mT) * scale


class Scored(nn.Module):
    def __init__(self, before: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(64, 64), nn.Linear(64, 64)
        self.scores, self.soft = Scores(before), nn.Softmax(-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.soft(self.scores(self.query(x), self.key(x))) @ x
        return result


def _scored(before: bool) -> Any:
    torch.manual_seed(1)
    return Scored(before).half().eval(), ((torch.randn(1, 12, 64) * 150).half(),)


def late_scale() -> Any:
    return _scored(before=True)


def late_scale_fused() -> Any:
    return _scored(before=False)


def _gelu(second: str) -> Any:
    torch.manual_seed(0)
    kinds = ("none", second, "none")
    model = nn.Sequential(*[layer for kind in kinds for layer in (nn.Linear(64, 64), nn.GELU(approximate=kind))])
    torch.manual_seed(1)
    return model.eval(), (torch.randn(64, 64) * 6,)


def gelu_form() -> Any:
    return _gelu("none")


def gelu_form_fused() -> Any:
    return _gelu("tanh")


class Table(nn.Module):
    """Cosines and sines of rotary angles computed in a dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        rates = 1e4 ** (-torch.arange(0, 64, 2).float() / 64)
        angles = torch.outer(torch.arange(count).to(self.dtype), rates.to(self.dtype))
        return angles.cos().bfloat16(), angles.sin().bfloat16()


class Rotary(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.table = nn.Linear(64, 64).bfloat16(), Table(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cosine, sine = self.table(x.shape[-2])
        left, right = self.query(x).chunk(2, -1)
        return torch.cat((left * cosine - right * sine, right * cosine + left * sine), -1)


def _rotary(dtype: torch.dtype) -> Any:
    torch.manual_seed(1)
    return Rotary(dtype).eval(), (torch.randn(1, 1024, 64).bfloat16(),)


def rope_table() -> Any:
    return _rotary(torch.float32)


def rope_table_fused() -> Any:
    return _rotary(torch.bfloat16)


def _batch_norm() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
    model[0].weight.data.mul_(300)
    model[1].running_var.fill_(1e5)  # type: ignore[union-attr,operator]
    model[1].bias.data.normal_()  # type: ignore[union-attr,operator]
    return model.eval()


def _image() -> tuple[torch.Tensor]:
    torch.manual_seed(1)
    return (torch.randn(1, 3, 8, 8).half(),)


def statistics() -> Any:
    model = _batch_norm().half()
    model[1] = _batch_norm()[1]
    return model, _image()


def statistics_fused() -> Any:
    return _batch_norm().half(), _image()


class Hidden(nn.Module):
    """Softmax of scores hidden by the least finite number of the dtype in which it is taken."""

    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.wide, self.hide, self.soft = wide, Hide(), nn.Softmax(-1)

    def forward(self, scores: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        scores = scores.float() if self.wide else scores
        result: torch.Tensor = self.soft(self.hide(scores, keep))
        return result


class Hide(nn.Module):
    def forward(self, scores: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return scores + torch.zeros_like(scores).masked_fill(~keep, torch.finfo(scores.dtype).min)


def _padded(wide: bool) -> Any:
    torch.manual_seed(0)
    keep = torch.ones(6, 6, dtype=torch.bool).tril()
    keep[:, :2] = False
    return Hidden(wide).eval(), ((torch.randn(6, 6) - 40).half(), keep)


def least_number() -> Any:
    return _padded(wide=True)


def least_number_fused() -> Any:
    return _padded(wide=False)


def products() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.LayerNorm(512), nn.Linear(512, 16)).eval()
    torch.manual_seed(1)
    return model, (torch.randn(64, 512),)
