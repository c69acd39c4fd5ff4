"""Give a fused kernel its arguments in the dtypes that autocast gives the calls it stands for.

Autocast acts inside torch's own functions, which a kernel replaces: without this a kernel in an autocast region would
compute in the dtype of the region's inputs, and be judged for a difference that is not its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from align.dumpers.naming import flat_tensors, map_tensors

_LOWERED = frozenset({
    "attention", "multi_head_attention", "linear_act", "ffn", "conv_bn_act_add", "resize_conv", "grouped_matmul",
})  # fmt: skip
"""Operators whose calls autocast runs in its low dtype: products and convolutions."""
_WIDENED = frozenset({
    "rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm", "group_norm_silu", "masked_softmax", "cross_entropy",
})  # fmt: skip
"""Operators whose calls autocast runs in float32 on accelerators; on a CPU it leaves them alone."""


def as_autocast(operator: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of an operator's kernel, cast if autocast is on where they lie."""
    first = next(iter(flat_tensors(dict(arguments))), None)
    if first is None or not torch.is_autocast_enabled(first.device.type):
        return arguments
    kind = first.device.type
    if operator in _LOWERED:
        dtype = torch.get_autocast_dtype(kind)
    elif operator in _WIDENED and kind != "cpu":
        dtype = torch.float32
    else:
        return arguments
    cast: Mapping[str, Any] = map_tensors(dict(arguments), lambda tensor: _cast(tensor, dtype))
    return cast


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    is_float = tensor.is_floating_point() and tensor.dtype is not torch.float64  # as autocast itself: not doubles
    return tensor.to(dtype) if is_float else tensor
