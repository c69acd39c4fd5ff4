"""`align show`: what a trace or a run folder holds, in the terminal."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from align.compare.source import open_source
from align.dumpers.dtypes import RawTensor, widen
from align.dumpers.model import NodeKey, NodeRecord, RunStatus, Storage
from align.dumpers.store import Trace
from align.reports.machine import plain, to_json
from align.reports.numbers import figure, nbytes
from align.reports.stored import load
from align.reports.summary import node_rows, parse_statuses
from align.reports.terminal import print_nodes, print_tree
from align.reports.text import printable, shorten

_EDGE = 4  # values printed at each end of a tensor


@dataclass(frozen=True, slots=True)
class RunView:
    """How to show a run folder."""

    top: int
    only: str
    is_tree: bool
    node: str
    is_json: bool


def show_run(folder: Path, console: Console, view: RunView) -> None:
    """The nodes of a run: table, tree, one node, or JSON."""
    report = load(folder)
    only = parse_statuses(view.only) if view.only else frozenset()
    if view.is_json:
        console.file.write(to_json(report) + "\n")
    elif view.is_tree:
        print_tree(report, console, only=only)
    else:
        print_nodes(report, console, top=view.top or len(node_rows(report)), only=only, glob=view.node or "*")


def list_nodes(path: Path, console: Console, *, top: int, is_json: bool) -> None:
    """The nodes of a trace in execution order, with what the run was and how it ended."""
    with open_source(path) as trace:
        header, nodes = trace.header, trace.nodes
        if is_json:
            body = {
                "schema_version": 1,
                "header": plain(asdict(header)),
                "status": str(trace.status),
                "nodes": [_as_object(r) for r in nodes],
            }
            console.file.write(json.dumps(body) + "\n")
            return
        _print_header(
            path,
            header.workload,
            f"{header.role} on {header.device} in {header.dtype}, seed {header.seed}",
            trace.status,
            console,
        )
        table = Table("node", "type", "dtype", "shape", "|max|", "std", "kept", box=None, pad_edge=False)
        for record in nodes[: top or len(nodes)]:
            statistics = record.statistics
            numbers = (figure(statistics.absmax), figure(statistics.std)) if statistics else ("", "")
            name = Text(shorten(printable(str(record.key)), 44))
            table.add_row(
                name, Text(printable(record.type_name)), record.dtype, _shape(record), *numbers, str(record.storage)
            )
        console.print(table)
        hidden = len(nodes) - (top or len(nodes))
        console.print(
            f"{len(nodes)} nodes, {nbytes(sum(record.nbytes for record in nodes))}"
            + (f"; {hidden} not shown" if hidden > 0 else ""),
            markup=False,
        )


def _print_header(path: Path, workload: str, run: str, status: RunStatus, console: Console) -> None:
    console.print(Text(f"{path}: {printable(workload)}, {run}"))
    if status is not RunStatus.COMPLETE:
        console.print(Text(f"the run is {status}: the nodes below are those sealed before it ended", style="yellow"))


def _shape(record: NodeRecord) -> str:
    return "x".join(map(str, record.shape)) or "scalar"


def _as_object(record: NodeRecord) -> object:
    return plain(asdict(record)) | {"key": str(record.key), "producers": [str(key) for key in record.producers]}


def show_node(path: Path, text: str, console: Console, *, is_json: bool) -> None:
    """Statistics and values of one node."""
    with Trace.open(path) as trace:
        record = trace.record(NodeKey.parse(text))
        raw = trace.read(record.key) if record.storage in (Storage.TENSOR, Storage.SAMPLE) else None
        if is_json:
            console.file.write(json.dumps(_as_object(record)) + "\n")
            return
        console.print(
            Text(f"{record.key}  {printable(record.type_name)}  {record.dtype}  {_shape(record)}  {record.storage}")
        )
        if record.producers:
            console.print(Text("reads " + ", ".join(printable(str(key)) for key in record.producers)))
        if record.note:
            console.print(Text(printable(record.note)))
        if record.statistics is not None:
            for name, value in asdict(record.statistics).items():
                console.print(Text(f"  {name:<11} {figure(float(value))}"))
        if raw is not None:
            console.print(Text(_values(raw)))


def _values(raw: RawTensor) -> str:
    with np.printoptions(edgeitems=_EDGE, threshold=64, linewidth=96, precision=6):
        return str(widen(raw))


def verify(path: Path, console: Console) -> bool:
    """Check every stored tensor against its digest; whether all agree."""
    bad: list[str] = []
    count = 0
    with Trace.open(path) as trace:
        for key, is_good in trace.verify():
            count += 1
            if not is_good:
                bad.append(str(key))
    for name in bad:
        console.print(Text(f"damaged: {name}", style="bold red"))
    console.print(Text(f"{count - len(bad)} of {count} stored tensors agree with their digests"))
    return not bad
