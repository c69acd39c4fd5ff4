"""Write the HTML report of a run folder: pages with error detail and maps for the nodes a reader will open."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from align.compare.detail import detail
from align.compare.model import ErrorDetail
from align.dumpers.dtypes import Array, RawTensor, widen
from align.dumpers.errors import AlignError
from align.dumpers.model import NodeKey, Statistics, Storage
from align.dumpers.store import Trace
from align.reports.html import render_html
from align.reports.model import RunReport
from align.reports.pages import NodePage
from align.reports.summary import node_rows, worst_first

Cells = tuple[tuple[float, ...], ...]

_CELLS = 96
_LARGEST_DETAIL = 1 << 24  # elements; beyond it a page has statistics only, so that reports stay quick


def write_html(report: RunReport, folder: Path, path: Path, *, pages: int = 200) -> Path:
    """Write the report; the worst `pages` nodes get a page of their own. Needs no torch."""
    pictures = {role: (folder / name).read_bytes() for role, name in report.pictures if (folder / name).is_file()}
    path.write_text(render_html(report, _pages(report, folder, pages), pictures), encoding="utf-8")
    return path


def _pages(report: RunReport, folder: Path, count: int) -> tuple[NodePage, ...]:
    rows = worst_first(node_rows(report))[:count]
    with ExitStack() as stack:
        traces: dict[str, Trace] = {}
        for role in report.roles:
            place = folder / role.trace
            if place.is_file():
                traces[role.role] = stack.enter_context(Trace.open(place))
        return tuple(_page(row.node.key, traces) for row in rows)


def _page(key: NodeKey, traces: dict[str, Trace]) -> NodePage:
    statistics = {role: _statistics(trace, key) for role, trace in traces.items()}
    reference, baseline, candidate = (_tensor(traces, role, key) for role in ("reference", "baseline", "candidate"))
    cells: Cells = ()
    rows = columns = ""
    if candidate is not None and reference is not None and candidate.shape == reference.shape:
        cells, rows, columns = error_map(candidate, reference)
    return NodePage(
        key, statistics.get("reference"), statistics.get("baseline"), statistics.get("candidate"),
        _detail(candidate, reference), _detail(baseline, reference), cells, rows, columns,
    )  # fmt: skip


def _statistics(trace: Trace, key: NodeKey) -> Statistics | None:
    try:
        return trace.record(key).statistics
    except AlignError:
        return None


def _tensor(traces: dict[str, Trace], role: str, key: NodeKey) -> RawTensor | None:
    trace = traces.get(role)
    if trace is None:
        return None
    try:
        record = trace.record(key)
        if record.storage is not Storage.TENSOR or int(np.prod(record.shape)) > _LARGEST_DETAIL:
            return None
        return trace.read(key)
    except AlignError:
        return None


def _detail(mine: RawTensor | None, reference: RawTensor | None) -> ErrorDetail | None:
    if mine is None or reference is None or mine.shape != reference.shape:
        return None
    return detail(mine, reference)


def error_map(candidate: RawTensor, reference: RawTensor) -> tuple[Cells, str, str]:
    """|c - r| as a picture: the last two axes (leading ones by maximum), reduced to at most 96 cells a side."""
    ours, theirs = (_double(widen(raw)) for raw in (candidate, reference))
    with np.errstate(invalid="ignore"):  # two equal infinities are no error
        error = np.where(ours == theirs, 0.0, np.abs(ours - theirs))
    if error.ndim == 0 or error.size == 0:
        return (), "", ""
    flat = error.reshape(1, -1) if error.ndim == 1 else error.reshape(-1, *error.shape[-2:]).max(axis=0)
    names = ("", "position") if error.ndim == 1 else (f"axis {error.ndim - 2}", f"axis {error.ndim - 1}")
    cells = _reduce(_reduce(flat, 0), 1)
    return tuple(tuple(float(value) for value in row) for row in cells), *names


def _double(values: Array) -> Array:
    return values.astype(np.complex128 if np.iscomplexobj(values) else np.float64)


def _reduce(values: Array, axis: int) -> Array:
    extent = values.shape[axis]
    if extent <= _CELLS:
        return values
    edges: Sequence[int] = np.linspace(0, extent, _CELLS, endpoint=False, dtype=int).tolist()
    return np.maximum.reduceat(values, edges, axis=axis)
