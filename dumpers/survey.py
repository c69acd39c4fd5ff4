"""Note every call's name, the calls its inputs came from, and who reads its outputs: the dataflow of one run.

The survey costs nothing extra: it rides on the reference run. It remembers, of every tensor, the call that made it; no
tensor is touched or kept alive, so nothing torch computes can change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from align.dumpers.labels import TensorLabels
from align.dumpers.model import NodeKey
from align.dumpers.naming import map_tensors, walk_tensors
from align.dumpers.wire import Call, CallId, Tap

# These hand back their very input when there is nothing to do, as every cast to float32 does in the reference run.
_MAY_RETURN_INPUT = frozenset({
    "to", "type", "type_as", "float", "double", "half", "bfloat16", "cpu", "cuda", "npu", "contiguous",
    "dropout", "flatten", "ravel",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Origin:
    """The output slot of a call in a step that a tensor came from."""

    step: int
    ident: CallId
    slot: str

    def key(self, rank: int = 0) -> NodeKey:
        """The node's key."""
        path, op, index = self.ident
        return NodeKey(path, op, index, self.slot, self.step, rank)


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor argument: where it came from (None: a parameter, buffer or input) and what it looks like."""

    origin: Origin | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_parameter: bool = False


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One call as the survey saw it: arguments with tensors replaced by `Operand`, outputs as `Operand` by slot."""

    ident: CallId
    step: int
    order: int
    qualified: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[tuple[str, Operand], ...]

    @property
    def op(self) -> str:
        """Short name of the function."""
        return self.ident[1]

    @property
    def path(self) -> str:
        """Path of the module the call happens in."""
        return self.ident[0]

    @property
    def name(self) -> str:
        """`path/op#call`."""
        path, op, index = self.ident
        return f"{path}/{op}#{index}"

    @property
    def output(self) -> Operand | None:
        """The first output, if any."""
        return self.outputs[0][1] if self.outputs else None

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument given by position or by name."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)


OUTSIDE = ("", "(outside)", 0)
"""Reader of tensors that leave the model: final outputs, yielded values, values read into Python."""


class CallGraph:
    """The calls of a run and who reads what: the ground on which patterns are matched."""

    def __init__(self) -> None:
        self._calls: dict[tuple[int, CallId], CallRecord] = {}
        self._readers: dict[tuple[int, CallId], set[tuple[int, CallId]]] = {}
        self._steps: dict[CallId, list[int]] = {}

    def add(self, record: CallRecord) -> None:
        """Enter a call; its operands' makers get it as a reader."""
        self._calls[record.step, record.ident] = record
        self._steps.setdefault(record.ident, []).append(record.step)
        for operand in _operands((record.args, record.kwargs)):
            self.add_reader(operand.origin, record.step, record.ident)

    def add_reader(self, origin: Origin | None, step: int, reader: CallId) -> None:
        """Note that `reader` reads the tensor that came from `origin`."""
        if origin is not None:
            self._readers.setdefault((origin.step, origin.ident), set()).add((step, reader))

    def __iter__(self) -> Iterator[CallRecord]:
        return iter(self._calls.values())

    def __len__(self) -> int:
        return len(self._calls)

    def record(self, step: int, ident: CallId) -> CallRecord | None:
        """The call of that identifier in a step."""
        return self._calls.get((step, ident))

    def reader_ids(self, record: CallRecord) -> frozenset[tuple[int, CallId]]:
        """(step, identifier) of every reader of any output of a call; OUTSIDE among them if it leaves the model."""
        return frozenset(self._readers.get((record.step, record.ident), ()))

    def maker(self, operand: Any) -> CallRecord | None:
        """The call an argument came from, or None when it is no tensor, or a parameter, buffer or input."""
        if not isinstance(operand, Operand) or operand.origin is None:
            return None
        return self._calls.get((operand.origin.step, operand.origin.ident))

    def readers(self, record: CallRecord) -> tuple[CallRecord | None, ...]:
        """The calls that read any output of a call, in order; None stands for a reader outside the model."""
        found = self._readers.get((record.step, record.ident), set())
        calls = [self._calls.get(key) for key in found]
        return tuple(sorted(calls, key=lambda call: -1 if call is None else call.order))

    def steps_of(self, ident: CallId) -> tuple[int, ...]:
        """The steps in which a call happens."""
        return tuple(self._steps.get(ident, ()))


def _operands(value: Any) -> Iterator[Operand]:
    if isinstance(value, Operand):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _operands(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _operands(item)


class Survey(Tap):
    """Build the call graph of a run."""

    def __init__(self) -> None:
        self.graph = CallGraph()
        self._order = 0
        self._origins: TensorLabels[Origin] = TensorLabels()
        self._inputs: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def prepare(self, call: Call) -> None:
        self._inputs[id(call)] = self._describe(call)

    def _describe(self, call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args = tuple(_strip(item, self._operand) for item in call.args)
        kwargs = {name: _strip(item, self._operand) for name, item in call.kwargs.items()}
        return args, kwargs

    def finish(self, call: Call, output: Any) -> Any:
        args, kwargs = self._inputs.pop(id(call))
        if call.op in _MAY_RETURN_INPUT:
            output = _apart(call, output)
        outputs = []
        for slot, tensor in walk_tensors(output):
            self._origins.put(tensor, Origin(call.step, call.ident, slot))
            outputs.append((slot, self._operand(tensor)))
        qualified = call.name.qualified if call.name else ""
        self.graph.add(CallRecord(call.ident, call.step, self._order, qualified, args, kwargs, tuple(outputs)))
        self._order += 1
        return output

    def fail(self, call: Call, error: BaseException) -> None:
        self._inputs.pop(id(call), None)

    def read(self, call: Call) -> None:
        self.note_outside((call.args, call.kwargs), call.step)

    def note_outside(self, value: Any, step: int) -> None:
        """Note that the tensors in a value leave the model: nothing may fuse them away."""
        for _, tensor in walk_tensors(value):
            self.graph.add_reader(self._origins.get(tensor), step, OUTSIDE)

    def _operand(self, tensor: torch.Tensor) -> Operand:
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        return Operand(self._origins.get(tensor), tuple(tensor.shape), tensor.dtype, is_parameter)


def _strip(value: Any, describe: Any) -> Any:
    """The value with tensors replaced by what is to be remembered of them; nothing is kept alive."""
    return describe(value) if isinstance(value, torch.Tensor) else map_tensors(value, describe)


def _apart(call: Call, output: Any) -> Any:
    """The output as a tensor of its own: one object cannot carry two marks, its maker's and the cast's."""
    is_input = bool(call.args) and output is call.args[0] and call.kwargs.get("inplace") is not True
    return output.view_as(output) if is_input and isinstance(output, torch.Tensor) else output
