"""Limits on a node's error as `[gate.limits]` states them: a figure, or a table of figures; an infinity is no limit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class ErrorLimits:
    """What a node's candidate may be off by: relative L2, largest absolute error, and error over the baseline's."""

    rel_l2: float = math.inf
    max_abs: float = math.inf
    excess: float = math.inf

    @property
    def stated(self) -> Iterator[tuple[str, float]]:
        """(metric, limit) of the limits there are."""
        for field in fields(self):
            limit = getattr(self, field.name)
            if limit < math.inf:
                yield field.name, limit


METRICS = tuple(field.name for field in fields(ErrorLimits))


def read_limits(value: Any) -> dict[str, ErrorLimits]:
    """Read `{"unet.*": 0.02, "head.*": {"max_abs": 0.1}}`; a figure alone limits relative L2. Raises ValueError."""
    if not isinstance(value, Mapping):
        raise ValueError('write a table of node globs, such as "unet.*" = 0.02')
    return {str(glob): _read_one(str(glob), limits) for glob, limits in value.items()}


def _read_one(glob: str, value: Any) -> ErrorLimits:
    if isinstance(value, ErrorLimits):
        return value
    table = value if isinstance(value, Mapping) else {"rel_l2": value}
    for metric, limit in table.items():
        if metric not in METRICS:
            raise ValueError(f"{glob!r} limits {metric!r}, which is not measured; there are {', '.join(METRICS)}")
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit >= 0:
            raise ValueError(f"{glob!r}: {metric} = {limit!r} is not a limit; write a number that is not negative")
    return ErrorLimits(**{str(metric): float(limit) for metric, limit in table.items()})


def parse_limit(text: str) -> tuple[str, dict[str, float]]:
    """Read `--limit GLOB=0.02` or `GLOB:max_abs=0.1`. Raises ValueError with the accepted form."""
    place, _, figure = text.rpartition("=")
    glob, _, metric = place.rpartition(":")
    if metric not in METRICS:
        glob, metric = place, "rel_l2"
    try:
        limit = float(figure)
    except ValueError:
        limit = math.nan
    if not glob or not limit >= 0:
        raise ValueError(f"not a limit: {text!r}")
    return glob, {metric: limit}
