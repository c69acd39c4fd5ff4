"""GELU: written out by erf, tanh or sigmoid, or F.gelu, which on an NPU is one fused kernel of the tanh formula.

aten's GELU on an NPU ignores `approximate`; a baseline there has to write the formula out.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from align.dumpers.model import OpClass
from align.dumpers.survey import CallGraph, CallRecord, Operand
from align.operators._gelu import gelu_primitive, gelu_sigmoid
from align.operators._npu_call import drawn, run_npu
from align.operators._npu_norm import refuses_dtype
from align.operators._patterns import argument, close, is_number, is_reflected, maker, same_tensor, take
from align.operators.base import Bound, Fixed, Kernel, Match, Operator, Take

SIGMOID = "sigmoid"
"""The formula x * sigmoid(1.702 x), beside torch's "none" and "tanh"."""

_SIDES = ((0, "input"), (1, "other"))


def unfused(x: Tensor, approximate: str = "none") -> Tensor:
    """[...] -> [...]: one primitive call a step, each rounded."""
    return gelu_sigmoid(x) if approximate == SIGMOID else gelu_primitive(x, approximate)


def aten(x: Tensor, approximate: str = "none") -> Tensor:
    """torch's own kernel: float32 inside, rounded once."""
    return F.gelu(x, approximate=approximate)


def npu(x: Tensor, approximate: str = "none") -> Tensor:
    """npu_gelu, which honours `approximate`, or npu_fast_gelu for the sigmoid formula."""
    result: Tensor = (
        run_npu("npu_fast_gelu", x) if approximate == SIGMOID else run_npu("npu_gelu", x, approximate=approximate)
    )
    return result


def refuses_sigmoid(bound: Bound, dtype: torch.dtype) -> str:
    """torch has erf and tanh."""
    return "torch has no kernel for x * sigmoid(1.702 x)" if bound["approximate"] == SIGMOID else ""


# -- finding -----------------------------------------------------------------------------------------------------------


def find_call(record: CallRecord, graph: CallGraph) -> Match | None:
    """F.gelu."""
    if record.op != "gelu":
        return None
    binding = {"x": take(record, 0, "input"), "approximate": take(record, -1, "approximate", "none")}
    return Match(GELU, (record.ident,), binding)


def find_written_out(record: CallRecord, graph: CallGraph) -> Match | None:
    """x / 2 * (1 + erf(x / sqrt 2)), the tanh formula, or x * sigmoid(1.702 x)."""
    if record.op != "mul":
        return None
    for side, other in (_SIDES, _SIDES[::-1]):
        gate = maker(graph, record, *side)
        if gate is not None and gate.op == "sigmoid":
            match = _sigmoid(record, gate, take(record, *other), graph)
        else:
            match = _halved(record, gate, maker(graph, record, *other), graph)
        if match is not None:
            return match
    return None


def _sigmoid(record: CallRecord, gate: CallRecord, x: Take, graph: CallGraph) -> Match | None:
    scaled = _times(maker(graph, gate, 0), 1.702)
    if scaled is None or not _same(graph, argument(scaled, 0, "input"), x.of(record)):
        return None
    return close(graph, WRITTEN_GELU, (scaled, gate, record), {"x": x, "approximate": Fixed(SIGMOID)})


def _halved(record: CallRecord, gate: CallRecord | None, half: CallRecord | None, graph: CallGraph) -> Match | None:
    """(x / 2) * (1 + g)."""
    if _times(half, 0.5) is None or half is None or gate is None or gate.op != "add" or argument(gate, 1, "other") != 1:
        return None
    x = take(half, 0, "input")
    inner = maker(graph, gate, 0)
    found = _erf(inner, x.of(half), graph) or _tanh(inner, x.of(half), graph)
    if found is None:
        return None
    calls, approximate = found
    return close(graph, WRITTEN_GELU, (record, half, gate, *calls), {"x": x, "approximate": Fixed(approximate)})


def _erf(call: CallRecord | None, x: Operand, graph: CallGraph) -> tuple[tuple[CallRecord, ...], str] | None:
    if call is None or call.op != "erf":
        return None
    scaled = _times(maker(graph, call, 0), math.sqrt(0.5))
    return ((call, scaled), "none") if scaled is not None and _same(graph, argument(scaled, 0, "input"), x) else None


def _tanh(call: CallRecord | None, x: Operand, graph: CallGraph) -> tuple[tuple[CallRecord, ...], str] | None:
    """tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))."""
    if call is None or call.op != "tanh":
        return None
    scaled = _times(maker(graph, call, 0), math.sqrt(2 / math.pi))
    total = maker(graph, scaled, 0) if scaled is not None else None
    if scaled is None or total is None or total.op != "add":
        return None
    for side, other in (_SIDES, _SIDES[::-1]):
        cubic = _times(maker(graph, total, *side), 0.044715)
        cube = maker(graph, cubic, 0) if cubic is not None else None
        if cubic is None or cube is None or not _same(graph, argument(total, *other), x):
            continue
        if (
            cube.op == "pow"
            and not is_reflected(cube)
            and argument(cube, 1, "exponent") == 3
            and _same(graph, argument(cube, 0, "input"), x)
        ):
            return (call, scaled, total, cubic, cube), "tanh"
    return None


def _times(record: CallRecord | None, factor: float) -> CallRecord | None:
    """The call if it multiplies its first argument by a number close to `factor`, or divides by the inverse."""
    if record is None or record.op not in ("mul", "div") or is_reflected(record):
        return None
    number = argument(record, 1, "other")
    if not is_number(number) or number == 0:
        return None
    return record if math.isclose(number if record.op == "mul" else 1.0 / number, factor, rel_tol=1e-6) else None


def _same(graph: CallGraph, one: object, other: object) -> bool:
    """One tensor: of one maker, or both the model's input as far as can be seen."""
    if same_tensor(one, other):
        return True
    return isinstance(one, Operand) and one.origin is None and one == other


_STEPS = "after every primitive call; fused: once"
_EXAMPLE = drawn((3, 5, 64), names="x", approximate="none")

GELU = Operator(
    name="gelu",
    op_class=OpClass.ORDINARY,
    summary="F.gelu, one fused tanh kernel on an NPU whatever `approximate` says",
    rounding=_STEPS,
    finders=(find_call,),
    unfused=unfused,
    kernels={"npu": Kernel(aten, "aclnnGelu, which F.gelu is on an NPU (tanh formula)", refuses_dtype)},
    example=_EXAMPLE,
    fused_anyway=frozenset({"npu"}),
)
WRITTEN_GELU = Operator(
    name="gelu",
    op_class=OpClass.ORDINARY,
    summary="GELU written out by erf, tanh or sigmoid",
    rounding=_STEPS,
    finders=(find_written_out,),
    unfused=unfused,
    kernels={
        "cpu": Kernel(aten, "torch gelu", refuses_sigmoid),
        "cuda": Kernel(aten, "torch gelu", refuses_sigmoid),
        "npu": Kernel(npu, "npu_gelu (npu_fast_gelu for the sigmoid formula)", refuses_dtype),
    },
    example=_EXAMPLE,
)
OPERATORS: tuple[Operator, ...] = (GELU, WRITTEN_GELU)
