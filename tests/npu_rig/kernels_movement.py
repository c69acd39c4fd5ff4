"""Reference kernels that move or cast, and the device's own housekeeping: bitwise, no arithmetic.

Memory formats do not exist here: a format cast returns its input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from npu_rig.dtypes import dtype_of
from npu_rig.registry import kernel


@kernel("npu_confusion_transpose")
def confusion_transpose(
    x: torch.Tensor, perm: Sequence[int], shape: Sequence[int], transpose_first: bool
) -> torch.Tensor:
    """Transpose then reshape, or reshape then transpose."""
    if transpose_first:
        return x.permute(tuple(perm)).reshape(tuple(shape)).contiguous()
    return x.reshape(tuple(shape)).permute(tuple(perm)).contiguous()


@kernel(
    "npu_format_cast", "npu_format_cast.Tensor", "_npu_format_cast", "npu_format_cast_", "npu_format_cast_.acl_format"
)
def format_cast(x: torch.Tensor, *formats: Any, **options: Any) -> torch.Tensor:
    """Return the input."""
    return x


@kernel("npu_dtype_cast")
def dtype_cast(x: torch.Tensor, dtype: int | torch.dtype, input_dtype: int | None = None) -> torch.Tensor:
    """Return a copy in another dtype."""
    if input_dtype is not None:
        raise NotImplementedError("npu::npu_dtype_cast: the rig has no input_dtype")
    return x.to(dtype_of(dtype, x.dtype), copy=True)


@kernel("_npu_dtype_cast")
def plain_dtype_cast(x: torch.Tensor, dtype: int | torch.dtype) -> torch.Tensor:
    """Return a copy in another dtype."""
    return dtype_cast(x, dtype)


@kernel("npu_transpose")
def transpose(x: torch.Tensor, perm: Sequence[int], require_contiguous: bool = True) -> torch.Tensor:
    """Return the permuted copy."""
    return x.permute(tuple(perm)).contiguous()


@kernel("npu_reshape")
def reshape(x: torch.Tensor, shape: Sequence[int], can_refresh: bool = False) -> torch.Tensor:
    """Return the reshaped copy."""
    return x.reshape(tuple(shape)).clone()


@kernel("npu_broadcast")
def broadcast(x: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """Return the broadcast copy."""
    return x.broadcast_to(tuple(size)).contiguous()


@kernel("copy_memory_")
def copy_memory(x: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Overwrite x by the source."""
    return x.copy_(source)


@kernel("npu_view_copy")
def view_copy(x: torch.Tensor, other: torch.Tensor, non_blocking: bool) -> torch.Tensor:
    """Overwrite x by the other tensor."""
    return x.copy_(other)


@kernel("one_")
def ones(x: torch.Tensor) -> torch.Tensor:
    """Overwrite x by ones."""
    return x.fill_(1)


@kernel("npu_alloc_float_status")
def alloc_float_status(x: torch.Tensor) -> torch.Tensor:
    """Return eight zeros: no overflow was seen."""
    return torch.zeros(8)


@kernel("npu_get_float_status", "npu_clear_float_status")
def float_status(x: torch.Tensor, mode: int = 0) -> torch.Tensor:
    """Return eight zeros: no overflow was seen."""
    return torch.zeros(8)
