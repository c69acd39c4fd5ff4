"""Cross entropy of class scores: log-softmax and the negative log-likelihood in one kernel. Fused on NPUs only."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from align.dumpers.model import OpClass
from align.dumpers.survey import CallGraph, CallRecord, Operand
from align.operators._npu_call import draw, refuse_rest, run_npu, widest, written
from align.operators._patterns import argument, take
from align.operators.base import Bound, Kernel, Match, Operator


def unfused(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """x [n, c], target [n] -> [] (or [n]): torch's log-softmax, then its negative log-likelihood."""
    return F.cross_entropy(
        x, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )


def fused(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """npu_cross_entropy_loss, whose reduced loss has one axis of one."""
    wide = None if weight is None else weight.float()
    loss: Tensor = run_npu("npu_cross_entropy_loss", x, target, wide, reduction, ignore_index, label_smoothing)[0]
    return loss if reduction == "none" else loss.reshape(())


def refuses(bound: Bound, dtype: torch.dtype) -> str:
    """[n, c] scores with class numbers."""
    x, target = bound["x"], bound["target"]
    if len(x.shape) != 2 or target.dtype.is_floating_point:
        return f"npu_cross_entropy_loss takes [n, c] scores and class numbers, not {list(x.shape)} and {target.dtype!s}"
    known = (torch.float16, torch.bfloat16, torch.float32)
    return "" if dtype in known else f"no NPU kernel in {str(dtype).removeprefix('torch.')}"


def example(device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """Seven rows, one of them ignored."""
    target = torch.tensor([0, 3, -100, 7, 1, 4, 2], device=device)
    return {
        "x": draw((7, 8), device, dtype, seed),
        "target": target,
        "weight": None,
        "ignore_index": -100,
        "reduction": "mean",
        "label_smoothing": 0.0,
    }


def find(record: CallRecord, graph: CallGraph) -> Match | None:
    """F.cross_entropy without the deprecated arguments."""
    if (
        record.op != "cross_entropy"
        or argument(record, 3, "size_average") is not None
        or argument(record, 5, "reduce") is not None
    ):
        return None
    if not isinstance(argument(record, 0, "input"), Operand) or not isinstance(argument(record, 1, "target"), Operand):
        return None
    binding = {
        "x": take(record, 0, "input"), "target": take(record, 1, "target"), "weight": take(record, 2, "weight"),
        "ignore_index": take(record, 4, "ignore_index", -100), "reduction": take(record, 6, "reduction", "mean"),
        "label_smoothing": take(record, 7, "label_smoothing", 0.0),
    }  # fmt: skip
    return Match(CROSS_ENTROPY, (record.ident,), binding)


CROSS_ENTROPY = Operator(
    name="cross_entropy",
    op_class=OpClass.SENSITIVE,
    summary="cross entropy of class scores",
    rounding="after the log-softmax (float32 inside) and after the mean; fused: once",
    finders=(find,),
    unfused=unfused,
    kernels={"npu": Kernel(fused, "npu_cross_entropy_loss", refuses)},
    example=example,
)


# -- torch_npu's own call ----------------------------------------------------------------------------------------------


def npu_cross_entropy_loss(
    input_: Tensor, target: Tensor, weight: Tensor | None = None, reduction: str = "mean", ignore_index: int = -100,
    label_smoothing: float = 0.0, lse_square_scale_for_zloss: float = 0.0, return_zloss: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss, log-probabilities, z-loss, log-sum-exp); a reduced loss has shape [1]; z-loss is not supported."""
    refuse_rest(
        "npu_cross_entropy_loss",
        {"lse_square_scale_for_zloss": lse_square_scale_for_zloss, "return_zloss": return_zloss},
    )
    log_probabilities = input_.to(widest(input_)).log_softmax(dim=-1).to(input_.dtype)
    loss = unfused(
        input_, target, None if weight is None else weight.to(input_.dtype), ignore_index, reduction, label_smoothing
    )
    loss = loss if reduction == "none" else loss.reshape(1)
    return loss, log_probabilities, torch.zeros_like(loss), input_.new_zeros(input_.shape[0])


def _npu_example(device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    values = example(device, dtype, seed)
    return {"input_": values["x"], "target": values["target"]}


OPERATORS: tuple[Operator, ...] = (
    CROSS_ENTROPY,
    written(
        "npu_cross_entropy_loss",
        npu_cross_entropy_loss,
        name="cross_entropy",
        op_class=OpClass.SENSITIVE,
        rounding="after the log-softmax (float32 inside) and after the mean",
        example=_npu_example,
    ),
)
