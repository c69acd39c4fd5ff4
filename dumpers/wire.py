"""The one interception layer: it stands between a model and torch, names every call, and hands it to small taps.

Module calls are caught by wrapping each module's `forward` for as long as the wire is on: unlike hooks this also
sees `child.forward(x)`, and does not switch off the fused fast paths that torch takes only on modules without hooks.
Function calls are caught by a TorchFunctionMode, entered only if some tap wants calls. Leaving restores everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from types import TracebackType
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from align.dumpers.model import MODULE_OP
from align.dumpers.naming import CallUse, OpName, is_compiled, named_modules, op_name


class _Pass(Enum):
    PASS = "pass"


PASS: Final = _Pass.PASS
"""What `Tap.execute` returns when it leaves the call to the next tap, or to torch."""

CallId = tuple[str, str, int]
"""(module path, op, call count within the step): the same in every run of one model."""


class Call:
    """One call under way. Taps may change `func`, `args` and `kwargs` before it runs."""

    __slots__ = ("args", "func", "ident", "kwargs", "module", "name", "step")

    def __init__(
        self, ident: CallId, step: int, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: OpName | None,
        module: nn.Module | None = None,
    ) -> None:  # fmt: skip
        self.ident = ident
        self.step = step
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.name = name
        self.module = module

    @property
    def path(self) -> str:
        """Path of the module in whose forward the call happens; for a module call, the module's own path."""
        return self.ident[0]

    @property
    def op(self) -> str:
        """Short name of the function, `forward` for a module call."""
        return self.ident[1]

    @property
    def type_name(self) -> str:
        """Class of the module, or qualified name of the function."""
        return type(self.module).__name__ if self.module is not None else (self.name.qualified if self.name else "")

    def __str__(self) -> str:
        path, op, index = self.ident
        return f"{path}/{op}#{index}"


class Tap:
    """What can be done to a call. A tap overrides only what it needs; the wire skips the rest.

    Order for a function call: every `prepare`, then the first `execute` that does not PASS (else torch), then every
    `finish` in the same order. For a module call: every `enter`, the module's own forward, every `leave`.
    """

    def prepare(self, call: Call) -> None:
        """Change func, args or kwargs before the call."""

    def execute(self, call: Call) -> Any:
        """Run the call some other way, or return PASS."""
        return PASS

    def finish(self, call: Call, output: Any) -> Any:
        """See the output, and return it or another one."""
        return output

    def read(self, call: Call) -> None:
        """Notice that Python reads values of tensors (`item`, `bool`, `tolist`)."""

    def enter(self, call: Call) -> None:
        """A module's forward begins; args and kwargs may be changed."""

    def leave(self, call: Call, output: Any) -> Any:
        """A module's forward has ended; return its output or another one."""
        return output

    def fail(self, call: Call, error: BaseException) -> None:
        """A call raised; whatever the tap began for it must be given up."""

    def next_step(self, step: int) -> None:
        """A new step of the workload's loop begins."""


def _overriders(taps: Sequence[Tap], method: str) -> tuple[Callable[..., Any], ...]:
    base = getattr(Tap, method)
    return tuple(getattr(tap, method) for tap in taps if getattr(type(tap), method) is not base)


class _Mode(TorchFunctionMode):
    """Hands torch function calls to the wire; kept apart so that the wire itself is an ordinary object."""

    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self._wire = wire

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = op_name(func)
        if name.use is CallUse.METADATA:
            return func(*args, **kwargs) if kwargs else func(*args)
        return self._wire.call(name, func, args, kwargs or {})


