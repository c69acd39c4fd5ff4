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
from align.operators._activations import ACTIVATIONS, activation_of, apply
from align.operators._folding import prepared
from align.operators._patterns import argument, close, maker, random_tensor, take
from align.operators._probe import probe
from align.operators.base import Binding, Bound, Fixed, Kernel, Match, Operator

ADD_THEN_ACT, ACT_THEN_ADD, NO_ADD = "add then act", "act then add", "no add"


def unfused(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int,
    mean: Tensor | None, var: Tensor | None, gamma: Tensor | None, beta: Tensor | None, eps: float,
    act: str, residual: Tensor | None, order: str,
) -> Tensor:  # fmt: skip
    """x [n, c, h, w] -> [n, o, h', w']: every step a call of its own."""
    y = F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    if mean is not None:
        y = F.batch_norm(y, mean, var, gamma, beta, training=False, eps=eps)
    if order == ADD_THEN_ACT:
        y = y + residual
    y = apply(act, y)
    return y + residual if order == ACT_THEN_ADD else y


def fold(
    weight: Tensor, bias: Tensor | None, mean: Tensor, var: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float
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


def _folded(weight: Tensor, bias: Tensor | None, norm: tuple[Tensor | None, ...], eps: float) -> tuple[Tensor, Tensor | None]:
    mean, var, gamma, beta = norm
    if mean is None or var is None:
        return weight, bias
    return prepared(("fold", eps), (weight, bias, *norm), lambda: fold(weight, bias, mean, var, gamma, beta, eps))


def onednn(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int,
    mean: Tensor | None, var: Tensor | None, gamma: Tensor | None, beta: Tensor | None, eps: float,
    act: str, residual: Tensor | None, order: str,
) -> Tensor:  # fmt: skip
    """The whole chain in one oneDNN primitive; an addition after the activation is no post-operation and comes apart."""
    weight, bias = _folded(weight, bias, (mean, var, gamma, beta), eps)
    slide = _onednn.window(stride, padding, dilation, groups)
    if order == ADD_THEN_ACT and residual is not None and residual.dtype == x.dtype:
        return _onednn.conv_add(x, weight, bias, residual, slide, act)
    if order == ADD_THEN_ACT and residual is not None:  # a wider residual (seen only now) decides the result's dtype
        return apply(act, _onednn.conv(x, weight, bias, slide, "") + residual)
    return _plus(_onednn.conv(x, weight, bias, slide, act), residual)


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


# -- what a kernel refuses ----------------------------------------------------------------------------------------------


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
    return refuses_everywhere(bound, dtype) or probe("cpu", dtype, onednn, unfused, _EXAMPLES[bound["order"], bound["act"]])


def refuses_on_cuda(bound: Bound, dtype: torch.dtype) -> str:
    """Without a norm to fold, only ReLU is worth a cuDNN call."""
    if bound["mean"] is None and bound["act"] != "relu":
        return f"cuDNN fuses ReLU only, not {bound['act']}"
    return refuses_everywhere(bound, dtype) or probe("cuda", dtype, cudnn, unfused, _EXAMPLES[bound["order"], bound["act"]])


# -- examples -----------------------------------------------------------------------------------------------------------


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
    (order, act): _make_example(order, act) for order in (ADD_THEN_ACT, ACT_THEN_ADD, NO_ADD) for act in ("", *ACTIVATIONS)
}


# -- finding ------------------------------------------------------------------------------------------------------------


def find(record: CallRecord, graph: CallGraph) -> Match | None:
    """Recognise a chain by its last call: an activation, an addition or a batch norm."""
    if record.op in ("add", "add_"):
        return _ending_in_add(record, graph)
    act = activation_of(record)
    if act:
        inner = maker(graph, record, 0)
        if inner is not None and inner.op in ("add", "add_"):
            return _around_add(inner, graph, outer=(record,), act=act)
        return _core(inner, graph, outer=(record,), act=act)
    return _core(record, graph, outer=(), act="") if record.op == "batch_norm" else None


def _ending_in_add(add: CallRecord, graph: CallGraph) -> Match | None:
    """An addition last: behind an activation, or directly behind a batch norm."""
    for position in (0, 1):
        side = maker(graph, add, position, _ADD_NAMES[position])
        act = activation_of(side)
        if side is not None and act:
            match = _added(maker(graph, side, 0), graph, (add, side), act, position, ACT_THEN_ADD)
            if match is not None:
                return match
    return _around_add(add, graph, outer=(), act="")


