"""Guess the clean latents from noisy ones, the time and the text: a small UNet of the usual parts."""

# torch types the call of a module as Any.
# mypy: disable-error-code="no-any-return"

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from align.demo.quantized import QuantLinear

LATENT_SIZE = 24


class ActThenAdd(nn.Module):
    """x + relu(bn(conv(x)))."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.bn(self.conv(x)))


class AddThenAct(nn.Module):
    """relu(bn(conv(relu(bn(conv(x))))) + x), the block of a residual network."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(inner)) + x)


class ResnetBlock(nn.Module):
    """Two GroupNorm-SiLU-conv stages around a skip; the time enters between them."""

    def __init__(self, inputs: int, outputs: int, time_width: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(8, inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(time_width, outputs)
        self.norm2 = nn.GroupNorm(8, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        inner = self.conv1(F.silu(self.norm1(x)))
        inner = inner + self.time(time)[:, :, None, None]
        inner = self.conv2(F.silu(self.norm2(inner)))
        return self.skip(x) + inner


class SelfAttention(nn.Module):
    """Attention over positions, softmax written by hand."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        scores = torch.matmul(query, key.transpose(-2, -1)) * (width // self.heads) ** -0.5
        mixed = torch.matmul(F.softmax(scores, dim=-1), value)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class CrossAttention(nn.Module):
    """Attention from positions to the text states."""

    def __init__(self, width: int, text_width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(text_width, width)
        self.value = nn.Linear(text_width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        query, key, value = self._split(self.query(x)), self._split(self.key(text)), self._split(self.value(text))
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))

    def _split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)


class FeedForward(nn.Module):
    """linear -> GELU -> linear."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class QuantFeedForward(nn.Module):
    """GEGLU whose first projection keeps int8 weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = QuantLinear(width, 8 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.proj(x).chunk(2, dim=-1)
        return self.down(value * F.gelu(gate))


class TransformerBlock(nn.Module):
    """Self-attention, cross-attention and a feed-forward over the positions of a map [batch, width, h, w]."""

    def __init__(self, width: int, text_width: int, feed: nn.Module, heads: int = 4) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(width, eps=1e-6)
        self.attn1 = SelfAttention(width, heads)
        self.norm2 = nn.RMSNorm(width, eps=1e-6)
        self.attn2 = CrossAttention(width, text_width, heads)
        self.norm3 = nn.RMSNorm(width, eps=1e-6)
        self.feed = feed

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        batch, width, height, breadth = x.shape
        rows = x.flatten(2).transpose(1, 2)
        rows = rows + self.attn1(self.norm1(rows))
        rows = rows + self.attn2(self.norm2(rows), text)
        rows = rows + self.feed(self.norm3(rows))
        return rows.transpose(1, 2).reshape(batch, width, height, breadth)


class Upsample(nn.Module):
    """Twice the size by nearest neighbour, then a convolution."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class TimeEmbedding(nn.Module):
    """Map a time in 0..1 to a row [1, width] of the dtype and device of `like`."""

    def __init__(self, width: int, frequencies: int = 32) -> None:
        super().__init__()
        self.frequencies = frequencies
        self.linear1 = nn.Linear(2 * frequencies, width)
        self.linear2 = nn.Linear(width, width)

    def forward(self, time: float, like: Tensor) -> Tensor:
        exponent = torch.arange(self.frequencies, device=like.device, dtype=torch.float32) / self.frequencies
        angle = 1000.0 * time * torch.exp(-math.log(10000.0) * exponent)
        waves = torch.cat((angle.cos(), angle.sin()))[None].to(like.dtype)
        return self.linear2(F.silu(self.linear1(waves)))


class Denoiser(nn.Module):
    """Map latents [batch, 4, 24, 24], a time in 0..1 and text [batch, length, text_width] to clean latents."""

    def __init__(self, base: int = 64, width: int = 128, text_width: int = 128) -> None:
        super().__init__()
        self.time = TimeEmbedding(width)
        self.position = nn.Parameter(torch.zeros(1, base, LATENT_SIZE, LATENT_SIZE))
        self.conv_in = nn.Conv2d(4, base, 3, padding=1)
        self.stem = nn.Sequential(AddThenAct(base), ActThenAdd(base))
        self.down0 = ResnetBlock(base, base, width)
        self.shrink = nn.Conv2d(base, width, 3, stride=2, padding=1)
        self.down1 = ResnetBlock(width, width, width)
        self.down_mix = TransformerBlock(width, text_width, FeedForward(width))
        self.mid_in = ResnetBlock(width, width, width)
        self.mid_mix = TransformerBlock(width, text_width, QuantFeedForward(width))
        self.mid_out = AddThenAct(width)
        self.up1 = ResnetBlock(2 * width, width, width)
        self.up_mix = TransformerBlock(width, text_width, FeedForward(width))
        self.grow = Upsample(width, base)
        self.up0 = ResnetBlock(2 * base, base, width)
        self.tail = nn.Sequential(ActThenAdd(base), AddThenAct(base))
        self.norm_out = nn.GroupNorm(8, base)
        self.conv_out = nn.Conv2d(base, 4, 3, padding=1)

    def forward(self, latents: Tensor, time: float, text: Tensor) -> Tensor:
        moment = F.silu(self.time(time, latents))
        fine = self.stem(self.conv_in(latents) + self.position)
        fine = self.down0(fine, moment)
        coarse = self.down_mix(self.down1(self.shrink(fine), moment), text)
        middle = self.mid_out(self.mid_mix(self.mid_in(coarse, moment), text))
        rising = self.up_mix(self.up1(torch.cat((middle, coarse), dim=1), moment), text)
        rising = self.up0(torch.cat((self.grow(rising), fine), dim=1), moment)
        return self.conv_out(F.silu(self.norm_out(self.tail(rising))))
