"""Catalog entries for calls that a model itself makes to torch_npu: recognised by name, run as written or unfused.

One entry stands for one `npu_*` function. Its unfused form has the very signature of the function's schema (a
parameter `input_` stands for `input`), takes the vendor's conventions as they are and returns the same outputs, so
that it can stand in wherever the function cannot run. torch_npu itself is touched only when a kernel runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from align.dumpers.errors import UndecidedError
from align.dumpers.model import OpClass
from align.dumpers.survey import CallGraph, CallRecord
from align.operators.base import Binding, ByName, Kernel, Match, Operator, Take

Example = Callable[[str, torch.dtype, int], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a schema: `position` is -1 for one that can only be named."""

    name: str
    position: int
    default: Any


def run_npu(op: str, *args: Any, **kwargs: Any) -> Any:
    """Call `torch.ops.npu.<op>`, which must have been loaded by whoever placed the tensors on an NPU."""
    return getattr(torch.ops.npu, op)(*args, **kwargs)


def refuse_rest(op: str, rest: Mapping[str, Any]) -> None:
    """Raise UndecidedError if an argument is set that the unfused form does not know."""
    used = sorted(
        name for name, value in rest.items() if isinstance(value, Tensor) or value not in (None, False, 0, "")
    )
    if used:
        raise UndecidedError(
            f"torch_npu.{op} is called with {', '.join(used)}, which its unfused form in the catalog does not know",
            "register an equivalent of your own: see 'Operators of your own' in docs/operators.md",
        )


def arguments_of(unfused: Callable[..., Any]) -> tuple[Argument, ...]:
    """The schema as the unfused form declares it."""
    found = []
    for position, parameter in enumerate(inspect.signature(unfused).parameters.values()):
        if parameter.kind is not parameter.VAR_KEYWORD:
            place = -1 if parameter.kind is parameter.KEYWORD_ONLY else position
            default = None if parameter.default is parameter.empty else parameter.default
            found.append(Argument(parameter.name, place, default))
    return tuple(found)


def written(
    op: str,
    unfused: Callable[..., Any],
    *,
    name: str,
    rounding: str,
    example: Example,
    op_class: OpClass = OpClass.ORDINARY,
) -> Operator:
    """The entry for calls of `torch_npu.<op>`: native on an NPU, unfused everywhere else and in a baseline."""
    arguments = arguments_of(unfused)
    known = frozenset(item.name for item in arguments)

    def find(record: CallRecord, graph: CallGraph) -> Match:
        binding: dict[str, Binding] = {
            item.name: Take(record.ident, item.position, item.name.rstrip("_"), item.default) for item in arguments
        }
        binding |= {
            key: Take(record.ident, -1, key) for key in record.kwargs if key not in known and f"{key}_" not in known
        }
        return Match(operator, (record.ident,), binding, is_written_fused=True)

    def run(**values: Any) -> Any:
        return run_npu(op, *_positional(arguments, values), **_named(arguments, values))

    operator = Operator(
        name=name,
        op_class=op_class,
        summary=f"torch_npu.{op} as called by the model",
        rounding=rounding,
        finders=(ByName(op, find),),
        unfused=unfused,
        kernels={"npu": Kernel(run, f"torch_npu.{op}", is_native=True)},
        example=example,
    )
    return operator


def op_of(operator: Operator) -> str:
    """The `npu_*` function that an entry made by `written` stands for."""
    return operator.kernels["npu"].label.removeprefix("torch_npu.")


def _positional(arguments: tuple[Argument, ...], values: Mapping[str, Any]) -> list[Any]:
    """Positional arguments up to the last that is not at its default: older releases lack the newest ones."""
    places = [item for item in arguments if item.position >= 0]
    while places and _is_default(places[-1], values):
        places.pop()
    return [values.get(item.name, item.default) for item in places]


def _named(arguments: tuple[Argument, ...], values: Mapping[str, Any]) -> dict[str, Any]:
    positional = {item.name for item in arguments if item.position >= 0}
    defaults = {item.name: item for item in arguments if item.position < 0}
    return {
        key: value
        for key, value in values.items()
        if key not in positional and not (key in defaults and _is_default(defaults[key], values))
    }


def _is_default(item: Argument, values: Mapping[str, Any]) -> bool:
    value = values.get(item.name, item.default)
    return value is item.default or (isinstance(value, (int, float, str, bool)) and value == item.default)


def widest(tensor: Tensor) -> torch.dtype:
    """float32, or float64 for a tensor that is float64: the dtype in which statistics are taken."""
    return torch.promote_types(tensor.dtype, torch.float32)


def draw(shape: tuple[int, ...], device: str, dtype: torch.dtype, seed: int) -> Tensor:
    """Normal numbers for examples, the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device=device, dtype=dtype)


def drawn(*shapes: tuple[int, ...], names: str, **fixed: Any) -> Example:
    """An example of normal tensors by name, in the run's dtype, plus fixed values."""

    def example(device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
        tensors = {
            key: draw(shape, device, dtype, seed + at)
            for at, (key, shape) in enumerate(zip(names.split(), shapes, strict=True))
        }
        return tensors | fixed

    return example
