"""The CPU: where the reference runs, and a device of its own with real fused kernels (oneDNN, flash attention)."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from align.devices.base import DEFAULT, Device, Flag, When, autocast, variable

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


class Cpu(Device):
    """The host's processor."""

    kind = "cpu"

    def why_unavailable(self) -> str:
        return ""

    def reset_peak_memory(self) -> None:
        try:
            _CLEAR_REFS.write_text("5")  # Linux: resets the peak resident size of this process
        except OSError:
            return

    def peak_memory(self) -> float:
        try:
            lines = _STATUS.read_text().splitlines()
        except OSError:
            return float("nan")
        found = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
        return float(found[0]) * 1024 if found else float("nan")

    def name(self) -> str:
        try:
            lines = Path("/proc/cpuinfo").read_text().splitlines()
        except OSError:
            return platform.processor() or "cpu"
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        return models[0] if models else platform.machine()

    def flags(self) -> Mapping[str, Flag]:
        precision = Flag(
            "cpu.float32_matmul_precision", ("highest", "high", "medium"), "highest", When.ANY_TIME,
            torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, narrows=True,
        )  # fmt: skip
        onednn = Flag(
            "cpu.onednn", ("on", "off"), "on", When.ANY_TIME,
            lambda: "on" if torch.backends.mkldnn.enabled else "off",
            lambda value: setattr(torch.backends.mkldnn, "enabled", value == "on"),
        )  # fmt: skip
        return {flag.name: flag for flag in (autocast("cpu"), precision, onednn, *_variables())}


def _variables() -> Iterator[Flag]:
    """What the libraries read once, at their start."""
    yield variable("cpu", "ATEN_CPU_CAPABILITY", (DEFAULT, "avx2", "avx512"), DEFAULT, "")
    yield variable("cpu", "ONEDNN_MAX_CPU_ISA", (DEFAULT, "AVX2", "AVX512_CORE", "AVX512_CORE_BF16"), DEFAULT, "")
    yield variable("cpu", "ONEDNN_DEFAULT_FPMATH_MODE", ("STRICT", "BF16", "F16", "ANY"), "STRICT", "STRICT")
