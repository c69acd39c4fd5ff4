"""Statistics and digest of one tensor, in one pass at the speed of memory, the same on every run and thread count.

Real floats go through compiled loops (`statistics_kernels`), 8-bit types through a histogram of their 256 codes, wider
integers and complex magnitudes through blocks of numpy. No dtype is widened as a whole.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from align.dumpers.dtypes import Array, RawTensor, dtype_of, float8_table, widen
from align.dumpers.model import Statistics
from align.dumpers.statistics_kernels import Scan, decode_kernel, histogram_kernel, scan_kernel

if TYPE_CHECKING:
    import torch

_CHUNK = 1 << 18  # elements of scratch: 1 MiB of float32, second cache
_SQUARES = (1e-140, 1e150)  # magnitudes between these square in float64 without vanishing or overflowing
_NOTHING = Scan(0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0)
_scratch = threading.local()


def digest(raw: RawTensor) -> str:
    """Return 32 hex digits that name dtype, shape and bits: xxHash3, 128 bits."""
    hasher = xxhash.xxh3_128(f"{raw.dtype}{tuple(raw.shape)}".encode())
    if raw.bits.size:
        hasher.update(np.ascontiguousarray(raw.bits).data)
    return hasher.hexdigest()


def describe(raw: RawTensor) -> Statistics:
    """Describe all values of `raw` in one pass. Integers have no NaN, no subnormals and no limit to be near to."""
    dtype = dtype_of(raw.dtype)
    flat = np.require(raw.bits, requirements=("C", "A")).reshape(-1)
    if dtype.itemsize == 1:
        return _describe_codes(flat, raw.dtype)
    if dtype.is_complex:
        return _describe_complex(flat, raw.dtype)
    if dtype.format is None:
        return _describe_integers(flat)
    return _describe_floats(flat, raw.dtype)


@cache
class Describer:
    """Describe tensors, and content that was seen before only once: a module's output is often its last call's.

    Remembers the last few thousand digests; for one thread.
    """

    _REMEMBERED = 4096

    def __init__(self) -> None:
        self._known: dict[str, Statistics] = {}

    def __call__(self, raw: RawTensor) -> tuple[Statistics, str]:
        """Statistics and digest of a tensor."""
        content = digest(raw)
        known = self._known.get(content)
        if known is None:
            if len(self._known) >= self._REMEMBERED:
                self._known.clear()
            known = self._known[content] = describe(raw)
        return known, content


def warm_up() -> None:
    """Load or compile the loops now, rather than inside the first observed call."""
    for name, carrier in (
        ("float32", np.float32),
        ("bfloat16", np.uint16),
        ("float16", np.float16),
        ("uint8", np.uint8),
    ):
        describe(RawTensor(np.zeros(1, carrier), name))


def describe_tensor(tensor: torch.Tensor) -> Statistics:
    """Describe a tensor on its own device, in float64 where the device has it, with one transfer of a few numbers.

    For tensors already on the CPU this is `describe`. Subnormals are counted in float32 or wider, so a device that
    flushes them counts them as zero.
    """
    from align.dumpers.tensors import describe_on_device, to_raw

    return describe(to_raw(tensor)) if tensor.device.type == "cpu" else describe_on_device(tensor)


# floats of 16, 32 and 64 bits


def _describe_floats(flat: Array, name: str) -> Statistics:
    width = 64 if name == "float64" else 32
    if flat.dtype.itemsize * 8 == width:
        scan = _scan(flat, name, width)
    else:
        scan = _NOTHING
        for start in range(0, flat.size, _CHUNK):
            scan = _merge(scan, _scan(_decoded(flat[start : start + _CHUNK], name), name, width))
    return _finish(scan, width, flat.size, lambda: iter((flat,)))


def _scan(values: Array, name: str, width: int) -> Scan:
    """Scan flat float32 or float64 values against the limits of dtype `name`."""
    code = np.dtype(f"int{width}")
    half, tiny = _limits(name, width)
    return Scan(*scan_kernel(width)(values.view(code), values, half, tiny))


@cache
def _limits(name: str, width: int) -> tuple[Any, Any]:
    """Codes, as floats of `width` bits, of half the largest and of the smallest normal value of dtype `name`."""
    limits = dtype_of(name).format
    assert limits is not None
    pair = np.array([limits.largest / 2, limits.smallest_normal], f"float{width}").view(f"int{width}")
    return pair[0], pair[1]


def _decoded(codes: Array, name: str) -> Array:
    """Widen one chunk of 16-bit floats exactly, into this thread's scratch (valid until the next call)."""
    if not hasattr(_scratch, "codes"):
        _scratch.codes = np.empty(_CHUNK, np.int32)
    out: npt.NDArray[np.int32] = _scratch.codes[: codes.size]
    decode_kernel(name)(codes.view(np.uint16), out)
    return out.view(np.float32)


