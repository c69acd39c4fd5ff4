"""Read one tensor from a .pt file, never running what the file asks for: torch's weights-only reader, on the CPU.

Tensors saved from an NPU name a function of torch_npu that rebuilds them; a stand-in that needs no NPU takes its place.
"""

from __future__ import annotations

import pickle
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from align.dumpers.dtypes import RawTensor
from align.dumpers.errors import TraceError
from align.dumpers.importers.found import UnreadableValuesError

_NPU_REBUILD = "torch_npu.utils.storage._rebuild_npu_tensor"
_READ_ERRORS = (
    RuntimeError,
    pickle.UnpicklingError,
    EOFError,
    OSError,
    ValueError,
    TypeError,
    AttributeError,
    KeyError,
)


@cache
def import_torch() -> ModuleType:
    """Import torch. Raises TraceError that says what to install."""
    try:
        import torch
    except ImportError as exc:
        raise TraceError("reading .pt files needs torch, which is not installed", "pip install torch") from exc
    return torch


def read_tensor(source: Path | BinaryIO) -> RawTensor:
    """The tensor in what `torch.save` wrote. Raises UnreadableValuesError when there is none, or more than a tensor."""
    torch = import_torch()
    from align.dumpers.tensors import to_raw

    name = source.name if isinstance(source, Path) else "the tensor"
    try:
        with torch.serialization.safe_globals([(_rebuild_npu_tensor, _NPU_REBUILD)]):
            found = torch.load(source, map_location="cpu", weights_only=True)
    except _READ_ERRORS as exc:
        raise UnreadableValuesError(f"{name}: {_first_line(exc)}") from exc
    if not isinstance(found, torch.Tensor):
        raise UnreadableValuesError(f"{name} holds a {type(found).__name__}, no tensor")
    return to_raw(found.detach())


def _rebuild_npu_tensor(
    storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: object
) -> object:
    """What torch_npu's function of this name does, less the way back to the device."""
    return import_torch().empty((0,), dtype=storage.dtype).set_(storage, offset, size, stride)


def _first_line(exc: BaseException) -> str:
    return (str(exc).strip().splitlines() or [type(exc).__name__])[0][:200]