_ADD_NAMES = ("input", "other")


def _around_add(add: CallRecord, graph: CallGraph, *, outer: tuple[CallRecord, ...], act: str) -> Match | None:
    """conv+bn on one side of an addition that comes before the activation, if there is one."""
    for position in (0, 1):
        side = maker(graph, add, position, _ADD_NAMES[position])
        match = _added(side, graph, (*outer, add), act, position, ADD_THEN_ACT)
        if match is not None and (outer or side is None or side.op == "batch_norm"):
            return match
    return None


def _added(
    core: CallRecord | None, graph: CallGraph, outer: tuple[CallRecord, ...], act: str, position: int, order: str
) -> Match | None:
    """The core on side `position` of an addition whose other side has the very shape of the result."""
    add = outer[0] if order == ACT_THEN_ADD else outer[-1]
    other = 1 - position
    residual = argument(add, other, _ADD_NAMES[other])
    if not isinstance(residual, Operand) or add.output is None or residual.shape != add.output.shape:
        return None
    if argument(add, 2, "alpha", 1) != 1:
        return None
    extra = {"residual": take(add, other, _ADD_NAMES[other]), "order": Fixed(order)}
    return _core(core, graph, outer=outer, act=act, extra=extra)


_NO_NORM: dict[str, Binding] = {name: Fixed(None) for name in ("mean", "var", "gamma", "beta")} | {"eps": Fixed(0.0)}
_NO_RESIDUAL: dict[str, Binding] = {"residual": Fixed(None), "order": Fixed(NO_ADD)}


def _core(
    record: CallRecord | None, graph: CallGraph, *, outer: tuple[CallRecord, ...], act: str, extra: dict[str, Binding] | None = None
) -> Match | None:
    """A batch norm in evaluation behind a convolution, or a convolution alone if something follows it."""
    if record is None:
        return None
    calls, binding, conv = (*outer, record), dict(_NO_NORM), record
    if record.op == "batch_norm":
        inner = maker(graph, record, 0)
        if inner is None or argument(record, 5, "training", False) or argument(record, 1, "running_mean") is None:
            return None
        calls, binding, conv = (*calls, inner), _norm_binding(record), inner
    x = argument(conv, 0, "input")
    if conv.op != "conv2d" or not isinstance(x, Operand) or len(x.shape) != 4:
        return None
    if isinstance(argument(conv, 4, "padding", 0), str) or len(calls) < 2:
        return None
    binding |= _conv_binding(conv) | {"act": Fixed(act)} | (extra or _NO_RESIDUAL)
    return close(graph, CONV_BN_ACT_ADD, calls, binding)


def _norm_binding(norm: CallRecord) -> dict[str, Binding]:
    return {
        "mean": take(norm, 1, "running_mean"), "var": take(norm, 2, "running_var"),
        "gamma": take(norm, 3, "weight"), "beta": take(norm, 4, "bias"), "eps": take(norm, 7, "eps", 1e-5),
    }  # fmt: skip


def _conv_binding(conv: CallRecord) -> dict[str, Binding]:
    return {
        "x": take(conv, 0, "input"), "weight": take(conv, 1, "weight"), "bias": take(conv, 2, "bias"),
        "stride": take(conv, 3, "stride", 1), "padding": take(conv, 4, "padding", 0),
        "dilation": take(conv, 5, "dilation", 1), "groups": take(conv, 6, "groups", 1),
    }  # fmt: skip


CONV_BN_ACT_ADD = Operator(
    name="conv_bn_act_add",
    op_class=OpClass.ORDINARY,
    summary="convolution with folded batch norm, activation and residual addition (any subset of two or more)",
    rounding="after the convolution, the norm, the addition and the activation; fused: folded weights once, then the result",
    finders=(find,),
    unfused=unfused,
    kernels={
        "cpu": Kernel(onednn, "oneDNN convolution with folded norm and fused activation or add+ReLU", refuses_on_cpu),
        "cuda": Kernel(cudnn, "cuDNN convolution with folded norm and fused ReLU or add+ReLU", refuses_on_cuda),
    },
    example=_EXAMPLES[ADD_THEN_ACT, "relu"],
)
OPERATORS: tuple[Operator, ...] = (CONV_BN_ACT_ADD,)
