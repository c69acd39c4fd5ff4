"""What the compiled loops read, write and compute with: tensors at addresses, 16-bit floats by their bits, exp and Phi.

A tensor comes as an address and a tag, a number whose type tells the tensor's: float32 as itself, uint16 for bfloat16,
int16 for float16 (numba has neither type on a processor). Values are widened exactly, worked with in float32 and
rounded once, to nearest even, by integer steps; NaN stays NaN. Everything here turns into vector instructions, which
calls of the C library's expf and erff would prevent (numba has no vector library of its own).
"""

# numba's decorators carry no types, or in its newer releases types that know no dictionary of options and no intrinsic.
# mypy: disable-error-code="untyped-decorator, attr-defined, arg-type, call-arg"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic, overload

from align.dumpers.dtypes import Array

PLAIN: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy", "fastmath": {"contract"}}
SUMS: dict[str, Any] = PLAIN | {"fastmath": {"contract", "reassoc", "nsz"}}


@intrinsic
def _pointer(typing: Any, address: Any) -> Any:
    """The address as a pointer."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), build


def at(address: int, place: int, count: int, tag: Any) -> Any:
    """`count` elements of the tensor at `address`, from element `place` on."""
    raise NotImplementedError


@overload(at, jit_options=PLAIN)
def _at(address: Any, place: Any, count: Any, tag: Any) -> Callable[..., Any]:
    def float32(address: Any, place: Any, count: Any, tag: Any) -> Any:
        return carray(_pointer(address + 4 * place), (count,), np.float32)

    def float16(address: Any, place: Any, count: Any, tag: Any) -> Any:
        return carray(_pointer(address + 2 * place), (count,), np.int16)

    def bfloat16(address: Any, place: Any, count: Any, tag: Any) -> Any:
        return carray(_pointer(address + 2 * place), (count,), np.uint16)

    return _of_kind(tag, float32, float16, bfloat16)


def _of_kind(kind: Any, *forms: Callable[..., Any]) -> Callable[..., Any]:
    """The form for numba's type of a tag or element: float32, int16 (float16) or uint16 (bfloat16)."""
    return forms[0] if isinstance(kind, types.Float) else forms[1 if kind.signed else 2]


# -- 16-bit floats -----------------------------------------------------------------------------------------------------


@njit(**PLAIN)
def _bits(value: Any) -> Any:
    return np.float32(value).view(np.uint32)


@njit(**PLAIN)
def _float(bits: Any) -> Any:
    return np.uint32(bits).view(np.float32)


@njit(**PLAIN)
def _widen_bfloat16(bits: Any) -> Any:
    return _float(np.uint32(bits) << np.uint32(16))


@njit(**PLAIN)
def _round_bfloat16(value: Any) -> Any:
    bits = _bits(value)
    last = np.uint32((bits >> np.uint32(16)) & np.uint32(1))
    rounded = np.uint32(np.uint32(bits + np.uint32(0x7FFF) + last) >> np.uint32(16))
    quiet = np.uint32(np.uint32(bits >> np.uint32(16)) | np.uint32(0x40))
    is_nan = np.uint32(bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.uint16(quiet if is_nan else rounded)


@njit(**PLAIN)
def _widen_float16(signed_bits: Any) -> Any:
    bits = np.uint32(np.uint16(signed_bits))
    size = np.uint32(bits & np.uint32(0x7FFF))
    normal = np.uint32(np.uint32(size << np.uint32(13)) + np.uint32(112 << 23))
    special = np.uint32(np.uint32(size << np.uint32(13)) | np.uint32(0x7F800000))
    small = _bits(np.float32(np.int32(size)) * np.float32(2.0**-24))
    wide = small if size < np.uint32(0x400) else (normal if size < np.uint32(0x7C00) else special)
    return _float(wide | np.uint32(np.uint32(bits & np.uint32(0x8000)) << np.uint32(16)))


@njit(**PLAIN)
def _round_float16(value: Any) -> Any:
    bits = _bits(value)
    size = np.uint32(bits & np.uint32(0x7FFFFFFF))
    last = np.uint32((size >> np.uint32(13)) & np.uint32(1))
    normal = np.uint32(np.uint32(size + np.uint32(0xFFF) + last - np.uint32(112 << 23)) >> np.uint32(13))
    # 0.5 has the last place of float16's subnormals: adding it rounds to them.
    small = np.uint32(_bits(_float(size) + np.float32(0.5)) - np.uint32(0x3F000000))
    large = np.uint32(0x7C00) if size <= np.uint32(0x7F800000) else np.uint32(0x7E00)
    rounded = small if size < np.uint32(113 << 23) else (normal if size < np.uint32(0x477FF000) else large)
    return np.int16(np.uint16(rounded | np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(0x8000))))


def load(values: Array, index: int) -> Any:
    """An element as float32, exactly."""
    raise NotImplementedError


