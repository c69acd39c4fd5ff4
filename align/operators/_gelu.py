"""GELU by erf, tanh and sigmoid in primitive calls: forms that no device can run fused.

aten's own GELU is one fused kernel on an NPU, and there of the tanh formula whatever `approximate` says.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def gelu_erf(x: Tensor) -> Tensor:
    """x / 2 * (1 + erf(x / sqrt(2))), one primitive call a step."""
    return x * 0.5 * (1.0 + torch.erf(x * math.sqrt(0.5)))


def gelu_tanh(x: Tensor) -> Tensor:
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), one primitive call a step."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def gelu_primitive(x: Tensor, approximate: str = "none") -> Tensor:
    """GELU by erf ("none") or tanh in primitive calls: nothing a device could run fused."""
    return gelu_tanh(x) if approximate == "tanh" else gelu_erf(x)


def plain_gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """F.gelu where it does what it says; in primitive calls on an NPU, where it is one fused tanh kernel."""
    return gelu_primitive(x, approximate) if x.device.type == "npu" else F.gelu(x, approximate=approximate)


def gelu_sigmoid(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x), the "fast" GELU."""
    return x * torch.sigmoid(1.702 * x)
