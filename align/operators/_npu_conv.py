"""Products, convolutions and rearrangements that a model calls by torch_npu's own names, in torch's primitive calls.

Nothing fuses here but the format: npu_bmmV2 may keep its result in an internal format, npu_format_cast changes nothing
but the memory layout. They are in the catalog so that a model calling them runs as baseline and on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from align.operators._npu_call import draw, drawn, refuse_rest, written
from align.operators.base import Operator


def linear(input_: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """npu_linear."""
    return F.linear(input_, weight, bias)


def bmm_v2(input_: Tensor, mat2: Tensor, output_sizes: Sequence[int]) -> Tensor:
    """npu_bmmV2: a batched product, in other sizes if some are given."""
    out = torch.matmul(input_, mat2)
    return out.reshape(tuple(output_sizes)) if len(output_sizes) else out


def conv2d(
    input_: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """npu_conv2d."""
    return F.conv2d(input_, weight, bias, tuple(stride), tuple(padding), tuple(dilation), groups)


def conv3d(
    input_: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """npu_conv3d."""
    return F.conv3d(input_, weight, bias, tuple(stride), tuple(padding), tuple(dilation), groups)


def conv_transpose2d(
    input_: Tensor, weight: Tensor, bias: Tensor | None, padding: Sequence[int], output_padding: Sequence[int],
    stride: Sequence[int], dilation: Sequence[int], groups: int,
) -> Tensor:  # fmt: skip
    """npu_conv_transpose2d: padding and output_padding come before the stride."""
    return F.conv_transpose2d(
        input_, weight, bias, tuple(stride), tuple(padding), tuple(output_padding), groups, tuple(dilation)
    )


def confusion_transpose(input_: Tensor, perm: Sequence[int], shape: Sequence[int], transpose_first: bool) -> Tensor:
    """npu_confusion_transpose: permute and reshape in either order; no arithmetic."""
    if transpose_first:
        return input_.permute(tuple(perm)).reshape(tuple(shape))
    return input_.reshape(tuple(shape)).permute(tuple(perm)).contiguous()


def format_cast(input_: Tensor, acl_format: Any, *, customize_dtype: Any = None, input_dtype: Any = None) -> Tensor:
    """npu_format_cast: the same values in another memory format, of which there is one here; a tensor of its own."""
    refuse_rest("npu_format_cast", {"customize_dtype": customize_dtype})
    return input_.view_as(input_)


def format_cast_in_place(input_: Tensor, src: Any, **rest: Any) -> Tensor:
    """npu_format_cast_: the tensor itself."""
    refuse_rest("npu_format_cast_", rest)
    return input_


def dtype_cast(input_: Tensor, dtype: Any, input_dtype: Any = None) -> Tensor:
    """npu_dtype_cast: a copy in another dtype."""
    from align.operators._npu_quant import wanted_dtype

    refuse_rest("npu_dtype_cast", {"input_dtype": input_dtype})
    return input_.to(wanted_dtype(dtype, input_.dtype), copy=True)


def transpose(input_: Tensor, perm: Sequence[int], require_contiguous: bool = True) -> Tensor:
    """npu_transpose: a permuted copy."""
    return input_.permute(tuple(perm)).contiguous()


# -- entries -----------------------------------------------------------------------------------------------------------

_SLIDE: dict[str, Any] = {"stride": [1, 1], "padding": [1, 1], "dilation": [1, 1], "groups": 1}


def _conv3d_example(device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    x, weight = draw((1, 2, 4, 5, 5), device, dtype, seed), draw((3, 2, 3, 3, 3), device, dtype, seed + 1)
    return {
        "input_": x,
        "weight": weight,
        "bias": None,
        "stride": [1] * 3,
        "padding": [1] * 3,
        "dilation": [1] * 3,
        "groups": 1,
    }


_ONCE = "after the sum of products"
_NONE = "none: values only move"

NPU_OPERATORS: tuple[Operator, ...] = (
    written(
        "npu_linear",
        linear,
        name="linear",
        rounding=_ONCE,
        example=drawn((5, 32), (16, 32), (16,), names="input_ weight bias"),
    ),
    written(
        "npu_bmmV2",
        bmm_v2,
        name="bmm",
        rounding=_ONCE,
        example=drawn((2, 5, 16), (2, 16, 7), names="input_ mat2", output_sizes=[]),
    ),
    written(
        "npu_conv2d",
        conv2d,
        name="conv2d",
        rounding=_ONCE,
        example=drawn((1, 4, 8, 8), (6, 4, 3, 3), (6,), names="input_ weight bias", **_SLIDE),
    ),
    written("npu_conv3d", conv3d, name="conv3d", rounding=_ONCE, example=_conv3d_example),
    written(
        "npu_conv_transpose2d",
        conv_transpose2d,
        name="conv_transpose2d",
        rounding=_ONCE,
        example=drawn((1, 4, 8, 8), (4, 6, 3, 3), (6,), names="input_ weight bias", output_padding=[0, 0], **_SLIDE),
    ),
    written(
        "npu_confusion_transpose",
        confusion_transpose,
        name="transpose_reshape",
        rounding=_NONE,
        example=drawn((2, 3, 4), names="input_", perm=[1, 0, 2], shape=[3, 8], transpose_first=True),
    ),
    written(
        "npu_format_cast",
        format_cast,
        name="format_cast",
        rounding=_NONE,
        example=drawn((2, 3), names="input_", acl_format=2),
    ),
    written(
        "npu_format_cast_",
        format_cast_in_place,
        name="format_cast",
        rounding=_NONE,
        example=drawn((2, 3), names="input_", src=2),
    ),
    written(
        "npu_dtype_cast",
        dtype_cast,
        name="dtype_cast",
        rounding="once",
        example=drawn((2, 3), names="input_", dtype=torch.float16),
    ),
    written(
        "npu_transpose",
        transpose,
        name="transpose_reshape",
        rounding=_NONE,
        example=drawn((2, 3, 4), names="input_", perm=[2, 0, 1]),
    ),
)
