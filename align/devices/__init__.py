"""Kinds of device: base seam, cpu, cuda, npu; `select` finds the one asked for."""

from align.devices.select import available_devices, select_device

__all__ = ["available_devices", "select_device"]
