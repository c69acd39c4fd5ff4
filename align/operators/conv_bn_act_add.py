"""Convolution, batch norm, activation and residual addition: folded into one weight and run as one primitive.

Recognised from the last call: any of conv+bn, conv+act, conv+bn+act, and these with an addition before the activation
(`relu(bn(conv(x)) + y)`) or after it (`y + relu(bn(conv(x)))`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from align.dumpers.model import OpClass
from align.dumpers.survey import CallGraph, CallRecord, Operand
from align.operators import _onednn
from align.operators._activations import ACTIVATIONS, apply
from align.operators._conv_chain import ACT_THEN_ADD, ADD_THEN_ACT, NO_ADD, find_chain
from align.operators._folding import prepared
from align.operators._patterns import random_tensor
from align.operators._probe import probe
from align.operators.base import Bound, Kernel, Match, Operator


def unfused(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int,
    mean: Tensor | None, var: Tensor | None, gamma: Tensor | None, beta: Tensor | None, eps: float,
    act: str, residual: Tensor | None, order: str,
) -> Tensor:  # fmt: skip
    """x [n, c, h, w] -> [n, o, h', w']: every step a call of its own."""
    y = F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    if mean is not None:
        y = F.batch_norm(y, mean, var, gamma, beta, training=False, eps=eps)
    if order == ADD_THEN_ACT and residual is not None:
        y = y + residual
    y = apply(act, y)
    return y + residual if order == ACT_THEN_ADD and residual is not None else y


def fold(
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Fold a batch norm in evaluation into the convolution before it, in float32, each result rounded once."""
    scale = torch.rsqrt(var.float() + eps)
    if gamma is not None:
        scale = scale * gamma.float()
    shift = -mean.float() if bias is None else bias.float() - mean.float()
    shift = shift * scale
    if beta is not None:
        shift = shift + beta.float()
    folded = weight.float() * scale[:, None, None, None]
    return folded.to(weight.dtype), shift.to(weight.dtype)


Norm = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
Folded = tuple[Tensor, Tensor | None]


def _fold(weight: Tensor, bias: Tensor | None, norm: Norm, eps: float) -> Folded:
    mean, var, gamma, beta = norm
    return (weight, bias) if mean is None or var is None else fold(weight, bias, mean, var, gamma, beta, eps)


def _folded(weight: Tensor, bias: Tensor | None, norm: Norm, eps: float) -> Folded:
    """The folded weight and bias, kept."""
    if norm[0] is None:
        return weight, bias
    return prepared(("fold", eps), (weight, bias, *norm), lambda: _fold(weight, bias, norm, eps))


def _packed(
    weight: Tensor, bias: Tensor | None, norm: Norm, eps: float, place: tuple[_onednn.Window, tuple[int, ...]]
) -> Folded:
    """The folded weight packed for inputs of one shape, and the folded bias, kept."""

    def make() -> Folded:
        folded, shift = _fold(weight, bias, norm, eps)
        return _onednn.pack(folded, *place), shift

    return prepared(("pack", eps, place), (weight, bias, *norm), make)


def onednn(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int,
    mean: Tensor | None, var: Tensor | None, gamma: Tensor | None, beta: Tensor | None, eps: float,
    act: str, residual: Tensor | None, order: str,
) -> Tensor:  # fmt: skip
    """The whole chain in one oneDNN primitive; only an addition after the activation comes apart."""
    slide, norm = _onednn.window(stride, padding, dilation, groups), (mean, var, gamma, beta)
    adds_inside = order == ADD_THEN_ACT and residual is not None and residual.dtype == x.dtype
    if adds_inside or _onednn.pays_to_pack(x, weight):
        weight, bias = _packed(weight, bias, norm, eps, (slide, x.shape))
    else:
        weight, bias = _folded(weight, bias, norm, eps)
    if residual is None or order == ACT_THEN_ADD:
        return _plus(_onednn.conv(x, weight, bias, slide, act), residual)
    if adds_inside:
        return _onednn.conv_add(x, weight, bias, residual, slide, act)
    return apply(act, _onednn.conv(x, weight, bias, slide, "") + residual)  # a wider residual decides the dtype


def _plus(y: Tensor, residual: Tensor | None) -> Tensor:
    """Add in place where that keeps the dtype of an addition."""
    if residual is None:
        return y
    return y.add_(residual) if residual.dtype == y.dtype else y + residual