class Wire:
    """Observe and steer one model while the context is open.

    roots    modules to name and wrap, by prefix (`{"": model}`, or several parts of a pipeline)
    taps     in the order in which they see a call
    sees_calls  whether torch function calls are caught at all; without, only modules are seen, at far lower cost
    sees_outside  whether function calls outside all roots count: a pipeline's own arithmetic, but not a user's script
    step_root  prefix of the root whose second call begins a new step; none by default
    """

    def __init__(
        self, roots: Mapping[str, nn.Module], taps: Sequence[Tap], *, sees_calls: bool, sees_outside: bool = True,
        step_root: str | None = None,
    ) -> None:  # fmt: skip
        self._roots = dict(roots)
        self._sees_outside = sees_outside
        self._step_root = step_root
        self._taps = tuple(taps)
        self._mode = _Mode(self) if sees_calls else None
        self._saved: list[tuple[nn.Module, bool, Any]] = []
        self._counts: dict[tuple[str, str], int] = {}
        self._path = ""
        self._step = 0
        self._depth = 0
        self.opaque: tuple[str, ...] = ()
        self._called: set[str] = set()
        self._with_parameters: set[str] = set()
        self._prepare = _overriders(taps, "prepare")
        self._execute = _overriders(taps, "execute")
        self._finish = _overriders(taps, "finish")
        self._read = _overriders(taps, "read")
        self._enter = _overriders(taps, "enter")
        self._leave = _overriders(taps, "leave")
        self._fail = _overriders(taps, "fail")

    # -- on and off -------------------------------------------------------------------------------------------------

    def __enter__(self) -> Wire:
        try:
            self._wrap_all()
            if self._mode is not None:
                self._mode.__enter__()
        except BaseException:
            self._unwrap_all()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if self._mode is not None:
                self._mode.__exit__(kind, error, trace)
        finally:
            self._unwrap_all()

    def _wrap_all(self) -> None:
        opaque = []
        for prefix, root in self._roots.items():
            for path, module in named_modules(root):
                full = ".".join(part for part in (prefix, path) if part)
                self._wrap(module, full)
                if is_compiled(module):
                    opaque.append(full)
                if module._parameters:
                    self._with_parameters.add(full)
        self.opaque = tuple(opaque)

    @property
    def silent(self) -> tuple[str, ...]:
        """Modules that own parameters and were never called: used functionally, or not at all. Needs a module tap."""
        return tuple(sorted(self._with_parameters - self._called))

    def _wrap(self, module: nn.Module, path: str) -> None:
        own = "forward" in module.__dict__
        original = module.forward
        self._saved.append((module, own, original))
        module.__dict__["forward"] = _wrapped_forward(self, module, path, original)

    def _unwrap_all(self) -> None:
        while self._saved:
            module, own, original = self._saved.pop()
            if own:
                module.__dict__["forward"] = original
            else:
                module.__dict__.pop("forward", None)

    # -- what happens -----------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Number of the step under way, from 0."""
        return self._step

    @property
    def depth(self) -> int:
        """How many module calls are under way."""
        return self._depth

    def next_step(self) -> None:
        """Begin the next step: call counts start again."""
        self._step += 1
        self._counts.clear()
        for tap in self._taps:
            tap.next_step(self._step)

    def _ident(self, path: str, op: str) -> CallId:
        key = (path, op)
        index = self._counts.get(key, 0)
        self._counts[key] = index + 1
        return path, op, index

    def call(self, name: OpName, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one torch function through the taps."""
        if _in_backward() or not (self._depth or self._sees_outside):
            return func(*args, **kwargs)
        if name.use is CallUse.READ:
            call = Call((self._path, name.short, 0), self._step, func, args, kwargs, name)
            for see in self._read:
                see(call)
            return func(*args, **kwargs)
        call = Call(self._ident(self._path, name.short), self._step, func, args, kwargs, name)
        try:
            for change in self._prepare:
                change(call)
            output: Any = PASS
            for execute in self._execute:
                output = execute(call)
                if output is not PASS:
                    break
            else:
                output = call.func(*call.args, **call.kwargs)
            for finish in self._finish:
                output = finish(call, output)
        except BaseException as error:
            for give_up in self._fail:
                give_up(call, error)
            raise
        return output

    def module_call(self, module: nn.Module, path: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run one module's forward through the taps."""
        outer, self._path = self._path, path
        self._depth += 1
        if not (self._enter or self._leave):
            try:
                return original(*args, **kwargs)
            finally:
                self._path = outer
                self._depth -= 1
        if path == self._step_root and self._depth == 1 and (path, MODULE_OP) in self._counts:
            self.next_step()
        call = Call(self._ident(path, MODULE_OP), self._step, original, args, kwargs, None, module)
        self._called.add(path)
        try:
            for enter in self._enter:
                enter(call)
            output = call.func(*call.args, **call.kwargs)
            for leave in self._leave:
                output = leave(call, output)
        except BaseException as error:
            for give_up in self._fail:
                give_up(call, error)
            raise
        finally:
            self._path = outer
            self._depth -= 1
        return output


def _wrapped_forward(wire: Wire, module: nn.Module, path: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        if _in_backward():  # activation checkpointing runs forward again: not another call
            return original(*args, **kwargs)
        return wire.module_call(module, path, original, args, kwargs)

    # Libraries read the signature of forward to decide which arguments they may pass.
    forward.__wrapped__ = original  # type: ignore[attr-defined]
    return forward


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
