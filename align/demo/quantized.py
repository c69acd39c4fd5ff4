"""Hold a linear layer's weights as int8, one scale an output channel; the activation stays in floating point."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INT8_MAX = 127


class QuantLinear(nn.Module):
    """Apply x [..., inputs] -> [..., outputs] with weights int8 [outputs, inputs] times scale [outputs]."""

    weight_int8: Tensor
    scale: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.register_buffer("weight_int8", torch.zeros(outputs, inputs, dtype=torch.int8))
        self.register_buffer("scale", torch.ones(outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    @torch.no_grad()
    def load_weight(self, weight: Tensor) -> None:
        """Quantise a floating-point weight [outputs, inputs]: symmetric, per output channel, nearest."""
        self.scale.copy_(weight.abs().amax(dim=1) / INT8_MAX)
        self.weight_int8.copy_((weight / self.scale[:, None]).round().to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight_int8.to(x.dtype) * self.scale[:, None].to(x.dtype)
        return F.linear(x, weight, self.bias)