def cudnn(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int,
    mean: Tensor | None, var: Tensor | None, gamma: Tensor | None, beta: Tensor | None, eps: float,
    act: str, residual: Tensor | None, order: str,
) -> Tensor:  # fmt: skip
    """The folded convolution by cuDNN, with its addition and ReLU where both stand in cuDNN's order."""
    weight, bias = _folded(weight, bias, (mean, var, gamma, beta), eps)
    slide = _onednn.window(stride, padding, dilation, groups)
    where = (slide.stride, slide.padding, slide.dilation, slide.groups)
    if act == "relu" and order == ADD_THEN_ACT and residual is not None and residual.dtype == x.dtype:
        return torch.cudnn_convolution_add_relu(x, weight, residual, 1.0, bias, *where)
    if order == ADD_THEN_ACT and residual is not None:
        return apply(act, F.conv2d(x, weight, bias, *where) + residual)
    if act == "relu":
        return _plus(torch.cudnn_convolution_relu(x, weight, bias, *where), residual)
    return _plus(apply(act, F.conv2d(x, weight, bias, *where)), residual)


def folded(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int,
    mean: Tensor | None, var: Tensor | None, gamma: Tensor | None, beta: Tensor | None, eps: float,
    act: str, residual: Tensor | None, order: str,
) -> Tensor:  # fmt: skip
    """The norm folded into the convolution; activation and addition stay calls of their own on an NPU."""
    weight, bias = _folded(weight, bias, (mean, var, gamma, beta), eps)
    y = F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    if order == ADD_THEN_ACT and residual is not None:
        return apply(act, y + residual)
    return _plus(apply(act, y), residual)


def refuses_on_npu(bound: Bound, dtype: torch.dtype) -> str:
    """Without a norm there is nothing to fold, and an NPU fuses nothing else in eager mode."""
    return "torch_npu fuses nothing but a batch norm into a convolution" if bound["mean"] is None else ""


# -- what a kernel refuses --------------------------------------------------------------------------------------------


def refuses_everywhere(bound: Bound, dtype: torch.dtype) -> str:
    """What the patterns allow but no fused kernel computes."""
    residual, act, order = bound["residual"], bound["act"], bound["order"]
    if order == ADD_THEN_ACT and act not in ("", "relu"):
        return f"no fused primitive for an addition before {act}"
    if order != NO_ADD and not isinstance(residual, Operand) and not isinstance(residual, Tensor):
        return "the value added is not a tensor"
    return ""


def refuses_on_cpu(bound: Bound, dtype: torch.dtype) -> str:
    """Ask oneDNN for the very post-operations, once per dtype."""
    return refuses_everywhere(bound, dtype) or probe(
        "cpu", dtype, onednn, unfused, _EXAMPLES[bound["order"], bound["act"]]
    )


def refuses_on_cuda(bound: Bound, dtype: torch.dtype) -> str:
    """Without a norm to fold, only ReLU is worth a cuDNN call."""
    if bound["mean"] is None and bound["act"] != "relu":
        return f"cuDNN fuses ReLU only, not {bound['act']}"
    return refuses_everywhere(bound, dtype) or probe(
        "cuda", dtype, cudnn, unfused, _EXAMPLES[bound["order"], bound["act"]]
    )


# -- examples ---------------------------------------------------------------------------------------------------------


def _make_example(order: str, act: str) -> Callable[[str, torch.dtype, int], dict[str, Any]]:
    def example(device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
        def draw(*shape: int) -> Tensor:
            return random_tensor(shape, device, dtype, seed + len(shape))

        return {
            "x": draw(2, 8, 10, 10), "weight": draw(16, 8, 3, 3) * 0.1, "bias": None,
            "stride": 1, "padding": 1, "dilation": 1, "groups": 1,
            "mean": draw(16) * 0.2, "var": draw(16).abs() + 0.5, "gamma": draw(16), "beta": draw(16), "eps": 1e-5,
            "act": act, "residual": None if order == NO_ADD else draw(2, 16, 10, 10), "order": order,
        }  # fmt: skip

    return example


_EXAMPLES = {
    (order, act): _make_example(order, act)
    for order in (ADD_THEN_ACT, ACT_THEN_ADD, NO_ADD)
    for act in ("", *ACTIVATIONS)
}


def find(record: CallRecord, graph: CallGraph) -> Match | None:
    """A chain by its last call."""
    return find_chain(CONV_BN_ACT_ADD, record, graph)


CONV_BN_ACT_ADD = Operator(
    name="conv_bn_act_add",
    op_class=OpClass.ORDINARY,
    summary="convolution with folded batch norm, activation and residual addition (any subset of two or more)",
    rounding="after convolution, norm, addition and activation; fused: the folded weights, then the result",
    finders=(find,),
    unfused=unfused,
    kernels={
        "cpu": Kernel(onednn, "oneDNN convolution with folded norm and fused activation or add+ReLU", refuses_on_cpu),
        "npu": Kernel(folded, "aclnn convolution with folded batch norm", refuses_on_npu),
        "cuda": Kernel(cudnn, "cuDNN convolution with folded norm and fused ReLU or add+ReLU", refuses_on_cuda),
    },
    example=_EXAMPLES[ADD_THEN_ACT, "relu"],
    fused_anyway=frozenset({"npu"}),
)
OPERATORS: tuple[Operator, ...] = (CONV_BN_ACT_ADD,)
