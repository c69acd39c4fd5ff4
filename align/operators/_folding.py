"""Weights prepared once (folded, packed) and kept for as long as the originals live unchanged.

A prepared weight is redone when an original has another version, storage or dtype. A write through `.data`
changes none of these, so it is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from torch import Tensor

Prepared = TypeVar("Prepared")

_State = tuple[tuple[int, int, Any], ...]
_kept: dict[Hashable, tuple[_State, tuple[Any, ...], Any]] = {}


def prepared(purpose: Hashable, originals: Sequence[Tensor | None], make: Callable[[], Prepared]) -> Prepared:
    """Return `make()`, or what it returned last time for the same purpose and the same, unchanged originals."""
    tensors = [item for item in originals if item is not None]
    key = (purpose, *map(id, originals))
    held = _kept.get(key)
    if held is not None and held[0] == _state(tensors):
        kept: Prepared = held[2]
        return kept
    value = make()
    if not any(tensor.is_inference() for tensor in tensors):  # these carry no version, so a change could not be noticed
        _kept[key] = (
            _state(tensors),
            tuple(weakref.ref(tensor, lambda _: _kept.pop(key, None)) for tensor in tensors),
            value,
        )
    return value


def _state(tensors: Sequence[Tensor]) -> _State:
    return tuple((tensor._version, tensor.data_ptr(), tensor.dtype) for tensor in tensors)
