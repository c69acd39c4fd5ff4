"""Find the calls that make the host wait for the device, and the line of user code each comes from.

On the CPU nothing waits; the calls are named all the same, for they will wait where the model is meant to run.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import align.dumpers.wire
import align.workload
from align.dumpers.naming import flat_tensors
from align.dumpers.wire import Call, Tap
from align.profiling.values import Waiting

_READS = frozenset({
    "item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__", "__complex__",
    "__contains__", "equal", "allclose", "is_nonzero",
})  # fmt: skip
_SPOKEN = {
    "__bool__": "bool(tensor)",
    "__float__": "float(tensor)",
    "__int__": "int(tensor)",
    "__index__": "index",
    "__contains__": "in",
}
# Their output's shape depends on values, which the host must have before it can go on.
_BY_VALUE = frozenset({"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"})
_OURS = tuple(
    str(Path(module.__file__ or "").resolve().parent) + os.sep for module in (align.workload, align.dumpers.wire)
)
_DEMO = f"{_OURS[0]}demo{os.sep}"
_TORCH = str(Path(torch.__file__).resolve().parent) + os.sep


class Synchronisations(Tap):
    """Count waiting calls by line of user code; `kind` is the kind of device the run is on."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._found: Counter[tuple[str, str, str]] = Counter()

    def read(self, call: Call) -> None:
        if call.op in _READS and self._on_device(call):
            self._note(call, _SPOKEN.get(call.op, call.op))

    def prepare(self, call: Call) -> None:
        if waits(call) and self._on_device(call):
            self._note(call, call.op)

    def waits(self) -> tuple[Waiting, ...]:
        """All waiting lines, the most frequent first."""
        rows = [Waiting(op, line, path, count) for (op, line, path), count in self._found.items()]
        return tuple(sorted(rows, key=lambda row: (-row.count, row.line, row.op)))

    def _on_device(self, call: Call) -> bool:
        tensors = flat_tensors((call.args, call.kwargs))
        return any(tensor.device.type == self._kind for tensor in tensors)

    def _note(self, call: Call, op: str) -> None:
        self._found[op, user_line(), call.path] += 1


def waits(call: Call) -> bool:
    """Whether a call that yields tensors makes the host wait for the device."""
    if call.op in _BY_VALUE or call.op == "cpu":
        return True
    if call.op == "where":
        return len(call.args) + len(call.kwargs) == 1
    if call.op == "repeat_interleave":
        return len(call.args) > 1 and isinstance(call.args[1], torch.Tensor) and call.kwargs.get("output_size") is None
    if call.op == "getitem":
        return _has_mask(call.args[1])
    return call.op == "to" and _leaves_for_host(call)


def _has_mask(index: Any) -> bool:
    items = index if isinstance(index, tuple) else (index,)
    return any(isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8) for item in items)


def _leaves_for_host(call: Call) -> bool:
    """A blocking copy from an accelerator to the CPU; `x.to(x.device)` on the CPU is none."""
    source = call.args[0]
    if not isinstance(source, torch.Tensor) or source.device.type == "cpu" or call.kwargs.get("non_blocking"):
        return False
    target = call.kwargs.get("device", call.args[1] if len(call.args) > 1 else None)
    if isinstance(target, torch.Tensor):
        target = target.device
    return isinstance(target, (str, torch.device)) and torch.device(target).type == "cpu"


def user_line() -> str:
    """`file.py:12` of the innermost frame that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith("<") and not is_library(name):
            return f"{_short(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def is_library(filename: str) -> bool:
    """Whether a file belongs to torch or to this tool, whose demo counts as a user's model."""
    return filename.startswith(_TORCH) or (filename.startswith(_OURS) and not filename.startswith(_DEMO))


def _short(filename: str) -> str:
    path = Path(filename)
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return "/".join(path.parts[-2:])
