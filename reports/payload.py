"""Pack the nodes of a run for the HTML page: columns instead of objects, strings once, figures to four digits; pure.

The page's scripts read it back by the same names. NaN is null, infinities are strings that JavaScript's Number() reads.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from align.compare.model import Measures, NodeComparison, Status
from align.dumpers.model import NodeKey
from align.reports.machine import plain
from align.reports.model import RunReport
from align.reports.numbers import shape
from align.reports.pages import NodePage
from align.reports.summary import MARKS, SEVERITY, NodeRow, node_rows
from align.reports.text import printable

MEASURES: tuple[str, ...] = tuple(field.name for field in fields(Measures) if field.name != "max_abs_index")
_DECADES = 4.0  # what an error map resolves; smaller errors are as good as none beside its largest
_STRING_COLUMNS: Mapping[str, Callable[[NodeRow], str]] = {
    "path": lambda row: row.node.key.path,
    "op": lambda row: row.node.key.op,
    "slot": lambda row: row.node.key.slot,
    "key": lambda row: str(row.node.key),
    "kind": lambda row: row.node.kind.value,
    "class": lambda row: row.node.op_class.value,
    "type": lambda row: row.node.type_name,
    "dtype": lambda row: row.node.dtype,
    "shape": lambda row: shape(row.node.shape),
    "pairing": lambda row: row.node.pairing.value,
    "site": lambda row: row.node.site,
    "problem": lambda row: row.node.problem,
    "metric": lambda row: row.verdict.metric,
    "why": lambda row: row.verdict.why,
    "at": lambda row: ", ".join(map(str, row.node.candidate.max_abs_index)) if row.node.candidate else "",
}


def packed(report: RunReport, pages: Sequence[NodePage]) -> dict[str, Any]:
    """The object that stands in the page: `strings`, `columns` (indices into it), `measures`, `pages`, `origins`."""
    rows = node_rows(report)
    place = {row.node.key: index for index, row in enumerate(rows)}
    strings = _Strings()
    floors = {floor.node: floor.rel_l2 for floor in report.floors}
    return {
        "statuses": [{"name": s.value, "mark": MARKS[s], "fault": s.is_fault} for s in SEVERITY],
        "columns": {name: [strings.index(read(row)) for row in rows] for name, read in _STRING_COLUMNS.items()},
        "status": [SEVERITY.index(row.status) for row in rows],
        "step": [row.node.key.step for row in rows],
        "value": [brief(row.verdict.value) for row in rows],
        "limit": [brief(row.verdict.limit) for row in rows],
        "floor": [brief(floors.get(str(row.node.key), math.nan)) for row in rows] if floors else [],
        "producers": [[place[key] for key in row.node.producers if key in place] for row in rows],
        "measures": {
            "candidate": _measure_columns(rows, lambda node: node.candidate),
            "baseline": _measure_columns(rows, lambda node: node.baseline),
        },
        "origins": _places(report.judgement.origins, place),
        "outputs": _places(report.judgement.outputs, place),
        "pages": {str(place[page.key]): _page(page) for page in pages if page.key in place},
        "strings": strings.items,
        "hidden": [SEVERITY.index(status) for status in (Status.FUSED_AWAY, Status.UNKNOWN)],
    }


def as_script(value: Any) -> str:
    """JSON that may stand inside `<script type="application/json">`: nothing in it can end the element or a line."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


class _Strings:
    """Each string once, made printable, under a number."""

    def __init__(self) -> None:
        self.items: list[str] = []
        self._known: dict[str, int] = {}

    def index(self, text: str) -> int:
        number = self._known.get(text)
        if number is None:
            number = self._known[text] = len(self.items)
            self.items.append(printable(text))
        return number


def _places(keys: Iterable[NodeKey], place: Mapping[NodeKey, int]) -> list[int]:
    return [place[key] for key in keys if key in place]


def _measure_columns(
    rows: Sequence[NodeRow], side: Callable[[NodeComparison], Measures | None]
) -> dict[str, list[Any]]:
    found = [side(row.node) for row in rows]
    return {name: [None if m is None else brief(getattr(m, name)) for m in found] for name in MEASURES}


def brief(value: float) -> float | int | str | None:
    """The figure as JSON, floats to four significant digits: more than is shown, half the bytes."""
    if isinstance(value, int):
        return value
    if not math.isfinite(value):
        return None if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return float(f"{value:.3e}")


def _levels(cells: Sequence[Sequence[float]]) -> dict[str, Any] | None:
    """An error map, one byte a cell: 0 zero or far below, 255 not finite, else logarithmic from `low` to `high`."""
    known = [math.log10(cell) for row in cells for cell in row if cell > 0 and math.isfinite(cell)]
    if not any(cells):
        return None
    high = max(known, default=0.0)
    low = max(high - _DECADES, min(known, default=-1.0))
    span = (high - low) or 1.0
    width = max(map(len, cells))
    levels = bytes(_level(cell, low, span) for row in cells for cell in (*row, *[0.0] * (width - len(row))))
    return {
        "rows": len(cells),
        "columns": width,
        "low": low,
        "high": low + span,
        "levels": base64.b64encode(levels).decode("ascii"),
    }


def _level(cell: float, low: float, span: float) -> int:
    if not math.isfinite(cell):
        return 255
    if cell <= 0:
        return 0
    return max(0, min(254, 1 + round((math.log10(cell) - low) / span * 253)))


def _page(page: NodePage) -> dict[str, Any]:
    return {
        "statistics": [plain(side) for side in (page.reference, page.baseline, page.candidate)],
        "detail": plain(page.detail),
        "baseline_detail": plain(page.baseline_detail),
        "map": _levels(page.error_map),
        "map_rows": printable(page.map_rows),
        "map_columns": printable(page.map_columns),
    }
