"""Remember something about tensors without touching them: no attribute, no reference that keeps one alive.

An attribute would travel: `torch.save` and `deepcopy` take a tensor's `__dict__` along, and a file saved by the user's
own script would then need our classes to load.
"""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

import torch

T = TypeVar("T")
_FIRST_SWEEP = 4096


class TensorLabels(Generic[T]):
    """Map tensors, by identity, to labels; entries of tensors that are gone are swept out now and then."""

    __slots__ = ("_entries", "_limit")

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[torch.Tensor], T]] = {}
        self._limit = _FIRST_SWEEP

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, tensor: torch.Tensor) -> T | None:
        """The tensor's label, None if it has none."""
        entry = self._entries.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def put(self, tensor: torch.Tensor, label: T) -> None:
        """Label a tensor, in place of an older label."""
        self._entries[id(tensor)] = (weakref.ref(tensor), label)
        if len(self._entries) > self._limit:
            self._sweep()

    def _sweep(self) -> None:
        for number, (reference, _) in list(self._entries.items()):
            if reference() is None:
                self._entries.pop(number, None)
        self._limit = max(_FIRST_SWEEP, 2 * len(self._entries))
