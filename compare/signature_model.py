"""What an error looks like, in a word and a sentence: SignatureKind, Signature, and the carrier hypotheses look at."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from align.dumpers.dtypes import FloatFormat, RawTensor

Values = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Positions = tuple[npt.NDArray[np.intp], ...]


class SignatureKind(StrEnum):
    """Kinds of error, the most specific first: of two that explain an error equally well, the earlier one is named."""

    EQUAL = "equal"
    MASK_POLARITY = "mask-polarity"  # kept and dropped positions are swapped
    MASK_IGNORED = "mask-ignored"
    NONFINITE = "nonfinite"  # NaN or Inf on one side only
    STALE = "stale"  # equals another node, or the same node at another step
    ZEROED = "zeroed"
    CLIPPED = "clipped"
    SIGN = "sign"
    FACTOR = "factor"
    OFFSET = "offset"
    GELU_FORM = "gelu-form"
    TRANSPOSED = "transposed"
    INTERLEAVED = "interleaved"  # pairs laid out (0, 1)(2, 3)... against (0, d/2)(1, d/2 + 1)...
    SHIFTED = "shifted"
    PERMUTED = "permuted"
    AVERAGED = "averaged"  # constant along an axis where the reference varies
    TRUNCATED = "truncated"  # rounded in one direction instead of to nearest
    COARSE = "coarse"  # holds values of a narrower dtype than it is stored in
    SLICE_FACTOR = "slice-factor"  # a factor per index of one axis
    SLICE_OFFSET = "slice-offset"
    CONFINED = "confined"
    GROWING = "growing"  # along an axis
    ROUNDING = "rounding"
    NONE_FITS = "none-fits"


@dataclass(frozen=True, slots=True)
class Signature:
    """One hypothesis that fits: `evidence` says it in a sentence with figures.

    `explained` is the share of the squared error that goes away, or lies where the hypothesis puts it; 0 to 1.
    `parameters` are its figures by name, for machines.
    """

    kind: SignatureKind
    evidence: str
    explained: float
    parameters: tuple[tuple[str, float], ...] = ()

    def parameter(self, name: str) -> float:
        """The figure called `name`. Raises KeyError when this kind has none of that name."""
        return dict(self.parameters)[name]


class Specimen(NamedTuple):
    """The pair under test, widened to float64 and thinned to a bounded size. A carrier, not a value.

    `error` is candidate - reference where both are finite and 0 elsewhere; `squared` its sum of squares.
    `format` is the candidate's floating format (None for integers); `unit` the spacing of that format's numbers
    around each reference value. `positions` are the original indices along each axis after thinning.
    """

    candidate: Values
    reference: Values
    error: Values
    finite: Flags
    squared: float
    unit: Values
    format: FloatFormat | None
    dtype: str
    positions: Positions
    baseline: Values | None = None
    inputs: tuple[RawTensor, ...] = ()
    is_thinned: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape after thinning."""
        return self.candidate.shape

    def explained_by(self, prediction: Values) -> float:
        """Share of the squared error that is gone if the candidate is held against `prediction` instead."""
        if self.squared == 0.0:
            return 0.0
        left = np.where(self.finite, self.candidate - prediction, 0.0)
        rest = float(np.vdot(left, left))
        return 0.0 if not np.isfinite(rest) else max(0.0, 1.0 - rest / self.squared)

    def is_bulk_explained(self, prediction: Values) -> bool:
        """Whether the typical error shrinks too, not only the few largest that rule the squares."""
        moved = np.flatnonzero(self.finite & (self.error != 0.0))
        if moved.size == 0:
            return False
        moved = moved[:: max(1, moved.size >> 16)]
        left = np.abs(self.candidate.ravel()[moved] - np.broadcast_to(prediction, self.shape).ravel()[moved])
        return bool(np.median(left) <= 0.7 * np.median(np.abs(self.error.ravel()[moved])))

    def share_at(self, where: Flags) -> float:
        """Share of the squared error that lies at `where`."""
        if self.squared == 0.0:
            return 0.0
        inside = self.error[where]
        return float(np.vdot(inside, inside)) / self.squared
