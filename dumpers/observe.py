"""Record what nodes hold, at the moment they are made, into a sink that does the slow part in the background.

With `dataflow`, tensors also carry a label: the keys of the nearest recorded nodes they were computed from. It gives
every record its producers, whatever level is recorded.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol

import torch

from align.dumpers.families import op_class_of
from align.dumpers.model import OUTPUT_OP, NodeKey, NodeKind, NodeRecord, Storage
from align.dumpers.naming import walk_tensors
from align.dumpers.placeholder import Placeholder
from align.dumpers.tensors import dtype_name, has_data, note_of
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


_LABEL = "_align_label"
Keys = tuple[NodeKey, ...]


class Dataflow:
    """Label tensors with the recorded nodes they stem from. Labels of other runs are told apart by their token."""

    def __init__(self) -> None:
        self._token = object()

    def of(self, value: Any) -> Keys:
        """Labels of all tensors in a value, each node once."""
        found: dict[NodeKey, None] = {}
        for _, tensor in walk_tensors(value):
            label = tensor.__dict__.get(_LABEL)
            if label is not None and label[0] is self._token:
                found.update(dict.fromkeys(label[1]))
        return tuple(found)

    def label(self, tensor: torch.Tensor, keys: Keys) -> None:
        """Say which nodes a tensor stems from."""
        tensor.__dict__[_LABEL] = (self._token, keys)


class NoDataflow(Dataflow):
    """Label nothing: runs whose dataflow is known from the reference."""

    def of(self, value: Any) -> Keys:
        return ()

    def label(self, tensor: torch.Tensor, keys: Keys) -> None:
        return None


class Observe(Tap):
    """Hand every admitted node to the sink. `sites` names, by call, the fused site whose output the call yields."""

    def __init__(
        self, sink: Sink, selection: Selection, *, dataflow: Dataflow, sites: Mapping[CallId, str] = {}, on_node: Callable[[int], None] = int
    ) -> None:  # fmt: skip
        self._sink = sink
        self._selection = selection
        self._flow = dataflow
        self._sites = sites
        self._on_node = on_node
        self._order = 0
        self._admitted: dict[CallId, bool] = {}
        self._sources: dict[int, Keys] = {}
        self.on_output: Callable[[NodeKey, torch.Tensor], None] | None = None

    def enter(self, call: Call) -> None:
        self._begin(call, is_seen=self._selection.sees_modules)

    def prepare(self, call: Call) -> None:
        self._begin(call, is_seen=self._selection.sees_calls)

    def leave(self, call: Call, output: Any) -> Any:
        entered = self._sources.pop(id(call), ())
        if self._selection.sees_modules and self._wanted(call):
            for slot, tensor in walk_tensors(output):
                self._output(call, slot, tensor, NodeKind.MODULE, self._flow.of(tensor) or entered)
        return output

    def finish(self, call: Call, output: Any) -> Any:
        sources = self._sources.pop(id(call), ())
        is_seen = self._selection.sees_calls and self._wanted(call)
        for slot, tensor in walk_tensors(output):
            if is_seen:
                self._output(call, slot, tensor, NodeKind.CALL, sources)
            else:
                self._flow.label(tensor, sources)
        return output

    def fail(self, call: Call, error: BaseException) -> None:
        self._sources.pop(id(call), None)

    def record_result(self, value: Any, step: int) -> Keys:
        """Record what the workload returned or yielded at a step; return the keys."""
        keys = []
        for slot, tensor in walk_tensors(value):
            key = NodeKey("", OUTPUT_OP, 0, slot, step, self._selection.rank)
            self._record(key, tensor, NodeKind.MODULE, "result", self._flow.of(tensor))
            keys.append(key)
        return tuple(keys)

    def record_gradient(self, key: NodeKey, gradient: torch.Tensor) -> None:
        """Record a gradient that has arrived."""
        self._record(replace(key, rank=self._selection.rank), gradient.detach(), NodeKind.GRADIENT, "gradient", ())

    def _begin(self, call: Call, *, is_seen: bool) -> None:
        self._sources[id(call)] = self._flow.of((call.args, call.kwargs))
        if self._selection.inputs and is_seen and self._wanted(call):
            path, op, index = call.ident
            for slot, tensor in walk_tensors((list(call.args), dict(call.kwargs))):
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
    ) -> None:  # fmt: skip
        dtype = dtype_name(tensor)
        judged_as = key.op if kind is NodeKind.CALL else type_name
        record = NodeRecord(
            key, self._order, kind, type_name, dtype, tuple(tensor.shape), tensor.device.type, op_class_of(judged_as, dtype),
            producers=producers, site=site,
        )  # fmt: skip
        self._order += 1
        self._on_node(self._order)
        if isinstance(tensor, Placeholder):
            self._sink.submit_bare(replace(record, storage=Storage.FUSED, site=tensor.site))
        elif not has_data(tensor):
            self._sink.submit_bare(replace(record, storage=Storage.ABSENT, note=note_of(tensor)))
        else:
            self._sink.submit(replace(record, storage=_STORAGE[self._selection.keep], note=note_of(tensor)), tensor)
