"""oneDNN's fused convolution and linear kernels, as torch exposes them in `torch.ops.mkldnn`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from align.operators._activations import ACTIVATIONS


@dataclass(frozen=True, slots=True)
class Window:
    """How a two-dimensional convolution slides: (height, width) each."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int


def window(stride: Any, padding: Any, dilation: Any, groups: int) -> Window:
    """Spell out numbers given once for both axes."""
    return Window(_pair(stride), _pair(padding), _pair(dilation), groups)


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, (tuple, list)):
        return (int(value[0]), int(value[-1]))
    return (int(value), int(value))


def conv(x: Tensor, weight: Tensor, bias: Tensor | None, slide: Window, act: str) -> Tensor:
    """Convolve and apply an activation ("" for none) in one primitive; the layout follows `x` as in F.conv2d."""
    kind = ACTIVATIONS[act] if act else None
    result: Tensor = torch.ops.mkldnn._convolution_pointwise(
        x, weight, bias, slide.padding, slide.stride, slide.dilation, slide.groups,
        kind.onednn if kind else "none", list(kind.scalars) if kind else [], kind.algorithm if kind else "",
    )  # fmt: skip
    return result


def conv_add(x: Tensor, packed: Tensor, bias: Tensor | None, residual: Tensor, slide: Window, act: str) -> Tensor:
    """Convolve with a weight from `pack`, add a tensor of the result's shape, apply ReLU ("" for none): one primitive.

    torch fuses the addition only for packed weights or channels-last tensors; elsewhere it silently runs it apart.
    Packed weights yield channels-last, so the written form's layout is put back.
    """
    result: Tensor = torch.ops.mkldnn._convolution_pointwise.binary(
        x,
        residual,
        packed,
        bias,
        slide.padding,
        slide.stride,
        slide.dilation,
        slide.groups,
        "add",
        1.0,
        act or None,
        [],
        "",
    )
    return result.contiguous() if x.is_contiguous() else result


def pack(weight: Tensor, slide: Window, shape: tuple[int, ...]) -> Tensor:
    """Put a convolution's weight into the layout that oneDNN likes best for inputs of that shape."""
    packed: Tensor = torch.ops.mkldnn._reorder_convolution_weight(
        weight, slide.padding, slide.stride, slide.dilation, slide.groups, list(shape)
    )
    return packed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, act: str) -> Tensor:
    """Apply a linear layer and an activation in one primitive."""
    kind = ACTIVATIONS[act]
    result: Tensor = torch.ops.mkldnn._linear_pointwise(
        x, weight, bias, kind.onednn, list(kind.scalars), kind.algorithm
    )
    return result
