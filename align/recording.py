"""Dump a model's nodes from within the user's own script: `with align.capture(model, "run.h5"): ...`.

Works on a module, on several by name, and on pipelines that hold their modules in `components` (diffusers) or as
attributes. A new step begins whenever the module that does the steps is called again: a token of `generate()`, a
denoising step of a pipeline. Outside the context nothing of ours is on the model, so it costs nothing when off.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import torch
from torch import nn

from align.dumpers.errors import UsageError
from align.dumpers.gradients import watch_gradients
from align.dumpers.model import RunStatus, TraceHeader
from align.dumpers.observe import Dataflow, Keep, Level, Observe, Selection
from align.dumpers.sink import QUEUE_BYTES, TraceSink
from align.dumpers.store import TraceWriter, status_after
from align.dumpers.wire import Wire

_STEPPERS = ("unet", "transformer", "prior", "decoder")  # what diffusers pipelines call the module they loop over


class capture:  # noqa: N801 - it is used as a function, like `torch.no_grad`
    """Record nodes of `model` into the trace at `path` while the context is open.

    model    a module, a mapping of names to modules, or an object with a `components` mapping or attributes of some
    level    "module", "call" or "both";   keep   "tensors", "stats" or "sample"
    include, exclude, operators   globs over module paths, calls and classes;   steps, ranks   only these
    inputs   record inputs too;   grad   record gradients of node outputs and parameters in `backward()`
    max_bytes   budget of the trace's tensors: those beyond it become statistics, large ones first
    queue_bytes   bound of the memory that waits for the disk;   step_module   name of the module whose calls are steps
    Under torch.distributed each rank writes `path` with `.rankR` before its suffix. Raises TraceError when the path
    cannot be written, and TraceBusyError when another process writes it. The model's own exception passes unchanged;
    the trace is closed and says that the run failed, and where. A SIGTERM that the program does not handle itself
    closes the trace, marked as interrupted, before the process ends by it.
    """

    def __init__(
        self,
        model: Any,
        path: str | os.PathLike[str],
        *,
        level: str = "module",
        keep: str = "tensors",
        include: Collection[str] = (),
        exclude: Collection[str] = (),
        operators: Collection[str] = (),
        steps: Collection[int] = (),
        ranks: Collection[int] = (),
        inputs: bool = False,
        grad: bool = False,
        max_bytes: int = 0,
        queue_bytes: int = QUEUE_BYTES,
        overwrite: bool = False,
        compression: str = "none",
        name: str = "",
        step_module: str = "",
    ) -> None:
        rank, world = _rank()
        self.path = _rank_path(Path(path), rank, world)
        self._roots = roots_of(model)
        self._step_root = _step_root(self._roots, step_module)
        self._selection = Selection(
            _one_of(Level, "level", level),
            _one_of(Keep, "keep", keep),
            _globs("include", include),
            _globs("exclude", exclude),
            frozenset(steps),
            _globs("operators", operators),
            inputs,
            rank,
        )
        self._is_chosen = not ranks or rank in ranks
        self._grad = grad
        self._budgets = (max_bytes, queue_bytes)
        self._overwrite = overwrite
        self._compression = compression
        self._header = TraceHeader(
            name or type(model).__name__,
            "capture",
            _device_of(self._roots),
            _dtype_of(self._roots),
            torch.initial_seed() % 2**31,
            level,
            rank,
            world,
            time.strftime("%Y-%m-%dT%H:%M:%S"),
            _environment(),
        )
        self._observe: Observe | None = None
        self._wire: Wire | None = None
        self._sink: TraceSink | None = None
        self._stop_watching: Any = None
        self._error: BaseException | None = None
        self._termination = _Termination()

    def __enter__(self) -> Self:
        if not self._is_chosen:
            return self
        if self._sink is not None:
            raise UsageError("this capture was used before", "make a new one: `with align.capture(...)`")
        writer = TraceWriter.create(self.path, self._header, overwrite=self._overwrite, compression=self._compression)
        self._sink = TraceSink(writer, max_bytes=self._budgets[0], queue_bytes=self._budgets[1])
        try:
            self._begin(self._sink)
        except BaseException as error:
            self._sink.close(status_after(error))
            raise
        return self

    def _begin(self, sink: TraceSink) -> None:
        self._observe = Observe(sink, self._selection, dataflow=Dataflow())
        self._wire = Wire(
            self._roots,
            [self._observe],
            sees_calls=self._selection.sees_calls,
            sees_outside=len(self._roots) > 1,
            step_root=self._step_root,
        )
        self._wire.__enter__()
        if self._grad:
            self._stop_watching = watch_gradients(
                self._roots, self._observe, lambda: self._wire.step if self._wire else 0
            )
        self._termination.begin()

    def step(self) -> None:
        """Begin the next step by hand."""
        if self._wire is not None:
            self._wire.next_step()

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the trace has to know: what was not seen, what was changed, where it stopped."""
        if self._wire is None or self._sink is None or self._observe is None:
            return ()
        notes = list(self._sink.notes)
        if self._wire.opaque:
            notes.append(f"compiled modules are seen from outside only: {_listed(self._wire.opaque)}")
        if self._wire.unfused:
            notes.append(f"torch's fused encoder path is off while calls are observed: {_listed(self._wire.unfused)}")
        if self._observe.last is None:
            notes.append(
                "nothing was recorded: no call that the selection admits was seen (is the model compiled from outside?)"
            )
        elif self._wire.silent and self._error is None:  # after an error it is the rest of the model
            notes.append(f"modules with parameters that were never called: {_listed(self._wire.silent)}")
        return (*notes, *self._why_stopped(self._error))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._wire is None or self._sink is None:
            return
        self._termination.defer()
        self._error = error
        try:
            self._wire.__exit__(kind, error, trace)
            if self._stop_watching is not None:
                self._stop_watching()
            self._seal(self._sink, error)
        finally:
            self._termination.end()

    def _seal(self, sink: TraceSink, error: BaseException | None) -> None:
        notes = self.notes
        self._error = None  # it holds frames, and they the model
        status = RunStatus.INTERRUPTED if self._termination.has_come else status_after(error)
        # where the model has raised, its own exception is the one to see
        with contextlib.suppress(Exception) if error is not None else contextlib.nullcontext():
            try:
                sink.put_document("notes", "\n".join(notes))
            finally:
                sink.close(status)

    def _why_stopped(self, error: BaseException | None) -> tuple[str, ...]:
        if error is None or self._observe is None:
            return ()
        text = str(error).strip().splitlines()
        failure, last = self._observe.failure, self._observe.last
        where = f" in {failure.call} ({failure.type_name})" if failure is not None and failure.error is error else ""
        said = f": {text[0]}" if text else ""
        return (f"stopped by {type(error).__name__}{where}{said}; last completed node: {last or 'none'}",)


