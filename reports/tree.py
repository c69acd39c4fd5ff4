"""Gather nodes into their module tree, each branch with the worst of what lies under it; pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from align.compare.model import Status
from align.reports.summary import SEVERITY, NodeRow

DEEPEST = 60  # further dots stay inside one name, so that a hostile path cannot exhaust the stack


@dataclass(frozen=True, slots=True)
class Branch:
    """A module: its own nodes and its sub-modules. `heat` is the worst excess below, `status` the gravest below."""

    name: str
    path: str
    rows: tuple[NodeRow, ...]
    children: tuple[Branch, ...]
    heat: float
    status: Status
    nodes: int
    faults: int


def module_tree(rows: Iterable[NodeRow]) -> Branch:
    """The tree of all module paths among the rows, children in order of first execution; the root has an empty path."""
    grown = _Growth("")
    for row in rows:
        grown.descend(row.node.key.path).rows.append(row)
    return grown.finish("")


class _Growth:
    """A branch while it is being filled."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows: list[NodeRow] = []
        self.children: dict[str, _Growth] = {}

    def descend(self, path: str) -> _Growth:
        here = self
        for part in path.split(".", DEEPEST) if path else ():
            here = here.children.setdefault(part, _Growth(part))
        return here

    def finish(self, path: str) -> Branch:
        children = tuple(child.finish(f"{path}.{name}" if path else name) for name, child in self.children.items())
        statuses = [row.status for row in self.rows] + [child.status for child in children]
        return Branch(
            self.name,
            path,
            tuple(self.rows),
            children,
            heat=max([row.heat for row in self.rows] + [child.heat for child in children], default=1.0),
            status=min(statuses, key=SEVERITY.index, default=Status.UNKNOWN),
            nodes=len(self.rows) + sum(child.nodes for child in children),
            faults=sum(row.status.is_fault for row in self.rows) + sum(child.faults for child in children),
        )
