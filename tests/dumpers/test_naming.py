from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from align.dumpers.naming import (
    CallUse,
    can_be_called,
    clean_path,
    flat_tensors,
    is_compiled,
    is_sealed,
    map_tensors,
    named_modules,
    op_name,
    walk_tensors,
)

Pair = namedtuple("Pair", "h c")


@dataclass
class Output:
    logits: torch.Tensor
    aux: Any = None
    derived: Any = field(default=None, init=False)


class Mapped(OrderedDict[str, Any]):
    """Like transformers' ModelOutput: a mapping that is also a dataclass in spirit."""


class Cache:
    """A plain object that holds tensors."""

    def __init__(self, x: torch.Tensor) -> None:
        self.keys = x
        self.size = 3


X, Y, Z = torch.ones(1), torch.zeros(1), torch.tensor(2.0)
NESTED = [
    (X, ["0"]),
    (None, []),
    (3, []),
    ("text", []),
    ((X, [Y, {"z": (Z,)}]), ["0", "1.0", "1.1.z.0"]),
    ({"y": X, "n": None}, ["y"]),
    (OrderedDict(out=X, aux=Y), ["out", "aux"]),
    (Mapped(last_hidden_state=X, hidden_states=(Y, Z)), ["last_hidden_state", "hidden_states.0", "hidden_states.1"]),
    (Output(X, [Y, None]), ["logits", "aux.0"]),
    (Pair(X, Y), ["h", "c"]),
    (Cache(X), ["keys"]),
    ([], []),
    (torch.Size((1, 2)), []),
]


@pytest.mark.parametrize(("value", "slots"), NESTED)
def test_tensors_are_found_in_every_container_and_named_by_where_they_lie(value: Any, slots: list[str]) -> None:
    assert [slot for slot, _ in walk_tensors(value)] == slots
    assert [id(tensor) for tensor in flat_tensors(value)] == [id(tensor) for _, tensor in walk_tensors(value)]


@pytest.mark.parametrize(("value", "slots"), [pair for pair in NESTED if not isinstance(pair[0], Cache)])
def test_a_nested_value_is_rebuilt_with_changed_tensors_and_kept_where_none_changes(
    value: Any, slots: list[str]
) -> None:
    assert map_tensors(value, lambda tensor: tensor) is value
    changed = map_tensors(value, lambda tensor: tensor + 1)
    assert type(changed) is type(value)
    assert [(slot, tensor.item()) for slot, tensor in walk_tensors(changed)] == [
        (slot, tensor.item() + 1) for slot, tensor in walk_tensors(value)
    ]


@pytest.mark.parametrize(
    ("func", "short"),
    [
        (torch.Tensor.__add__, "add"),
        (torch.Tensor.__radd__, "add"),
        (torch.add, "add"),
        (torch.Tensor.add_, "add_"),
        (torch.Tensor.__iadd__, "add_"),
        (torch.Tensor.__rsub__, "sub"),
        (torch.Tensor.__matmul__, "matmul"),
        (torch.Tensor.__truediv__, "div"),
        (torch.Tensor.__getitem__, "getitem"),
        (F.linear, "linear"),
        (F.scaled_dot_product_attention, "scaled_dot_product_attention"),
        (torch.ops.aten.add.Tensor, "add"),
        (torch.Tensor.T.__get__, "T"),
    ],
)
def test_one_operation_has_one_name_however_it_is_spelled(func: Any, short: str) -> None:
    assert op_name(func).short == short
    assert op_name(func).use is CallUse.COMPUTE


@pytest.mark.parametrize(
    "func", [torch.Tensor.size, torch.Tensor.dim, torch.Tensor.shape.__get__, torch.Tensor.device.__get__]
)
def test_looking_at_metadata_is_no_node(func: Any) -> None:
    assert op_name(func).use is CallUse.METADATA


@pytest.mark.parametrize("func", [torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__bool__, torch.Tensor.numpy])
def test_reading_values_into_python_is_reading(func: Any) -> None:
    assert op_name(func).use is CallUse.READ


class ActivationWrapper(nn.Module):
    """Named like the base class of torch's checkpoint wrapper, and built like it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._checkpoint_wrapped_module = inner


def names(model: nn.Module) -> list[str]:
    return [path for path, _ in named_modules(model)]


def test_wrappers_do_not_show_in_module_paths() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert names(nn.DataParallel(inner)) == names(inner) == ["", "0", "1"]
    assert names(nn.Sequential(ActivationWrapper(inner), nn.ReLU())) == ["", "0", "0.0", "0.1", "1"]


def test_a_module_under_two_names_and_one_that_holds_itself_are_listed_once() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, shared)
    model.register_module("again", model)
    assert names(model) == ["", "0"]
    seen: set[int] = set()
    assert [path for part in (model, shared) for path, _ in named_modules(part, seen)] == ["", "0"]


def test_sealed_modules_are_listed_without_their_inside() -> None:
    compiled = torch.compile(nn.Sequential(nn.Linear(2, 2)), backend="eager")
    assert names(nn.Sequential(compiled, nn.ReLU())) == ["", "0", "1"]
    assert is_compiled(compiled)
    several = nn.DataParallel(nn.Sequential(nn.ReLU()))
    several.device_ids = [0, 1]
    assert is_sealed(several)
    assert names(several) == [""]


def test_containers_cannot_be_called() -> None:
    assert not can_be_called(nn.ModuleList())
    assert not can_be_called(nn.ParameterList())
    assert can_be_called(nn.Sequential())


def test_wrapper_names_are_dropped_from_a_path() -> None:
    assert clean_path("module.encoder._orig_mod.0") == "encoder.0"
    assert clean_path("encoder.modules.0") == "encoder.modules.0"
