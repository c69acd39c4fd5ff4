from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from align.dumpers.gradients import watch_gradients
from align.dumpers.model import NodeKind, NodeRecord
from align.dumpers.observe import Dataflow, Level, Observe, Selection
from align.dumpers.wire import Wire

MODULES = Selection(Level.MODULE)


class Gradients:
    """A sink that keeps gradients."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def submit(self, record: NodeRecord, tensor: torch.Tensor) -> None:
        if record.kind is NodeKind.GRADIENT:
            assert str(record.key) not in self.values
            self.values[str(record.key)] = tensor.flatten().tolist()

    def submit_bare(self, record: NodeRecord) -> None:
        raise AssertionError("a gradient has data")


def watched(model: nn.Module, run: Any, selection: Selection = MODULES) -> dict[str, list[float]]:
    sink = Gradients()
    observe = Observe(sink, selection, dataflow=Dataflow())
    with Wire({"": model}, [observe], sees_calls=selection.sees_calls, step_root="") as wire:
        stop = watch_gradients({"": model}, observe, lambda: wire.step)
        try:
            run()
        finally:
            stop()
    return sink.values


def scale(factor: float) -> nn.Linear:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, factor)
    return layer


def test_gradients_of_outputs_and_parameters_are_nodes_with_the_values_of_the_chain_rule() -> None:
    model = nn.Sequential(scale(2.0), scale(5.0))
    found = watched(model, lambda: model(torch.full((1, 1), 3.0)).sum().backward())
    assert found == {
        "/forward#0:grad.0": [1.0],
        "1/forward#0:grad.0": [1.0],
        "1/parameter#0:grad.weight": [6.0],  # its input, 2 * 3
        "0/forward#0:grad.0": [5.0],
        "0/parameter#0:grad.weight": [15.0],  # 5 * 3
    }


def test_a_parameters_node_is_one_passs_own_gradient_numbered_by_step_and_pass() -> None:
    model = scale(2.0)

    def run() -> None:
        for value in (3.0, 4.0):
            loss = model(torch.full((1, 1), value)).sum()
            loss.backward(retain_graph=True)
            loss.backward()

    found = watched(model, run)
    assert {key: value for key, value in found.items() if "parameter" in key} == {
        "/parameter#0:grad.weight": [3.0],
        "/parameter#1:grad.weight": [3.0],
        "/parameter#0:grad.weight@1": [4.0],
        "/parameter#1:grad.weight@1": [4.0],
    }
    assert "/forward#0:grad2.0@1" in found
    assert model.weight.grad is not None
    assert model.weight.grad.item() == 14.0


def test_call_outputs_have_gradients_too_and_globs_choose() -> None:
    model = nn.Sequential(scale(2.0), nn.Tanh())
    found = watched(model, lambda: model(torch.zeros(1, 1)).sum().backward(), Selection(Level.CALL, include=("1",)))
    assert found == {"1/tanh#0:grad.0": [1.0]}


def test_nothing_is_recorded_after_the_end_and_nothing_stays_on_the_parameters() -> None:
    model = nn.Sequential(scale(2.0), scale(5.0))
    kept: list[torch.Tensor] = []
    assert watched(model, lambda: kept.append(model(torch.ones(1, 1)).sum())) == {}
    kept[0].backward()
    assert [parameter._backward_hooks for parameter in model.parameters()] == [None, None]
    assert [parameter.grad.item() for parameter in model.parameters() if parameter.grad is not None] == [5.0, 2.0]


def test_a_hook_of_the_users_stays_on_the_parameter() -> None:
    model, seen = scale(2.0), []
    model.weight.register_hook(lambda gradient: seen.append(gradient.item()))
    watched(model, lambda: model(torch.ones(1, 1)).sum().backward())
    model(torch.ones(1, 1)).sum().backward()
    assert seen == [1.0, 1.0]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_records_every_gradient_once(use_reentrant: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = scale(2.0), scale(5.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(checkpoint(self.a, x, use_reentrant=use_reentrant))

    model = Net()
    x = torch.full((1, 1), 3.0, requires_grad=True)
    found = watched(model, lambda: model(x).sum().backward())
    assert found["a/parameter#0:grad.weight"] == [15.0]
    assert found["b/parameter#0:grad.weight"] == [6.0]
    # without gradients at forward time a reentrant region has no graph yet that could be hooked
    assert ("a/forward#0:grad.0" in found) is not use_reentrant


def test_a_tied_parameter_has_one_gradient_under_its_first_name() -> None:
    model = nn.Sequential(scale(2.0), scale(1.0))
    model[1].weight = model[0].weight
    found = watched(model, lambda: model(torch.full((1, 1), 3.0)).sum().backward())
    assert {key: value for key, value in found.items() if "parameter" in key} == {"0/parameter#0:grad.weight": [12.0]}
