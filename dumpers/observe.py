"""Record what nodes hold, at the moment they are made, into a sink that does the slow part in the background.

With `dataflow`, the nearest recorded nodes that each tensor was computed from are known too. It gives every record its
producers, whatever level is recorded.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import torch

from align.dumpers.families import op_class_of
from align.dumpers.labels import TensorLabels
from align.dumpers.model import OUTPUT_OP, NodeKey, NodeKind, NodeRecord, Storage
from align.dumpers.naming import flat_tensors, walk_tensors
from align.dumpers.placeholder import Placeholder
from align.dumpers.tensors import components, dtype_name, has_data, note_of
from align.dumpers.wire import Call, CallId, Tap


class Level(StrEnum):
    """Which calls become nodes."""

    MODULE = "module"
    CALL = "call"
    BOTH = "both"


class Keep(StrEnum):
    """What is stored of a node."""

    TENSORS = "tensors"
    STATISTICS = "stats"
    SAMPLE = "sample"


_STORAGE = {Keep.TENSORS: Storage.TENSOR, Keep.STATISTICS: Storage.STATISTICS, Keep.SAMPLE: Storage.SAMPLE}


@dataclass(frozen=True, slots=True)
class Selection:
    """Which nodes are recorded. Globs match the call's name (`path/op#call`) or its module path; empty means all."""

    level: Level = Level.BOTH
    keep: Keep = Keep.TENSORS
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    steps: frozenset[int] = frozenset()
    operators: tuple[str, ...] = ()
    inputs: bool = False
    rank: int = 0

    @property
    def sees_calls(self) -> bool:
        """Whether function calls are nodes."""
        return self.level is not Level.MODULE

    @property
    def sees_modules(self) -> bool:
        """Whether module calls are nodes."""
        return self.level is not Level.CALL

    def admits(self, ident: CallId, type_name: str) -> bool:
        """Whether a call's nodes are recorded, steps aside."""
        path, op, index = ident
        names = (f"{path}/{op}#{index}", path)
        if self.include and not _any_match(names, self.include):
            return False
        if self.exclude and _any_match(names, self.exclude):
            return False
        return not self.operators or _any_match((op, type_name), self.operators)


def _any_match(names: tuple[str, ...], globs: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, glob) for name in names for glob in globs)


class Sink(Protocol):
    """Where records go: the background writer, or a test's list."""

    def submit(self, record: NodeRecord, tensor: torch.Tensor) -> None:
        """Take a node: its value is read before this returns, or copied."""

    def submit_bare(self, record: NodeRecord) -> None:
        """Take a record of a node that holds no data."""


Keys = tuple[NodeKey, ...]


class Dataflow:
    """Know, of every tensor, the recorded nodes it stems from."""

    def __init__(self) -> None:
        self._labels: TensorLabels[Keys] = TensorLabels()

    def of(self, value: Any) -> Keys:
        """Labels of all tensors in a value, each node once."""
        get = self._labels.get
        if isinstance(value, torch.Tensor):
            return get(value) or ()
        labels = [keys for tensor in flat_tensors(value) if (keys := get(tensor))]
        if len(labels) < 2:
            return labels[0] if labels else ()
        return tuple(dict.fromkeys(key for keys in labels for key in keys))

    def label(self, tensor: torch.Tensor, keys: Keys) -> None:
        """Say which nodes a tensor stems from."""
        self._labels.put(tensor, keys)


class NoDataflow(Dataflow):
    """Label nothing: runs whose dataflow is known from the reference."""

    def of(self, value: Any) -> Keys:
        return ()

    def label(self, tensor: torch.Tensor, keys: Keys) -> None:
        return None


@dataclass(frozen=True, slots=True)
class Failure:
    """The call in which an exception arose, and the exception."""

    call: str
    type_name: str
    error: BaseException


