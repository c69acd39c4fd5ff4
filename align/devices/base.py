"""The small seam between the tool and a kind of device: what is there, clocks, memory, flags, seeds."""

from __future__ import annotations

import abc
import difflib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from align.dumpers.errors import UsageError

DEFAULT = "default"
"""The value of a flag that nobody has set: what it means is up to the library."""


class When(StrEnum):
    """When a flag may be set."""

    ANY_TIME = "any time"
    BEFORE_FIRST_OP = "before the first operation"
    PROCESS_START = "process start"


@dataclass(frozen=True, slots=True)
class Flag:
    """A switch of the device that changes numerics: how to read and set it, and its values.

    exact    the value in which results are most exact; "" where it makes no difference to them
    narrows  whether another value lets float32 be computed in less than float32
    """

    name: str
    values: tuple[str, ...]
    exact: str
    when: When
    read: Callable[[], str]
    write: Callable[[str], None]
    narrows: bool = False


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

    def synchronize(self) -> None:  # noqa: B027 - a device that works in step with the host has nothing to wait for
        """Wait until all work given to the device is done."""

    has_own_clock = False
    """Whether the device works beside the host, so that its time must be taken by marks in its own order of work."""

    def mark(self) -> Any:
        """Note the moment at which the device gets here in its order of work; nothing waits for it."""
        return time.perf_counter()

    def seconds_between(self, start: Any, end: Any) -> float:
        """Seconds from one mark to another; `synchronize` first."""
        return float(end - start)

    def reset_peak_memory(self) -> None:  # noqa: B027 - there are devices that cannot tell
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

    def check_flags(self, wanted: Mapping[str, str]) -> None:
        """Raise UsageError for a flag that this device does not have, or a value that the flag cannot take."""
        known = self.flags()
        for name, value in wanted.items():
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {near[0]}?" if near else f"flags here: {', '.join(known) or 'none'}"
                raise UsageError(f"{self.kind} has no flag {name!r}", hint)
            if value not in known[name].values:
                raise UsageError(f"flag {name} cannot be {value!r}", f"values: {', '.join(known[name].values)}")

    def late_flags(self, wanted: Mapping[str, str]) -> dict[str, str]:
        """Of the wanted flags those that are not in force and can only be set in a process that has yet to start."""
        known = self.flags()
        return {
            name: value
            for name, value in wanted.items()
            if known[name].when is not When.ANY_TIME and known[name].read() != value
        }

    def prepare(self, wanted: Mapping[str, str]) -> None:
        """Set what can be set only before the first operation: call it in a fresh process, before a model is placed."""
        known = self.flags()
        for name, value in wanted.items():
            if known[name].when is not When.ANY_TIME:
                known[name].write(value)

    @contextmanager
    def set_flags(self, wanted: Mapping[str, str]) -> Iterator[None]:
        """Set flags for the context and restore what was there; what can be set only once stays as it is afterwards.

        Unknown names are the caller's mistake. Raises UsageError for a flag that can no longer be set.
        """
        self.prepare(wanted)
        known = self.flags()
        changed = {n: v for n, v in wanted.items() if known[n].when is When.ANY_TIME and known[n].read() != v}
        before = {name: known[name].read() for name in changed}
        try:
            for name, value in changed.items():
                known[name].write(value)
            yield
        finally:
            for name, value in before.items():
                known[name].write(value)

    def exact_flags(self) -> dict[str, str]:
        """The setting in which results are most exact, as far as it can be set now."""
        return {flag.name: flag.exact for flag in self.flags().values() if flag.when is When.ANY_TIME}

    def float32_flags(self) -> dict[str, str]:
        """The setting in which FP32 means FP32, everything else left alone."""
        return {flag.name: flag.exact for flag in self.flags().values() if flag.narrows and flag.when is When.ANY_TIME}

    placing_flags: frozenset[str] = frozenset()
    """Flags that decide how a tensor is laid out when it comes to the device: a placed model keeps what held then."""


def switch(name: str, owner: object, attribute: str, *, exact: bool, narrows: bool = False) -> Flag:
    """A boolean attribute as an on/off flag that may be set any time."""
    return Flag(
        name, ("on", "off"), "on" if exact else "off", When.ANY_TIME,
        lambda: "on" if getattr(owner, attribute) else "off",
        lambda value: setattr(owner, attribute, value == "on"),
        narrows,
    )  # fmt: skip


def autocast(kind: str) -> Flag:
    """Whether whole runs are under torch.autocast, and in which dtype; regions in the model's own code stay."""
    usual = torch.get_autocast_dtype(kind)

    def read() -> str:
        dtype = torch.get_autocast_dtype(kind)
        return str(dtype).removeprefix("torch.") if torch.is_autocast_enabled(kind) else "off"

    def write(value: str) -> None:
        torch.set_autocast_enabled(kind, value != "off")
        torch.set_autocast_dtype(kind, usual if value == "off" else getattr(torch, value))
        torch.clear_autocast_cache()  # it remembers cast weights by address, and the next run may change them

    return Flag(f"{kind}.autocast", ("off", "bfloat16", "float16"), "off", When.ANY_TIME, read, write)


_ENVIRONMENT = ".env."


def variable(kind: str, name: str, values: tuple[str, ...], usual: str, exact: str) -> Flag:
    """An environment variable as the flag `kind.env.NAME`. `usual` is what holds where the variable is not set.

    Libraries read theirs once, some at import and some at first use: changing one later would do nothing without a
    word, so here it is an error.
    """

    def read() -> str:
        return os.environ.get(name, usual)

    def write(value: str) -> None:
        if value != read():
            raise UsageError(
                f"flag {kind}{_ENVIRONMENT}{name} is {read()!r} and can be set at process start only, not to {value!r}",
                f"start with {name}={value} in the environment",
            )

    return Flag(f"{kind}{_ENVIRONMENT}{name}", values, exact, When.PROCESS_START, read, write)


def process_environment(flags: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that a process must start with so that it has these flags; "" is a variable not set."""
    return {
        name.partition(_ENVIRONMENT)[2]: "" if value == DEFAULT else value
        for name, value in flags.items()
        if _ENVIRONMENT in name
    }
