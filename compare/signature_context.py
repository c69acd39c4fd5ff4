"""Hypotheses that need more than the pair: stale values of other nodes, GELU's form, rotary layout, masks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache

import numpy as np

from align.compare.signature_model import Flags, Signature, SignatureKind, Specimen, Values
from align.compare.signature_specimen import sample, thinned
from align.dumpers.dtypes import RawTensor

_GRID = np.linspace(-10.0, 10.0, 8001)
_NEGATIVE = -1000.0  # scores at or below count as masked
_MOST_SCORES = 1 << 22


def find_stale(specimen: Specimen, others: Mapping[str, RawTensor], shape: tuple[int, ...]) -> Iterator[Signature]:
    """The candidate equals another node's values, or this node's at another step."""
    axes = specimen.positions[: len(shape)]
    for name, raw in others.items():
        if raw.shape != shape:
            continue
        other = thinned(raw, axes)
        explained = specimen.explained_by(other)
        if explained >= 0.9 and np.ptp(other) > 0.0:
            same = float(np.mean(specimen.candidate == other))
            evidence = f"candidate equals {name}: {same:.1%} of the values to the bit"
            yield Signature(SignatureKind.STALE, evidence, explained, (("equal", same),))


@cache
def gelu_table() -> tuple[Values, Values, Values]:
    """GELU on a grid by erf, by tanh, and by a sigmoid (x * sigmoid(1.702 x))."""
    erf = np.array([0.5 * x * math.erfc(-x / math.sqrt(2.0)) for x in _GRID])
    inner = math.sqrt(2.0 / math.pi) * (_GRID + 0.044715 * _GRID**3)
    return erf, 0.5 * _GRID * (1.0 + np.tanh(inner)), _GRID / (1.0 + np.exp(-1.702 * _GRID))


def find_gelu_form(specimen: Specimen) -> Iterator[Signature]:
    """The error as a function of the input is the difference of two forms of GELU (erf, tanh, sigmoid).

    The input is taken from `inputs` if one has the output's shape, else from inverting erf GELU on positive outputs.
    """
    shape = specimen.shape
    tensors = [
        thinned(raw, specimen.positions) for raw in specimen.inputs if raw.shape and len(raw.shape) == len(shape)
    ]
    erf, tanh, sigmoid = gelu_table()
    index = sample(specimen)
    error, output = specimen.error.ravel()[index], specimen.reference.ravel()[index]
    sources = [("input", values.ravel()[index]) for values in tensors if values.shape == shape]
    rising = _GRID >= 0.0
    sources.append(("output", np.where(output > 0, np.interp(output, erf[rising], _GRID[rising]), np.nan)))
    for source, x in sources:
        inside = np.abs(x) < _GRID[-1]
        if inside.sum() < 32:
            continue
        for name, form in (("tanh", tanh), ("sigmoid", sigmoid)):
            yield from _gelu(error[inside], np.interp(x[inside], _GRID, form - erf), name, source)


def _gelu(error: Values, predicted: Values, form: str, source: str) -> Iterator[Signature]:
    squared = float(np.vdot(error, error))
    if squared == 0.0:
        return
    most = float(np.abs(predicted).max())
    for sign, ours, theirs in ((1.0, form, "erf"), (-1.0, "erf", form)):
        left = error - sign * predicted
        explained = max(0.0, 1.0 - float(np.vdot(left, left)) / squared)
        evidence = f"the error follows {ours} minus {theirs} GELU of the {source}, at most {most:.2g}"
        yield Signature(
            SignatureKind.GELU_FORM, evidence, explained, (("sign", sign), ("is_tanh", float(form == "tanh")))
        )


def find_rotary_layout(specimen: Specimen) -> Iterator[Signature]:
    """A rotation keeps the length of every pair: one pairing for the reference, the other for the candidate."""
    width = specimen.shape[-1]
    if width % 2 or width < 8:
        return
    for number, raw in enumerate(specimen.inputs):
        if len(raw.shape) != len(specimen.shape):
            continue
        source = thinned(raw, specimen.positions)
        if source.shape != specimen.shape:
            continue
        halves, pairs = (_kept_lengths(specimen, source, pairing) for pairing in ("half", "interleaved"))
        for (reference, _), (other, candidate), words in (
            (halves, pairs, "reference rotates (i, i + d/2), candidate (2i, 2i + 1)"),
            (pairs, halves, "reference rotates (2i, 2i + 1), candidate (i, i + d/2)"),
        ):
            if reference < 0.02 and candidate < 0.02 and other > 0.1:
                evidence = f"pair lengths of input {number} are kept by both sides, by different pairs: {words}"
                yield Signature(
                    SignatureKind.INTERLEAVED, evidence, 1.0 - candidate, (("axis", -1.0), ("input", number))
                )


def _kept_lengths(specimen: Specimen, source: Values, pairing: str) -> tuple[float, float]:
    """Relative distance of reference's and candidate's pair lengths from the source's under one pairing."""
    want, reference, candidate = (
        _lengths(values, pairing) for values in (source, specimen.reference, specimen.candidate)
    )
    norm = max(float(np.linalg.norm(want)), 1e-300)
    return float(np.linalg.norm(reference - want)) / norm, float(np.linalg.norm(candidate - want)) / norm


