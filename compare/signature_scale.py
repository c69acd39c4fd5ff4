"""Hypotheses of one figure for the whole tensor: a factor, a flipped sign, an offset, a limit that values stop at."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from align.compare.signature_model import Flags, Signature, SignatureKind, Specimen, Values

_FEW = 8  # fewer elements prove nothing
_LIMITS = {65504.0: "float16's largest", 448.0: "float8_e4m3fn's largest", 57344.0: "float8_e5m2's largest",
           240.0: "float8_e4m3fnuz's largest", 127.0: "int8's largest", -128.0: "int8's smallest",
           255.0: "uint8's largest", 32767.0: "int16's largest", 0.0: "a ReLU's"}  # fmt: skip
_USUAL_DEPTHS = (16, 32, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256, 320, 512, 576, 640, 768, 1024, 1280, 2048, 4096)
_NAMED_FACTORS = {
    2.0: "2", 0.5: "1/2", 4.0: "4", 0.25: "1/4", 3.0: "3", 8.0: "8", 0.125: "1/8", 10.0: "10", 0.1: "1/10",
    127.0: "127 (int8)", 1 / 127.0: "1/127 (int8)", 128.0: "128", 1 / 128.0: "1/128", 255.0: "255 (uint8)",
    1 / 255.0: "1/255 (uint8)", 448.0: "448 (float8)", 1 / 448.0: "1/448 (float8)", math.sqrt(2): "sqrt(2)",
    1 / math.sqrt(2): "1/sqrt(2)", math.log2(math.e): "log2(e)", math.log(2): "ln(2)", 1000.0: "1000", 0.001: "1/1000",
    0.18215: "0.18215 (VAE scaling)", 1 / 0.18215: "1/0.18215 (VAE scaling)", 0.13025: "0.13025 (VAE scaling)",
    1 / 0.13025: "1/0.13025 (VAE scaling)", 1 / 0.9: "1/0.9 (dropout 0.1)", 0.9: "0.9 (dropout 0.1)",
}  # fmt: skip


def find_factor(specimen: Specimen) -> Signature | None:
    """Candidate = factor x reference, by least squares; -1 is a flipped sign."""
    candidate, reference = (values[specimen.finite] for values in (specimen.candidate, specimen.reference))
    energy = float(np.vdot(reference, reference))
    if candidate.size < _FEW or energy == 0.0 or np.ptp(np.abs(reference)) == 0.0:
        return None
    factor = float(np.vdot(candidate, reference)) / energy
    explained = specimen.explained_by(factor * specimen.reference)
    if factor == 0.0 or not specimen.is_bulk_explained(factor * specimen.reference):
        return None
    rest = specimen.squared * (1.0 - explained)
    # A factor near 0 takes away any error of size |reference|: it must explain the candidate as well.
    explained = min(explained, 1.0 - rest / max(float(np.vdot(candidate, candidate)), 5e-324))
    doubt = 4.0 * math.sqrt(rest / energy / candidate.size) / abs(factor)
    figures = (("factor", factor), ("doubt", doubt))
    if abs(factor + 1.0) <= 1e-3 + doubt:
        return Signature(
            SignatureKind.SIGN, f"candidate = {factor:.5g} x reference: the sign is flipped", explained, figures
        )
    name = name_factor(
        factor, 1e-3 + doubt, tuple(extent for raw in specimen.inputs for extent in raw.shape) + specimen.shape
    )
    evidence = f"candidate = {factor:.6g} x reference" + (f", which is {name}" if name else "")
    return Signature(SignatureKind.FACTOR, evidence, explained, figures)


def name_factor(factor: float, tolerance: float, extents: tuple[int, ...]) -> str:
    """A recognisable name of a factor within a relative tolerance, the nearest one; empty if there is none."""
    names = dict(_NAMED_FACTORS)
    for depth in sorted({*_USUAL_DEPTHS, *(extent for extent in extents if extent > 4)}, reverse=True):
        names.update({math.sqrt(depth): f"sqrt({depth})", 1 / math.sqrt(depth): f"1/sqrt({depth})",
                      1.0 / depth: f"1/{depth}", float(depth): f"{depth}"})  # fmt: skip
    nearest = min(names, key=lambda known: abs(abs(factor) / known - 1.0))
    if abs(abs(factor) / nearest - 1.0) > tolerance:
        return ""
    return ("-" if factor < 0 else "") + names[nearest]


def find_offset(specimen: Specimen) -> Signature | None:
    """Candidate = reference + offset."""
    count = int(specimen.finite.sum())
    if count < _FEW:
        return None
    offset = float(specimen.error.sum()) / count
    explained = specimen.explained_by(specimen.reference + offset)
    if explained < 0.5 or not specimen.is_bulk_explained(specimen.reference + offset):
        return None
    return Signature(SignatureKind.OFFSET, f"candidate = reference {offset:+.6g}", explained, (("offset", offset),))


def find_slice_factors(specimen: Specimen) -> Iterator[Signature]:
    """A factor for every index of one axis (a missing per-channel scale)."""
    yield from _sliced(specimen, SignatureKind.SLICE_FACTOR)


def find_slice_offsets(specimen: Specimen) -> Iterator[Signature]:
    """An offset for every index of one axis (a missing bias)."""
    yield from _sliced(specimen, SignatureKind.SLICE_OFFSET)


def _sliced(specimen: Specimen, kind: SignatureKind) -> Iterator[Signature]:
    is_factor = kind is SignatureKind.SLICE_FACTOR
    for axis, extent in enumerate(specimen.shape):
        others = tuple(other for other in range(len(specimen.shape)) if other != axis)
        per_slice = specimen.error.size // max(extent, 1)
        if extent < 2 or per_slice < 4:
            continue
        reference = np.where(specimen.finite, specimen.reference, 0.0)
        weight = reference if is_factor else specimen.finite.astype(np.float64)
        below = (weight * weight).sum(others, keepdims=True)
        figure = np.divide(
            (specimen.error * weight).sum(others, keepdims=True), below, out=np.zeros(below.shape), where=below > 0
        )
        explained = specimen.explained_by(specimen.reference + figure * weight)
        if explained < 0.5 or not specimen.is_bulk_explained(specimen.reference + figure * weight):
            continue
        if is_factor:
            own = specimen.candidate[specimen.finite]
            explained = min(
                explained, 1.0 - specimen.squared * (1.0 - explained) / max(float(np.vdot(own, own)), 5e-324)
            )
        # One fitted figure a slice explains the share of one element in pure noise: take that away.
        count = _effective_count(specimen, others)
        explained = 1.0 - (1.0 - explained) * count / max(count - 1.0, 1e-9)
        touched = int((np.abs(figure) > 1e-3 * np.abs(figure).max()).sum())
        low, high = float(figure.min()) + is_factor, float(figure.max()) + is_factor
        word = "factor" if is_factor else "offset"
        evidence = (
            f"one {word} per index of axis {axis}, from {low:.4g} to {high:.4g}, {touched} of {extent} indices touched"
        )
        yield Signature(kind, evidence, explained, (("axis", axis), ("low", low), ("high", high), ("touched", touched)))


def _effective_count(specimen: Specimen, others: tuple[int, ...]) -> float:
    """How many elements of a slice share its squared error, on average over the error: (sum e^2)^2 / sum e^4."""
    square = specimen.error * specimen.error
    slices, fourth = square.sum(others), (square * square).sum(others)
    ratio = np.divide(slices**3, fourth, out=np.zeros_like(slices), where=fourth > 0)
    return float(ratio.sum() / slices.sum())


def find_clipped(specimen: Specimen) -> Iterator[Signature]:
    """One side stops at a limit that the other side goes beyond."""
    candidate, reference = specimen.candidate, specimen.reference
    yield from _clipped(specimen, candidate, reference, "candidate")
    yield from _clipped(specimen, reference, candidate, "reference")


def _clipped(specimen: Specimen, cut: Values, whole: Values, side: str) -> Iterator[Signature]:
    if specimen.finite.sum() < _FEW:
        return
    inside = cut[specimen.finite]
    low, high = float(inside.min()), float(inside.max())
    if low == high:
        return
    above = _stopped(specimen, cut == high, whole - high, high)
    below = _stopped(specimen, cut == low, low - whole, low)
    if not (above.any() or below.any()):
        return
    prediction = np.clip(whole, low if below.any() else -math.inf, high if above.any() else math.inf)
    left = np.where(specimen.finite, cut - prediction, 0.0)
    own = float(np.vdot(cut[specimen.finite], cut[specimen.finite]))
    explained = max(0.0, 1.0 - float(np.vdot(left, left)) / min(specimen.squared, own))
    limits = [(limit, int(hit.sum())) for limit, hit in ((low, below), (high, above)) if hit.any()]
    texts = [f"{limit:.6g}{_named_limit(limit)} ({count} elements)" for limit, count in limits]
    figures = tuple((name, limit) for name, limit, hit in (("low", low, below), ("high", high, above)) if hit.any())
    evidence = f"the {side} stops at {' and '.join(texts)} where the other side goes on"
    yield Signature(
        SignatureKind.CLIPPED, evidence, explained, (*figures, ("count", float(sum(count for _, count in limits))))
    )


def _stopped(specimen: Specimen, at_limit: Flags, beyond: Values, limit: float) -> Flags:
    """Positions at the limit whose partner lies clearly beyond it; none if too few to be a limit."""
    hit = at_limit & specimen.finite & (beyond > 2.0 * specimen.unit)
    enough = 1 if limit and limit in _LIMITS else 3
    return hit if hit.sum() >= enough else np.zeros_like(hit)


def _named_limit(limit: float) -> str:
    name = _LIMITS.get(limit, "")
    return f", {name} limit" if name else ""
