"""Try a kernel once per dtype on a tiny example, so that what this machine cannot run is refused by name beforehand."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Unit roundoff: half the distance from 1 to the next number."""


@cache
def probe(
    device: str,
    dtype: torch.dtype,
    kernel: Callable[..., Any],
    unfused: Callable[..., Any],
    example: Callable[..., Any],
) -> str:
    """The reason why a kernel does not work here in a dtype, or "": it must run and agree with the unfused form."""
    if dtype not in UNIT:
        return f"no kernel in {_name(dtype)}"
    try:
        with torch.no_grad():
            arguments = example(device, dtype, 0)
            got, expected = kernel(**arguments).double(), unfused(**arguments).double()
    except (RuntimeError, NotImplementedError, AttributeError, TypeError) as error:
        return f"this machine has no such kernel in {_name(dtype)}: {_first_line(error)}"
    error_size = float((got - expected).norm() / expected.norm().clamp_min(1e-30))
    if got.shape != expected.shape or not error_size <= 64 * UNIT[dtype]:
        return f"gives wrong results in {_name(dtype)} on this machine (relative error {error_size:.1e})"
    return ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]
