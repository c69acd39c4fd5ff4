from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from align.dumpers.survey import OUTSIDE, Operand, Survey
from align.dumpers.wire import Wire


def surveyed(model: nn.Module, *args: Any, **kwargs: Any) -> Survey:
    survey = Survey()
    with torch.no_grad(), Wire({"": model}, [survey], sees_calls=True, sees_outside=False) as wire:
        survey.note_outside(model(*args, **kwargs), wire.step)
    return survey


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.proj(x)
        return F.silu(h) * h


def names(survey: Survey, calls: Any) -> list[str]:
    return [call.name if call else "outside" for call in calls]


def test_every_call_knows_its_makers_and_readers() -> None:
    graph = surveyed(Net(), torch.ones(1, 4)).graph
    linear, silu, mul = list(graph)
    assert [call.name for call in graph] == ["proj/linear#0", "/silu#0", "/mul#0"]
    assert [maker.name for maker in map(graph.maker, mul.args) if maker] == ["/silu#0", "proj/linear#0"]
    assert [call.name if call else None for call in graph.readers(linear)] == ["/silu#0", "/mul#0"]
    assert graph.reader_ids(mul) == frozenset({(0, OUTSIDE)})
    assert graph.maker(linear.args[0]) is None
    assert isinstance(linear.args[1], Operand)
    assert linear.args[1].is_parameter
    assert graph.record(0, ("", "silu", 0)) is silu
    assert silu.output is not None
    assert silu.output.shape == (1, 4)


def test_arguments_are_found_by_position_or_name() -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.softmax(x, dim=-1) + torch.add(x, x, alpha=2)

    softmax, add, _ = list(surveyed(Scaled(), torch.ones(2)).graph)
    assert softmax.argument(1, "dim") == -1
    assert add.argument(9, "alpha") == 2
    assert add.argument(9, "out", "none") == "none"


def test_reading_a_value_into_python_is_a_reader_outside() -> None:
    class Peeks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = x.abs()
            return h.neg() if h.sum().item() > 0 else h

    graph = surveyed(Peeks(), torch.ones(2)).graph
    total = graph.record(0, ("", "sum", 0))
    assert total is not None
    assert graph.reader_ids(total) == frozenset({(0, OUTSIDE)})


def test_a_cast_that_does_nothing_is_told_apart_from_its_input() -> None:
    class Casts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.abs().float().neg()

    graph = surveyed(Casts(), torch.ones(2)).graph
    neg = graph.record(0, ("", "neg", 0))
    assert neg is not None
    maker = graph.maker(neg.args[0])
    assert maker is not None
    assert maker.name == "/float#0"


def test_no_tensor_carries_anything_afterwards_and_a_second_survey_starts_anew() -> None:
    model, x = Net(), torch.ones(1, 4)
    first = surveyed(model, x)
    y = model(x)
    second = surveyed(nn.Identity(), y)
    assert len(first.graph) == 3
    assert len(second.graph) == 0
    assert [vars(tensor) for tensor in (x, y, *model.parameters())] == [{}] * 4


def test_a_call_that_raises_is_not_in_the_graph() -> None:
    class Careful(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return x @ torch.ones(7, 7)
            except RuntimeError:
                return x.neg()

    assert [call.op for call in surveyed(Careful(), torch.ones(2, 2)).graph] == ["ones", "neg"]


def test_the_same_call_in_several_steps_is_known_by_step() -> None:
    survey, model = Survey(), nn.ReLU()
    with Wire({"": model}, [survey], sees_calls=True) as wire:
        for _ in range(3):
            model(torch.ones(1))
            wire.next_step()
    assert survey.graph.steps_of(("", "relu", 0)) == (0, 1, 2)
