"""The catalog as rows: operators with their kernels, and the sites of one workload with what fusing each saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from align.operators.base import Operator
from align.operators.registry import catalog
from align.plan import PlannedSite
from align.reports.numbers import nbytes
from align.session import Session
from align.settings import RunSettings

DEVICES = ("npu", "cuda", "cpu")
_ON_CHIP_BYTES = (
    32 << 20
)  # an interior map beyond any on-chip memory goes through main memory even inside a fused kernel


@dataclass(frozen=True, slots=True)
class OperatorRow:
    """One operator: class, devices with a fused kernel, and how many sites of the workload it has."""

    name: str
    op_class: str
    summary: str
    kernels: tuple[str, ...]
    sites: int

    def as_object(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class SiteRow:
    """One site: whether a kernel takes it here, the bytes that fusing does not write, and a doubt if there is one."""

    site: str
    operator: str
    reason: str
    interior_nbytes: int
    doubt: str

    def as_object(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def catalog_rows(sites: Sequence[SiteRow]) -> tuple[OperatorRow, ...]:
    """All operators by name; entries of one name are one row."""
    rows = []
    for name in sorted({operator.name for operator in catalog()}):
        same = [operator for operator in catalog() if operator.name == name]
        kinds = tuple(kind for kind in DEVICES if any(kind in operator.kernels for operator in same))
        count = sum(site.operator == name for site in sites)
        told = main_entry(same)
        rows.append(OperatorRow(name, str(told.op_class), told.summary, kinds, count))
    return tuple(rows)


def main_entry(same: Sequence[Operator]) -> Operator:
    """Of the entries of one name the one that tells what the operator is: not that of a call of torch_npu."""
    return next((operator for operator in same if not operator.summary.startswith("torch_npu.")), same[0])


def site_rows(target: str, device: str, dtype: str) -> tuple[SiteRow, ...]:
    """Survey a target and list its sites."""
    session = Session(RunSettings(target=target, device=device, dtype=dtype))
    session.survey()
    return tuple(
        SiteRow(
            str(planned.choice),
            planned.site.operator,
            planned.reason,
            planned.site.interior_nbytes,
            doubt_of(planned),
        )
        for planned in session.sites
    )


_LAYOUT = ("contiguous", "permute", "clone")


def doubt_of(planned: PlannedSite) -> str:
    """Why fusing a site may not pay here, or "": its interior goes through main memory anyway, or is laid out anew."""
    if planned.site.interior_nbytes > _ON_CHIP_BYTES:
        return "interior larger than on-chip memory: measure before fusing"
    moved = [op for _, op, _ in planned.match.calls[:-1] if op in _LAYOUT]
    return f"layout changes in between ({moved[0]}): measure before fusing" if moved else ""


def print_catalog(rows: Sequence[OperatorRow], console: Console) -> None:
    """The operators as a table."""
    table = Table("operator", "class", "fused kernels", "sites", "what it is", box=None, pad_edge=False)
    for row in rows:
        table.add_row(
            row.name, row.op_class, ", ".join(row.kernels) or "none", str(row.sites) if row.sites else "", row.summary
        )
    console.print(table, markup=False)


def print_sites(rows: Sequence[SiteRow], console: Console) -> None:
    """The sites as a table."""
    table = Table("site", "saves", "here", box=None, pad_edge=False)
    for row in rows:
        table.add_row(
            row.site, nbytes(row.interior_nbytes) if row.interior_nbytes else "", row.reason or row.doubt or "fused"
        )
    console.print()
    console.print(table, markup=False)
