"""The reference stays in float32 whatever the model asks for; chosen sites run in their own precision."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from align.dumpers.choice import Choice, ChoiceKind
from align.dumpers.naming import CallUse, OpName
from align.dumpers.wire import Call, Tap, Wire
from align.taps.cast import SitePrecision, WidenReference

torch.manual_seed(0)


class Says(nn.Module):
    """A model whose forward is a function."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self._function = function
        self.stray = [torch.full((3,), 0.1, dtype=torch.bfloat16)]

    def forward(self, x: torch.Tensor) -> Any:
        return self._function(x)


def widened(function: Callable[[torch.Tensor], Any]) -> tuple[torch.Tensor, dict[str, int]]:
    tap = WidenReference()
    model = Says(function)
    with torch.no_grad(), Wire({"": model}, [tap], sees_calls=True):
        result: torch.Tensor = model(torch.tensor([0.1, 0.2, 0.3]))
    return result, tap.widened


def _autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x @ torch.eye(3)


STRAY = torch.full((3,), 0.1, dtype=torch.float16)
LOWERING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "half": lambda x: x.half() + 0,
    "bfloat16": lambda x: x.bfloat16() + 0,
    "to": lambda x: x.to(torch.float16) * 1,
    "to by name": lambda x: x.to(dtype=torch.bfloat16) * 1,
    "to other": lambda x: x.to(STRAY) * 1,
    "dtype argument": lambda x: F.softmax(x, -1, dtype=torch.float16),
    "factory": lambda x: x + torch.zeros(3, dtype=torch.float16),
    "autocast": _autocast,
    "type_as": lambda x: x.type_as(STRAY) * 1,
}


@pytest.mark.parametrize("name", LOWERING)
def test_a_cast_to_low_precision_is_widened_and_counted(name: str) -> None:
    result, counted = widened(LOWERING[name])
    assert result.dtype is torch.float32
    assert sum(counted.values()) >= 1


def test_casts_to_integers_are_the_models_own_meaning() -> None:
    result, counted = widened(lambda x: (x * 10).to(torch.int8) + 0)
    assert result.dtype is torch.int8
    assert counted == {}


def test_a_stray_low_tensor_is_widened_exactly() -> None:
    result, counted = widened(lambda x: x * STRAY)
    assert torch.equal(result, torch.tensor([0.1, 0.2, 0.3]) * STRAY.float())
    assert list(counted) == ["/mul#0"]


def _prepared(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, WidenReference]:
    tap = WidenReference()
    call = Call(("", op, 0), 0, torch.add, args, kwargs, OpName(op, f"npu::{op}", CallUse.COMPUTE))
    tap.prepare(call)
    return call, tap


@pytest.mark.parametrize(
    ("op", "keyword", "value"),
    [
        ("npu_quant_matmul", "output_dtype", torch.float16),
        ("npu_quant_matmul", "output_dtype", 15),
        ("npu_grouped_matmul", "output_dtype", 5),
        ("npu_anti_quant", "dst_dtype", torch.bfloat16),
        ("npu_anti_quant", "dst_dtype", None),
        ("npu_ffn", "output_dtype", torch.float16),
        ("grouped_mm", "out_dtype", torch.bfloat16),
    ],
)
def test_every_keyword_that_names_a_result_dtype_is_widened(op: str, keyword: str, value: object) -> None:
    call, tap = _prepared(op, (), {} if value is None else {keyword: value})
    assert call.kwargs == {keyword: torch.float32}
    assert tap.widened == {f"/{op}#0": 1}


@pytest.mark.parametrize(
    ("op", "keyword", "value"),
    [
        ("npu_quant_matmul", "output_dtype", torch.int8),
        ("npu_dynamic_quant", "dst_type", 1),
        ("npu_quant_matmul", "output_dtype", None),
        ("sum", "dtype", 5),
        ("add", "alpha", 5),
    ],
)
def test_other_values_of_these_keywords_stay(op: str, keyword: str, value: object) -> None:
    call, tap = _prepared(op, (), {keyword: value})
    assert call.kwargs == {keyword: value}
    assert tap.widened == {}


# -- sites in their own precision -------------------------------------------------------------------------------------


class Dtypes(Tap):
    """The dtype of each call's output."""

    def __init__(self) -> None:
        self.of: dict[str, torch.dtype] = {}

    def finish(self, call: Call, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            self.of[str(call)] = output.dtype
        return output


def block() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.GELU()), nn.Linear(8, 8)).bfloat16().eval()


def precise(*sites: str) -> tuple[torch.Tensor, dict[str, torch.dtype]]:
    choices = [Choice(ChoiceKind.PRECISION, *site.split("@")) for site in sites]
    seen, model = Dtypes(), block()
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2)).bfloat16()
    with torch.no_grad(), Wire({"": model}, [SitePrecision(choices, torch.bfloat16), seen], sees_calls=True):
        result = model(x)
    return result, seen.of


@pytest.mark.parametrize("site", ["1", "1.*", "1*/*"])
def test_calls_inside_a_chosen_module_run_in_its_precision_and_the_rest_does_not(site: str) -> None:
    _, dtypes = precise(f"float32@{site}")
    assert dtypes == {
        "0/linear#0": torch.bfloat16, "1.0/linear#0": torch.float32, "1.1/gelu#0": torch.float32,
        "2/linear#0": torch.bfloat16,
    }  # fmt: skip


def test_the_longest_site_holds() -> None:
    _, dtypes = precise("float32@*", "bfloat16@1.1")
    assert dtypes["1.0/linear#0"] is torch.float32
    assert dtypes["1.1/gelu#0"] is torch.bfloat16


def test_everything_in_float32_is_the_widened_model() -> None:
    result, _ = precise("float32@*")
    model = block().float()
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2)).bfloat16().float()
    with torch.no_grad():
        assert torch.equal(result.float(), model(x))
