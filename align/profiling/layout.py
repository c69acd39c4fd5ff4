"""Follow every tensor's layout through a run, and find where it is changed and later changed back.

A tensor's state is the order of its axes (permuted views), the order of its axes in memory (copies), and its dtype.
Work that keeps the number of axes hands the state on, so `permute -> norm -> permute back` is one round trip.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from align.dumpers.labels import TensorLabels
from align.dumpers.naming import flat_tensors
from align.dumpers.placeholder import Placeholder
from align.dumpers.tensors import has_data
from align.dumpers.wire import Call, CallId, Tap
from align.profiling.values import RoundTrip, Turning

_PERMUTING = frozenset(
    {"permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "T", "mT", "H", "mH", "t", "adjoint"}
)
_COPYING = frozenset({"contiguous", "clone", "to", "npu_format_cast"})
_LONGEST_TRAIL = 16
Axes = tuple[int, ...]
Moment = tuple[int, CallId]
"""(step, call)."""


@dataclass(frozen=True, slots=True)
class _Turn:
    turning: Turning
    at: Moment
    before: Any
    after: Any
    copied_nbytes: int


@dataclass(frozen=True, slots=True)
class _State:
    axes: Axes
    memory: Axes
    trail: tuple[_Turn, ...] = ()


@dataclass(slots=True)
class _Trip:
    """Round trips between the same two places, as they add up."""

    layout: str
    other_layout: str
    count: int = 0
    copied_nbytes: int = 0
    moves: set[Moment] = field(default_factory=set)


class Layout(Tap):
    """Watch layouts. Reads shapes and strides only, never values."""

    def __init__(self) -> None:
        self._states: TensorLabels[_State] = TensorLabels()
        self._permutations: dict[tuple[str, str, int], Axes | None] = {}
        self._sources: dict[int, torch.Tensor] = {}
        self._trips: dict[tuple[Turning, str, str], _Trip] = {}

    def prepare(self, call: Call) -> None:
        tensors = flat_tensors(call.args) or flat_tensors(call.kwargs)
        if tensors:
            self._sources[id(call)] = tensors[0]

    def fail(self, call: Call, error: BaseException) -> None:
        self._sources.pop(id(call), None)

    def finish(self, call: Call, output: Any) -> Any:
        source = self._sources.pop(id(call), None)
        if source is not None and not isinstance(source, Placeholder):
            for tensor in flat_tensors(output):
                if tensor is not source and not isinstance(tensor, Placeholder) and tensor.layout is torch.strided:
                    self._follow(call, source, tensor)
        return output

    def _follow(self, call: Call, source: torch.Tensor, tensor: torch.Tensor) -> None:
        before = self._states.get(source) or _fresh(source)
        if tensor.ndim != source.ndim:
            self._states.put(tensor, _fresh(tensor))
            return
        axes = self._axes_after(call, source, before)
        after = _State(axes, tuple(axes[i] for i in memory_order(tensor)), before.trail)
        copied = 0 if _shares_memory(source, tensor) else tensor.numel() * tensor.element_size()
        at = (call.step, call.ident)
        for turning, old, new in _changes(call, before, after, source, tensor):
            after = self._turn(after, _Turn(turning, at, old, new, copied))
        self._states.put(tensor, after)

    def _axes_after(self, call: Call, source: torch.Tensor, before: _State) -> Axes:
        if call.op not in _PERMUTING:
            return before.axes
        order = self._permutation(call, source.ndim)
        return tuple(before.axes[i] for i in order) if order is not None else tuple(range(source.ndim))

    def _permutation(self, call: Call, ndim: int) -> Axes | None:
        """Which axis each new axis is: the call itself on an empty tensor all of whose extents differ."""
        key = (call.op, repr((call.args[1:], call.kwargs)), ndim)
        if key not in self._permutations:
            self._permutations[key] = _permutation_of(call, ndim) if call.args else None
        return self._permutations[key]

    def _turn(self, state: _State, turn: _Turn) -> _State:
        start = next((i for i in reversed(range(len(state.trail))) if _undoes(turn, state.trail[i])), None)
        if start is None:
            return _State(state.axes, state.memory, (*state.trail, turn)[-_LONGEST_TRAIL:])
        whole = (*state.trail[start:], turn)
        self._note([item for item in whole if item.turning in (turn.turning, Turning.MEMORY)])
        kept = (*state.trail[:start], *(item for item in whole if item.turning not in (turn.turning, Turning.MEMORY)))
        return _State(state.axes, state.memory, kept)

    def _note(self, turns: list[_Turn]) -> None:
        first, last = turns[0], turns[-1]
        key = (last.turning, _place(first.at), _place(last.at))
        trip = self._trips.setdefault(key, _Trip(_text(first.before), _text(first.after)))
        trip.count += 1
        trip.copied_nbytes += sum(turn.copied_nbytes for turn in turns)
        trip.moves.update(turn.at for turn in turns)

    def round_trips(self, seconds: Mapping[Moment, float]) -> tuple[RoundTrip, ...]:
        """All round trips, dearest first, given what each call took."""
        found = [
            RoundTrip(
                *key,
                trip.layout,
                trip.other_layout,
                trip.count,
                sum(seconds.get(at, 0.0) for at in trip.moves),
                trip.copied_nbytes,
            )
            for key, trip in self._trips.items()
        ]
        return tuple(sorted(found, key=lambda trip: (-trip.seconds, trip.first, trip.last)))


def _fresh(tensor: torch.Tensor) -> _State:
    return _State(tuple(range(tensor.ndim)), memory_order(tensor))


def _changes(
    call: Call, before: _State, after: _State, source: torch.Tensor, tensor: torch.Tensor
) -> list[tuple[Turning, Any, Any]]:
    found: list[tuple[Turning, Any, Any]] = []
    if after.axes != before.axes:
        found.append((Turning.AXES, before.axes, after.axes))
    elif call.op in _COPYING and after.memory != before.memory and tensor.shape == source.shape:
        found.append((Turning.MEMORY, before.memory, after.memory))
    if tensor.dtype != source.dtype and tensor.is_floating_point() and source.is_floating_point():
        found.append((Turning.DTYPE, source.dtype, tensor.dtype))
    return found


def _undoes(turn: _Turn, earlier: _Turn) -> bool:
    return earlier.turning is turn.turning and earlier.before == turn.after


def memory_order(tensor: torch.Tensor) -> Axes:
    """Axes from the slowest to the fastest in memory; axes of extent 1 come first, since they have no order."""
    if not has_data(tensor) or tensor.is_contiguous():
        return tuple(range(tensor.ndim))
    if tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return (0, 2, 3, 1)
    strides = tensor.stride()
    return tuple(sorted(range(tensor.ndim), key=lambda axis: (tensor.shape[axis] != 1, -strides[axis], axis)))


def _permutation_of(call: Call, ndim: int) -> Axes | None:
    extents = tuple(range(2, 2 + ndim))
    try:
        made = call.func(torch.empty(extents, device="meta"), *call.args[1:], **call.kwargs)
    except Exception:  # a form of the call that reads more than its first argument
        return None
    order = tuple(extent - 2 for extent in made.shape)
    return order if sorted(order) == list(range(ndim)) else None


def _shares_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    if not (has_data(first) and has_data(second)):
        return True
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def _place(at: Moment) -> str:
    path, op, _ = at[1]
    return f"{path}/{op}"


def _text(layout: Any) -> str:
    if isinstance(layout, torch.dtype):
        return str(layout).removeprefix("torch.")
    return "".join(map(str, layout)) if max(layout, default=0) < 10 else str(layout)
