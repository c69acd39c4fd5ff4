"""Paint latents as a picture: convolutions, GroupNorm with SiLU, and twofold nearest resizes before convolutions."""

# torch types the call of a module as Any.
# mypy: disable-error-code="no-any-return"

import torch.nn.functional as F
from torch import Tensor, nn


class PaintBlock(nn.Module):
    """A residual GroupNorm-SiLU-conv stage."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, channels)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, padding_mode="replicate")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(F.silu(self.norm(x)))


class Decoder(nn.Module):
    """Map latents [batch, 4, h, w] to a picture [batch, 3, 4h, 4w] with values in 0..1."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(4, width, 3, padding=1, padding_mode="replicate")
        self.block1 = PaintBlock(width)
        self.grow1 = nn.Conv2d(width, width // 2, 3, padding=1)
        self.block2 = PaintBlock(width // 2)
        self.grow2 = nn.Conv2d(width // 2, width // 2, 3, padding=1)
        self.norm_out = nn.GroupNorm(8, width // 2)
        self.conv_out = nn.Conv2d(width // 2, 3, 3, padding=1, padding_mode="replicate")

    def forward(self, latents: Tensor) -> Tensor:
        x = self.block1(self.conv_in(latents))
        x = self.grow1(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        x = self.block2(x)
        x = self.grow2(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return self.conv_out(F.silu(self.norm_out(x))).sigmoid()
