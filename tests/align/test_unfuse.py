"""Calls of fused kernels run in their unfused form before any survey exists; unknown NPU calls say what to do."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from align.dumpers.errors import UndecidedError
from align.dumpers.naming import CallUse, OpName
from align.dumpers.wire import PASS, Call, Tap, Wire
from align.operators.base import ByName
from align.operators.registry import FinderIndex, catalog
from align.taps.unfuse import UnfuseCalls


def called(op: str, *args: Any, **kwargs: Any) -> Any:
    """What the tap makes of a call of `torch_npu.<op>`, which need not be installed."""
    call = Call(("layer", op, 0), 0, torch.add, args, kwargs, OpName(op, f"npu::{op}", CallUse.COMPUTE))
    return UnfuseCalls(catalog()).execute(call)


def test_a_call_of_torch_npu_runs_where_there_is_none() -> None:
    x, gain = torch.randn(3, 8), torch.rand(8)
    y, rstd = called("npu_rms_norm", x, gain, epsilon=1e-5)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain.double()
    assert torch.allclose(y.double(), expected, rtol=1e-6, atol=0)
    assert rstd.dtype is torch.float32


def test_the_half_that_geglu_activates_is_the_right_one() -> None:
    x = torch.randn(3, 8)
    out, gated = called("npu_geglu", x, -1, 0)
    left, right = x.chunk(2, -1)
    assert torch.allclose(gated, F.gelu(right), atol=1e-6)
    assert torch.allclose(out, left * F.gelu(right), atol=1e-6)


def test_a_reference_of_quantised_values_is_float32_if_it_is_asked_for_it() -> None:
    small = torch.randint(-100, 100, (4, 8), dtype=torch.int8)
    out = called("npu_anti_quant", small, torch.tensor([0.1]), dst_dtype=torch.float32)
    assert out.dtype is torch.float32
    assert torch.equal(out, small.float() * torch.tensor(0.1))


def test_an_unknown_npu_call_names_itself_and_the_way_to_register_it() -> None:
    with pytest.raises(UndecidedError) as caught:
        called("npu_unheard_of", torch.ones(1))
    assert (
        caught.value.problem == "layer/npu_unheard_of#0: npu_unheard_of runs on an NPU only and is not in the catalog"
    )
    assert caught.value.remedy == (
        "register its unfused form with @align.replaces_call('npu_unheard_of'); how: end of docs/operators.md"
    )


@pytest.mark.parametrize("kind", ["add", "linear", "conv2d"])
def test_other_calls_are_left_to_torch(kind: str) -> None:
    call = Call(
        ("", kind, 0), 0, torch.add, (torch.ones(2, 2), torch.ones(2, 2)), {}, OpName(kind, kind, CallUse.COMPUTE)
    )
    assert UnfuseCalls(catalog()).execute(call) is PASS


def test_finders_of_other_names_are_not_asked() -> None:
    index = FinderIndex(catalog())
    asked = index.of("linear")
    assert [find for find in asked if isinstance(find, ByName)] == []
    assert [find.op for find in index.of("npu_swiglu") if isinstance(find, ByName)] == ["npu_swiglu"]
    assert len(asked) < sum(len(operator.finders) for operator in catalog()) / 2


class Order(Tap):
    """Names of the calls in order."""

    def __init__(self) -> None:
        self.ops: list[str] = []

    def finish(self, call: Call, output: Any) -> Any:
        self.ops.append(call.op)
        return output


def test_attention_as_written_is_unfused_and_keeps_its_name_and_place() -> None:
    class Attend(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    model, x, order = Attend(), torch.randn(1, 2, 5, 8), Order()
    with torch.no_grad(), Wire({"": model}, [UnfuseCalls(catalog()), order], sees_calls=True):
        result = model(x)
    assert order.ops == ["scaled_dot_product_attention"]
    assert torch.allclose(result, model(x), atol=1e-6)
