"""Hypotheses on how values were rounded: a narrower dtype than the stored one, one direction, ordinary rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from align.compare.signature_model import Flags, Signature, SignatureKind, Specimen, Values
from align.compare.signature_specimen import NARROW, one_rounding, round_to, sample, spacing
from align.dumpers.dtypes import FloatFormat

_MOST_TERMS = 1024  # of roundings in the stored dtype that we still call ordinary
_MOST_NARROW_TERMS = 64  # of a narrower dtype than the stored one
_ENOUGH = 32  # elements below which the direction of rounding proves nothing


def find_coarse(specimen: Specimen) -> Signature | None:
    """The candidate holds only values of a narrower format than its dtype, the reference does not."""
    found = narrow_format(specimen)
    if found is None:
        return None
    name, fmt = found
    unit = spacing(specimen.reference, fmt)
    explained = specimen.share_at(np.abs(specimen.error) <= 8.0 * unit)
    zeros = (specimen.format.mantissa_bits if specimen.format else fmt.mantissa_bits) - fmt.mantissa_bits
    evidence = f"every value is a {name} number, stored as {specimen.dtype}: the low {zeros} mantissa bits are zero"
    figures = (("mantissa_bits", float(fmt.mantissa_bits)), ("zero_bits", float(zeros)))
    return Signature(SignatureKind.COARSE, evidence, explained, figures)


def narrow_format(specimen: Specimen) -> tuple[str, FloatFormat] | None:
    """The coarsest format that holds (nearly) every candidate value but not the reference's."""
    index = sample(specimen)
    candidate, reference = specimen.candidate.ravel()[index], specimen.reference.ravel()[index]
    index = (candidate != 0.0) & (reference != 0.0)
    candidate, reference = candidate[index], reference[index]
    if specimen.format is None or candidate.size < _ENOUGH:
        return None
    for name, fmt in NARROW.items():
        if fmt.mantissa_bits >= specimen.format.mantissa_bits:
            continue
        if np.mean(_holds(candidate, fmt)) >= 0.999 and np.mean(_holds(reference, fmt)) < 0.5:
            return name, fmt
    return None


def _holds(values: Values, fmt: FloatFormat) -> Flags:
    return np.asarray((round_to(values, fmt) == values) & (np.abs(values) <= fmt.largest))


def find_truncated(specimen: Specimen) -> Iterator[Signature]:
    """Errors of up to one spacing, all to one side: rounded toward zero, away from it, down or up."""
    if specimen.format is None:
        return
    name, fmt = narrow_format(specimen) or (specimen.dtype, specimen.format)
    unit = spacing(specimen.reference, fmt)
    moved = specimen.finite & (specimen.error != 0.0)
    steps = np.divide(specimen.error, unit, out=np.zeros_like(unit), where=moved)
    count = int(moved.sum())
    if count < _ENOUGH or np.abs(steps).max(initial=0.0) < 0.6:
        return
    inward = steps * np.sign(specimen.reference)
    for mode, way in (("toward zero", -inward), ("away from zero", inward), ("down", -steps), ("up", steps)):
        is_one_way = moved & (way > 0.0) & (way <= 1.0 + 1e-3)
        mean = float(way[moved].mean())
        if is_one_way.sum() >= 0.97 * count and mean >= 0.25:
            share, signed = is_one_way.sum() / count, -mean if mode in ("toward zero", "down") else mean
            evidence = f"{share:.1%} of the errors go {mode}, {mean:.2f} spacings of {name} on average (nearest: 0)"
            explained = specimen.share_at(is_one_way)
            yield Signature(SignatureKind.TRUNCATED, evidence, explained, (("mean_spacings", signed),))
            return


def find_rounding(specimen: Specimen) -> Iterator[Signature]:
    """Error of the size that rounding at n terms makes, without bias, in the stored dtype or a narrower one."""
    count = int(specimen.finite.sum())
    if specimen.format is None or count == 0 or _is_biased(specimen, count):
        return
    if specimen.baseline is not None:
        gap = np.where(specimen.finite & np.isfinite(specimen.baseline), specimen.baseline - specimen.reference, 0.0)
        ordinary = float(np.vdot(gap, gap))
        if specimen.squared <= 4.0 * ordinary:
            times = math.sqrt(specimen.squared / ordinary)
            evidence = f"the error is {times:.2f} times the unfused run's own"
            yield Signature(SignatureKind.ROUNDING, evidence, 1.0, (("times_baseline", times),))
            return
    yield from _sized_rounding(specimen)


def _sized_rounding(specimen: Specimen) -> Iterator[Signature]:
    assert specimen.format is not None
    stored = specimen.format
    choices = [(specimen.dtype, stored, _MOST_TERMS)]
    choices += [
        (name, fmt, _MOST_NARROW_TERMS)
        for name, fmt in reversed(NARROW.items())
        if fmt.mantissa_bits < stored.mantissa_bits
    ]
    for name, fmt, most in choices:
        terms = specimen.squared / max(one_rounding(specimen, fmt), 5e-324)
        if terms > most:
            continue
        explained = _share_of_bulk(specimen, spacing(specimen.reference, fmt), terms)
        where = "" if fmt is stored else f" (stored as {specimen.dtype})"
        evidence = f"unbiased error of the size of {terms:.3g} roundings in {name}{where}"
        figures = (("terms", terms), ("mantissa_bits", float(fmt.mantissa_bits)))
        yield Signature(SignatureKind.ROUNDING, evidence, explained, figures)
        return


def _share_of_bulk(specimen: Specimen, unit: Values, terms: float) -> float:
    """Share of the squared error within six standard deviations, of each element's own or of the whole tensor's."""
    whole = math.sqrt(float(np.mean(unit[specimen.finite] ** 2)))
    bound = 6.0 * math.sqrt(max(terms, 1.0) / 12.0) * np.maximum(unit, whole)
    return specimen.share_at(np.abs(specimen.error) <= bound)


def _is_biased(specimen: Specimen, count: int) -> bool:
    """Whether the mean error, or its correlation with the reference, is beyond chance and matters."""
    error, reference = specimen.error, np.where(specimen.finite, specimen.reference, 0.0)
    mean_share = float(error.sum()) ** 2 / max(count * specimen.squared, 5e-324)
    energy = float(np.vdot(reference, reference))
    factor_share = float(np.vdot(error, reference)) ** 2 / max(energy * specimen.squared, 5e-324)
    # Where few elements rule the squares, a correlation is chance.
    effective = specimen.squared**2 / max(float(np.vdot(error * error, error * error)), 5e-324)
    return max(mean_share, factor_share) > max(0.5, 25.0 / max(effective, 1.0))
