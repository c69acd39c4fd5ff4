"""Encode byte tokens into text states: a small decoder-style transformer, written as such models are published."""

# torch types the call of a module as Any.
# mypy: disable-error-code="no-any-return"

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from align.demo.tokenizer import VOCABULARY


class RMSNorm(nn.Module):
    """Scale rows to unit mean square in float32, then by a learned gain in the input's dtype."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        input_dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return self.weight * x.to(input_dtype)


def rotary_tables(length: int, head_width: int, like: Tensor, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each [length, head_width], worked out in float32 and cast to the dtype of `like`."""
    exponent = torch.arange(0, head_width, 2, device=like.device, dtype=torch.float32) / head_width
    position = torch.arange(length, device=like.device, dtype=torch.float32)
    angle = torch.outer(position, base**-exponent)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads [batch, heads, length, head_width] by their position (half style)."""
    return x * cos + rotate_half(x) * sin


class CausalAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        query = apply_rotary(self.query(x).view(split).transpose(1, 2), cos, sin)
        key = apply_rotary(self.key(x).view(split).transpose(1, 2), cos, sin)
        value = self.value(x).view(split).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class SwiGLU(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class EncoderLayer(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(width)
        self.attention = CausalAttention(width, heads)
        self.mlp_norm = RMSNorm(width)
        self.mlp = SwiGLU(width, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class TextEncoder(nn.Module):
    """Map token ids [batch, length] to text states [batch, length, width]."""

    def __init__(self, width: int = 128, heads: int = 4, hidden: int = 320, layers: int = 3) -> None:
        super().__init__()
        self.head_width = width // heads
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(EncoderLayer(width, heads, hidden) for _ in range(layers))
        self.norm = RMSNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        cos, sin = rotary_tables(tokens.shape[1], self.head_width, x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)
