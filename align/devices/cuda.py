"""NVIDIA GPUs through torch.cuda."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from align.devices.base import DEFAULT, Device, Flag, autocast, switch, variable


class Cuda(Device):
    """The current CUDA device."""

    kind = "cuda"

    def why_unavailable(self) -> str:
        return "" if torch.cuda.is_available() else "torch sees no CUDA device"

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def why_no_dtype(self, dtype: torch.dtype) -> str:
        if dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported():
            return "this GPU has no bfloat16"
        return ""

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    has_own_clock = True

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds_between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1e3

    def reset_peak_memory(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak_memory(self) -> float:
        return float(torch.cuda.max_memory_allocated())

    def name(self) -> str:
        return torch.cuda.get_device_name()

    def flags(self) -> Mapping[str, Flag]:
        matmul = torch.backends.cuda.matmul
        items = (
            autocast("cuda"),
            switch("cuda.matmul.allow_tf32", matmul, "allow_tf32", exact=False, narrows=True),
            switch(
                "cuda.matmul.allow_fp16_reduced_precision_reduction",
                matmul,
                "allow_fp16_reduced_precision_reduction",
                exact=False,
            ),
            switch(
                "cuda.matmul.allow_bf16_reduced_precision_reduction",
                matmul,
                "allow_bf16_reduced_precision_reduction",
                exact=False,
            ),
            switch("cuda.cudnn.allow_tf32", torch.backends.cudnn, "allow_tf32", exact=False, narrows=True),
            switch("cuda.cudnn.deterministic", torch.backends.cudnn, "deterministic", exact=True),
            switch("cuda.cudnn.benchmark", torch.backends.cudnn, "benchmark", exact=False),
            variable("cuda", "NVIDIA_TF32_OVERRIDE", (DEFAULT, "0", "1"), DEFAULT, "0"),
        )
        return {flag.name: flag for flag in items}
