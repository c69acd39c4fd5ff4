"""The table of reference kernels for torch_npu's own operators.

Invariant: one kernel an operator and overload; registering twice is an error that names both.
A kernel gets host tensors over the device's bytes, in the order of the real schema, and returns host tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Kernel = Callable[..., Any]
AnyKernel = TypeVar("AnyKernel", bound=Kernel)

KERNELS: dict[str, Kernel] = {}


def kernel(*names: str) -> Callable[[AnyKernel], AnyKernel]:
    """Register a function as the reference kernel of `npu::<name>` (with `.overload` where there is one)."""

    def register(function: AnyKernel) -> AnyKernel:
        for name in names:
            if name in KERNELS:
                raise ValueError(f"npu::{name} has two kernels: {KERNELS[name].__qualname__}, {function.__qualname__}")
            KERNELS[name] = function
        return function

    return register
