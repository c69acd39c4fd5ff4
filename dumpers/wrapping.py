"""Put an object in the place of a module's `forward`, and take it away again, leaving no trace.

Unlike hooks this also sees `child.forward(x)`, and does not switch off the fused fast paths that torch takes only on
modules without hooks. A module that has hooks of its own is left only after them: their value is what flows on. A
module compiled in place is caught where torch branches off into the compiled code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.nn.modules import module as torch_module

from align.dumpers.naming import is_sealed

if TYPE_CHECKING:
    from align.dumpers.wire import Call, Wire


class Wrapped:
    """Stands for one attribute of a module, `forward` as a rule, and hands its calls to the wire.

    It is transparent: attributes are the original's, and a copy or pickle of the module holds the original. Once the
    wire is closed it does nothing, should somebody have kept it. Not slotted: torch.compile guards on its `__dict__`.
    """

    def __init__(self, wire: Wire, module: nn.Module, path: str, name: str) -> None:
        self.wire = wire
        self.module = module
        self.path = path
        self.is_sealed = is_sealed(module)
        self.frame: list[Call] | None = None  # where a call is put that the module's own hooks have yet to see
        self._name = name
        self._is_own = name in module.__dict__
        self.original = getattr(module, name)
        module.__dict__[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or not self.wire.is_open or torch._C._current_graph_task_id() != -1:
            return self.original(*args, **kwargs)
        return self.wire.module_call(self, args, kwargs)

    @property
    def __wrapped__(self) -> Any:
        """Libraries read the signature of forward to decide which arguments they may pass."""
        return self.original

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.original,)

    def remove(self) -> None:
        """Put the original back, unless the user has put something else there meanwhile."""
        holder = self.module.__dict__
        if holder.get(self._name) is not self:
            return
        original, is_own = self.original, self._is_own
        while isinstance(original, Wrapped) and not original.wire.is_open:  # of a wire that was closed before this one
            original, is_own = original.original, original._is_own
        if is_own:
            holder[self._name] = original
        else:
            del holder[self._name]


class WrappedWithHooks(Wrapped):
    """Stands for `_call_impl` of a module that has hooks: forward begins the call, this ends it."""

    def __init__(self, wire: Wire, module: nn.Module, path: str) -> None:
        super().__init__(wire, module, path, "_call_impl")
        self._forward = Wrapped(wire, module, path, "forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or not self.wire.is_open or torch._C._current_graph_task_id() != -1:
            return self.original(*args, **kwargs)
        begun: list[Call] = []
        outer, self._forward.frame = self._forward.frame, begun
        try:
            output = self.original(*args, **kwargs)
        except BaseException as error:
            if begun:
                self.wire.give_up(begun[0], error)
            raise
        finally:
            self._forward.frame = outer
        return self.wire.leave_hooked(begun[0], output) if begun else output

    def remove(self) -> None:
        self._forward.remove()
        super().remove()


def wrap(wire: Wire, module: nn.Module, path: str) -> Wrapped:
    """Hand a module's calls to the wire until the result is removed."""
    if module.__dict__.get("_compiled_call_impl") is not None:
        return Wrapped(wire, module, path, "_compiled_call_impl")
    if _has_hooks(module):
        return WrappedWithHooks(wire, module, path)
    return Wrapped(wire, module, path, "forward")


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or torch_module._global_forward_hooks)


def _itself(value: Any) -> Any:
    return value
