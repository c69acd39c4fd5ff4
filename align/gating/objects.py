"""Make targets of objects that are in memory, for callers that have a model rather than the text of a target."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from torch import nn

from align.dumpers.errors import TargetError
from align.workload import Target, find_target


def target_of(name: str, made: Any) -> Target:
    """A target named `name` that hands out what a target's function may return, or calls a function that does.

    Models are copied first, as running them rounds and moves their weights in place. Loading the target raises
    TargetError for a model that cannot be copied.
    """
    if callable(made) and not isinstance(made, nn.Module):
        return Target(name, made)
    return Target(name, lambda: _copied(name, made))


def finder(targets: Mapping[str, Target]) -> Callable[[str], Target]:
    """What finds these targets by their names, and any other text as `find_target` does."""
    return lambda text: targets[text] if text in targets else find_target(text)


def _copied(name: str, made: Any) -> Any:
    if isinstance(made, tuple) and made and isinstance(made[0], nn.Module):
        return (_copy(name, made[0]), *made[1:])
    if isinstance(getattr(made, "model", None), nn.Module):
        parts = {part: getattr(made, part) for part in ("inputs", "loop", "input_sets") if hasattr(made, part)}
        return SimpleNamespace(model=_copy(name, made.model), **parts)
    return made  # not a workload: whoever loads it says so


def _copy(name: str, model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as exc:
        problem = f"{name}: the model cannot be copied ({type(exc).__name__}: {exc})"
        raise TargetError(problem, "give a function that builds model and inputs instead of the model") from exc