@overload(load, jit_options=PLAIN)
def _load(values: Any, index: Any) -> Callable[..., Any]:
    def float32(values: Any, index: Any) -> Any:
        return values[index]

    def float16(values: Any, index: Any) -> Any:
        return _widen_float16(values[index])

    def bfloat16(values: Any, index: Any) -> Any:
        return _widen_bfloat16(values[index])

    return _of_kind(values.dtype, float32, float16, bfloat16)


def store(values: Array, index: int, value: Any) -> None:
    """Round a float32 to the element's type: the only rounding of a fused kernel."""
    raise NotImplementedError


@overload(store, jit_options=PLAIN)
def _store(values: Any, index: Any, value: Any) -> Callable[..., None]:
    def float32(values: Any, index: Any, value: Any) -> None:
        values[index] = value

    def float16(values: Any, index: Any, value: Any) -> None:
        values[index] = _round_float16(value)

    def bfloat16(values: Any, index: Any, value: Any) -> None:
        values[index] = _round_bfloat16(value)

    return _of_kind(values.dtype, float32, float16, bfloat16)


# -- functions ---------------------------------------------------------------------------------------------------------

_ONE, _HALF, _INFINITE = np.float32(1.0), np.float32(0.5), np.float32(np.inf)
_LOWEST, _HIGHEST = np.float32(-87.3), np.float32(88.7)  # beyond, 2^n is no normal float32
_MAGIC = np.float32(12582912.0)  # 1.5 * 2^23: what is added to it is rounded to a whole number, held in the low bits
_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693145751953125)  # ln 2 in so few bits that n times it is exact
_LN2_LOW = np.float32(1.42860682030941723e-6)  # the rest of it
_E0, _E1, _E2, _E3, _E4, _E5, _E6 = (
    np.float32(c)
    for c in (1.0, 1.0, 0.49999991059303284, 0.16666419804096222, 0.04166822507977486, 0.008374817669391632,
              0.0013836839934810996)
)  # fmt: skip


@njit(**PLAIN)
def exponential(x: Any) -> Any:
    """e^x in float32, relative error below 1.6e-7; 0 below -87.3, infinity above 88.7 and for NaN.

    x = n ln 2 + r with |r| <= ln 2 / 2 (Cody and Waite); e^r by a polynomial of relative error 2e-9 before rounding
    (least squares, reweighted towards minimax), to whose exponent n is added.
    """
    moved = x * _LOG2_E + _MAGIC
    n = moved - _MAGIC
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    p = _E0 + r * (_E1 + r * (_E2 + r * (_E3 + r * (_E4 + r * (_E5 + r * _E6)))))
    raised = _float(_bits(p) + np.uint32(_bits(moved) << np.uint32(23)))
    raised = raised if x > _LOWEST else np.float32(0.0)
    return raised if x < _HIGHEST else _INFINITE


@njit(**PLAIN)
def silu(x: Any) -> Any:
    """x / (1 + e^-x), relative error below 4e-7."""
    return x / (_ONE + exponential(-x))


_SPREAD, _ONE_BITS = np.float32(0.3), np.uint32(0x3F800000)
_P0, _P1, _P2, _P3, _P4, _P5, _P6, _P7, _P8, _P9, _P10 = (
    np.float32(c)
    for c in (0.1196826845407486, 0.11968205124139786, 0.10893642157316208, 0.08699049800634384, 0.060738835483789444,
              0.015509785152971745, 0.023564929142594337, -0.03294012323021889, -0.030212607234716415,
              0.03880830109119415, -0.010760792531073093)
)  # fmt: skip


@njit(**PLAIN)
def gelu(x: Any) -> Any:
    """x Phi(x), relative error below 6e-7 for x > -3 and 1e-5 wherever Phi is a normal float32.

    Phi(-|x|) = s P(s) e^(-x^2 / 2) with s = 1 / (1 + 0.3 |x|), a polynomial of relative error 3e-8 (least squares,
    reweighted towards minimax): unlike 1 + erf(x / sqrt 2) it keeps its digits where Phi is small.
    """
    bits = _bits(x)
    size = _float(bits & np.uint32(0x7FFFFFFF))
    s = _ONE / (_ONE + _SPREAD * size)
    p = _P5 + s * (_P6 + s * (_P7 + s * (_P8 + s * (_P9 + s * _P10))))
    p = _P0 + s * (_P1 + s * (_P2 + s * (_P3 + s * (_P4 + s * p))))
    tail = s * p * exponential(-_HALF * x * x)
    # tail if x < 0 else 1 - tail: LLVM makes branches of the plain words.
    is_positive = np.uint32((bits >> np.uint32(31)) - np.uint32(1))
    start = _float(_ONE_BITS & is_positive)
    turned = _float(_bits(tail) ^ np.uint32(is_positive & np.uint32(0x80000000)))
    return x * (start + turned)


_TWICE_ROOT = np.float32(1.5957691216057308)  # 2 sqrt(2 / pi)
_CUBE = np.float32(0.044715)


@njit(**PLAIN)
def gelu_tanh(x: Any) -> Any:
    """x / 2 (1 + tanh u) = x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3): the second form keeps its digits."""
    return x / (_ONE + exponential(-_TWICE_ROOT * (x + _CUBE * x * x * x)))
