"""From any tensor torch can make to bits on the host: a view where torch allows one, a copy of this moment where asked.

Stated representations: quantised tensors are stored dequantised (their integers mean nothing beside another run's
scale), sparse ones dense while that stays small and else as their coalesced values, nested ones as the concatenation of
their components (or one node each, see `components`), a DTensor as its local part. `note_of` says so in words.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

from align.dumpers.dtypes import DTYPES, RawTensor
from align.dumpers.errors import UsageError
from align.dumpers.model import Statistics

DENSE_LIMIT_BYTES = 256 * 2**20
POOL_BYTES = 128 * 2**20
# what numpy does not know, seen through an integer of the same width
_CARRIERS: dict[torch.dtype, tuple[torch.dtype, type[np.generic]]] = {
    torch.bfloat16: (torch.int16, np.uint16),
    **{
        getattr(torch, name): (torch.uint8, np.uint8)
        for name, entry in DTYPES.items()
        if name.startswith("float8") and hasattr(torch, name)
    },
}
_NAMES: dict[torch.dtype, str] = {getattr(torch, name): name for name in DTYPES if hasattr(torch, name)}


def dtype_name(tensor: torch.Tensor) -> str:
    """Name of the tensor's dtype without `torch.`; of a quantised tensor, the quantised one (`qint8`)."""
    return _NAMES.get(tensor.dtype) or str(tensor.dtype).removeprefix("torch.")


def has_data(tensor: torch.Tensor) -> bool:
    """Whether there are values to read: meta and fake tensors have none, nor do wrappers that cannot show theirs."""
    if tensor.device.type == "meta":
        return False
    return type(tensor) in _PLAIN or not _is_fake(tensor)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _is_fake(tensor: torch.Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(tensor, FakeTensor):
        return True
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor) or torch._is_functional_tensor(tensor))


def note_of(tensor: torch.Tensor) -> str:
    """Say in words how an unusual tensor is represented; empty for ordinary ones."""
    if not has_data(tensor):
        return "no data"
    if tensor.is_nested:
        return f"nested: {len(components(tensor))} components, concatenated"
    if tensor.is_mkldnn:
        return "mkldnn layout, stored dense"
    if tensor.layout is not torch.strided:
        return _sparse_note(tensor)
    if tensor.is_quantized:
        return _quantised_note(tensor)
    return "local part of a distributed tensor" if _is_distributed(tensor) else ""


def _sparse_note(tensor: torch.Tensor) -> str:
    layout = str(tensor.layout).removeprefix("torch.")
    kept = "stored dense" if _dense_nbytes(tensor) <= DENSE_LIMIT_BYTES else "coalesced values stored, indices not"
    return f"{layout}: {tensor._nnz()} stored values, {kept}"


def _quantised_note(tensor: torch.Tensor) -> str:
    name = f"{dtype_name(tensor)}, stored dequantised"
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return f"{name}: scale {tensor.q_scale()!r}, zero point {tensor.q_zero_point()}"
    return f"{name}: per channel of axis {tensor.q_per_channel_axis()}"


