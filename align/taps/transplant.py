"""Run chosen modules of a second variant as the first one's: what tells which part of the user's own variant is guilty.

Two models are compared from the root down; the outermost modules that differ in themselves (class, own weights, plain
attributes) are the parts. Whether the variant trains where the baseline does not is a part of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from align.dumpers.choice import Choice, ChoiceKind
from align.dumpers.wire import Call, Tap

PART, BASELINE_PART = "module", "baseline_module"
MODE, BASELINE_MODE = "training_mode", "baseline_mode"


def parts_of(candidate: nn.Module, baseline: nn.Module) -> dict[Choice, Choice]:
    """What differs between two models: each part's choice, and the choice that puts the baseline's in its place."""
    paths = differing_paths(candidate, baseline)
    parts = {Choice(ChoiceKind.USER, PART, path): Choice(ChoiceKind.USER, BASELINE_PART, path) for path in paths}
    if any(ours.training != theirs.training for ours, theirs in _common(candidate, baseline)):
        parts[Choice(ChoiceKind.USER, MODE)] = Choice(ChoiceKind.USER, BASELINE_MODE)
    return parts


def differing_paths(candidate: nn.Module, baseline: nn.Module, path: str = "") -> tuple[str, ...]:
    """Paths of the outermost modules that differ in themselves; "" is the root."""
    ours, theirs = dict(candidate.named_children()), dict(baseline.named_children())
    if ours.keys() != theirs.keys() or not _is_alike(candidate, baseline):
        return (path,)
    prefix = f"{path}." if path else ""
    return tuple(found for name in ours for found in differing_paths(ours[name], theirs[name], prefix + name))


def _is_alike(candidate: nn.Module, baseline: nn.Module) -> bool:
    if not _is_same_class(type(candidate), type(baseline)):
        return False
    ours, theirs = _own(candidate), _own(baseline)
    return ours.keys() == theirs.keys() and all(_is_equal(ours[name], theirs[name]) for name in ours)


def _own(module: nn.Module) -> dict[str, Any]:
    plain = {name: value for name, value in vars(module).items() if not name.startswith("_") and name != "training"}
    return (
        plain | {f"p.{k}": v for k, v in module._parameters.items()} | {f"b.{k}": v for k, v in module._buffers.items()}
    )


def _is_equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return ours.shape == theirs.shape and ours.dtype == theirs.dtype and _same_bits(ours, theirs)
    if isinstance(ours, FunctionType) and isinstance(theirs, FunctionType):
        return _code(ours) == _code(theirs)
    if not _is_same_class(type(ours), type(theirs)):
        return False
    if isinstance(ours, (bool, int, float, str, tuple, frozenset, torch.dtype, type(None))):
        return bool(ours == theirs)
    return True  # configurations and the like: equal objects need not say so


def _is_same_class(ours: type, theirs: type) -> bool:
    """The same class, or the same code under the same name: the file of both variants is imported once for each."""
    if ours is theirs:
        return True
    return ours.__qualname__ == theirs.__qualname__ and _methods(ours) == _methods(theirs)


def _methods(kind: type) -> dict[str, Any]:
    own = (base for base in kind.__mro__ if base not in nn.Module.__mro__)
    return {
        f"{base.__qualname__}.{name}": _code(item)
        for base in own
        for name, item in vars(base).items()
        if isinstance(item, FunctionType)
    }


def _code(function: FunctionType) -> tuple[Any, ...]:
    code = function.__code__
    plain = tuple(constant for constant in code.co_consts if not isinstance(constant, CodeType))
    return code.co_code, code.co_names, plain


def _same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.equal(torch.nan_to_num(ours.detach().cpu()), torch.nan_to_num(theirs.detach().cpu()))


def _common(candidate: nn.Module, baseline: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    theirs = dict(baseline.named_modules())
    return ((module, theirs[path]) for path, module in candidate.named_modules() if path in theirs)


class Transplant(Tap):
    """Run the baseline's modules where a plan's choices ask for it."""

    def __init__(self, choices: Iterable[Choice], baseline: nn.Module) -> None:
        modules = dict(baseline.named_modules())
        wanted = (choice.site for choice in choices if choice.kind is ChoiceKind.USER and choice.name == BASELINE_PART)
        self._modules = {path: modules[path] for path in wanted if path in modules}

    def enter(self, call: Call) -> None:
        other = self._modules.get(call.path)
        if other is not None:
            call.func = other


def is_transplant(choice: Choice) -> bool:
    """Whether a choice puts a part of the baseline into the user's variant."""
    return choice.kind is ChoiceKind.USER and choice.name in (BASELINE_PART, BASELINE_MODE)


@contextmanager
def baseline_mode(choices: Iterable[Choice], candidate: nn.Module, baseline: nn.Module) -> Iterator[None]:
    """Let the candidate train exactly where the baseline does, if a choice says so, for the context."""
    if not any(choice.kind is ChoiceKind.USER and choice.name == BASELINE_MODE for choice in choices):
        yield
        return
    before = [(module, module.training) for module in candidate.modules()]
    try:
        for ours, theirs in _common(candidate, baseline):
            ours.training = theirs.training
        yield
    finally:
        for module, training in before:
            module.training = training
