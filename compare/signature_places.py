"""Hypotheses on where the error lies: NaN and Inf, rows gone to zero or their average, slices, growth along an axis."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from align.compare.signature_model import Flags, Signature, SignatureKind, Specimen, Values
from align.dumpers.dtypes import widen

_GAP = 30.0  # in squared relative error, between the worst clean slice and the best dirty one
_SHARE = 0.99  # of the squared error that a place must hold
_CLEAN = 1.0 / 8.0  # in units of the dtype's epsilon: relative error of a slice that counts as none


def find_nonfinite(specimen: Specimen) -> Iterator[Signature]:
    """NaN or Inf on one side only: how many, on which side, where, and whether a range was left."""
    candidate, reference = specimen.candidate, specimen.reference
    agree = specimen.finite | (candidate == reference) | (np.isnan(candidate) & np.isnan(reference))
    if agree.all():
        return
    ours = ~agree & ~np.isfinite(candidate)
    theirs = ~agree & ~np.isfinite(reference) & np.isfinite(candidate)
    is_ours = ours.sum() >= theirs.sum()
    side, hit, here, there = (
        ("candidate", ours, candidate, reference) if is_ours else ("reference", theirs, reference, candidate)
    )
    nan, inf = int(np.isnan(here[hit]).sum()), int(np.isinf(here[hit]).sum())
    evidence = f"{side} holds {nan} NaN and {inf} Inf that the other side does not, in {describe_places(specimen, hit)}"
    evidence += _overflow(specimen, np.abs(there[hit]), inf)
    yield Signature(SignatureKind.NONFINITE, evidence, 1.0, (("nan", nan), ("inf", inf), ("rows", count_rows(hit))))


def _overflow(specimen: Specimen, partners: Values, inf: int) -> str:
    if not inf or specimen.format is None:
        return ""
    beyond = int((partners > specimen.format.largest).sum())
    limit = f"{specimen.dtype}'s {specimen.format.largest:.6g}"
    if 2 * beyond >= inf:
        return f"; the other side is beyond {limit} at {beyond} of them"
    return f"; only {beyond} of the true values are beyond {limit}, so the overflow lies inside the computation"


def count_rows(where: Flags) -> int:
    """Number of rows (along the last axis) with any position set."""
    return int(where.any(axis=-1).sum())


def describe_places(specimen: Specimen, where: Flags) -> str:
    """Say where the positions lie: their share, and along each axis the few indices that hold them all."""
    parts = []
    for axis, extent in enumerate(where.shape):
        others = tuple(other for other in range(where.ndim) if other != axis)
        index = np.flatnonzero(where.any(axis=others))
        if index.size < extent:
            parts.append(f"axis {axis} {describe_indices(specimen.positions[axis], index)}")
    at = f" ({', '.join(parts)})" if parts else ""
    return f"{int(where.sum())} of {where.size} positions{at}"


def describe_indices(positions: npt.NDArray[np.intp], index: npt.NDArray[np.intp]) -> str:
    """A set of indices in words: `index 3`, `from 128 on`, `up to 7`, `indices 2 to 5`, `37 of 128 indices`."""
    extent, original = positions.size, positions[index]
    if index.size == 1:
        return f"index {original[0]}"
    if index.size == index[-1] - index[0] + 1:
        if index[-1] == extent - 1:
            return f"from {original[0]} on"
        return f"up to {original[-1]}" if index[0] == 0 else f"indices {original[0]} to {original[-1]}"
    if index.size <= 4:
        return "indices " + ", ".join(map(str, original))
    return f"{index.size} of {extent} indices"


def find_constant(specimen: Specimen) -> Iterator[Signature]:
    """Candidate constant along an axis where the reference varies: zeroed, averaged, or stuck at another value."""
    best: tuple[float, int, Flags] | None = None
    for axis in range(len(specimen.shape)):
        flat = _is_flat(specimen, axis)
        if flat is None or not flat.any():
            continue
        share = specimen.share_at(np.broadcast_to(flat, specimen.shape))
        if best is None or share > best[0] + 1e-3:
            best = share, axis, flat
    if best is None or best[0] < 0.5:
        return
    share, axis, flat = best
    where = np.broadcast_to(flat, specimen.shape) & specimen.finite
    places = describe_places(specimen, where)
    if not specimen.candidate[where].any():
        evidence = f"candidate is zero at {places}, where the reference is not"
        yield Signature(
            SignatureKind.ZEROED,
            evidence,
            share,
            (("axis", axis), ("rows", count_rows(where)), ("positions", float(where.sum()))),
        )
        return
    mean, low = _matches_mean(specimen, axis, flat), float(specimen.candidate[where].min())
    evidence = f"candidate is constant along axis {axis} at {places}" + (
        ": the average of the reference" if mean else ""
    )
    yield Signature(SignatureKind.AVERAGED, evidence, share, (("axis", axis), ("is_mean", float(mean)), ("low", low)))


def _is_flat(specimen: Specimen, axis: int) -> Flags | None:
    """Lines along the axis where the candidate varies by at most two spacings and the reference by far more."""
    if specimen.shape[axis] < 2 or not specimen.finite.any():
        return None
    candidate, reference = (np.where(specimen.finite, side, 0.0) for side in (specimen.candidate, specimen.reference))
    unit = specimen.unit.max(axis=axis, keepdims=True)
    allowed = 2.0 * unit * (candidate != 0).any(axis=axis, keepdims=True)  # a zero line must be zero
    stands = np.ptp(candidate, axis=axis, keepdims=True) <= allowed
    return np.asarray(stands & (np.ptp(reference, axis=axis, keepdims=True) > 16.0 * unit))


def _matches_mean(specimen: Specimen, axis: int, flat: Flags) -> bool:
    line = specimen.candidate.mean(axis=axis, keepdims=True)[flat]
    mean = specimen.reference.mean(axis=axis, keepdims=True)[flat]
    scale = specimen.reference.std(axis=axis, keepdims=True)[flat]
    return bool(np.median(np.abs(line - mean)) < 0.02 * np.median(scale))


def find_zero_elements(specimen: Specimen) -> Signature | None:
    """Scattered zeros (or a zero tail, or zero columns) that the reference does not have."""
    hit = specimen.finite & (specimen.candidate == 0.0) & (np.abs(specimen.reference) > 16.0 * specimen.unit)
    count = int(hit.sum())
    if count < 2 or specimen.format is None or _is_relu(specimen, hit):
        return None
    evidence = f"candidate is zero at {describe_places(specimen, hit)}, where the reference is not"
    figures = (("axis", -1.0), ("rows", float(count_rows(hit))), ("positions", float(count)))
    return Signature(SignatureKind.ZEROED, evidence, specimen.share_at(hit), figures)


def _is_relu(specimen: Specimen, hit: Flags) -> bool:
    """Whether all zeros stand for values of one sign and no value of that sign is left."""
    signs, left = np.sign(specimen.reference[hit]), np.sign(specimen.candidate[specimen.finite])
    return bool((signs == signs[0]).all() and not (left == signs[0]).any())


def find_confined(specimen: Specimen) -> Iterator[Signature]:
    """All the error in some indices of some axes, the rest clean: a head, a tail, positions beyond N, masked rows."""
    box: Flags = np.ones(specimen.shape, dtype=bool)
    parts: list[str] = []
    figures: list[tuple[str, float]] = []
    for axis, extent in enumerate(specimen.shape):
        index = _dirty_slices(specimen, axis)
        if index is None:
            continue
        member = np.zeros(extent, dtype=bool)
        member[index] = True
        box &= member.reshape([-1 if other == axis else 1 for other in range(len(specimen.shape))])
        parts.append(f"axis {axis} {describe_indices(specimen.positions[axis], index)}")
        figures += [
            ("axis", axis),
            ("first", float(specimen.positions[axis][index[0]])),
            ("last", float(specimen.positions[axis][index[-1]])),
            ("count", index.size),
        ]
    rows = _dirty_rows(specimen)
    if rows is not None and rows.parameter("rows") < 0.9 * count_rows(box):
        yield rows
    elif parts:
        evidence = f"{specimen.share_at(box):.2%} of the squared error lies in {', '.join(parts)}; the rest is clean"
        yield Signature(SignatureKind.CONFINED, evidence, specimen.share_at(box), tuple(figures))


def _dirty_slices(specimen: Specimen, axis: int) -> npt.NDArray[np.intp] | None:
    others = tuple(other for other in range(len(specimen.shape)) if other != axis)
    return _split(specimen, others, specimen.error.size // max(specimen.shape[axis], 1))


def _dirty_rows(specimen: Specimen) -> Signature | None:
    """Rows (along the last axis) in no regular pattern, as a padding mask leaves them."""
    if len(specimen.shape) < 3:
        return None
    index = _split(specimen, (-1,), specimen.shape[-1])
    if index is None:
        return None
    rows = math.prod(specimen.shape[:-1])
    evidence = f"all the squared error lies in {index.size} of {rows} rows (last axis); the rest is clean"
    return Signature(SignatureKind.CONFINED, evidence, _SHARE, (("rows", index.size),))


def _split(specimen: Specimen, over: tuple[int, ...], per_slice: int) -> npt.NDArray[np.intp] | None:
    """Indices of the slices that hold the error, if a wide gap parts them from clean ones; sums go over `over`."""
    error = (specimen.error * specimen.error).sum(over).ravel()
    if error.size < 2 or per_slice < 4 or specimen.squared == 0.0:
        return None
    reference = np.where(specimen.finite, specimen.reference, 0.0)
    energy = (reference * reference).sum(over).ravel()
    relative = error / np.maximum(energy, 1e-6 * energy.mean() + 1e-300)
    epsilon = specimen.format.epsilon if specimen.format else 1e-6
    order = np.argsort(relative, kind="stable")
    ordered = np.maximum(relative[order], (_CLEAN * epsilon) ** 2)
    gaps = ordered[1:] / ordered[:-1]
    cut = int(np.argmax(gaps)) + 1
    dirty = np.sort(order[cut:])
    is_few = dirty.size <= 0.9 * error.size
    if gaps[cut - 1] < _GAP or not is_few or error[dirty].sum() < _SHARE * specimen.squared:
        return None
    return dirty


def find_masked(specimen: Specimen) -> Iterator[Signature]:
    """All the error where a boolean input says so: at its set or its unset positions."""
    for number, raw in enumerate(specimen.inputs):
        mask = _as_mask(widen(raw), specimen.shape) if raw.dtype == "bool" and not specimen.is_thinned else None
        if mask is None or mask.all() or not mask.any():
            continue
        for word, where in (("set", mask), ("unset", ~mask)):
            share = specimen.share_at(where)
            if share >= _SHARE and where.mean() <= 0.9:
                evidence = (
                    f"{share:.2%} of the squared error lies where input {number} is {word} ({where.mean():.1%} of it)"
                )
                yield Signature(
                    SignatureKind.CONFINED, evidence, share, (("input", number), ("is_set", float(word == "set")))
                )


def _as_mask(mask: npt.NDArray[np.bool_], shape: tuple[int, ...]) -> Flags | None:
    """The mask spread over the output: broadcast as it is, or over further last axes (a padding mask)."""
    for trailing in range(len(shape) - mask.ndim + 1):
        try:
            return np.broadcast_to(mask.reshape(mask.shape + (1,) * trailing), shape)
        except ValueError:
            continue
    return None


def find_growing(specimen: Specimen) -> Iterator[Signature]:
    """Error per slice grows with the index along an axis, ten times at least; here `explained` is the monotone share.

    It must grow against the reference's size too: where values grow, rounding grows with them.
    """
    for axis, extent in enumerate(specimen.shape):
        edges = _growth_bins(extent, specimen.error.size // max(extent, 1))
        if edges.size < 6:
            continue
        error = _profile(specimen.error, axis, edges)
        size = _profile(np.where(specimen.finite, specimen.reference, 0.0), axis, edges)
        begin = int(np.argmax(error > 0))  # positions before the first error
        edges, error, size = edges[begin:], error[begin:], size[begin:]
        if error.size < 5 or not ((error > 0).all() and (size > 0).all()):
            continue
        growth = min(error[-1] / error[0], error[-1] / size[-1] / (error[0] / size[0]))
        if growth < 10.0:
            continue
        x, y = np.log(np.sqrt(edges[:-1].clip(1) * edges[1:])), np.log(error)
        fall = np.maximum.accumulate(y) - y  # an error may grow and then stay; it may not come back
        share = 1.0 - float(np.vdot(fall, fall)) / float(np.vdot(y - y.mean(), y - y.mean()))
        slope = float(np.polyfit(x, y, 1)[0])
        evidence = (
            f"the error grows along axis {axis} as index^{slope:.2g}, {growth:.3g}-fold (monotone share {share:.2f})"
        )
        yield Signature(
            SignatureKind.GROWING, evidence, share, (("axis", axis), ("exponent", slope), ("growth", float(growth)))
        )


def _growth_bins(extent: int, per_slice: int) -> npt.NDArray[np.intp]:
    """Edges of bins of equal ratio, the first of at least 32 elements; none for an axis too short to tell."""
    narrowest = max(1, math.ceil(32 / max(per_slice, 1)))
    if extent < 32 * narrowest:
        return np.arange(0)
    return np.concatenate(([0], np.unique(np.geomspace(narrowest, extent, 8).astype(np.intp))))


def _profile(values: Values, axis: int, edges: npt.NDArray[np.intp]) -> Values:
    """Root mean square in each bin of the axis."""
    others = tuple(other for other in range(values.ndim) if other != axis)
    mean = np.asarray((values * values).mean(others), dtype=np.float64)
    return np.sqrt(np.add.reduceat(mean, edges[:-1]) / np.diff(edges))
