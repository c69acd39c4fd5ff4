"""Write a run as JSON: one object with a schema version, keys in a fixed order, and no figure that JSON cannot hold.

NaN becomes null; infinities become the strings "Infinity" and "-Infinity", which Python's float() and JavaScript's
Number() both read. Keys and choices are written as their text forms.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from align.dumpers.choice import Choice, Plan
from align.dumpers.model import NodeKey
from align.reports.model import RunReport
from align.reports.summary import NodeRow, headline, node_rows, origin_rows, status_counts, worst_nodes

SCHEMA_VERSION = 1


def to_json(report: RunReport, *, indent: int = 1) -> str:
    """The whole run as one JSON object (docs: `schema_version` grows whenever a key changes its meaning or goes)."""
    return json.dumps(as_object(report), indent=indent, allow_nan=False, ensure_ascii=True) + "\n"


def as_object(report: RunReport) -> dict[str, Any]:
    """The object that `to_json` writes: dicts, lists, strings, numbers, booleans and None only."""
    rows = node_rows(report)
    return {
        "schema_version": SCHEMA_VERSION,
        "tool": "align",
        "workload": report.workload,
        "folder": report.folder,
        "command": report.command,
        "verdict": {
            "status": report.judgement.status.value,
            "is_fault": report.judgement.status.is_fault,
            "sentence": headline(report).sentence,
            "policy": report.judgement.policy,
            "outputs": plain(report.judgement.outputs),
            "origins": [str(row.node.key) for row in origin_rows(report)],
            "worst": [str(row.node.key) for row in worst_nodes(report)],
            "counts": {status.value: number for status, number in status_counts(rows)},
        },
        "coverage": {**plain(report.comparison.coverage), "share": plain(report.comparison.coverage.share)},
        "has_baseline": report.comparison.has_baseline,
        "runs": plain(report.roles),
        "choices": plain(report.choices),
        "timing": plain(report.timing),
        "culprits": plain(report.culprits),
        "origins": plain(report.origins),
        "floors": {str(floor.node): plain(floor.rel_l2) for floor in report.floors},
        "warnings": plain(report.comparison.warnings),
        "notes": plain(report.notes),
        "pictures": [{"label": label, "path": path} for label, path in report.pictures],
        "files": plain(report.files),
        "environment": dict(report.environment),
        "nodes": [_node(row) for row in rows],
    }


def _node(row: NodeRow) -> dict[str, Any]:
    verdict = {k: v for k, v in plain(row.verdict).items() if k != "key"}
    return {**plain(row.node), "excess": plain(row.node.excess), "verdict": verdict}


def plain(value: Any) -> Any:
    """A frozen value as JSON's own types: dataclasses by field order, sets sorted, floats made safe."""
    if value is None or (isinstance(value, bool | int | str) and not isinstance(value, Enum)):
        return value
    if isinstance(value, float):
        return _safe_float(float(value))
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, NodeKey | Choice):
        return str(value)
    if isinstance(value, Plan):
        return {**json.loads(value.to_json()), "digest": value.digest}
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    return _plain_group(value)


def _plain_group(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, frozenset | set):
        return sorted(plain(item) for item in value)
    return [plain(item) for item in value]


def _safe_float(value: float) -> float | str | None:
    if math.isnan(value):
        return None
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value
