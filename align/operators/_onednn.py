"""oneDNN's fused convolution and linear kernels, as torch exposes them in `torch.ops.mkldnn`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from align.operators._activations import ACTIVATIONS


class Window(NamedTuple):
    """How a two-dimensional convolution slides: (height, width) each. A named tuple, as one is made every call."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int


def window(stride: Any, padding: Any, dilation: Any, groups: int) -> Window:
    """Spell out numbers given once for both axes."""
    return Window(_pair(stride), _pair(padding), _pair(dilation), groups)


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, (tuple, list)):
        return (value[0], value[-1])
    return (value, value)


def conv(x: Tensor, weight: Tensor, bias: Tensor | None, slide: Window, act: str) -> Tensor:
    """Convolve with a weight, packed or not, and apply an activation ("" for none) in one primitive."""
    kind = ACTIVATIONS[act] if act else None
    result: Tensor = torch.ops.mkldnn._convolution_pointwise.default(
        x, weight, bias, slide.padding, slide.stride, slide.dilation, slide.groups,
        kind.onednn if kind else "none", list(kind.scalars) if kind else [], kind.algorithm if kind else "",
    )  # fmt: skip
    return result if is_channels_last(x) else result.contiguous()


def conv_add(x: Tensor, packed: Tensor, bias: Tensor | None, residual: Tensor, slide: Window, act: str) -> Tensor:
    """Convolve with a weight from `pack`, add a tensor of the result's shape, apply ReLU ("" for none): one primitive.

    torch fuses the addition only for packed weights or channels-last tensors; elsewhere it silently runs it apart.
    """
    result: Tensor = torch.ops.mkldnn._convolution_pointwise.binary(
        x, residual, packed, bias, slide.padding, slide.stride, slide.dilation, slide.groups,
        "add", 1.0, act or None, [], "",
    )  # fmt: skip
    return result if is_channels_last(x) else result.contiguous()


def is_channels_last(x: Tensor) -> bool:
    """Whether F.conv2d would give a channels-last result; packed weights always do, so others are copied back."""
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def pays_to_pack(x: Tensor, weight: Tensor) -> bool:
    """Whether reordering the weight at every call would cost more than the change of layout that packing brings."""
    return weight.numel() > x.numel() or is_channels_last(x)


def pack(weight: Tensor, slide: Window, shape: tuple[int, ...]) -> Tensor:
    """Put a convolution's weight into the layout that oneDNN likes best for inputs of that shape."""
    packed: Tensor = torch.ops.mkldnn._reorder_convolution_weight(
        weight, slide.padding, slide.stride, slide.dilation, slide.groups, list(shape)
    )
    return packed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, act: str) -> Tensor:
    """Apply a linear layer and an activation in one primitive."""
    kind = ACTIVATIONS[act]
    result: Tensor = torch.ops.mkldnn._linear_pointwise.default(
        x, weight, bias, kind.onednn, list(kind.scalars), kind.algorithm
    )
    return result
