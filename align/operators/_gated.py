"""Recognise gated activations: act(gate) * up, the two halves from two layers or from one tensor cut in two."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from align.dumpers.survey import CallGraph, CallRecord, Operand
from align.operators._activations import activation_of
from align.operators._patterns import argument, close, is_last_axis, maker, take
from align.operators.base import Binding, Fixed, Match, Operator


def halves(gate: Tensor | None, up: Tensor | None, packed: Tensor | None, gate_first: bool) -> tuple[Tensor, Tensor]:
    """The two halves, from either form of the arguments."""
    if packed is not None:
        first, second = packed.chunk(2, dim=-1)
        return (first, second) if gate_first else (second, first)
    assert gate is not None
    assert up is not None
    return gate, up


def joined(
    gate: Tensor | None, up: Tensor | None, packed: Tensor | None, gate_first: bool, *, want_gate_first: bool
) -> Tensor:
    """One tensor [..., 2 d] with the halves in the order a kernel wants; copies only if they do not lie so already."""
    if packed is not None and gate_first == want_gate_first:
        return packed
    one, other = halves(gate, up, packed, gate_first)
    return torch.cat((one, other) if want_gate_first else (other, one), dim=-1)


def find_gated(operator: Operator, record: CallRecord, graph: CallGraph, acts: Collection[str]) -> Match | None:
    """The product of an activation and a tensor of its shape, with `act` bound to the activation's name."""
    if record.op not in ("mul", "mul_"):
        return None
    for position, name in ((0, "input"), (1, "other")):
        act = maker(graph, record, position, name)
        up_place = (1 - position, "other" if position == 0 else "input")
        up = argument(record, *up_place)
        kind = activation_of(act)
        if (
            act is None
            or kind not in acts
            or not isinstance(up, Operand)
            or act.output is None
            or up.shape != act.output.shape
        ):
            continue
        gate = argument(act, 0, "input")
        cut = _cut_in_two(graph, gate, up)
        binding: dict[str, Binding] = {"act": Fixed(kind)}
        if cut is None:
            binding |= {
                "gate": take(act, 0, "input"),
                "up": take(record, *up_place),
                "packed": Fixed(None),
                "gate_first": Fixed(True),
            }
            return close(graph, operator, (act, record), binding)
        binding |= {
            "gate": Fixed(None),
            "up": Fixed(None),
            "packed": take(cut, 0, "input"),
            "gate_first": Fixed(gate.origin.slot == "0"),
        }
        return close(graph, operator, (cut, act, record), binding)
    return None


def _cut_in_two(graph: CallGraph, gate: object, up: object) -> CallRecord | None:
    """The call that cut one tensor along its last axis into exactly this gate and this factor."""
    cut = graph.maker(gate)
    if (
        cut is None
        or cut is not graph.maker(up)
        or cut.op not in ("chunk", "split", "tensor_split")
        or len(cut.outputs) != 2
    ):
        return None
    same_size = cut.outputs[0][1].shape == cut.outputs[1][1].shape
    return cut if same_size and is_last_axis(argument(cut, 2, "dim", 0), argument(cut, 0, "input")) else None
