"""The scalar whose gradients are recorded: `sum` of the results, or the user's own function of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from align.dumpers.errors import TargetError
from align.dumpers.naming import walk_tensors
from align.workload import find_target

Scalar = Callable[[Any], torch.Tensor]


def scalar_named(text: str) -> Scalar:
    """`sum`, or a function `file.py:name(result) -> scalar tensor`. Raises TargetError when it is not there."""
    return sum_of_results if text == "sum" else find_target(text).build


def sum_of_results(result: Any) -> torch.Tensor:
    """The sum of all floating results in float32."""
    parts = [tensor.float().sum() for _, tensor in walk_tensors(result) if tensor.is_floating_point()]
    return torch.stack(parts).sum()


def backward(scalar: Scalar, result: Any) -> None:
    """Compute the gradients of the scalar. Raises TargetError when it is no scalar, or nothing leads back from it."""
    value = scalar(result)
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise TargetError(f"the gradient's scalar is {type(value).__name__}", "return a tensor of one element")
    if not value.requires_grad:
        raise TargetError("no gradient leads back from the scalar", "build the model with parameters that require one")
    value.backward()  # type: ignore[no-untyped-call]
