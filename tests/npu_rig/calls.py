"""Record which operators the simulated device executed.

Invariant: one entry a kernel that ran on the device, in order, named like `aten::mm` or `npu::npu_rms_norm`.
Views, allocations and stream calls run no kernel and are not listed. `fallback:` marks aten operators that torch_npu
has no kernel for (on a machine with an NPU they run on the host, through copies).
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

FILE_VARIABLE = "NPU_RIG_CALLS"
FALLBACK = "fallback:"
# npu:: operators that only move, cast or keep house, and the aten operator that is a fused kernel on the device.
_NOT_FUSED = ("cast", "format", "npu_transpose", "npu_reshape", "npu_broadcast", "copy", "float_status", "one_")
_FUSED_ATEN = frozenset({"aten::gelu.out"})
_listeners: list[list[str]] = []


def note(name: str) -> None:
    """Tell every open recording that a kernel runs."""
    for listener in _listeners:
        listener.append(name)


@contextmanager
def rig_calls() -> Iterator[list[str]]:
    """Collect the names of the kernels that run inside the block, on any thread."""
    names: list[str] = []
    _listeners.append(names)
    try:
        yield names
    finally:
        # list.remove would compare by value, and an outer recording may hold the same names.
        _listeners[:] = [listener for listener in _listeners if listener is not names]


def fused_names(names: Iterable[str]) -> list[str]:
    """Pick the fused kernels out of a recording; empty for a baseline that is really unfused."""
    return [name for name in names if name in _FUSED_ATEN or (name.startswith("npu::") and not _keeps_house(name))]


def _keeps_house(name: str) -> bool:
    return any(word in name for word in _NOT_FUSED)


def write_at_exit() -> None:
    """Append every kernel's name to the file that NPU_RIG_CALLS names, when the process ends."""
    path = os.environ.get(FILE_VARIABLE)
    if not path:
        return
    names: list[str] = []
    _listeners.append(names)

    def write() -> None:
        with Path(path).open("a", encoding="utf-8") as file:
            file.writelines(f"{name}\n" for name in names)

    atexit.register(write)
