"""Operators and fusions of the user's own: an unfused form for a call the catalog does not know, or a fused module.

@align.replaces_call("npu_my_op")                     # or "myspace::my_op": any torch function or custom operator
def my_op(x, weight, scale=1.0):                      # the unfused form: same arguments, primitive calls
    return torch.relu(x @ weight) * scale

@align.fuses_module("unet.*.attn")                    # the fused form of modules; the choice is `my_attention`
def my_attention(module, x, mask=None):
    return fast_attention(module.qkv(x), mask)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from align.dumpers.errors import UsageError
from align.dumpers.model import OpClass
from align.dumpers.survey import CallRecord
from align.operators.base import Binding, ByName, Kernel, Match, Operator, Take
from align.operators.registry import register

Form = TypeVar("Form", bound=Callable[..., Any])


def replaces_call(op: str, *, op_class: OpClass = OpClass.ORDINARY) -> Callable[[Form], Form]:
    """Register the decorated function as the unfused form of the torch call `op`, which is itself the fused one.

    `op` is the short name (`npu_my_op`) or the qualified one (`myspace::my_op`). Raises UsageError when it is taken.
    """

    def decorate(unfused: Form) -> Form:
        name = op.rpartition("::")[2]
        find = ByName(name, lambda record, graph: _match(record, op, operator))
        operator = Operator(
            name, op_class, f"{op}, registered by the user", "as the registered function rounds",
            (find,), _by_position(unfused), _native_kernels(op), _no_example,
        )  # fmt: skip
        register(operator)
        return unfused

    return decorate


def _match(record: CallRecord, op: str, operator: Operator) -> Match | None:
    if op not in (record.op, record.qualified):
        return None
    binding: dict[str, Binding] = {f"{_POSITION}{i}": Take(record.ident, i) for i in range(len(record.args))}
    binding |= {name: Take(record.ident, -1, name) for name in record.kwargs}
    return Match(operator, (record.ident,), binding, is_written_fused=True)


_POSITION = "_argument_"


def _by_position(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called with arguments that are all named: positional ones by their place."""

    def call(**arguments: Any) -> Any:
        places = sorted(
            (name for name in arguments if name.startswith(_POSITION)), key=lambda name: int(name[len(_POSITION) :])
        )
        named = {name: value for name, value in arguments.items() if not name.startswith(_POSITION)}
        return function(*(arguments[name] for name in places), **named)

    return call


def _native_kernels(op: str) -> dict[str, Kernel]:
    """The call runs as written on every kind of device; torch_npu's own on an NPU only."""
    kernel = Kernel(_never, "the model's own call", is_native=True)
    kinds = ("npu",) if op.startswith(("npu_", "npu::")) else ("cpu", "cuda", "npu")
    return dict.fromkeys(kinds, kernel)


def _never(**_: Any) -> Any:
    raise AssertionError("a native kernel is left as written")


def _no_example(device: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    raise UsageError("an operator of the user's own has no example", "test it with a model that calls it")


@dataclass(frozen=True, slots=True)
class ModuleFusion:
    """A fused form for the modules whose path a glob names; `unfused` replaces their own forward when it is off."""

    name: str
    glob: str
    fused: Callable[..., Any]
    unfused: Callable[..., Any] | None = None


_modules: dict[str, ModuleFusion] = {}


def fuses_module(glob: str, *, unfused: Callable[..., Any] | None = None) -> Callable[[Form], Form]:
    """Register the decorated `(module, *args, **kwargs)` as the fused form of modules; its name is the choice's.

    Raises UsageError when the name is taken, naming both globs.
    """

    def decorate(fused: Form) -> Form:
        name = fused.__name__
        if name in _modules:
            raise UsageError(
                f"fusion {name!r} is registered twice: for {_modules[name].glob!r} and {glob!r}",
                "give the second function another name",
            )
        _modules[name] = ModuleFusion(name, glob, fused, unfused)
        return fused

    return decorate


def module_fusions() -> tuple[ModuleFusion, ...]:
    """All module fusions the user has registered."""
    return tuple(_modules.values())


def forget(name: str) -> None:
    """Take a module fusion out again."""
    _modules.pop(name, None)
