"""What the page of one node shows beyond its measures: handed in beside a RunReport, for the nodes worth opening."""

from __future__ import annotations

from dataclasses import dataclass

from align.compare.model import ErrorDetail
from align.dumpers.model import NodeKey, Statistics


@dataclass(frozen=True, slots=True)
class NodePage:
    """Statistics of the three runs, where the error lies, and a picture of it.

    `detail` is of the candidate, `baseline_detail` of the baseline, both against the reference. `error_map` holds
    |c - r|, reduced to at most about 128 x 128 cells by maximum, rows first; `map_rows` and `map_columns` say what the
    two axes are (`channel`, `position`, `head`).
    """

    key: NodeKey
    reference: Statistics | None = None
    baseline: Statistics | None = None
    candidate: Statistics | None = None
    detail: ErrorDetail | None = None
    baseline_detail: ErrorDetail | None = None
    error_map: tuple[tuple[float, ...], ...] = ()
    map_rows: str = ""
    map_columns: str = ""
