"""Ascend NPUs through torch_npu, imported only when asked for: having the package without CANN must break nothing."""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from align.devices.base import Device, Flag
from align.devices.npu_flags import npu_flags
from align.dumpers.errors import DeviceError


def load_torch_npu() -> Any:
    """Import torch_npu. Raises DeviceError with what is missing."""
    if importlib.util.find_spec("torch_npu") is None:
        raise DeviceError("torch_npu is not installed", "pip install 'npu-align[npu]' on a machine with CANN")
    # torch_npu's own way of copying a storage, which nobody but its authors can change.
    warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning, "torch_npu")
    try:
        return importlib.import_module("torch_npu")
    except Exception as exc:  # without CANN the import fails in many ways: OSError, ImportError, RuntimeError
        home = os.environ.get("ASCEND_HOME_PATH", "unset")
        raise DeviceError(
            f"torch_npu cannot be loaded (ASCEND_HOME_PATH {home}): {exc}",
            "install CANN and source its set_env.sh, then try again",
        ) from exc


class Npu(Device):
    """The current Ascend device."""

    kind = "npu"

    def why_unavailable(self) -> str:
        try:
            load_torch_npu()
        except DeviceError as exc:
            return exc.problem
        return "" if self._npu.is_available() else "torch_npu sees no device"

    @property
    def _npu(self) -> Any:
        if not hasattr(torch, "npu"):
            load_torch_npu()
        return torch.npu  # type: ignore[attr-defined]

    @property
    def torch_device(self) -> torch.device:
        return torch.device("npu", self._npu.current_device())

    def synchronize(self) -> None:
        self._npu.synchronize()

    has_own_clock = True

    def mark(self) -> Any:
        event = self._npu.Event(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1e3

    def reset_peak_memory(self) -> None:
        self._npu.reset_peak_memory_stats()

    def peak_memory(self) -> float:
        return float(self._npu.max_memory_allocated())

    def name(self) -> str:
        return str(self._npu.get_device_name())

    def why_no_dtype(self, dtype: torch.dtype) -> str:
        if dtype is torch.float64:
            return "an NPU computes no float64"
        if dtype is torch.bfloat16 and not self._npu.is_bf16_supported():
            return "this chip has no bfloat16"
        return ""

    def flags(self) -> Mapping[str, Flag]:
        return {flag.name: flag for flag in npu_flags(self._npu)}

    placing_flags = frozenset({"npu.allow_internal_format"})
