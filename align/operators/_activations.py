"""Activations that a matrix kernel can apply on its way out: how calls spell them, what oneDNN calls them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from align.dumpers.survey import CallRecord
from align.operators._gelu import plain_gelu
from align.operators._patterns import argument


@dataclass(frozen=True, slots=True)
class Activation:
    """One activation: the primitive call, and oneDNN's name, scalars and algorithm for it."""

    name: str
    apply: Callable[[Tensor], Tensor]
    onednn: str
    scalars: tuple[float, ...] = ()
    algorithm: str = ""


def _gelu_tanh(x: Tensor) -> Tensor:
    return plain_gelu(x, "tanh")


ACTIVATIONS = {
    item.name: item
    for item in (
        Activation("relu", torch.relu, "relu"),
        Activation("gelu", plain_gelu, "gelu", (), "none"),
        Activation("gelu_tanh", _gelu_tanh, "gelu", (), "tanh"),
        Activation("silu", F.silu, "swish"),
        Activation("sigmoid", torch.sigmoid, "sigmoid"),
        Activation("tanh", torch.tanh, "tanh"),
        Activation("hardswish", F.hardswish, "hardswish"),
    )
}


def activation_of(record: CallRecord | None) -> str:
    """The activation a call applies to its first argument, or ""."""
    if record is None:
        return ""
    name = record.op.removesuffix("_")
    if name == "gelu" and argument(record, -1, "approximate", "none") == "tanh":
        return "gelu_tanh"
    return name if name in ACTIVATIONS else ""


def apply(name: str, x: Tensor) -> Tensor:
    """Apply the activation of that name; "" leaves the tensor as it is."""
    return ACTIVATIONS[name].apply(x) if name else x
