"""Products of groups of rows with one weight each: the experts of a mixture.

torch's F.grouped_mm takes cumulative ends; torch_npu's group_list is cumulative with group_list_type 0 and counts with
1, and mixing the two up computes something else without a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from align.dumpers.errors import UndecidedError
from align.dumpers.model import OpClass
from align.dumpers.survey import CallGraph, CallRecord, Operand
from align.operators._npu_call import draw, refuse_rest, run_npu, written
from align.operators._patterns import argument, take, written_fused
from align.operators.base import Bound, Kernel, Match, Operator


def unfused(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [t, k], weight [e, k, n], ends [e] cumulative -> [t, n]; rows behind the last end are zero."""
    pieces = _pieces(ends.tolist())
    parts = [torch.matmul(x[piece], matrix) for piece, matrix in zip(pieces, weight, strict=True)]
    return _padded(torch.cat(parts), x.shape[0])


def _pieces(ends: Sequence[int]) -> list[slice]:
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _padded(out: Tensor, rows: int) -> Tensor:
    return F.pad(out, (0, 0, 0, rows - out.shape[0])) if out.shape[0] < rows else out


def native(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """torch's grouped product."""
    return F.grouped_mm(x, weight, offs=ends)


def npu(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x cut along its rows (group_type 0) by cumulative ends (group_list_type 0), one result (3)."""
    found: Sequence[Tensor] = run_npu(
        "npu_grouped_matmul",
        [x],
        [weight],
        group_list=ends.to(torch.int64),
        split_item=3,
        group_type=0,
        group_list_type=0,
    )
    return found[0]


def refuses_on_npu(bound: Bound, dtype: torch.dtype) -> str:
    """The cube unit's grouped product takes float16, bfloat16 and float32."""
    known = (torch.float16, torch.bfloat16, torch.float32)
    return "" if dtype in known else f"no NPU kernel in {str(dtype).removeprefix('torch.')}"


def example(device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """Three experts, one of them idle."""
    ends = torch.tensor([5, 5, 12], dtype=torch.int32, device=device)
    return {
        "x": draw((12, 32), device, dtype, seed),
        "weight": draw((3, 32, 16), device, dtype, seed + 1),
        "ends": ends,
    }


def find(record: CallRecord, graph: CallGraph) -> Match | None:
    """F.grouped_mm (or torch._grouped_mm) of a matrix and a stack of matrices."""
    if record.op not in ("grouped_mm", "_grouped_mm"):
        return None
    x, weight, ends = argument(record, 0, "mat_a"), argument(record, 1, "mat_b"), argument(record, 2, "offs")
    if not all(isinstance(item, Operand) for item in (x, weight, ends)) or (len(x.shape), len(weight.shape)) != (2, 3):
        return None
    if argument(record, 3, "bias") is not None or argument(record, 4, "out_dtype") is not None:
        return None
    # torch._grouped_mm calls its matrices `input` and `mat2`; both libraries and people give them by position.
    return written_fused(
        GROUPED_MATMUL,
        record,
        {"x": take(record, 0, "mat_a"), "weight": take(record, 1, "mat_b"), "ends": take(record, 2, "offs")},
    )


GROUPED_MATMUL = Operator(
    name="grouped_matmul",
    op_class=OpClass.ORDINARY,
    summary="groups of rows times one matrix each (experts)",
    rounding="after each product",
    finders=(find,),
    unfused=unfused,
    kernels={
        "cpu": Kernel(native, "torch grouped product", is_native=True),
        "cuda": Kernel(native, "torch grouped product", is_native=True),
        "npu": Kernel(npu, "npu_grouped_matmul", refuses_on_npu),
    },
    example=example,
)


# -- torch_npu's own call ----------------------------------------------------------------------------------------------


def npu_grouped_matmul(
    x: Sequence[Tensor], weight: Sequence[Tensor], *, bias: Sequence[Tensor] | None = None, group_list: Any = None,
    split_item: int | None = 0, group_type: int | None = None, group_list_type: int | None = 0,
    act_type: int | None = 0, **rest: Any,
) -> list[Tensor]:  # fmt: skip
    """One product an expert; split_item 2 and 3 join the results, 0 and 1 do not."""
    refuse_rest(
        "npu_grouped_matmul",
        {name: value for name, value in rest.items() if not isinstance(value, (list, tuple)) or value},
    )
    refuse_rest("npu_grouped_matmul", {"act_type": act_type, "group_type 2 (cut along k)": group_type == 2})
    matrices = list(weight[0]) if len(weight) == 1 and weight[0].dim() == 3 else list(weight)
    parts = list(x) if len(x) > 1 else _cut(x[0], group_list, group_list_type or 0)
    biases = _biases(bias, len(matrices))
    out = [_product(part, matrix, row) for part, matrix, row in zip(parts, matrices, biases, strict=True)]
    return [_padded(torch.cat(out), x[0].shape[0])] if split_item in (2, 3) else out


def _cut(x: Tensor, group_list: Any, kind: int) -> list[Tensor]:
    """The rows of each group; kind 0 means cumulative ends, 1 counts."""
    if group_list is None:
        return [x]
    numbers = group_list.tolist() if isinstance(group_list, Tensor) else list(group_list)
    if kind not in (0, 1):
        refuse_rest("npu_grouped_matmul", {"group_list_type": kind})
    ends = list(accumulate(numbers)) if kind == 1 else numbers
    if ends != sorted(ends) or ends[-1] > x.shape[0]:
        raise UndecidedError(
            f"npu_grouped_matmul: group_list {numbers} of type {kind} does not fit {x.shape[0]} rows",
            "group_list_type 0 means cumulative ends, 1 counts",
        )
    return [x[piece] for piece in _pieces(ends)]


def _biases(bias: Sequence[Tensor] | None, count: int) -> list[Tensor | None]:
    if not bias:
        return [None] * count
    return list(bias[0]) if len(bias) == 1 and bias[0].dim() == 2 else list(bias)


def _product(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    out = torch.matmul(x, matrix)
    return out if bias is None else (out + bias).to(x.dtype)


def _npu_example(device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    values = example(device, dtype, seed)
    counts = torch.tensor([5, 0, 7], device=device)
    return {
        "x": [values["x"]],
        "weight": [values["weight"]],
        "group_list": counts,
        "split_item": 3,
        "group_type": 0,
        "group_list_type": 1,
    }


OPERATORS: tuple[Operator, ...] = (
    GROUPED_MATMUL,
    written(
        "npu_grouped_matmul",
        npu_grouped_matmul,
        name="grouped_matmul",
        rounding="after each product and bias",
        example=_npu_example,
    ),
)
