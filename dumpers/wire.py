"""The one interception layer: it stands between a model and torch, names every call, and hands it to small taps.

Module calls are caught by wrapping each module's `forward` for as long as the wire is on (see `wrapping`). Function
calls are caught by a TorchFunctionMode, entered only if some tap wants calls. Leaving restores everything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from types import GeneratorType, TracebackType
from typing import Any, Final

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

from align.dumpers.model import MODULE_OP
from align.dumpers.naming import CallUse, OpName, can_be_called, named_modules, op_name
from align.dumpers.wrapping import Wrapped, wrap


class _Pass(Enum):
    PASS = "pass"  # noqa: S105 - no password


PASS: Final = _Pass.PASS
"""What `Tap.execute` returns when it leaves the call to the next tap, or to torch."""

CallId = tuple[str, str, int]
"""(module path, op, call count within the step): the same in every run of one model."""


class Call:
    """One call under way. Taps may change `func`, `args` and `kwargs` before it runs."""

    __slots__ = ("args", "func", "ident", "kwargs", "module", "name", "step")

    def __init__(
        self,
        ident: CallId,
        step: int,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: OpName | None,
        module: nn.Module | None = None,
    ) -> None:
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
    `finish` in the same order. For a module call: every `enter`, the module's own forward, every `leave`. What a tap
    itself asks of torch is not a call. A forward that is a generator makes a call of op `yield` of every resumption.
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
        if is_compiling():  # the compiled program must be the one that runs without us
            return func(*args, **kwargs) if kwargs else func(*args)
        name = op_name(func)
        if name.use is CallUse.METADATA:
            return func(*args, **kwargs) if kwargs else func(*args)
        return self._wire.call(name, func, args, kwargs or {})


class _Place(threading.local):
    """Where in the model a thread is: path of the innermost module call, and how many are under way."""

    path = ""
    depth = 0


YIELD_OP = "yield"
"""Op of the values that a module whose forward is a generator yields."""

_FUSED_PATHS = (nn.TransformerEncoderLayer, nn.MultiheadAttention)


class Wire:
    """Observe and steer one model while the context is open.

    roots    modules to name and wrap, by prefix (`{"": model}`, or several parts of a pipeline)
    taps     in the order in which they see a call
    sees_calls  whether torch function calls are caught at all; without, only modules are seen, at far lower cost
    sees_outside  whether function calls outside all roots count: a pipeline's own arithmetic, but not a user's script
    step_root  prefix of the root whose second call begins a new step; none by default
    """

    def __init__(
        self,
        roots: Mapping[str, nn.Module],
        taps: Sequence[Tap],
        *,
        sees_calls: bool,
        sees_outside: bool = True,
        step_root: str | None = None,
    ) -> None:
        self._roots = dict(roots)
        self._sees_outside = sees_outside
        self._step_root = step_root
        self._taps = tuple(taps)
        self._mode = _Mode(self) if sees_calls else None
        self._wrapped: list[Wrapped] = []
        self._counts: dict[tuple[str, str], int] = {}
        self._place = _Place()
        self._thread = 0
        self._step = 0
        self.is_open = False
        self.opaque: tuple[str, ...] = ()
        self.unfused: tuple[str, ...] = ()
        self._called: set[str] = set()
        self._with_parameters: set[str] = set()
        self._prepare = _overriders(taps, "prepare")
        self._execute = _overriders(taps, "execute")
        self._finish = _overriders(taps, "finish")
        self._read = _overriders(taps, "read")
        self._enter = _overriders(taps, "enter")
        self._leave = _overriders(taps, "leave")
        self._fail = _overriders(taps, "fail")
        self._sees_modules = bool(self._enter or self._leave)

    # -- on and off -------------------------------------------------------------------------------------------------

    def __enter__(self) -> Wire:
        self._thread = threading.get_ident()
        self.is_open = True
        try:
            self._wrap_all()
            if self._mode is not None:
                self._mode.__enter__()  # type: ignore[no-untyped-call]
        except BaseException:
            self._unwrap_all()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._mode is not None:
                self._mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        finally:
            self._unwrap_all()

    def _wrap_all(self) -> None:
        opaque, unfused, seen = [], [], set[int]()
        has_fused_path = self._mode is not None and torch.backends.mha.get_fastpath_enabled()
        for prefix, root in self._roots.items():
            for path, module in named_modules(root, seen):
                if not can_be_called(module):
                    continue
                full = f"{prefix}.{path}" if prefix and path else prefix or path
                wrapped = wrap(self, module, full)
                self._wrapped.append(wrapped)
                if wrapped.is_sealed:
                    opaque.append(full)
                if module._parameters:
                    self._with_parameters.add(full)
                if has_fused_path and isinstance(module, _FUSED_PATHS) and not module.training:
                    unfused.append(full)
        self.opaque = tuple(opaque)
        self.unfused = tuple(unfused)

    @property
    def silent(self) -> tuple[str, ...]:
        """Modules that own parameters and were never called: used functionally, or not at all. Needs a module tap."""
        return tuple(sorted(self._with_parameters - self._called))

    def _unwrap_all(self) -> None:
        self.is_open = False
        while self._wrapped:
            self._wrapped.pop().remove()

    # -- what happens -----------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Number of the step under way, from 0."""
        return self._step

    @property
    def depth(self) -> int:
        """How many module calls are under way in this thread."""
        return self._place.depth

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
        place = self._place
        if _in_backward() or not (place.depth or self._sees_outside):
            return func(*args, **kwargs)
        if name.use is CallUse.READ:
            call = Call((place.path, name.short, 0), self._step, func, args, kwargs, name)
            for see in self._read:
                see(call)
            return func(*args, **kwargs)
        call = Call(self._ident(place.path, name.short), self._step, func, args, kwargs, name)
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
            self._give_up(call, error)
            raise
        return output

    def module_call(self, wrapped: Wrapped, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one module's forward through the taps; a wrapped module calls this."""
        path, place = wrapped.path, self._place
        outer, place.path = place.path, path
        place.depth += 1
        try:
            with self._mode_for(wrapped, place.depth):
                if not self._sees_modules:
                    return wrapped.original(*args, **kwargs)
                if path == self._step_root and place.depth == 1 and (path, MODULE_OP) in self._counts:
                    self.next_step()
                call = Call(
                    self._ident(path, MODULE_OP), self._step, wrapped.original, args, kwargs, None, wrapped.module
                )
                self._called.add(path)
                hooked = wrapped.frame
                if hooked is not None and not hooked:
                    output = self._through_taps(call, is_left=False)
                    hooked.append(call)
                    return output
                output = self._through_taps(call, is_left=True)
            return self._followed(call, output) if type(output) is GeneratorType else output
        finally:
            place.path = outer
            place.depth -= 1

    def leave_hooked(self, call: Call, output: Any) -> Any:
        """End a module call whose output the module's own hooks have seen, and perhaps replaced."""
        try:
            return self._left(call, output)
        except BaseException as error:
            self._give_up(call, error)
            raise

    def give_up(self, call: Call, error: BaseException) -> None:
        """A module call ended in one of the module's own hooks."""
        self._give_up(call, error)

    def _through_taps(self, call: Call, *, is_left: bool) -> Any:
        try:
            if self._enter:
                with self._unseen():
                    for enter in self._enter:
                        enter(call)
            output = call.func(*call.args, **call.kwargs)
            return self._left(call, output) if is_left else output
        except BaseException as error:
            self._give_up(call, error)
            raise

    def _left(self, call: Call, output: Any) -> Any:
        with self._unseen():
            for leave in self._leave:
                output = leave(call, output)
        return output

    def _give_up(self, call: Call, error: BaseException) -> None:
        for give_up in self._fail:
            give_up(call, error)

    def _followed(self, call: Call, made: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """The user's generator, every resumption of which runs inside its module and is a call of its own."""
        resume: Callable[[Any], Any] = made.send
        given: Any = None
        while True:
            try:
                value = self._resumed(call, resume, given) if self.is_open else resume(given)
            except StopIteration as stop:
                return stop.value
            try:
                given = yield value
                resume = made.send
            except GeneratorExit:
                made.close()
                raise
            except BaseException as error:
                resume, given = made.throw, error

    def _resumed(self, call: Call, resume: Callable[[Any], Any], given: Any) -> Any:
        place = self._place
        outer, place.path = place.path, call.path
        place.depth += 1
        try:
            part = Call(self._ident(call.path, YIELD_OP), self._step, resume, (given,), {}, None, call.module)
            return self._through_taps(part, is_left=True)
        finally:
            place.path = outer
            place.depth -= 1

    # -- when the mode is to be on or off --------------------------------------------------------------------------

    def _unseen(self) -> AbstractContextManager[Any]:
        return torch._C.DisableTorchFunction() if self._mode is not None else _NOTHING

    def _mode_for(self, wrapped: Wrapped, depth: int) -> AbstractContextManager[Any]:
        """No mode inside compiled code, which would be compiled anew with us in it; one also in the user's threads."""
        if self._mode is None:
            return _NOTHING
        if wrapped.is_sealed:
            is_on_top = _get_current_function_mode() is self._mode  # type: ignore[no-untyped-call]
            return _pop_mode_temporarily() if is_on_top else _NOTHING
        if depth == 1 and threading.get_ident() != self._thread:
            return _Mode(self)
        return _NOTHING


_NOTHING: AbstractContextManager[Any] = nullcontext()


def _in_backward() -> bool:
    """Whether the autograd engine runs: checkpointing runs forward again there, which is not another call."""
    return torch._C._current_graph_task_id() != -1
