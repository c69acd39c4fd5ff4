"""Say what kind of error a node shows: every hypothesis is tried on the pair, those that fit return, best first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

import numpy as np

from align.compare.signature_bits import find_coarse, find_rounding, find_truncated
from align.compare.signature_context import (
    find_attention_mask,
    find_gelu_form,
    find_rotary_layout,
    find_stale,
    find_swapped_support,
)
from align.compare.signature_model import Signature, SignatureKind, Specimen
from align.compare.signature_order import find_reordered, find_transposed
from align.compare.signature_places import (
    find_confined,
    find_constant,
    find_growing,
    find_masked,
    find_nonfinite,
    find_zero_elements,
)
from align.compare.signature_scale import find_clipped, find_factor, find_offset, find_slice_factors, find_slice_offsets
from align.compare.signature_specimen import prepare
from align.dumpers.dtypes import RawTensor

_SINGLE = (find_factor, find_offset, find_coarse, find_zero_elements)
_SEVERAL = (
    find_nonfinite, find_swapped_support, find_attention_mask, find_constant, find_clipped, find_gelu_form,
    find_rotary_layout, find_transposed, find_reordered, find_slice_factors, find_slice_offsets, find_truncated,
    find_masked, find_confined, find_growing, find_rounding,
)  # fmt: skip
_ENOUGH = 0.85
"""Share of the squared error a hypothesis must explain to be named."""

_RANK = {kind: rank for rank, kind in enumerate(SignatureKind)}
_NO_OTHERS: Mapping[str, RawTensor] = MappingProxyType({})


def diagnose(
    candidate: RawTensor,
    reference: RawTensor,
    *,
    baseline: RawTensor | None = None,
    inputs: tuple[RawTensor, ...] = (),
    others: Mapping[str, RawTensor] = _NO_OTHERS,
) -> tuple[Signature, ...]:
    """Name the kinds of error that explain at least 85 % of the squared error, best first; NONE_FITS if none does.

    `baseline` is the unfused run's tensor, `inputs` what the node read (in argument order), `others` tensors that a
    stale result could equal, by the name to print. Tensors above 2^20 elements are thinned to evenly spaced slices;
    orders along a thinned axis are not tested.
    """
    if candidate.shape != reference.shape:
        return (_none(f"shapes differ: {candidate.shape} against {reference.shape}"),)
    specimen = prepare(candidate, reference, baseline, inputs)
    # Where values are not finite a hypothesis may compute NaN: every comparison with it is false, so it does not fit.
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        found = [*_all_found(specimen), *find_stale(specimen, others, candidate.shape)]
    if specimen.squared == 0.0 and not found:
        return (Signature(SignatureKind.EQUAL, "both sides are equal", 1.0),)
    return order_found(found) or (_none("no hypothesis explains 85 % of the squared error"),)


def _all_found(specimen: Specimen) -> Iterator[Signature]:
    if specimen.candidate.size == 0:
        return
    if specimen.squared == 0.0:  # what remains is a matter of NaN and Inf
        yield from find_nonfinite(specimen)
        yield from find_swapped_support(specimen)
        return
    for single in _SINGLE:
        signature = single(specimen)
        if signature is not None:
            yield signature
    for several in _SEVERAL:
        yield from several(specimen)


def order_found(found: Iterable[Signature]) -> tuple[Signature, ...]:
    """Those that explain enough: in tiers of a tenth, the more specific kind first, the better explained first."""
    fitting = (signature for signature in found if signature.explained >= _ENOUGH)
    return tuple(sorted(fitting, key=lambda s: (-round(s.explained, 1), _RANK[s.kind], -s.explained)))


def _none(why: str) -> Signature:
    return Signature(SignatureKind.NONE_FITS, why, 0.0)


__all__ = ["Signature", "SignatureKind", "diagnose"]
