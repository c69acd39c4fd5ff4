"""Make the specimen the hypotheses look at: widen exactly, thin huge tensors evenly, know the spacing of each dtype."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from align.compare.signature_model import Positions, Specimen, Values
from align.dumpers.dtypes import FloatFormat, RawTensor, dtype_of, is_floating, widen

LIMIT = 1 << 20
"""Elements looked at. A larger tensor is thinned to evenly spaced slices of its longest axes but the last."""

NARROW: dict[str, FloatFormat] = {
    "bfloat16": FloatFormat(16, 8, 7, 127),
    "float16": FloatFormat(16, 5, 10, 15),
    "tf32": FloatFormat(19, 8, 10, 127),
    "hf32": FloatFormat(20, 8, 11, 127),  # Ascend: float32 cut to 11 mantissa bits
    "float32": FloatFormat(32, 8, 23, 127),
}
"""Formats a value may really have been computed in, the coarsest first."""


def prepare(
    candidate: RawTensor, reference: RawTensor, baseline: RawTensor | None, inputs: tuple[RawTensor, ...]
) -> Specimen:
    """Thin, widen and subtract. Candidate and reference have the same shape."""
    positions = thin(candidate.shape)
    wide, truth = thinned(candidate, positions), thinned(reference, positions)
    finite = np.isfinite(wide) & np.isfinite(truth)
    error = np.subtract(wide, truth, out=np.zeros(finite.shape), where=finite)
    fmt = dtype_of(candidate.dtype).format if is_floating(candidate.dtype) else None
    has_baseline = baseline is not None and baseline.shape == candidate.shape
    return Specimen(
        candidate=wide,
        reference=truth,
        error=error,
        finite=finite,
        squared=float(np.vdot(error, error)),
        unit=spacing(truth, fmt) if fmt else np.ones(finite.shape),
        format=fmt,
        dtype=candidate.dtype,
        positions=_whole_positions(positions, finite.shape),
        baseline=thinned(baseline, positions) if baseline is not None and has_baseline else None,
        inputs=inputs,
        is_thinned=finite.size < math.prod(candidate.shape),
    )


def thinned(raw: RawTensor, positions: Positions) -> Values:
    """The kept elements as float64; complex numbers get a last axis (real, imaginary), a scalar the shape (1,)."""
    bits = raw.bits
    for axis, index in enumerate(positions):
        if index.size < bits.shape[axis]:
            bits = bits.take(index, axis)
    wide = widen(RawTensor(bits, raw.dtype))
    if np.iscomplexobj(wide):
        wide = np.stack((wide.real, wide.imag), axis=-1)
    return np.atleast_1d(wide.astype(np.float64))


def _whole_positions(positions: Positions, shape: tuple[int, ...]) -> Positions:
    """Positions for the axes that a scalar or a complex tensor gained."""
    return positions + tuple(np.arange(extent) for extent in shape[len(positions) :])


def thin(shape: tuple[int, ...]) -> Positions:
    """Indices to keep along each axis so that at most LIMIT elements stay; the last axis goes last."""
    kept = list(shape)
    while math.prod(kept) > LIMIT:
        outer = max(range(len(kept) - 1), key=kept.__getitem__, default=None)
        axis = outer if outer is not None and kept[outer] > 1 else len(kept) - 1
        rest = math.prod(kept) // kept[axis]
        half = (kept[axis] + 1) // 2
        kept[axis] = max(1, LIMIT // rest) if rest * half <= LIMIT else half
    return tuple(np.linspace(0, extent - 1, count).astype(np.intp) for extent, count in zip(shape, kept, strict=True))


def spacing(values: Values, fmt: FloatFormat) -> Values:
    """Gap between neighbouring numbers of `fmt` at each value's magnitude; the smallest normal's below it."""
    floor = fmt.smallest_normal
    magnitude = np.clip(np.abs(np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)), floor, None)
    _, exponent = np.frexp(magnitude)
    return np.asarray(np.ldexp(1.0, exponent - 1 - fmt.mantissa_bits), dtype=np.float64)


def round_to(values: Values, fmt: FloatFormat) -> Values:
    """Nearest number of `fmt`, ties to even, without regard to overflow."""
    unit = spacing(values, fmt)
    return np.rint(values / unit) * unit


def one_rounding(specimen: Specimen, fmt: FloatFormat) -> float:
    """Expected squared error of one rounding of every reference value to `fmt`: the sum of spacing^2 / 12."""
    unit = spacing(specimen.reference, fmt)[specimen.finite]
    return float(np.vdot(unit, unit)) / 12.0


def sample(specimen: Specimen, count: int = 1 << 16) -> npt.NDArray[np.intp]:
    """Flat indices of at most `count` finite positions, evenly spaced."""
    finite = np.flatnonzero(specimen.finite)
    return finite[:: max(1, math.ceil(finite.size / count))]
