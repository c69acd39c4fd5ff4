"""Hypotheses on the order of values: swapped axes, a shifted, permuted or interleaved axis.

Slices of an axis are recognised by a few random projections, so rounding does not hide them; a found order is then
held against the whole (thinned) tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from align.compare.signature_model import Signature, SignatureKind, Specimen, Values

Order = npt.NDArray[np.intp]

_PROJECTIONS = 8
_LONGEST = 2048  # extent of an axis whose slices are matched
_MOST_COLUMNS = 1 << 12  # elements of a slice that enter its projections
_PROBES = 4096


def find_transposed(specimen: Specimen) -> Iterator[Signature]:
    """The candidate's memory is the reference's with axes swapped, read in the same or in the reference's shape."""
    reference = specimen.reference
    if specimen.is_thinned or reference.ndim < 2 or reference.ndim > 5 or not specimen.finite.all():
        return
    spot = np.linspace(0, reference.size - 1, min(reference.size, _PROBES)).astype(np.intp)
    flat, squared = specimen.candidate.ravel()[spot], float(np.mean(specimen.error.ravel()[spot] ** 2))
    found = []
    for axes in itertools.permutations(range(reference.ndim)):
        turned = reference.transpose(axes)
        picked = turned[np.unravel_index(spot, turned.shape)]
        found.append((float(np.mean((picked - flat) ** 2)), axes))
    rest, axes = min(found)
    if rest > 0.2 * squared:
        return
    explained = specimen.explained_by(reference.transpose(axes).reshape(reference.shape))
    same = tuple(reference.shape[axis] for axis in axes) == reference.shape
    evidence = f"candidate = reference with axes in order {axes}" + (
        "" if same else f", read as if of shape {reference.shape}"
    )
    yield Signature(
        SignatureKind.TRANSPOSED, evidence, explained, tuple((f"axis{i}", float(a)) for i, a in enumerate(axes))
    )


def find_reordered(specimen: Specimen) -> Iterator[Signature]:
    """Along one axis the candidate's slices are the reference's in another order."""
    if not specimen.finite.all():
        return
    for axis, extent in enumerate(specimen.shape):
        is_whole = np.array_equal(specimen.positions[axis], np.arange(extent))
        if not 2 <= extent <= _LONGEST or not is_whole or specimen.error.size == extent < 16:
            continue
        order = _match(specimen, axis)
        if order is None:
            continue
        yield from _judge(specimen, axis, order)


def _match(specimen: Specimen, axis: int) -> Order | None:
    """For each candidate slice the index of the nearest reference slice; None when most slices have none near."""
    candidate, reference = (_projections(side, axis) for side in (specimen.candidate, specimen.reference))
    distance = (candidate**2).sum(1)[:, None] + (reference**2).sum(1)[None, :] - 2.0 * candidate @ reference.T
    order = distance.argmin(axis=1)
    rows = np.arange(order.size)
    if np.array_equal(order, rows):
        return None
    # A true order brings the slices far nearer than they are in place.
    nearer = distance[rows, order] <= 0.25 * distance[rows, rows]
    moved = order != rows
    return order if nearer[moved].mean() >= 0.6 else None


def _projections(values: Values, axis: int) -> Values:
    """Each slice's products with the same few random vectors."""
    slices = np.moveaxis(values, axis, 0).reshape(values.shape[axis], -1)
    slices = slices[:, :: max(1, math.ceil(slices.shape[1] / _MOST_COLUMNS))]
    if slices.shape[1] <= _PROJECTIONS:
        return slices
    weights = np.random.default_rng(0).standard_normal((slices.shape[1], _PROJECTIONS))
    return slices @ weights


def _judge(specimen: Specimen, axis: int, order: Order) -> Iterator[Signature]:
    extent = order.size
    step, votes = _commonest_step(order)
    valid = (np.arange(extent) + step >= 0) & (np.arange(extent) + step < extent)
    follows = order == np.arange(extent) + step
    if step and follows[valid].mean() >= 0.9 and valid.sum() >= max(2, extent // 2):
        yield _shifted(specimen, axis, step, valid)
        return
    if not np.array_equal(np.sort(order), np.arange(extent)):
        return
    explained = specimen.explained_by(specimen.reference.take(order, axis))
    moved = int((order != np.arange(extent)).sum())
    figures = (("axis", float(axis)), ("moved", float(moved)))
    if votes == extent or _is_cyclic(order):
        around = int(order[0])
        text = f"axis {axis} is rotated by {around} of {extent}: candidate[i] = reference[i + {around} mod {extent}]"
        yield Signature(SignatureKind.SHIFTED, text, explained, (("axis", axis), ("shift", around)))
        return
    kind, text = _name_order(order)
    yield Signature(kind, f"along axis {axis}, {moved} of {extent} slices moved: {text}", explained, figures)


def _commonest_step(order: Order) -> tuple[int, int]:
    steps, counts = np.unique(order - np.arange(order.size), return_counts=True)
    best = int(counts.argmax())
    return int(steps[best]), int(counts[best])


def _shifted(specimen: Specimen, axis: int, step: int, valid: npt.NDArray[np.bool_]) -> Signature:
    here = np.flatnonzero(valid)
    ours, theirs = specimen.candidate.take(here, axis), specimen.reference.take(here + step, axis)
    before, left = specimen.error.take(here, axis), ours - theirs
    explained = max(0.0, 1.0 - float(np.vdot(left, left)) / max(float(np.vdot(before, before)), 5e-324))
    text = f"candidate[i] = reference[i {step:+d}] along axis {axis}, {here.size} of {valid.size} slices"
    return Signature(SignatureKind.SHIFTED, text, explained, (("axis", axis), ("shift", step)))


def _is_cyclic(order: Order) -> bool:
    return np.array_equal(order, (np.arange(order.size) + order[0]) % order.size)


def _name_order(order: Order) -> tuple[SignatureKind, str]:
    """Interleaving first (also within equal blocks), then reading an axis as (a, b) transposed, reversal, a swap."""
    extent = order.size
    for block in (size for size in range(2, extent + 1) if extent % size == 0):
        inner = order[:block]
        if block < 4 or not np.array_equal(
            order, (np.arange(extent) // block) * block + inner[np.arange(extent) % block]
        ):
            continue
        within = f" in blocks of {block}" if block < extent else ""
        for rows in (size for size in range(2, block) if block % size == 0):
            if np.array_equal(inner, np.arange(block).reshape(rows, -1).T.ravel()):
                kind = SignatureKind.INTERLEAVED if 2 in (rows, block // rows) else SignatureKind.PERMUTED
                return kind, f"read as ({rows}, {block // rows}) transposed{within}"
    if np.array_equal(order, np.arange(extent)[::-1]):
        return SignatureKind.PERMUTED, "in reverse"
    moved = np.flatnonzero(order != np.arange(extent))
    if moved.size == 2:
        return SignatureKind.PERMUTED, f"{moved[0]} and {moved[1]} swapped"
    return SignatureKind.PERMUTED, "order begins " + ", ".join(map(str, order[:8]))
