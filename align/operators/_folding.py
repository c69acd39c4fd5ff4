"""Weights prepared once (folded, packed) and kept for as long as the originals live unchanged.

A prepared weight is redone when an original has another version, storage, dtype or device. A write through `.data`
changes none of these, so it is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch import Tensor

Prepared = TypeVar("Prepared")

_kept: dict[Hashable, tuple[tuple[Hashable, ...], tuple[Any, ...], Any]] = {}


def prepared(purpose: Hashable, originals: tuple[Tensor | None, ...], make: Callable[[], Prepared]) -> Prepared:
    """Return `make()`, or what it returned last time for the same purpose and the same, unchanged originals."""
    tensors = tuple(item for item in originals if item is not None)
    if any(tensor.is_inference() for tensor in tensors):  # carries no version, so a change could not be noticed
        return make()
    key = (purpose, tuple(id(item) if item is not None else 0 for item in originals))
    state = tuple(_state(tensor) for tensor in tensors)
    held = _kept.get(key)
    if held is not None and held[0] == state:
        value: Prepared = held[2]
        return value
    value = make()
    _kept[key] = (state, tuple(weakref.ref(tensor, lambda _: _kept.pop(key, None)) for tensor in tensors), value)
    return value


def _state(tensor: Tensor) -> Hashable:
    return (tensor._version, tensor.data_ptr(), tensor.dtype, tensor.device, tuple(tensor.shape))