def _merge(left: Scan, right: Scan) -> Scan:
    """Join the scans of two parts (Chan, Golub, LeVeque 1979)."""
    if left.finite == 0 or right.finite == 0:
        moments = right[-4:] if left.finite == 0 else left[-4:]
    else:
        both = left.finite + right.finite
        step = right.mean - left.mean
        share = right.finite / both
        moments = (
            min(left.lowest, right.lowest),
            max(left.highest, right.highest),
            left.mean + step * share,
            left.squares + right.squares + step * step * left.finite * share,
        )
    return Scan(*(a + b for a, b in zip(left[:7], right[:7], strict=True)), *moments)  # type: ignore[call-arg]


def _finish(scan: Scan, width: int, count: int, parts: Callable[[], Iterator[Array]]) -> Statistics:
    """Turn a scan into statistics; `parts` yields the values again when their squares do not fit float64."""
    if scan.finite == 0:
        return _without_values(count, scan)
    low, high = _uncoded(scan.lowest, width), _uncoded(scan.highest, width)
    absmax = max(abs(low), abs(high))
    mean, squares, exponent = scan.mean, scan.squares, 0
    if width == 64 and absmax > 0 and not _SQUARES[0] < absmax < _SQUARES[1]:
        exponent = math.frexp(absmax)[1]
        mean, squares = _scaled_moments(parts(), exponent)
    std = math.sqrt(squares / scan.finite)
    l2 = math.sqrt(squares + scan.finite * mean * mean)
    counts = {name: int(getattr(scan, name)) for name in _COUNTED}
    return Statistics(
        count, low, high, _ldexp(mean, exponent), _ldexp(std, exponent), _ldexp(l2, exponent), absmax, **counts
    )


_COUNTED = ("nan", "posinf", "neginf", "zero", "subnormal", "near_limit")


def _without_values(count: int, scan: Scan = _NOTHING) -> Statistics:
    """Statistics of a tensor that has no finite value."""
    return Statistics(count, *(6 * (math.nan,)), **{name: int(getattr(scan, name)) for name in _COUNTED})


def _uncoded(order: int, width: int) -> float:
    """Value of an order-preserving code; the two zeros are told as 0."""
    order = int(order)
    bits = order if order >= 0 else (order ^ (2 ** (width - 1) - 1))
    return float(np.array(bits, f"int{width}").view(f"float{width}")) + 0.0


def _scaled_moments(parts: Iterator[Array], exponent: int) -> tuple[float, float]:
    """Mean and squared deviations of the finite values times 2^-exponent, for magnitudes whose squares do not fit."""
    total = _NOTHING
    for part in parts:
        for start in range(0, part.size, _CHUNK):
            with np.errstate(all="ignore"):
                values = np.ldexp(part[start : start + _CHUNK], -exponent)
            total = _merge(total, _scan(values, "float64", 64))
    return total.mean, total.squares


def _ldexp(value: float, exponent: int) -> float:
    try:
        return math.ldexp(value, exponent)
    except OverflowError:  # the norm itself exceeds float64
        return math.inf


# complex, by magnitude


def _describe_complex(flat: Array, name: str) -> Statistics:
    scan = _NOTHING
    for part in _magnitudes(flat, name):
        scan = _merge(scan, _scan(part, name, 64))
    count = flat.size // 2 if name == "complex32" else flat.size
    return _finish(scan, 64, count, lambda: _magnitudes(flat, name))


