"""Nearest resize to twice the size, then a 3x3 convolution: four 2x2 phase convolutions on the small map.

Of the nine taps of an output pixel, those that fall on one small pixel are summed beforehand (in float32, rounded
once): output (2i+a, 2j+b) needs 2x2 small pixels. 16 products a small pixel instead of 36, and no large map in between.
This is the sub-pixel view of Shi et al., arXiv:1609.07009, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from align.dumpers.model import OpClass
from align.dumpers.survey import CallGraph, CallRecord, Operand
from align.operators._folding import prepared
from align.operators._patterns import argument, close, maker, random_tensor, take
from align.operators._probe import probe
from align.operators.base import Bound, Kernel, Match, Operator


def unfused(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [n, c, h, w], weight [o, c, 3, 3] -> [n, o, 2h, 2w]; the resize is exact, the convolution rounds once."""
    return F.conv2d(F.interpolate(x, scale_factor=2.0, mode="nearest"), weight, bias, padding=1)


def phase_weights(weight: Tensor) -> Tensor:
    """[o, c, 3, 3] -> [4 o, c, 2, 2], phases (a, b) outermost: (0, 0), (0, 1), (1, 0), (1, 1)."""
    rows = _sum_taps(weight.float(), 2)
    phases = [phase for row in rows for phase in _sum_taps(row, 3)]
    return torch.cat(phases).to(weight.dtype)


def _sum_taps(weight: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Taps of the even and of the odd output pixel along an axis: (w0, w1 + w2) and (w0 + w1, w2)."""
    first, middle, last = (weight.narrow(axis, tap, 1) for tap in range(3))
    return torch.cat((first, middle + last), axis), torch.cat((first + middle, last), axis)


def phases(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """One 2x2 convolution of the padded small map for all four phases, then interleaved."""
    outputs = weight.shape[0]
    n, _, h, w = x.shape
    small = prepared("phases", (weight,), lambda: phase_weights(weight))
    four = None if bias is None else prepared("four times", (bias,), lambda: bias.repeat(4))
    y = F.conv2d(x, small, four, padding=1).view(n, 2, 2, outputs, h + 1, w + 1)
    out = y.new_empty((n, outputs, h, 2, w, 2))
    for a in (0, 1):
        for b in (0, 1):
            out[:, :, :, a, :, b] = y[:, a, b, :, a : a + h, b : b + w]
    large = out.view(n, outputs, 2 * h, 2 * w)
    is_channels_last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return large.contiguous(memory_format=torch.channels_last) if is_channels_last else large


def _refuses(device: str, dtype: torch.dtype) -> str:
    return probe(device, dtype, phases, unfused, example)


def refuses_on_cpu(bound: Bound, dtype: torch.dtype) -> str:
    """Only what F.conv2d refuses."""
    return _refuses("cpu", dtype)


def refuses_on_cuda(bound: Bound, dtype: torch.dtype) -> str:
    """Only what F.conv2d refuses."""
    return _refuses("cuda", dtype)


def example(device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """A small map whose height and width differ."""
    return {
        "x": random_tensor((2, 6, 5, 7), device, dtype, seed),
        "weight": random_tensor((4, 6, 3, 3), device, dtype, seed + 1) * 0.2,
        "bias": random_tensor((4,), device, dtype, seed + 2),
    }


def find(record: CallRecord, graph: CallGraph) -> Match | None:
    """A 3x3 convolution of stride and padding 1 right behind a nearest resize that doubles both sides."""
    if record.op != "conv2d" or not _is_plain(record):
        return None
    resize = maker(graph, record, 0)
    if resize is None or resize.op not in ("interpolate", "upsample") or not _doubles(resize):
        return None
    binding = {"x": take(resize, 0, "input"), "weight": take(record, 1, "weight"), "bias": take(record, 2, "bias")}
    return close(graph, RESIZE_CONV, (resize, record), binding)


def _is_plain(conv: CallRecord) -> bool:
    weight = argument(conv, 1, "weight")
    ones = (
        argument(conv, 3, "stride", 1),
        argument(conv, 4, "padding", 0),
        argument(conv, 5, "dilation", 1),
        argument(conv, 6, "groups", 1),
    )
    return isinstance(weight, Operand) and weight.shape[2:] == (3, 3) and all(_is_one(value) for value in ones)


def _is_one(value: Any) -> bool:
    return (
        all(item == 1 for item in value) if isinstance(value, Sequence) and not isinstance(value, str) else value == 1
    )


def _doubles(resize: CallRecord) -> bool:
    x, out = argument(resize, 0, "input"), resize.output
    if not isinstance(x, Operand) or out is None or len(x.shape) != 4:
        return False
    mode = argument(resize, 3, "mode", "nearest")  # nearest-exact picks the same pixels at a factor of two
    return mode in ("nearest", "nearest-exact") and out.shape[2:] == (2 * x.shape[2], 2 * x.shape[3])


RESIZE_CONV = Operator(
    name="resize_conv",
    op_class=OpClass.ORDINARY,
    summary="nearest resize to twice the size followed by a 3x3 convolution",
    rounding="after the convolution; fused: summed weights once, then the result",
    finders=(find,),
    unfused=unfused,
    kernels={
        "cpu": Kernel(phases, "four 2x2 phase convolutions on the small map", refuses_on_cpu),
        "cuda": Kernel(phases, "four 2x2 phase convolutions on the small map", refuses_on_cuda),
    },
    example=example,
)
OPERATORS: tuple[Operator, ...] = (RESIZE_CONV,)