class _Terminated(KeyboardInterrupt):
    """SIGTERM has come. Like Ctrl-C, it passes `except Exception` in the user's code."""


class _Termination:
    """Turn SIGTERM into an exception for as long as a trace is open, unless the program handles it itself."""

    def __init__(self) -> None:
        self.has_come = False
        self._is_ours = False
        self._is_deferred = False

    def begin(self) -> None:
        """Take the signal over, in the main thread."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._come)
            self._is_ours = True

    def defer(self) -> None:
        """From now on only note that it has come: the trace is being closed."""
        self._is_deferred = True

    def end(self) -> None:
        """Give the signal back, and end the process by it if it has come."""
        if not self._is_ours:
            return
        self._is_ours = False
        if signal.getsignal(signal.SIGTERM) == self._come:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self.has_come:
            signal.raise_signal(signal.SIGTERM)

    def _come(self, number: int, frame: FrameType | None) -> None:
        self.has_come = True
        if not self._is_deferred:
            raise _Terminated


def roots_of(model: Any) -> dict[str, nn.Module]:
    """The modules to name and their prefixes. Raises UsageError when there are none."""
    if isinstance(model, nn.Module):
        return {"": model}
    parts = (
        model if isinstance(model, Mapping) else getattr(model, "components", None) or getattr(model, "__dict__", {})
    )
    found = {str(name): part for name, part in parts.items() if isinstance(part, nn.Module)}
    if not found:
        raise UsageError(
            f"{type(model).__name__} holds no torch modules", "give a module, a mapping of modules, or a pipeline"
        )
    return found


def largest_root(roots: Mapping[str, nn.Module]) -> str:
    """Prefix of the module whose calls are steps: of diffusers' usual names, else the one with most parameters."""
    usual = [name for name in (_STEPPERS if len(roots) > 1 else roots) if name in roots]
    return usual[0] if usual else max(roots, key=lambda name: sum(p.numel() for p in roots[name].parameters()))


def _step_root(roots: Mapping[str, nn.Module], name: str) -> str:
    if name and name not in roots:
        raise UsageError(f"no module {name!r} to count steps by", f"the modules are: {', '.join(roots)}")
    return name or largest_root(roots)


def _one_of(kind: Any, what: str, text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise UsageError(f"unknown {what} {text!r}", f"choose one of {', '.join(kind)}") from None


def _globs(what: str, globs: Collection[str]) -> tuple[str, ...]:
    if isinstance(globs, str):
        raise UsageError(f"{what} is one text: {globs!r}", f"write {what}=({globs!r},)")
    return tuple(globs)


def _listed(paths: tuple[str, ...]) -> str:
    shown = ", ".join(path or "(model)" for path in paths[:20])
    return f"{shown}, and {len(paths) - 20} more" if len(paths) > 20 else shown


def _rank() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _rank_path(path: Path, rank: int, world: int) -> Path:
    return path if world == 1 else path.with_suffix(f".rank{rank}{path.suffix or '.h5'}")


def _environment() -> tuple[tuple[str, str], ...]:
    return (
        ("python", platform.python_version()),
        ("torch", torch.__version__),
        ("threads", str(torch.get_num_threads())),
    )


def _device_of(roots: Mapping[str, nn.Module]) -> str:
    return next((tensor.device.type for root in roots.values() for tensor in root.parameters()), "cpu")


def _dtype_of(roots: Mapping[str, nn.Module]) -> str:
    floats = (tensor.dtype for root in roots.values() for tensor in root.parameters() if tensor.is_floating_point())
    return str(next(floats, torch.float32)).removeprefix("torch.")
