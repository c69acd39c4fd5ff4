"""Format every figure that is shown to a person, in one place: three significant digits, plain ASCII, no locale.

NaN means "not known" throughout the reports and prints as `-`; an infinity prints as `inf`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

UNKNOWN = "-"
_DECIMAL_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def figure(value: float) -> str:
    """Three significant digits: `0.0123`, `12.3`, `1.23e-05`; a plain zero stays `0`."""
    if math.isnan(value):
        return UNKNOWN
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if value == 0.0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        return _fixed(value)
    return f"{value:.2e}"


def _fixed(value: float) -> str:
    # The exponent is taken after rounding: 9.996 has three digits as 10.0, not as 10.00.
    exponent = int(f"{abs(value):.2e}".partition("e")[2])
    return f"{value:.{max(0, 2 - exponent)}f}"


def times(value: float) -> str:
    """A factor: `1.30x`, `812x`, `1.2e+06x`."""
    if not math.isfinite(value):
        return figure(value)
    return f"{value:.1e}x" if abs(value) >= 1e5 else f"{figure(value)}x"


def percent(share: float) -> str:
    """A share of one as per cent: `97.3 %`, `100 %`; what is not everything never rounds to `100 %`."""
    if math.isnan(share):
        return UNKNOWN
    text = f"{share * 100:.3g}"
    if share < 1.0 and float(text) >= 100.0:
        return "> 99.9 %"
    return f"{text} %"


def seconds(value: float) -> str:
    """A duration in the unit that suits it: `1.23 s`, `318 ms`, `4.10 us`; minutes from 100 s on."""
    if not math.isfinite(value):
        return figure(value)
    if abs(value) >= 100.0:
        return f"{int(value // 60)} min {int(value % 60)} s" if value > 0 else f"{value:.0f} s"
    for size, unit in _TIME_UNITS:
        if abs(value) >= size * 0.9995:
            return f"{figure(value / size)} {unit}"
    return "0 s" if value == 0.0 else f"{figure(value / 1e-9)} ns"


def nbytes(value: float) -> str:
    """A size in decimal units: `512 B`, `12.3 MB`."""
    if not math.isfinite(value):
        return figure(value)
    index = 0
    while abs(value) >= 999.5 and index < len(_DECIMAL_UNITS) - 1:
        value, index = value / 1000.0, index + 1
    return f"{value:.0f} B" if index == 0 else f"{figure(value)} {_DECIMAL_UNITS[index]}"


def count(value: int) -> str:
    """A whole number with thin groups of three: `12,345`."""
    return f"{value:,}"


def plural(value: int, noun: str) -> str:
    """`1 node`, `2 nodes`, `0 nodes`."""
    return f"{count(value)} {noun}" + ("" if value == 1 else "s")


def interval(low: float, high: float) -> str:
    """Both ends of an interval: `1.27-1.33`."""
    return f"{figure(low)}-{figure(high)}"


def shape(extents: Sequence[int]) -> str:
    """A tensor's shape: `1x320x64x64`, `scalar`."""
    return "x".join(map(str, extents)) if extents else "scalar"
