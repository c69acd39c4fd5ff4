"""Rotary position embedding: x * cos + rotate(x) * sin. torch has no fused kernel for it; on a CPU we have our own.

Half style (Llama) turns the pairs (x_i, x_{i + d/2}); interleaved style (GPT-J, Flux) turns (x_{2i}, x_{2i+1}).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from align.dumpers.model import OpClass
from align.dumpers.survey import CallGraph, CallRecord, Operand
from align.operators import _cpu
from align.operators._npu_rotary import NPU_ROTARY_KERNEL
from align.operators._patterns import argument, close, is_last_axis, maker, random_tensor, same_tensor, take
from align.operators.base import Binding, Bound, Fixed, Kernel, Match, Operator

_SIDES = ((0, "input"), (1, "other"))


def unfused(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """x [..., s, d], cos and sin that broadcast to it -> [..., s, d], rounded after both products and the sum."""
    if interleaved:
        even, odd = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
        turned = torch.stack((-odd, even), dim=-1).flatten(-2)
    else:
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    return x * cos + turned * sin


def example(device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """Angles of six positions."""
    angle = torch.outer(torch.arange(6.0), 100.0 ** -torch.arange(0, 1, 1 / 8))
    angle = torch.cat((angle, angle), -1).to(device)
    x = random_tensor((2, 3, 6, 16), device, dtype, seed)
    return {"x": x, "cos": angle.cos().to(dtype), "sin": angle.sin().to(dtype), "interleaved": False}


_probed = _cpu.refusal(_cpu.rotary, unfused, example)


def refuses_on_cpu(bound: Bound, dtype: torch.dtype) -> str:
    """The loop turns halves."""
    return "no loop for interleaved pairs" if bound["interleaved"] else _probed(bound, dtype)


def find(record: CallRecord, graph: CallGraph) -> Match | None:
    """The sum x * cos + rotate(x) * sin in either order."""
    if record.op != "add":
        return None
    for position in (0, 1):
        plain, turned = maker(graph, record, *_SIDES[position]), maker(graph, record, *_SIDES[1 - position])
        if plain is not None and turned is not None and plain.op == turned.op == "mul":
            match = _products(record, plain, turned, graph)
            if match is not None:
                return match
    return None


def _products(record: CallRecord, plain: CallRecord, turned: CallRecord, graph: CallGraph) -> Match | None:
    for side, (position, name) in enumerate(_SIDES):
        rotation = maker(graph, turned, position, name)
        found = _rotation(rotation, graph)
        if rotation is None or found is None:
            continue
        calls, x = found
        for place, (x_position, x_name) in enumerate(_SIDES):
            if same_tensor(argument(plain, x_position, x_name), x):
                binding: dict[str, Binding] = {
                    "x": take(plain, x_position, x_name),
                    "cos": take(plain, *_SIDES[1 - place]),
                    "sin": take(turned, *_SIDES[1 - side]),
                    "interleaved": Fixed(False),
                }
                return close(graph, ROTARY, (record, plain, turned, rotation, *calls), binding)
    return None


def _rotation(cat: CallRecord | None, graph: CallGraph) -> tuple[tuple[CallRecord, ...], Operand] | None:
    """cat((-second, first)) of the halves of one tensor: the calls behind it, and that tensor."""
    parts = argument(cat, 0, "tensors") if cat is not None and cat.op == "cat" else None
    if (
        cat is None
        or not isinstance(parts, (tuple, list))
        or len(parts) != 2
        or not is_last_axis(argument(cat, 1, "dim", 0), cat.output)
    ):
        return None
    negative, first = graph.maker(parts[0]), graph.maker(parts[1])
    if negative is None or negative.op != "neg" or first is None:
        return None
    second = maker(graph, negative, 0)
    if second is None:
        return None
    x, other = _half(first, parts[1], 0), _half(second, argument(negative, 0, "input"), 1)
    if x is None or other is None or not same_tensor(x, other):
        return None
    calls = {call.ident: call for call in (negative, first, second)}
    return tuple(calls.values()), x


def _half(call: CallRecord, part: Any, which: int) -> Operand | None:
    """The tensor that a call cut in two, if `part` is half number `which` (0 first, 1 second)."""
    x = argument(call, 0, "input")
    if (
        not isinstance(x, Operand)
        or not isinstance(part, Operand)
        or part.origin is None
        or part.shape[-1] * 2 != x.shape[-1]
    ):
        return None
    if call.op in ("chunk", "split") and is_last_axis(argument(call, 2, "dim", 0), x):
        return x if part.origin.slot == str(which) else None
    if call.op == "getitem":
        return x if _is_half_slice(argument(call, 1, "index"), x.shape[-1] // 2, which) else None
    return None


def _is_half_slice(index: Any, middle: int, which: int) -> bool:
    if not isinstance(index, tuple) or len(index) != 2 or index[0] is not Ellipsis or not isinstance(index[1], slice):
        return False
    part = index[1]
    if part.step not in (None, 1):
        return False
    if which == 0:
        return part.start in (None, 0) and part.stop == middle
    return part.start == middle and part.stop in (None, 2 * middle)


ROTARY = Operator(
    name="rotary",
    op_class=OpClass.ORDINARY,
    summary="rotary position embedding: x * cos + rotate_half(x) * sin",
    rounding="after each product and after the sum; fused: once",
    finders=(find,),
    unfused=unfused,
    kernels={
        "cpu": Kernel(_cpu.rotary, "single pass over rows, float32 inside, one rounding (numba)", refuses_on_cpu),
        "npu": NPU_ROTARY_KERNEL,
    },
    example=example,
)
OPERATORS: tuple[Operator, ...] = (ROTARY,)
