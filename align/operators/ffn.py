"""Two linear layers around an activation: the feed-forward block of a transformer. Fused on NPUs only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from align.dumpers.errors import UndecidedError
from align.dumpers.model import OpClass
from align.dumpers.survey import CallGraph, CallRecord
from align.operators._activations import activation_of, apply
from align.operators._folding import prepared
from align.operators._gelu import gelu_sigmoid, gelu_tanh, plain_gelu
from align.operators._npu_call import drawn, refuse_rest, run_npu, written
from align.operators._patterns import climb_from, close, take
from align.operators.base import Binding, Bound, Fixed, Kernel, Match, Operator

_NAMES = {"relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu", "silu": "silu"}


def unfused(
    x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None, act: str
) -> Tensor:
    """x [..., i], weight1 [h, i], weight2 [o, h] -> [..., o], rounded after each layer and after the activation."""
    hidden = F.linear(x, weight1, bias1)
    return F.linear(_activated(hidden, act), weight2, bias2)


def _activated(x: Tensor, act: str) -> Tensor:
    if act in ("gelu", "gelu_tanh"):
        return plain_gelu(x, "tanh" if act == "gelu_tanh" else "none")
    return apply(act, x)


def fused(x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None, act: str) -> Tensor:
    """npu_ffn, which takes weights as [in, out] and, for bfloat16, biases in float32; inside, all is float32."""
    across = [_across(weight) for weight in (weight1, weight2)]
    wide = torch.float32 if x.dtype == torch.bfloat16 else x.dtype
    biases = {name: bias.to(wide) for name, bias in (("bias1", bias1), ("bias2", bias2)) if bias is not None}
    result: Tensor = run_npu("npu_ffn", x, *across, _NAMES[act], inner_precise=0, **biases)
    return result


def _across(weight: Tensor) -> Tensor:
    return prepared(("ffn",), (weight,), lambda: weight.t().contiguous())


def refuses(bound: Bound, dtype: torch.dtype) -> str:
    """npu_ffn: half precision, and the activations it names."""
    if bound["act"] not in _NAMES:
        return f"npu_ffn has no {bound['act']}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"npu_ffn takes float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    return ""


def find(record: CallRecord, graph: CallGraph) -> Match | None:
    """linear(act(linear(x))), with dropout that is off or casts in between."""
    if record.op != "linear":
        return None
    act, passed = climb_from(graph, record, 0)
    kind = activation_of(act)
    if act is None or not kind:
        return None
    first, more = climb_from(graph, act, 0)
    if first is None or first.op != "linear":
        return None
    binding: dict[str, Binding] = {
        "x": take(first, 0, "input"), "weight1": take(first, 1, "weight"), "bias1": take(first, 2, "bias"),
        "weight2": take(record, 1, "weight"), "bias2": take(record, 2, "bias"), "act": Fixed(kind),
    }  # fmt: skip
    return close(graph, FFN, (first, *more, act, *passed, record), binding)


FFN = Operator(
    name="ffn",
    op_class=OpClass.ORDINARY,
    summary="feed-forward block: linear layer, activation, linear layer",
    rounding="after each layer and after the activation; fused: before the second product and once at the end",
    finders=(find,),
    unfused=unfused,
    kernels={"npu": Kernel(fused, "npu_ffn (GELU by tanh)", refuses)},
    example=drawn((3, 32), (64, 32), (64,), (16, 64), (16,), names="x weight1 bias1 weight2 bias2", act="relu"),
    fused_anyway=frozenset({"npu"}),
)


# -- torch_npu's own call ----------------------------------------------------------------------------------------------


def _gated(act: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def apply_gate(x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        return act(left) * right

    return apply_gate


_FFN_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "fastgelu": gelu_sigmoid, "gelu": gelu_tanh, "relu": torch.relu, "silu": F.silu,
    "geglu": _gated(gelu_tanh), "swiglu": _gated(F.silu), "reglu": _gated(torch.relu),
}  # fmt: skip


def npu_ffn(
    x: Tensor, weight1: Tensor, weight2: Tensor, activation: str, *, expert_tokens: Sequence[int] | None = None,
    expert_tokens_index: Sequence[int] | None = None, bias1: Tensor | None = None, bias2: Tensor | None = None,
    inner_precise: int | None = None, **rest: Any,
) -> Tensor:  # fmt: skip
    """act(x @ weight1 + bias1) @ weight2 + bias2, weights [k, n]; with experts [e, k, n] and tokens an expert."""
    refuse_rest("npu_ffn", rest)
    if activation not in _FFN_ACTIVATIONS:
        raise UndecidedError(
            f"npu_ffn has no activation {activation!r} in the catalog", f"known: {', '.join(_FFN_ACTIVATIONS)}"
        )
    layers = (weight1, bias1, weight2, bias2)
    if weight1.dim() == 2:
        return _block(x, _FFN_ACTIVATIONS[activation], *layers)
    ends = list(expert_tokens_index) if expert_tokens_index is not None else list(accumulate(expert_tokens or ()))
    parts = [
        _block(
            x[start:end], _FFN_ACTIVATIONS[activation], *(None if layer is None else layer[expert] for layer in layers)
        )
        for expert, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True))
    ]
    return torch.cat(parts)


def _block(
    x: Tensor,
    act: Callable[[Tensor], Tensor],
    weight1: Tensor | None,
    bias1: Tensor | None,
    weight2: Tensor | None,
    bias2: Tensor | None,
) -> Tensor:
    return _layer(act(_layer(x, weight1, bias1)), weight2, bias2)


def _layer(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    assert weight is not None
    out = torch.matmul(x, weight)
    return out if bias is None else (out + bias).to(x.dtype)


OPERATORS: tuple[Operator, ...] = (
    FFN,
    written(
        "npu_ffn",
        npu_ffn,
        name="ffn",
        rounding="after each product, bias and step of the activation",
        example=drawn((6, 32), (32, 64), (64, 16), names="x weight1 weight2", activation="gelu"),
    ),
)
