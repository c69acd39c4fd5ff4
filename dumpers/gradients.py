"""Record gradients as nodes: of every recorded output (slot `grad.<slot>`) and of parameters (op `parameter`).

A parameter's node is what one backward pass adds to its `.grad`; passes of one step are counted like calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from align.dumpers.model import NodeKey
from align.dumpers.naming import named_modules
from align.dumpers.observe import Observe

PARAMETER_OP = "parameter"


def watch_gradients(
    roots: Mapping[str, nn.Module], observe: Observe, step: Callable[[], int] = int
) -> Callable[[], None]:
    """Record gradients from now on, numbered by `step()`; the returned function stops it and leaves nothing behind."""
    watch = _Watch(observe, step)
    observe.on_output = watch.output
    seen: set[int] = set()
    for prefix, root in roots.items():
        for path, module in named_modules(root, seen):
            watch.module(f"{prefix}.{path}" if prefix and path else prefix or path, module)
    return watch.stop


class _Watch:
    """What is hooked, and whether hooks that autograd still holds may still record."""

    def __init__(self, observe: Observe, step: Callable[[], int]) -> None:
        self._observe = observe
        self._step = step
        self._is_on = True
        self._handles: list[tuple[torch.Tensor, bool, Any]] = []
        self._counts: dict[tuple[str, str, int], int] = {}
        self._hooked: set[int] = set()

    def output(self, key: NodeKey, tensor: torch.Tensor) -> None:
        """Hook a recorded output; the hook goes with the graph, so no handle is kept."""
        if tensor.requires_grad:
            tensor.register_hook(self._output_recorder(key))  # type: ignore[no-untyped-call]

    def module(self, path: str, module: nn.Module) -> None:
        """Hook a module's own parameters, if the selection admits them."""
        if not self._observe.selection.admits((path, PARAMETER_OP, 0), type(module).__name__):
            return
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in self._hooked:  # tied ones have one gradient
                self._hooked.add(id(parameter))
                is_first = parameter._backward_hooks is None
                handle = parameter.register_hook(self._recorder(path, name))  # type: ignore[no-untyped-call]
                self._handles.append((parameter, is_first, handle))

    def stop(self) -> None:
        """Record no more, and unhook the parameters."""
        self._is_on = False
        self._observe.on_output = None
        while self._handles:
            parameter, is_first, handle = self._handles.pop()
            handle.remove()
            if is_first and not parameter._backward_hooks:
                parameter._backward_hooks = None

    def _output_recorder(self, key: NodeKey) -> Callable[[torch.Tensor], None]:
        passes = 0

        def record(gradient: torch.Tensor) -> None:
            nonlocal passes
            passes += 1  # the same graph may be walked more than once
            self._arrived(replace(key, slot=f"grad{passes if passes > 1 else ''}.{key.slot}"), gradient)

        return record

    def _recorder(self, path: str, name: str) -> Callable[[torch.Tensor], None]:
        def record(gradient: torch.Tensor) -> None:
            step = self._step()
            count = self._counts.get((path, name, step), 0)
            self._counts[path, name, step] = count + 1
            if not self._observe.selection.steps or step in self._observe.selection.steps:
                self._arrived(NodeKey(path, PARAMETER_OP, count, f"grad.{name}", step), gradient)

        return record

    def _arrived(self, key: NodeKey, gradient: torch.Tensor) -> None:
        if self._is_on:
            with torch._C.DisableTorchFunction():
                self._observe.record_gradient(key, gradient)
