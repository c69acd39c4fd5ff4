"""The catalog: every operator by name, and the search for their sites in a surveyed run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

import torch

from align.dumpers.choice import Site
from align.dumpers.dtypes import itemsize
from align.dumpers.errors import UsageError
from align.dumpers.survey import OUTSIDE, CallGraph, CallRecord, Operand
from align.dumpers.wire import CallId
from align.operators.base import ByName, Finder, Match, Operator

_NOT_OPERATORS = frozenset({"base", "registry"})


@cache
def _built_in() -> tuple[Operator, ...]:
    """Operators of every file in this folder, by file name; each file names its own in OPERATORS."""
    import align.operators as folder

    found: list[Operator] = []
    for info in sorted(iter_modules(folder.__path__), key=lambda item: item.name):
        if info.name in _NOT_OPERATORS or info.name.startswith("_"):
            continue
        module = import_module(f"align.operators.{info.name}")
        found.extend(module.OPERATORS)
    return tuple(found)


_registered: dict[str, Operator] = {}


def register(operator: Operator) -> Operator:
    """Add an operator of the user's own. Raises UsageError when the name is taken, naming both."""
    for other in catalog():
        if other.name == operator.name:
            raise UsageError(
                f"operator {operator.name!r} is registered twice: {other.summary!r} and {operator.summary!r}",
                "give the second one another name",
            )
    _registered[operator.name] = operator
    return operator


def unregister(name: str) -> None:
    """Take a user's operator out again."""
    _registered.pop(name, None)


def catalog() -> tuple[Operator, ...]:
    """All operators: built-in ones and the user's."""
    return _built_in() + tuple(_registered.values())


def find_sites(
    graph: CallGraph, operators: Iterable[Operator], kind: str = "", dtype: torch.dtype = torch.float32
) -> tuple[Match, ...]:
    """Recognise operators in a surveyed run, no call in two sites, in execution order.

    A match stands only if its interior values have no reader outside the site, and if it is the same in every step in
    which any of its calls happens. Where matches overlap, one wins whose kernel on that kind of device takes these
    operands in that dtype ("" prefers none), then the one of more calls, then the earlier.
    """
    candidates: dict[CallId, list[tuple[CallRecord, Match]]] = {}
    for record, match in _closed_matches(graph, tuple(operators)):
        candidates.setdefault(record.ident, []).append((record, match))
    steady = [item for ident, found in candidates.items() for item in _steady(ident, found, graph)]
    refused = {id(match): bool(why_unfused(match, graph, kind, dtype)) for _, match in steady}
    steady.sort(key=lambda item: (refused[id(item[1])], -len(item[1].calls), item[0].order))
    claimed: set[CallId] = set()
    chosen: list[tuple[int, Match]] = []
    for record, match in steady:
        wanted = (*match.calls, *match.kept)
        if claimed.isdisjoint(wanted):
            claimed.update(wanted)
            chosen.append((record.order, match))
    return tuple(match for _, match in sorted(chosen, key=lambda item: item[0]))


def why_unfused(match: Match, graph: CallGraph, kind: str, dtype: torch.dtype) -> str:
    """The reason why a site cannot run fused on that kind of device in that dtype, or ""."""
    kernel = match.operator.kernels.get(kind)
    if kernel is None:
        return f"no fused kernel on {kind}"
    step = graph.steps_of(match.calls[-1])[0]
    return kernel.refuses(match.bound(graph, step), dtype)


class FinderIndex:
    """The finders worth asking of calls of a function, in the catalog's order; remembered by its name."""

    def __init__(self, operators: Iterable[Operator]) -> None:
        self._all = tuple(find for operator in operators for find in operator.finders)
        self._by_name: dict[str, tuple[Finder, ...]] = {}

    def of(self, op: str) -> tuple[Finder, ...]:
        """All finders but those that wait for another name."""
        if op not in self._by_name:
            self._by_name[op] = tuple(find for find in self._all if not isinstance(find, ByName) or find.op == op)
        return self._by_name[op]


def _closed_matches(graph: CallGraph, operators: Sequence[Operator]) -> Iterator[tuple[CallRecord, Match]]:
    index = FinderIndex(operators)
    for record in graph:
        for find in index.of(record.op):
            match = find(record, graph)
            if match is not None and _is_closed(match, record.step, graph):
                yield record, match


def _is_closed(match: Match, step: int, graph: CallGraph) -> bool:
    inside = set(match.calls)
    for ident in match.calls[:-1]:
        record = graph.record(step, ident)
        if record is None:
            return False
        for reader_step, reader in graph.reader_ids(record):
            if reader == OUTSIDE or reader_step != step or reader not in inside:
                return False
    return True


def _steady(
    ident: CallId, found: Sequence[tuple[CallRecord, Match]], graph: CallGraph
) -> Iterable[tuple[CallRecord, Match]]:
    by_match: dict[tuple[str, tuple[CallId, ...]], list[tuple[CallRecord, Match]]] = {}
    for record, match in found:
        by_match.setdefault((match.operator.name, match.calls), []).append((record, match))
    for same in by_match.values():
        steps = {record.step for record, _ in same}
        if all(set(graph.steps_of(call)) <= steps for call in same[0][1].calls):
            yield same[0]


def site_of(match: Match, graph: CallGraph, dtype: torch.dtype) -> Site:
    """The site's value: call names, class, and the bytes its interior tensors take in the run's dtype."""
    step = graph.steps_of(match.calls[-1])[0]
    width = itemsize(str(dtype).removeprefix("torch."))
    interior = 0
    for ident in match.calls[:-1]:
        record = graph.record(step, ident)
        out = record.output if record is not None else None
        interior += _count(out) * width
    names = tuple(f"{path}/{op}#{index}" for path, op, index in match.calls)
    operator = match.operator
    return Site(operator.name, names, operator.op_class, match.is_written_fused, interior)


def _count(operand: Operand | None) -> int:
    if operand is None:
        return 0
    count = 1
    for extent in operand.shape:
        count *= extent
    return count
