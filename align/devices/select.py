"""Find the device asked for, or the best one that is there."""

from __future__ import annotations

import torch

from align.devices.base import Device
from align.devices.cpu import Cpu
from align.devices.cuda import Cuda
from align.devices.npu import Npu
from align.dumpers.errors import DeviceError

_KINDS: dict[str, type[Device]] = {"npu": Npu, "cuda": Cuda, "cpu": Cpu}


def available_devices() -> tuple[Device, ...]:
    """Every usable kind of device, most wanted first; the CPU always comes last."""
    return tuple(device for device in (kind() for kind in _KINDS.values()) if not device.why_unavailable())


def select_device(kind: str) -> Device:
    """The device of a kind, `auto` for the best there is. Raises DeviceError with the reason."""
    if kind == "auto":
        return available_devices()[0]
    name = kind.partition(":")[0]
    if name not in _KINDS:
        raise DeviceError(f"unknown device {kind!r}", f"known devices: auto, {', '.join(_KINDS)}")
    device = _KINDS[name]()
    reason = device.why_unavailable()
    if reason:
        raise DeviceError(
            f"device {kind!r} cannot be used: {reason}",
            "run `align doctor` to see what is missing, or use --device cpu",
        )
    return device


def select_dtype(name: str, device: Device) -> torch.dtype:
    """A floating dtype by name. Raises DeviceError when it is unknown or the device cannot compute in it."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise DeviceError(f"unknown floating dtype {name!r}", "use bfloat16, float16, float32 or float64")
    reason = device.why_no_dtype(dtype)
    if reason:
        raise DeviceError(f"dtype {name} cannot be used on {device.kind}: {reason}", "choose another --dtype")
    return dtype
