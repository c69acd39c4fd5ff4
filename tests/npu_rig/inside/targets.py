"""Small workloads for the checks: a model that calls torch_npu itself, others whose plain torch is fused on an NPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class OwnCalls(nn.Module):
    """A decoder layer as an Ascend user writes it: every step is a call of torch_npu."""

    def __init__(self, size: int = 128, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(size, 3 * size)
        self.out = nn.Linear(size, size)
        self.up = nn.Linear(size, 4 * size)
        self.down = nn.Linear(2 * size, size)
        self.first, self.second = (nn.Parameter(torch.rand(size) + 0.5) for _ in range(2))
        angle = torch.outer(torch.arange(6.0), 100.0 ** -torch.arange(0, 1, 2 * heads / size))
        self.register_buffer("angle", torch.cat((angle, angle), -1)[None, :, None, :])
        self.register_buffer("tile", torch.ones(2048, 2048, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import torch_npu

        y, _ = torch_npu.npu_rms_norm(x, self.first, epsilon=1e-5)
        query, key, value = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(y).chunk(3, -1))
        angle = self.angle.expand(x.shape[0], -1, 1, -1)
        query, key = query.contiguous(), key.contiguous()
        torch_npu.npu_apply_rotary_pos_emb(query, key, angle.cos(), angle.sin())  # in place
        mixed = torch_npu.npu_fusion_attention(
            query, key, value, self.heads, "BSND", atten_mask=self.tile, scale=0.125, sparse_mode=3
        )[0]
        y, _, x = torch_npu.npu_add_rms_norm(self.out(mixed.flatten(2)), x, self.second, 1e-5)
        return x + self.down(torch_npu.npu_swiglu(self.up(y)))


class PlainTorch(nn.Module):
    """Plain torch that an NPU runs fused whether one likes it or not: SDPA, GELU, layer norm, multi-head attention."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.attention = nn.MultiheadAttention(size, 4, batch_first=True)
        self.grow, self.shrink = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)
        self.gate = nn.Linear(size, 2 * size)
        self.last = nn.LayerNorm(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        heads = y.unflatten(-1, (4, -1)).transpose(1, 2)
        x = x + F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.shrink(F.gelu(self.grow(x)))
        left, right = self.gate(x).chunk(2, -1)
        x = x + left * F.gelu(right)
        return self.last(F.gelu(x))


class Unknown(nn.Module):
    """Calls a kernel that is in no catalog."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.npu.npu_sort_v2(x, -1, False)
        return result


class Noisy(nn.Module):
    """Draws random numbers in every way a sampler does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.randn_like(x) + torch.rand(x.shape, device=x.device, dtype=x.dtype)
        return F.dropout(x, 0.5, training=True)


class AutocastInside(nn.Module):
    """A float32 model whose author lowers a part of it."""

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.norm, self.grow, self.shrink = nn.LayerNorm(size), nn.Linear(size, 2 * size), nn.Linear(2 * size, size)
        self.conv, self.batch = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            y = self.shrink(F.gelu(self.grow(self.norm(x))))
            z = F.relu(self.batch(self.conv(image)))
        return y.float() + x, z.float()


def noisy() -> Any:
    """The sampler's draws, and their input."""
    return Noisy(), (torch.zeros(64, 64),)


def autocast_inside() -> Any:
    """The partly lowered model, and its inputs."""
    torch.manual_seed(0)
    return AutocastInside().eval(), (torch.randn(8, 32), torch.randn(2, 4, 8, 8))


def convolutions() -> Any:
    """Two convolutions, and their input."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)).eval(), (torch.randn(2, 3, 12, 12),)


def own_calls() -> Any:
    """The layer of torch_npu calls, and its input."""
    torch.manual_seed(0)
    return OwnCalls(), (torch.randn(2, 6, 128),)


def plain_torch() -> Any:
    """The layer of plain torch, and its input."""
    torch.manual_seed(0)
    return PlainTorch(), (torch.randn(2, 6, 64),)


def unknown() -> Any:
    """The unknown kernel, and its input."""
    return Unknown(), (torch.randn(2, 6),)


def unet() -> Any:
    """A diffusers UNet whose GEGLU calls torch_npu behind the user's back."""
    import diffusers

    torch.manual_seed(0)
    model = diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(16, 32),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16, attention_head_dim=8, norm_num_groups=8,
    ).eval()  # fmt: skip
    return model, (torch.randn(1, 4, 8, 8), 10, torch.randn(1, 5, 16))
