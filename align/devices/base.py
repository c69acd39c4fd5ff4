"""The small seam between the tool and a kind of device: what is there, clocks, memory, flags, seeds."""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch


class When(StrEnum):
    """When a flag may be set."""

    ANY_TIME = "any time"
    BEFORE_FIRST_OP = "before the first operation"
    PROCESS_START = "process start"


@dataclass(frozen=True, slots=True)
class Flag:
    """A switch of the device that changes numerics: how to read and set it, its values, and what exact FP32 needs."""

    name: str
    values: tuple[str, ...]
    exact: str
    when: When
    read: Callable[[], str]
    write: Callable[[str], None]


class Device(abc.ABC):
    """One kind of device."""

    kind: str

    @abc.abstractmethod
    def why_unavailable(self) -> str:
        """The reason why the device cannot be used here, or "" when it can."""

    @property
    def torch_device(self) -> torch.device:
        """The device on which this process runs its models."""
        return torch.device(self.kind)

    def why_no_dtype(self, dtype: torch.dtype) -> str:
        """The reason why a dtype cannot be computed in, or ""."""
        return ""

    def synchronize(self) -> None:
        """Wait until all work given to the device is done."""

    has_own_clock = False
    """Whether the device works beside the host, so that its time must be taken by marks in its own order of work."""

    def mark(self) -> Any:
        """Note the moment at which the device gets here in its order of work; nothing waits for it."""
        return time.perf_counter()

    def seconds_between(self, start: Any, end: Any) -> float:
        """Seconds from one mark to another; `synchronize` first."""
        return float(end - start)

    def reset_peak_memory(self) -> None:
        """Start measuring the peak anew."""

    def peak_memory(self) -> float:
        """Bytes at the peak since the last reset; NaN where the device cannot tell."""
        return float("nan")

    def flags(self) -> Mapping[str, Flag]:
        """The switches that change this device's numerics, by name."""
        return {}

    def name(self) -> str:
        """The chip's name."""
        return self.kind

    @contextmanager
    def set_flags(self, wanted: Mapping[str, str]) -> Iterator[None]:
        """Set flags for the context and restore what was there. Unknown names are the caller's mistake."""
        known = self.flags()
        before = {name: known[name].read() for name in wanted}
        try:
            for name, value in wanted.items():
                known[name].write(value)
            yield
        finally:
            for name, value in before.items():
                known[name].write(value)

    def exact_flags(self) -> dict[str, str]:
        """The setting in which FP32 means FP32."""
        return {flag.name: flag.exact for flag in self.flags().values() if flag.when is When.ANY_TIME}


def switch(name: str, owner: object, attribute: str, *, exact: bool) -> Flag:
    """A boolean attribute as an on/off flag that may be set any time."""
    return Flag(
        name, ("on", "off"), "on" if exact else "off", When.ANY_TIME,
        lambda: "on" if getattr(owner, attribute) else "off",
        lambda value: setattr(owner, attribute, value == "on"),
    )  # fmt: skip
