"""Write a comparison to JSON and read it back, exactly: so that another policy can judge it without any tensor.

NaN and infinities, which JSON has not, are the strings "nan", "inf", "-inf". Measures are rows under one list of names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from align.compare.model import Comparison, Coverage, Measures, NodeComparison, Pairing
from align.dumpers.errors import UsageError
from align.dumpers.model import NodeKey, NodeKind, OpClass

SCHEMA = "align.comparison/1"
_NAMES = tuple(field.name for field in fields(Measures))
_INTEGERS = frozenset(field.name for field in fields(Measures) if field.type == "int")


def to_json(comparison: Comparison) -> str:
    """The comparison as one JSON object."""
    body = {
        "schema": SCHEMA,
        "has_baseline": comparison.has_baseline,
        "warnings": list(comparison.warnings),
        "coverage": {field.name: getattr(comparison.coverage, field.name) for field in fields(Coverage)},
        "measures": list(_NAMES),
        "nodes": [_write_node(node) for node in comparison.nodes],
    }
    return json.dumps(body, allow_nan=False, separators=(",", ":"))


def from_json(text: str) -> Comparison:
    """Read what `to_json` wrote. Raises UsageError when it is something else."""
    try:
        body: dict[str, Any] = json.loads(text)
        if body["schema"] != SCHEMA:
            raise ValueError(f"schema {body['schema']!r} instead of {SCHEMA!r}")
        nodes = tuple(_read_node(entry, body["measures"]) for entry in body["nodes"])
        return Comparison(nodes, Coverage(**body["coverage"]), bool(body["has_baseline"]), tuple(body["warnings"]))
    except (ValueError, KeyError, TypeError, UsageError) as exc:
        raise UsageError(f"not a comparison: {exc}", "give a file that this version of align wrote") from exc


def _write_node(node: NodeComparison) -> dict[str, Any]:
    return {
        "key": str(node.key),
        "order": node.order,
        "kind": node.kind,
        "op_class": node.op_class,
        "type_name": node.type_name,
        "dtype": node.dtype,
        "shape": list(node.shape),
        "pairing": node.pairing,
        "site": node.site,
        "problem": node.problem,
        "candidate": _write_measures(node.candidate),
        "baseline": _write_measures(node.baseline),
        "producers": [str(key) for key in node.producers],
    }


def _write_measures(measures: Measures | None) -> list[Any] | None:
    if measures is None:
        return None
    return [_write_figure(name, getattr(measures, name)) for name in _NAMES]


def _write_figure(name: str, value: Any) -> Any:
    if name == "max_abs_index":
        return [int(index) for index in value]
    if name in _INTEGERS:
        return int(value)
    figure = float(value)
    return figure if math.isfinite(figure) else str(figure)


def _read_node(entry: dict[str, Any], names: Sequence[str]) -> NodeComparison:
    return NodeComparison(
        key=NodeKey.parse(entry["key"]),
        order=entry["order"],
        kind=NodeKind(entry["kind"]),
        op_class=OpClass(entry["op_class"]),
        type_name=entry["type_name"],
        dtype=entry["dtype"],
        shape=tuple(entry["shape"]),
        pairing=Pairing(entry["pairing"]),
        candidate=_read_measures(entry["candidate"], names),
        baseline=_read_measures(entry["baseline"], names),
        site=entry["site"],
        problem=entry["problem"],
        producers=tuple(map(NodeKey.parse, entry["producers"])),
    )


def _read_measures(row: list[Any] | None, names: Sequence[str]) -> Measures | None:
    if row is None:
        return None
    return Measures(**{name: _read_figure(name, value) for name, value in zip(names, row, strict=True)})


def _read_figure(name: str, value: Any) -> Any:
    if name == "max_abs_index":
        return tuple(value)
    return value if name in _INTEGERS else float(value)
