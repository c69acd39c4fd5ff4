"""Dump a model's nodes from within the user's own script: `with align.capture(model, "run.h5"): ...`.

Works on a module, on several by name, and on pipelines that keep their modules in `components` (diffusers). A new step
begins whenever the largest module is called again: a token of `generate()`, a denoising step of a pipeline.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from align.dumpers.errors import UsageError
from align.dumpers.gradients import watch_gradients
from align.dumpers.model import TraceHeader
from align.dumpers.observe import Dataflow, Keep, Level, Observe, Selection
from align.dumpers.sink import TraceSink
from align.dumpers.store import TraceWriter, status_after
from align.dumpers.wire import Wire


class capture:  # noqa: N801 - it is used as a function, like `torch.no_grad`
    """Record nodes of `model` into the trace at `path` while the context is open.

    model    a module, a mapping of names to modules, or an object with a `components` mapping of some
    level    "module", "call" or "both";   keep   "tensors", "stats" or "sample"
    include, exclude, operators   globs over module paths, calls and classes;   steps   only these
    inputs   record inputs too;   grad   record gradients of node outputs and parameters in `backward()`
    max_bytes   budget of the trace: tensors beyond it become statistics
    Under torch.distributed each rank writes `path` with `.rankR` before its suffix. Raises TraceError when the path
    cannot be written, and TraceBusyError when another process writes it. The model's own exception passes unchanged;
    the trace is closed and says that the run failed.
    """

    def __init__(
        self, model: Any, path: str | Path, *, level: str = "module", keep: str = "tensors", include: tuple[str, ...] = (),
        exclude: tuple[str, ...] = (), operators: tuple[str, ...] = (), steps: tuple[int, ...] = (), inputs: bool = False,
        grad: bool = False, max_bytes: int = 0, overwrite: bool = False, compression: str = "none", name: str = "",
    ) -> None:  # fmt: skip
        rank, world = _rank()
        self.path = _rank_path(Path(path), rank, world)
        self._roots = roots_of(model)
        self._selection = Selection(
            Level(level), Keep(keep), tuple(include), tuple(exclude), frozenset(steps), tuple(operators), inputs, rank
        )  # fmt: skip
        self._grad = grad
        self._max_bytes = max_bytes
        self._overwrite = overwrite
        self._compression = compression
        self._header = TraceHeader(
            name or type(model).__name__, "capture", _device_of(self._roots), _dtype_of(self._roots), torch.initial_seed() % 2**31,
            level, rank, world, time.strftime("%Y-%m-%dT%H:%M:%S"),
        )  # fmt: skip
        self._wire: Wire | None = None
        self._sink: TraceSink | None = None
        self._stop_watching: Any = None

    def __enter__(self) -> Self:
        writer = TraceWriter.create(self.path, self._header, overwrite=self._overwrite, compression=self._compression)
        self._sink = TraceSink(writer, max_bytes=self._max_bytes)
        flow = Dataflow()
        observe = Observe(self._sink, self._selection, dataflow=flow)
        if self._grad:
            self._stop_watching = watch_gradients(self._roots, observe)
        self._wire = Wire(
            self._roots, [observe], sees_calls=self._selection.sees_calls, sees_outside=len(self._roots) > 1,
            step_root=largest_root(self._roots),
        )  # fmt: skip
        self._wire.__enter__()
        return self

    def step(self) -> None:
        """Begin the next step by hand."""
        assert self._wire is not None
        self._wire.next_step()

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the trace has to know: compiled or never-called modules, degraded tensors."""
        wire = self._wire
        notes = self._sink.notes if self._sink else ()
        if wire is None:
            return notes
        if wire.opaque:
            notes = (*notes, f"compiled modules are seen from outside only: {', '.join(wire.opaque)}")
        if wire.silent:
            notes = (*notes, f"modules with parameters that were never called: {', '.join(wire.silent)}")
        return notes

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._wire is not None and self._sink is not None
        self._wire.__exit__(kind, error, trace)
        if self._stop_watching is not None:
            self._stop_watching()
        self._sink.put_document("notes", "\n".join(self.notes))
        status = status_after(error)
        try:
            self._sink.close(status)
        except Exception:
            if error is None:
                raise  # otherwise the model's own exception is the one to see


def roots_of(model: Any) -> dict[str, nn.Module]:
    """The modules to name and their prefixes. Raises UsageError when there are none."""
    if isinstance(model, nn.Module):
        return {"": model}
    parts = model if isinstance(model, Mapping) else getattr(model, "components", {})
    found = {str(name): part for name, part in parts.items() if isinstance(part, nn.Module)}
    if not found:
        raise UsageError(f"{type(model).__name__} holds no torch modules", "give a module, a mapping of modules, or a pipeline")
    return found


def largest_root(roots: Mapping[str, nn.Module]) -> str:
    """Prefix of the module with the most parameters: the one whose calls count the steps."""
    return max(roots, key=lambda name: sum(p.numel() for p in roots[name].parameters()))


def _rank() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _rank_path(path: Path, rank: int, world: int) -> Path:
    return path if world == 1 else path.with_suffix(f".rank{rank}{path.suffix or '.h5'}")


def _device_of(roots: Mapping[str, nn.Module]) -> str:
    for root in roots.values():
        for tensor in root.parameters():
            return tensor.device.type
    return "cpu"


def _dtype_of(roots: Mapping[str, nn.Module]) -> str:
    for root in roots.values():
        for tensor in root.parameters():
            if tensor.is_floating_point():
                return str(tensor.dtype).removeprefix("torch.")
    return "float32"