def _lengths(values: Values, pairing: str) -> Values:
    half = values.shape[-1] // 2
    first, second = (
        (values[..., :half], values[..., half:]) if pairing == "half" else (values[..., 0::2], values[..., 1::2])
    )
    return np.hypot(first, second)


def find_swapped_support(specimen: Specimen) -> Iterator[Signature]:
    """Positions the reference drops (zero, hugely negative, -Inf) are those the candidate keeps, and the other way."""
    for name, drop in (("zero", _is_zero), ("masked scores", _is_masked)):
        reference, candidate = drop(specimen.reference), drop(specimen.candidate)
        if not 0.02 <= reference.mean() <= 0.98:
            continue
        opposite = float(np.mean(reference != candidate))
        if opposite >= 0.98:
            evidence = (
                f"{name} where the other side is not, at {opposite:.1%} of the positions: kept and dropped are swapped"
            )
            yield Signature(SignatureKind.MASK_POLARITY, evidence, opposite, (("opposite", opposite),))


def _is_zero(values: Values) -> Flags:
    return np.asarray(values == 0.0)


def _is_masked(values: Values) -> Flags:
    return np.asarray(values <= _NEGATIVE)


def find_attention_mask(specimen: Specimen) -> Iterator[Signature]:
    """Given query, key, value and mask: attention under the inverted mask, or without one, is the candidate."""
    parts = attention_parts(specimen)
    if parts is None:
        return
    query, key, value, keep, bias = parts
    plain = attention(query, key, value, keep, bias)
    if _distance(plain, specimen.reference) > 0.05:
        return
    is_additive = bias is not None
    kept = keep if keep is not None else (bias > _NEGATIVE / 10.0 if bias is not None else None)
    if kept is None or kept.all():
        return
    noun = "additive" if is_additive else "boolean"
    for kind, words, guess in (
        (SignatureKind.MASK_POLARITY, "inverted", attention(query, key, value, ~kept, None)),
        (SignatureKind.MASK_IGNORED, "left out", attention(query, key, value, None, None)),
    ):
        evidence = (
            f"candidate is attention with the {noun} mask {words} ({float(kept.mean()):.0%} of the keys are kept)"
        )
        yield Signature(kind, evidence, specimen.explained_by(guess), (("kept", float(kept.mean())),))


def attention_parts(specimen: Specimen) -> tuple[Values, Values, Values, Flags | None, Values | None] | None:
    """Query, key, value, and the mask as keep-flags or as additive bias; None when the inputs are not of that form."""
    if len(specimen.inputs) < 4 or specimen.is_thinned:
        return None
    raws = specimen.inputs[:4]
    query, key, value, mask = (thinned(raw, tuple(np.arange(extent) for extent in raw.shape)) for raw in raws)
    is_attention = min(query.ndim, key.ndim, value.ndim) >= 2 and query.shape[-1] == key.shape[-1]
    if not is_attention or key.shape[-2] != value.shape[-2] or specimen.shape != (*query.shape[:-1], value.shape[-1]):
        return None
    scores = (*query.shape[:-1], key.shape[-2])
    try:
        mask = np.broadcast_to(mask, scores)
    except ValueError:
        return None
    if math.prod(scores) > _MOST_SCORES or key.shape[:-2] != query.shape[:-2] or value.shape[:-2] != query.shape[:-2]:
        return None
    return (query, key, value, mask != 0.0, None) if raws[3].dtype == "bool" else (query, key, value, None, mask)


def attention(query: Values, key: Values, value: Values, keep: Flags | None, bias: Values | None) -> Values:
    """softmax(q k^T / sqrt(d) + bias) v over the kept keys, in float64; a row without any key is zero."""
    scores = query @ key.swapaxes(-1, -2) / math.sqrt(query.shape[-1])
    scores = scores if bias is None else scores + bias
    scores = scores if keep is None else np.where(keep, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0.0))
    total = weights.sum(axis=-1, keepdims=True)
    share = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    return np.asarray(share @ value, dtype=np.float64)


def _distance(guess: Values, reference: Values) -> float:
    both = np.isfinite(guess) & np.isfinite(reference)
    return float(np.linalg.norm((guess - reference)[both]) / max(float(np.linalg.norm(reference[both])), 1e-300))
