"""Say which call outputs were alive together when they took most memory.

An approximation from outside: outputs of calls are seen, kernels' work space and inputs are not; views count with the
tensor whose memory they share, weights not at all.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from align.dumpers.naming import flat_tensors
from align.dumpers.placeholder import Placeholder
from align.dumpers.tensors import has_data
from align.dumpers.wire import Call, Tap
from align.profiling.values import LiveTensor

_LARGEST = 8


@dataclass(slots=True)
class _Piece:
    """A piece of memory: what made it, and how many tensors we know of that lie in it."""

    tensor: LiveTensor
    owners: int = 0
    references: list[Any] = field(default_factory=list)


class LiveOutputs(Tap):
    """Keep account of the memory that outputs of calls hold, by weak references."""

    def __init__(self) -> None:
        self._pieces: dict[int, _Piece] = {}
        self._permanent: set[int] = set()
        self._events: list[tuple[LiveTensor, int]] = []

    def enter(self, call: Call) -> None:
        if call.module is not None:
            for held in (*call.module._parameters.values(), *call.module._buffers.values()):
                if held is not None and has_data(held):
                    self._permanent.add(held.untyped_storage().data_ptr())

    def finish(self, call: Call, output: Any) -> Any:
        for tensor in flat_tensors(output):
            if not isinstance(tensor, Placeholder) and tensor.layout is torch.strided and has_data(tensor):
                self._hold(call, tensor)
        return output

    def _hold(self, call: Call, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place == 0 or place in self._permanent:
            return
        piece = self._pieces.get(place)
        if piece is None:
            name = f"{call}@{call.step}" if call.step else str(call)
            made = LiveTensor(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), storage.nbytes())
            piece = self._pieces[place] = _Piece(made)
            self._events.append((made, made.nbytes))
        piece.owners += 1
        piece.references.append(weakref.ref(tensor, lambda _: self._release(place, piece)))

    def _release(self, place: int, piece: _Piece) -> None:
        piece.owners -= 1
        if piece.owners == 0:
            self._events.append((piece.tensor, -piece.tensor.nbytes))
            if self._pieces.get(place) is piece:
                del self._pieces[place]

    def peak(self) -> tuple[int, tuple[LiveTensor, ...]]:
        """Most bytes alive at a time, and the largest tensors alive then."""
        most = now = 0
        at = -1
        for index, (_, change) in enumerate(self._events):
            now += change
            if now > most:
                most, at = now, index
        alive: dict[int, LiveTensor] = {}
        for tensor, change in self._events[: at + 1]:
            if change >= 0:
                alive[id(tensor)] = tensor
            else:
                alive.pop(id(tensor), None)
        return most, tuple(sorted(alive.values(), key=lambda tensor: -tensor.nbytes)[:_LARGEST])