def components(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors a nested tensor is made of; any other tensor alone."""
    return tuple(tensor.detach().unbind()) if tensor.is_nested else (tensor,)


def to_raw(tensor: torch.Tensor) -> RawTensor:
    """View a tensor's values as numpy, copying only what numpy cannot see as it lies. Raises UsageError without data.

    The result shares memory with the tensor where it can: read it before the model goes on, or take a `snapshot`.
    """
    if not has_data(tensor):
        raise UsageError(
            f"a {type(tensor).__name__} on {tensor.device} has no values", "record its shape and dtype only"
        )
    with torch._C.DisableTorchFunction():
        return _view(_plain(tensor))


def _view(tensor: torch.Tensor) -> RawTensor:
    """View a plain strided tensor, from whatever device."""
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    tensor = tensor.contiguous()
    name = dtype_name(tensor)
    if tensor.dtype == torch.complex32:
        return RawTensor(torch.view_as_real(tensor).numpy(), name)
    if tensor.dtype in _CARRIERS:
        seen_as, carrier = _CARRIERS[tensor.dtype]
        return RawTensor(tensor.view(seen_as).numpy().view(carrier), name)
    if name in DTYPES:
        return RawTensor(tensor.numpy(), name)
    return _opaque(tensor)


def _opaque(tensor: torch.Tensor) -> RawTensor:
    """Bytes of a packed dtype that the table does not know (`float4_e2m1fn_x2`, `bits8`, `uint4`), as uint8."""
    width = tensor.dtype.itemsize
    flat = tensor.view(torch.uint8) if width == 1 or tensor.ndim else tensor.reshape(1).view(torch.uint8)
    return RawTensor(flat.numpy(), "uint8")


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A detached strided tensor with resolved conj and neg bits that stands for any tensor, as the module says."""
    tensor = tensor.detach()
    if _is_distributed(tensor):
        tensor = tensor.to_local()  # type: ignore[attr-defined]
    if tensor.is_nested:
        parts = [part.reshape(-1) for part in tensor.unbind()]
        return torch.cat(parts) if parts else torch.empty(0, dtype=tensor.dtype)
    if tensor.is_mkldnn:
        return tensor.to_dense()
    if tensor.layout is not torch.strided:
        return _densified(tensor)
    if tensor.is_quantized:
        return tensor.dequantize()
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def _densified(tensor: torch.Tensor) -> torch.Tensor:
    if _dense_nbytes(tensor) <= DENSE_LIMIT_BYTES:
        return tensor.to_dense()
    return tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.values()


def _dense_nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize


def _is_distributed(tensor: torch.Tensor) -> bool:
    return type(tensor) not in _PLAIN and hasattr(tensor, "to_local") and hasattr(tensor, "placements")


class _BufferPool:
    """Host buffers used again: the page faults of a new one cost ten times the copy into it (0.5 MiB: 295 to 22 us)."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = {}
        self._nbytes = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> torch.Tensor:
        """Return a buffer of exactly `nbytes`."""
        with self._lock:
            same = self._free.get(nbytes)
            if same:
                self._nbytes -= nbytes
                return same.pop()
        return torch.empty(nbytes, dtype=torch.uint8)

    def give(self, buffer: torch.Tensor) -> None:
        """Take a buffer back, unless the pool is full."""
        nbytes = buffer.numel()
        with self._lock:
            if self._nbytes + nbytes > POOL_BYTES:
                self._free.clear()  # the sizes in demand have changed, or more is in flight than is worth keeping
                self._nbytes = 0
            if nbytes <= POOL_BYTES:
                self._free.setdefault(nbytes, []).append(buffer)
                self._nbytes += nbytes


_pool = _BufferPool()


class Snapshot:
    """A tensor's value at one moment, on its way to the host; holds nothing that the model can still change."""

    __slots__ = ("_buffer", "_event", "_host", "_source", "nbytes")

    def __init__(self, host: torch.Tensor, event: Any = None, source: Any = None, buffer: Any = None) -> None:
        self._host = host
        self._event = event
        self._source = source  # keeps the device copy's memory until the transfer is done
        self._buffer = buffer
        self.nbytes = host.numel() * host.dtype.itemsize

    def wait(self) -> RawTensor:
        """Return the value, once it has arrived."""
        if self._event is not None:
            self._event.synchronize()
            self._event = self._source = None
        with torch._C.DisableTorchFunction():
            return _view(self._host)

    def release(self) -> None:
        """Let the memory be used for another snapshot: what `wait` returned must not be read any more."""
        if self._buffer is not None:
            _pool.give(self._buffer)
            self._buffer = None
        self._host = torch.empty(0)


def snapshot(tensor: torch.Tensor) -> Snapshot:
    """Take the value of a tensor now: one copy on the CPU, a transfer that overlaps with computing on a device.

    Raises UsageError when there is no data (see `has_data`).
    """
    if not has_data(tensor):
        raise UsageError(
            f"a {type(tensor).__name__} on {tensor.device} has no values", "record its shape and dtype only"
        )
    with torch._C.DisableTorchFunction(), torch.no_grad():
        plain = _plain(tensor)
        return _copy_on_host(plain) if plain.device.type == "cpu" else _from_device(plain)


def _copy_on_host(plain: torch.Tensor) -> Snapshot:
    nbytes = plain.numel() * plain.dtype.itemsize
    if nbytes == 0:
        return Snapshot(plain.clone(memory_format=torch.contiguous_format))
    buffer = _pool.take(nbytes)
    host = buffer.view(plain.dtype).view(plain.shape)
    host.copy_(plain)
    return Snapshot(host, buffer=buffer)


def _from_device(plain: torch.Tensor) -> Snapshot:
    """Copy on the device in stream order (cheap, and safe against later writes), then move by a second stream."""
    backend: Any = getattr(torch, plain.device.type, None)
    if not hasattr(backend, "Stream") or not hasattr(backend, "Event"):
        return Snapshot(plain.cpu())
    with backend.device(plain.device):
        copied = plain.clone(memory_format=torch.contiguous_format)
        host = torch.empty(copied.shape, dtype=copied.dtype, pin_memory=True)
        side = _side_stream(backend, plain.device)
        side.wait_stream(backend.current_stream())
        with backend.stream(side):
            host.copy_(copied, non_blocking=True)
            event = backend.Event()
            event.record(side)
        copied.record_stream(side)
    return Snapshot(host, event, copied)


_side_streams: dict[torch.device, Any] = {}


def _side_stream(backend: Any, device: torch.device) -> Any:
    if device not in _side_streams:
        _side_streams[device] = backend.Stream(device)
    return _side_streams[device]


def describe_on_device(tensor: torch.Tensor) -> Statistics:
    """Describe a tensor by torch operations on its device and one transfer; float64 where the device computes in it."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        plain = _plain(tensor).reshape(-1)
        values = plain.abs() if plain.is_complex() else plain
        try:
            wide = values.to(torch.float64)
        except (RuntimeError, TypeError):  # MPS and some NPU operators know no float64
            wide = values.to(torch.float32)
        numbers = torch.stack(_device_numbers(wide, dtype_name(plain))).tolist() if plain.numel() else []
    return _from_numbers(plain.numel(), numbers)


def _device_numbers(wide: torch.Tensor, name: str) -> list[torch.Tensor]:
    finite = torch.isfinite(wide)
    count = finite.sum().to(wide.dtype)
    kept = torch.where(finite, wide, torch.zeros_like(wide))
    size = kept.abs()
    mean = kept.sum() / count
    gap = torch.where(finite, wide - mean, torch.zeros_like(wide))
    scale = torch.where(size.max() > 0, size.max(), torch.ones_like(mean))
    limits = DTYPES[name].format if name in DTYPES else None
    tiny, half = (0.0, float("inf")) if limits is None else (limits.smallest_normal, limits.largest / 2)
    numbers = [
        count,
        torch.where(finite, wide, float("inf")).min(),
        torch.where(finite, wide, float("-inf")).max(),
        mean,
        (gap / scale).square().mean().sqrt() * scale * (wide.numel() / count).sqrt(),
        (kept / scale).square().sum().sqrt() * scale,
        size.max(),
        torch.isnan(wide).sum(),
        (wide == float("inf")).sum(),
        (wide == float("-inf")).sum(),
        (wide == 0).sum(),
        ((size > 0) & (size < tiny)).sum(),
        (size > half).sum(),
    ]
    return [number.to(wide.dtype) for number in numbers]


def _from_numbers(count: int, numbers: list[float]) -> Statistics:
    if not numbers:
        return Statistics(count, *(6 * (float("nan"),)))
    low, high, mean, std, l2, absmax = numbers[1:7] if numbers[0] else 6 * [float("nan")]
    nan, up, down, zero, subnormal, near = (int(number) for number in numbers[7:])
    return Statistics(count, low, high, mean, std, l2, absmax, nan, up, down, zero, subnormal, near)
