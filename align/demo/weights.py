"""Fill the demo's model with seeded weights whose activations stay near 1, as those of trained networks do."""

import math

import torch
from torch import Tensor, nn

from align.demo.denoiser import QuantFeedForward, TransformerBlock

OUTLIER_CHANNELS = (5, 37, 70, 101)
OUTLIER_GAIN = 60.0
BLUR = (0.25, 0.5, 0.25)


@torch.no_grad()
def seed_weights(model: nn.Module) -> None:
    """Fill every module of the model from torch's global generator, in the order of `model.modules()`."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            _fill(module.weight, module.bias, fan_in=module.in_features)
        elif isinstance(module, nn.Conv2d):
            _fill(module.weight, module.bias, fan_in=module.weight[0].numel())
        elif isinstance(module, nn.BatchNorm2d):
            _fill_batch_norm(module)
        elif isinstance(module, TransformerBlock) and isinstance(module.feed, QuantFeedForward):
            _plant_outliers(module.norm3, module.feed)


def _fill(weight: Tensor, bias: Tensor | None, *, fan_in: int) -> None:
    weight.normal_(std=fan_in**-0.5)
    if bias is not None:
        bias.normal_(std=0.1)


def _fill_batch_norm(norm: nn.BatchNorm2d) -> None:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    norm.running_mean.normal_(std=0.2)
    norm.running_var.uniform_(0.5, 1.5)
    norm.weight.uniform_(0.5, 1.0)
    norm.bias.normal_(std=0.2)


def _plant_outliers(norm: nn.RMSNorm, feed: QuantFeedForward) -> None:
    """Raise a few gains and lower the weights that read them, as training does in large transformers.

    The layer's result in floating point is the same; one int8 scale for the whole activation can no longer
    resolve the ordinary channels.
    """
    channels = list(OUTLIER_CHANNELS)
    weight = torch.randn(feed.proj.weight_int8.shape) * norm.weight.numel() ** -0.5
    norm.weight[channels] *= OUTLIER_GAIN
    weight[:, channels] /= OUTLIER_GAIN
    feed.proj.load_weight(weight)


@torch.no_grad()
def lay_out_waves(position: Tensor) -> None:
    """Fill a position embedding [1, channels, h, w] with one slow plane wave a channel."""
    _, channels, height, width = position.shape
    down = torch.linspace(-1, 1, height)[:, None]
    right = torch.linspace(-1, 1, width)
    for channel in range(channels):
        turn, phase, speed = (torch.rand(3) * torch.tensor([2 * math.pi, 2 * math.pi, 7.0])).tolist()
        wave = torch.sin(speed * (math.cos(turn) * right + math.sin(turn) * down) + phase)
        position[0, channel] = 1.5 * wave


@torch.no_grad()
def smooth_kernels(module: nn.Module, share: float) -> None:
    """Mix a share in 0..1 of a blur into the 3x3 kernels of a module, so that its maps vary slowly in space."""
    blur = torch.outer(torch.tensor(BLUR), torch.tensor(BLUR))
    for conv in module.modules():
        if isinstance(conv, nn.Conv2d) and conv.kernel_size == (3, 3):
            mix = torch.randn(conv.weight.shape[:2]) * conv.in_channels**-0.5
            rough = math.sqrt(1 - share**2) * conv.weight
            conv.weight.copy_(rough + share * mix[:, :, None, None] * blur)
