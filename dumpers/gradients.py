"""Record gradients as nodes: of every recorded output (`slot` `grad.<slot>`) and of parameters (`op` `parameter`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from align.dumpers.model import NodeKey, NodeKind
from align.dumpers.naming import named_modules
from align.dumpers.observe import Observe

PARAMETER_OP = "parameter"


def watch_gradients(roots: Mapping[str, nn.Module], observe: Observe) -> Callable[[], None]:
    """Record gradients from now on; the returned function stops it."""
    handles: list[Any] = []
    observe.on_output = lambda key, tensor: _watch_output(observe, key, tensor, handles)
    for prefix, root in roots.items():
        for path, module in named_modules(root):
            full = ".".join(part for part in (prefix, path) if part)
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad:
                    handles.append(parameter.register_post_accumulate_grad_hook(_recorder(observe, full, name)))

    def stop() -> None:
        observe.on_output = None
        for handle in handles:
            handle.remove()

    return stop


def _watch_output(observe: Observe, key: NodeKey, tensor: torch.Tensor, handles: list[Any]) -> None:
    if tensor.requires_grad:
        gradient = replace(key, slot=f"grad.{key.slot}")
        handles.append(tensor.register_hook(lambda value: observe.record_gradient(gradient, value)))


def _recorder(observe: Observe, path: str, name: str) -> Callable[[torch.Tensor], None]:
    count = 0

    def record(parameter: torch.Tensor) -> None:
        nonlocal count
        if parameter.grad is not None:
            observe.record_gradient(NodeKey(path, PARAMETER_OP, count, f"grad.{name}"), parameter.grad)
        count += 1

    return record