class Observe(Tap):
    """Hand every admitted node to the sink. `sites` names, by call, the fused site whose output the call yields."""

    def __init__(
        self,
        sink: Sink,
        selection: Selection,
        *,
        dataflow: Dataflow,
        sites: Mapping[CallId, str] = {},
        on_node: Callable[[int], object] = int,
    ) -> None:
        self._sink = sink
        self._selection = selection
        self._sees_modules = selection.sees_modules
        self._sees_calls = selection.sees_calls
        self._records_inputs = selection.inputs
        self._storage = _STORAGE[selection.keep]
        self._flow = dataflow
        self._sites = sites
        self._on_node = on_node
        self._orders = itertools.count()
        self._admitted: dict[CallId, bool] = {}
        self._sources: dict[int, Keys] = {}
        self.on_output: Callable[[NodeKey, torch.Tensor], None] | None = None
        self.last: NodeKey | None = None
        self.failure: Failure | None = None

    @property
    def selection(self) -> Selection:
        """Which nodes are recorded."""
        return self._selection

    def enter(self, call: Call) -> None:
        self._begin(call)
        if self._records_inputs and self._sees_modules and self._wanted(call):
            self._inputs(call)

    def prepare(self, call: Call) -> None:
        self._begin(call)
        if self._records_inputs and self._sees_calls and self._wanted(call):
            self._inputs(call)

    def leave(self, call: Call, output: Any) -> Any:
        entered = self._sources.pop(id(call), ())
        if self._sees_modules and self._wanted(call):
            for slot, tensor in _parts(output):
                self._output(call, slot, tensor, NodeKind.MODULE, self._flow.of(tensor) or entered)
        return output

    def finish(self, call: Call, output: Any) -> Any:
        sources = self._sources.pop(id(call), ())
        if self._sees_calls and self._wanted(call):
            for slot, tensor in _parts(output):
                self._output(call, slot, tensor, NodeKind.CALL, sources)
        else:
            for tensor in flat_tensors(output):
                self._flow.label(tensor, sources)
        return output

    def fail(self, call: Call, error: BaseException) -> None:
        self._sources.pop(id(call), None)
        if self.failure is None or self.failure.error is not error:  # the innermost call is told first
            self.failure = Failure(str(call), call.type_name, error)

    def record_result(self, value: Any, step: int) -> Keys:
        """Record what the workload returned or yielded at a step; return the keys."""
        keys = []
        for slot, tensor in _parts(value):
            key = NodeKey("", OUTPUT_OP, 0, slot, step, self._selection.rank)
            self._record(key, tensor, NodeKind.MODULE, "result", self._flow.of(tensor))
            keys.append(key)
        return tuple(keys)

    def record_gradient(self, key: NodeKey, gradient: torch.Tensor) -> None:
        """Record a gradient that has arrived; its rank is filled in."""
        key = NodeKey(key.path, key.op, key.call, key.slot, key.step, self._selection.rank)
        self._record(key, gradient.detach(), NodeKind.GRADIENT, "gradient", ())

    def _begin(self, call: Call) -> None:
        self._sources[id(call)] = self._flow.of((call.args, call.kwargs) if call.kwargs else call.args)

    def _inputs(self, call: Call) -> None:
        path, op, index = call.ident
        for slot, tensor in _parts((list(call.args), dict(call.kwargs))):
            key = NodeKey(path, op, index, "in." + slot.split(".", 1)[1], call.step, self._selection.rank)
            self._record(key, tensor, NodeKind.INPUT, call.type_name, self._flow.of(tensor))

    def _wanted(self, call: Call) -> bool:
        if self._selection.steps and call.step not in self._selection.steps:
            return False
        admitted = self._admitted.get(call.ident)
        if admitted is None:
            admitted = self._admitted[call.ident] = self._selection.admits(call.ident, call.type_name)
        return admitted

    def _output(self, call: Call, slot: str, tensor: torch.Tensor, kind: NodeKind, producers: Keys) -> None:
        path, op, index = call.ident
        key = NodeKey(path, op, index, slot, call.step, self._selection.rank)
        self._record(key, tensor, kind, call.type_name, producers, self._sites.get(call.ident, ""))
        self._flow.label(tensor, (key,))
        if self.on_output is not None:
            self.on_output(key, tensor)

    def _record(
        self, key: NodeKey, tensor: torch.Tensor, kind: NodeKind, type_name: str, producers: Keys, site: str = ""
    ) -> None:
        dtype = dtype_name(tensor)
        order = next(self._orders)
        storage, note, has_values = self._storage, "", True
        if isinstance(tensor, Placeholder):
            storage, site, has_values = Storage.FUSED, tensor.site, False
        elif not has_data(tensor):
            storage, note, has_values = Storage.ABSENT, note_of(tensor), False
        elif not _is_ordinary(tensor):
            note = note_of(tensor)
        record = NodeRecord(
            key,
            order,
            kind,
            type_name,
            dtype,
            _shape_of(tensor),
            tensor.device.type,
            op_class_of(key.op if kind is NodeKind.CALL else type_name, dtype),
            producers,
            storage,
            None,
            "",
            site,
            note,
        )
        self._on_node(order + 1)
        if has_values:
            self._sink.submit(record, tensor)
        else:
            self._sink.submit_bare(record)
        self.last = key


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _is_ordinary(tensor: torch.Tensor) -> bool:
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_quantized


def _parts(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(slot, tensor) of every tensor of a value; a nested one, which has no shape, is its components: `0.0`, `0.1`."""
    if type(value) is torch.Tensor and not value.is_nested:
        yield "0", value
        return
    for slot, tensor in walk_tensors(value):
        if tensor.is_nested and has_data(tensor):
            yield from ((f"{slot}.{number}", part) for number, part in enumerate(components(tensor)))
        else:
            yield slot, tensor


def _shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    if type(tensor) in _PLAIN and not tensor.is_nested:
        return tuple(tensor.shape)
    try:
        return tuple(int(extent) for extent in tensor.shape)
    except (RuntimeError, TypeError, ValueError):  # ragged or symbolic, and without data: there is no number to tell
        return ()
