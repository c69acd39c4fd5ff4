"""Operators and fusions of the user's own, and choices that user code asks for."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import align
from align import own
from align.choices import switched
from align.dumpers.errors import UsageError
from align.dumpers.wire import Wire
from align.operators.registry import catalog, unregister
from align.taps.module_swap import ModuleSwap
from align.taps.unfuse import UnfuseCalls

SPACE = "align_test_own"
LIBRARY = torch.library.Library(SPACE, "DEF")
LIBRARY.define("scaled_relu(Tensor x, Tensor weight, float scale=1.0) -> Tensor")


@torch.library.impl(LIBRARY, "scaled_relu", "CompositeExplicitAutograd")
def _kernel(x: torch.Tensor, weight: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return torch.relu(x @ weight) * scale + 0.5  # plainly not the unfused form


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    unregister("scaled_relu")
    for name in ("fast_block", "npu_mine"):
        own.forget(name)
        unregister(name)


class Calls(nn.Module):
    """Calls the user's own kernel, with positional and named arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.align_test_own.scaled_relu(x, self.weight, scale=2.0)
        return result


@pytest.mark.parametrize("name", ["scaled_relu", f"{SPACE}::scaled_relu"])
def test_a_registered_form_replaces_the_call_where_it_is_to_be_unfused(name: str) -> None:
    @align.replaces_call(name)
    def plain(x: torch.Tensor, weight: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return torch.relu(x @ weight) * scale

    model, x = Calls(), torch.tensor([[1.0, -1.0, 2.0]])
    with torch.no_grad(), Wire({"": model}, [UnfuseCalls(catalog())], sees_calls=True):
        assert model(x).tolist() == [[2.0, 0.0, 4.0]]
    with torch.no_grad():
        assert model(x).tolist() == [[2.5, 0.5, 4.5]]


def test_an_overload_of_the_call_is_replaced_too() -> None:
    @align.replaces_call(f"{SPACE}::scaled_relu")
    def plain(x: torch.Tensor, weight: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return torch.relu(x @ weight) * scale

    class Overload(Calls):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = torch.ops.align_test_own.scaled_relu.default(x, self.weight)
            return result

    model = Overload()
    with torch.no_grad(), Wire({"": model}, [UnfuseCalls(catalog())], sees_calls=True):
        assert model(torch.ones(1, 3)).tolist() == [[1.0, 1.0, 1.0]]


def test_a_call_of_torch_npu_has_its_kernel_on_an_npu_only() -> None:
    align.replaces_call("npu_mine")(lambda x: x)
    align.replaces_call("scaled_relu")(lambda x: x)
    kernels = {operator.name: set(operator.kernels) for operator in catalog()}
    assert kernels["npu_mine"] == {"npu"}
    assert kernels["scaled_relu"] == {"cpu", "cuda", "npu"}


def test_registering_twice_names_both() -> None:
    align.replaces_call("scaled_relu")(lambda x: x)
    with pytest.raises(UsageError, match="registered twice: 'scaled_relu, registered by the user'"):
        align.replaces_call("scaled_relu")(lambda x: x)

    def fast_block(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x

    align.fuses_module("a.*")(fast_block)
    with pytest.raises(UsageError, match=r"registered twice: for 'a\.\*' and 'b\.\*'"):
        align.fuses_module("b.*")(fast_block)


@pytest.mark.parametrize(("on", "expected"), [(True, [11.0, 2.0]), (False, [1.0, 2.0])])
def test_a_fused_module_runs_only_where_its_glob_and_the_plan_say(on: bool, expected: list[float]) -> None:
    @align.fuses_module("first")
    def fast_block(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x + 10

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Identity(), nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([self.first(x), self.second(x + 1)])

    model = Two()
    swap = ModuleSwap(own.module_fusions(), frozenset({"fast_block"} if on else ()))
    with torch.no_grad(), Wire({"": model}, [swap], sees_calls=True):
        assert model(torch.tensor(1.0)).tolist() == expected


def test_a_choice_is_on_outside_runs_and_as_the_plan_says_inside() -> None:
    assert align.choice("fast_norm")
    with switched(frozenset({"other"})) as asked:
        assert not align.choice("fast_norm")
        assert align.choice("other")
    assert asked == {"fast_norm", "other"}
    assert align.choice("fast_norm")