def _magnitudes(flat: Array, name: str) -> Iterator[Array]:
    """Yield magnitudes in float64; finite parts keep a finite magnitude, one infinite part makes it infinite."""
    pairs = flat.reshape(-1, 2) if name == "complex32" else flat
    for start in range(0, len(pairs), _CHUNK):
        part = widen(RawTensor(pairs[start : start + _CHUNK], name))
        with np.errstate(all="ignore"):  # signalling NaN among the parts
            real, imag = part.real.astype(np.float64), part.imag.astype(np.float64)
            size = np.hypot(real, imag) if name == "complex128" else np.sqrt(real * real + imag * imag)
        if not np.isfinite(size).all():
            infinite = np.isinf(real) | np.isinf(imag)
            size[np.isinf(size)] = np.finfo(np.float64).max
            size[infinite] = np.inf
        yield size


# integers, and everything of 8 bits


def _describe_integers(flat: Array) -> Statistics:
    low, high, zero, scan = math.inf, -math.inf, 0, _NOTHING
    for start in range(0, flat.size, _CHUNK):
        part = flat[start : start + _CHUNK]
        low, high = min(low, int(part.min())), max(high, int(part.max()))
        zero += part.size - int(np.count_nonzero(part))
        scan = _merge(scan, _scan(part.astype(np.float64), "float64", 64))
    if flat.size == 0:
        return _without_values(0)
    std = math.sqrt(scan.squares / flat.size)
    l2 = math.sqrt(scan.squares + flat.size * scan.mean**2)
    return Statistics(
        flat.size, float(low), float(high), scan.mean, std, l2, float(max(abs(low), abs(high))), zero=zero
    )


def _describe_codes(flat: Array, name: str) -> Statistics:
    """Describe 8-bit values from the count of each of their 256 codes; exact up to the last rounding."""
    counts = _code_counts(flat, name)
    values = _code_values(name)
    finite = np.isfinite(values)
    present = finite & (counts > 0)
    nan, up, down = (int(counts[mask].sum()) for mask in (np.isnan(values), values == np.inf, values == -np.inf))
    scan = _NOTHING._replace(nan=nan, posinf=up, neginf=down)
    if not present.any():
        return _without_values(flat.size, scan)
    kept, weight = values[present], counts[present].astype(np.float64)
    mean = math.fsum(weight * kept) / float(weight.sum())
    std = math.sqrt(math.fsum(weight * (kept - mean) ** 2) / float(weight.sum()))
    l2 = math.sqrt(math.fsum(weight * kept * kept))
    zero = int(counts[values == 0].sum())
    subnormal, near = _code_limits(name, values, counts)
    low, high = float(kept.min()) + 0.0, float(kept.max()) + 0.0
    return Statistics(
        flat.size, low, high, mean, std, l2, max(abs(low), abs(high)), nan, up, down, zero, subnormal, near
    )


def _code_counts(flat: Array, name: str) -> npt.NDArray[np.int64]:
    if name == "bool":
        counts = np.zeros(256, np.int64)
        counts[1] = np.count_nonzero(flat)
        counts[0] = flat.size - counts[1]
        return counts
    result: npt.NDArray[np.int64] = histogram_kernel()(flat.view(np.uint8)).sum(axis=0)
    return result


def _code_values(name: str) -> npt.NDArray[np.float64]:
    if name.startswith("float8"):
        return float8_table(name).astype(np.float64)
    codes = np.arange(256, dtype=np.uint8)
    return (codes.view(np.int8) if name == "int8" else codes).astype(np.float64)


def _code_limits(name: str, values: npt.NDArray[np.float64], counts: npt.NDArray[np.int64]) -> tuple[int, int]:
    """Counts of subnormal values and of those above half the largest; e8m0 has exponents only, so none is subnormal."""
    limits = dtype_of(name).format
    if limits is None:
        return 0, 0
    size = np.abs(np.where(np.isfinite(values), values, 0.0))
    tiny = 0.0 if limits.mantissa_bits == 0 else limits.smallest_normal
    return int(counts[(size > 0) & (size < tiny)].sum()), int(counts[size > size.max() / 2].sum())
