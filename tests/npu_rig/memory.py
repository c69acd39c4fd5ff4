"""Look at the simulated device's memory as host tensors, and put results back on the device.

Invariant: `as_host` never copies: the host tensor and the device tensor are the same bytes.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

DEVICE = "npu"


def is_on_device(value: object) -> bool:
    """Say whether a value is a tensor of the simulated device."""
    return isinstance(value, torch.Tensor) and value.device.type == DEVICE


def as_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor of the same dtype, shape and strides over the same bytes."""
    size, stride = tensor.size(), tensor.stride()
    extent = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if tensor.numel() == 0:
        # Resizable, since an `out=` argument usually starts empty.
        return torch.empty(size, dtype=tensor.dtype)
    nbytes = extent * tensor.element_size()
    memory = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype, count=extent).as_strided(size, stride)


def as_device(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a CPU result into fresh device memory, with its strides where they leave no hole."""
    if tensor.layout is not torch.strided:
        raise NotImplementedError(f"the rig keeps strided tensors only, not {tensor.layout}")
    if torch.ops.aten.is_non_overlapping_and_dense.default(tensor):
        result = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=DEVICE)
    else:
        result = torch.empty(tensor.size(), dtype=tensor.dtype, device=DEVICE)
    if tensor.numel():
        as_host(result).copy_(tensor)
    return result


class HostCall:
    """The arguments of one call, moved to the host, and the way back for its results."""

    def __init__(self) -> None:
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def lower(self, value: Any) -> Any:
        """Replace device tensors by host tensors over the same bytes, and the device by the CPU."""
        if isinstance(value, torch.Tensor):
            return self._lower_tensor(value) if value.device.type == DEVICE else value
        if isinstance(value, (list, tuple)):
            return type(value)(self.lower(item) for item in value)
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return value

    def lift(self, value: Any) -> Any:
        """Replace host tensors by device tensors: an argument that came back by itself, the rest by copies."""
        if isinstance(value, torch.Tensor):
            for device, host in self._pairs:
                if host is value:
                    return device
            return as_device(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self.lift(item) for item in value)
        return value

    def store_resized(self) -> None:
        """Give back to the device what an operator resized on the host (empty `out=` arguments)."""
        for device, host in self._pairs:
            if host.size() != device.size():
                device.resize_(host.size())
                as_host(device).copy_(host)

    def _lower_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        for device, host in self._pairs:
            if device is tensor:
                return host
        host = as_host(tensor)
        self._pairs.append((tensor, host))
        return host
