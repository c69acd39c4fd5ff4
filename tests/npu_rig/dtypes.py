"""Read a dtype argument of torch_npu: a torch.dtype, or the number that the dispatcher makes of one."""

from __future__ import annotations

import torch

# c10::ScalarType. torch_npu's own dtypes (int4, float4, hifloat8) have numbers beyond it, and no kernel here.
_SCALAR_TYPES = {
    0: torch.uint8,
    1: torch.int8,
    2: torch.int16,
    3: torch.int32,
    4: torch.int64,
    5: torch.float16,
    6: torch.float32,
    7: torch.float64,
    11: torch.bool,
    12: torch.qint8,
    13: torch.quint8,
    14: torch.qint32,
    15: torch.bfloat16,
}
# The device returns plain integers where torch's quantised dtypes are asked for.
_PLAIN = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}


def dtype_of(number: int | torch.dtype | None, default: torch.dtype) -> torch.dtype:
    """Return the dtype that a call asks for, or the default for None."""
    if number is None:
        return default
    dtype = number if isinstance(number, torch.dtype) else _SCALAR_TYPES.get(number)
    if dtype is None:
        raise NotImplementedError(f"the rig has no dtype number {number}")
    return _PLAIN.get(dtype, dtype)
