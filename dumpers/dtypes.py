"""The one table of dtypes: names, sizes, limits, and the exact way from stored bits to values. Needs numpy only.

Bits are carried as numpy arrays: numpy's own types as themselves, bfloat16 as uint16, float8 as uint8, complex32
(two halves) as float16 with a last axis of 2. Widening is exact: every stored value has a float32 of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from align.dumpers.errors import UsageError

Array = npt.NDArray[Any]


class RawTensor(NamedTuple):
    """Bits of a tensor and the dtype they are bits of. A carrier between store and measures, not a value."""

    bits: Array
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape."""
        return self.bits.shape[:-1] if self.dtype == "complex32" else self.bits.shape


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """A binary floating format: `bias` of the exponent, and how the top exponent is used."""

    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    has_infinity: bool = True
    has_negative_zero: bool = True

    @property
    def epsilon(self) -> float:
        """Gap between 1 and the next value."""
        return 2.0**-self.mantissa_bits

    @property
    def largest(self) -> float:
        """Largest finite value."""
        if not self.mantissa_bits:  # a bare power of two: the all-ones code is NaN
            return float(2.0 ** ((1 << self.exponent_bits) - 2 - self.bias))
        top = (1 << self.exponent_bits) - (2 if self.has_infinity else 1)
        fraction = 2.0 - self.epsilon
        if not self.has_infinity and self.has_negative_zero:  # the all-ones code is NaN
            fraction -= self.epsilon
        return float(2.0 ** (top - self.bias) * fraction)

    @property
    def smallest_normal(self) -> float:
        """Smallest positive normal value."""
        return float(2.0 ** (1 - self.bias))


@dataclass(frozen=True, slots=True)
class Dtype:
    """One dtype: its torch name without `torch.`, the numpy type its bits are carried in, its float format if any."""

    name: str
    carrier: str
    format: FloatFormat | None = None
    is_complex: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return np.dtype(self.carrier).itemsize * (2 if self.name == "complex32" else 1)


_HALF = FloatFormat(16, 5, 10, 15)
_BFLOAT16 = FloatFormat(16, 8, 7, 127)
_SINGLE = FloatFormat(32, 8, 23, 127)
_DOUBLE = FloatFormat(64, 11, 52, 1023)

DTYPES: dict[str, Dtype] = {
    d.name: d
    for d in (
        Dtype("float64", "float64", _DOUBLE),
        Dtype("float32", "float32", _SINGLE),
        Dtype("float16", "float16", _HALF),
        Dtype("bfloat16", "uint16", _BFLOAT16),
        Dtype("float8_e4m3fn", "uint8", FloatFormat(8, 4, 3, 7, has_infinity=False)),
        Dtype("float8_e5m2", "uint8", FloatFormat(8, 5, 2, 15)),
        Dtype("float8_e4m3fnuz", "uint8", FloatFormat(8, 4, 3, 8, has_infinity=False, has_negative_zero=False)),
        Dtype("float8_e5m2fnuz", "uint8", FloatFormat(8, 5, 2, 16, has_infinity=False, has_negative_zero=False)),
        Dtype("float8_e8m0fnu", "uint8", FloatFormat(8, 8, 0, 127, has_infinity=False)),
        Dtype("complex32", "float16", _HALF, is_complex=True),
        Dtype("complex64", "complex64", _SINGLE, is_complex=True),
        Dtype("complex128", "complex128", _DOUBLE, is_complex=True),
        *(Dtype(name, name) for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")),
        Dtype("bool", "bool"),
    )
}


def dtype_of(name: str) -> Dtype:
    """The table's entry. Raises UsageError with the known names."""
    try:
        return DTYPES[name]
    except KeyError:
        raise UsageError(f"unknown dtype {name!r}", f"known dtypes: {', '.join(DTYPES)}") from None


def itemsize(name: str) -> int:
    """Bytes per element; 1 for dtypes outside the table (packed or opaque ones)."""
    return DTYPES[name].itemsize if name in DTYPES else 1


def is_floating(name: str) -> bool:
    """Whether values round: a real floating dtype."""
    dtype = DTYPES.get(name)
    return dtype is not None and dtype.format is not None and not dtype.is_complex


def widen(raw: RawTensor) -> Array:
    """Values as float32 (16- and 8-bit floats), float64, complex64/128, or the integers themselves; always exact."""
    name, bits = raw.dtype, raw.bits
    if name == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if name == "float16":
        return bits.astype(np.float32)
    if name.startswith("float8"):
        return float8_table(name)[bits]
    if name == "complex32":
        pairs = np.ascontiguousarray(bits.astype(np.float32))
        return pairs.view(np.complex64)[..., 0]
    return bits


@cache
def float8_table(name: str) -> npt.NDArray[np.float32]:
    """The 256 values of an 8-bit float format as float32, indexed by code (OCP 8-bit floats; `fnuz` as in MLIR)."""
    fmt = dtype_of(name).format
    assert fmt is not None
    table = np.array([_decode(code, name, fmt) for code in range(256)], dtype=np.float32)
    table.setflags(write=False)
    return table


def _decode(code: int, name: str, fmt: FloatFormat) -> float:
    if name == "float8_e8m0fnu":  # an unsigned power of two, 0xFF is NaN
        return float("nan") if code == 0xFF else float(2.0 ** (code - 127))
    sign = -1.0 if code & 0x80 else 1.0
    exponent = (code & 0x7F) >> fmt.mantissa_bits
    mantissa = code & ((1 << fmt.mantissa_bits) - 1)
    top = (1 << fmt.exponent_bits) - 1
    if not fmt.has_negative_zero and code == 0x80:
        return float("nan")
    if exponent == top and fmt.has_infinity:
        return float("nan") if mantissa else sign * float("inf")
    if exponent == top and fmt.has_negative_zero and mantissa == (1 << fmt.mantissa_bits) - 1:
        return float("nan")
    scale = 2.0 ** ((exponent or 1) - fmt.bias)
    return sign * scale * ((1.0 if exponent else 0.0) + mantissa * fmt.epsilon)
