"""Read which kernels an NPU ran, and for how long, from torch_npu.profiler's kernel_details.csv.

Columns come and go with version and profiler level, so they are found by name: `Block Dim` became `Block Num`, and
`HF32 Eligible` exists from level 1 on.
"""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from align.dumpers.errors import TraceFormatError
from align.profiling.values import KernelTotal

_FILE = "kernel_details.csv"
_BLOCKS = ("Block Num", "Block Dim")


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One kernel that ran: its type names the operator (FlashAttentionScore, AddRmsNorm, ...)."""

    name: str
    type: str
    core: str
    seconds: float
    wait_seconds: float
    blocks: int
    is_hf32: bool


def read_kernel_details(path: Path) -> tuple[KernelRow, ...]:
    """Read a kernel_details.csv. Raises TraceFormatError when a column that is needed is missing."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            _check(path, rows.fieldnames or ())
            return tuple(_row(row) for row in rows)
    except OSError as exc:
        raise TraceFormatError(
            f"cannot read {path}: {exc.strerror}", "give the kernel_details.csv that torch_npu.profiler wrote"
        ) from exc


def _check(path: Path, columns: Iterable[str]) -> None:
    missing = sorted({"Name", "Type", "Duration(us)"} - {column.strip() for column in columns})
    if missing:
        raise TraceFormatError(
            f"{path} has no column {missing[0]!r}", "give the kernel_details.csv that torch_npu.profiler wrote"
        )


def _row(row: Mapping[str, str | None]) -> KernelRow:
    cells = {
        name.strip(): (value or "").strip()
        for name, value in row.items()
        if isinstance(name, str) and not isinstance(value, list)
    }
    blocks = next((cells[name] for name in _BLOCKS if cells.get(name)), "0")
    return KernelRow(
        cells["Name"], cells["Type"], cells.get("Accelerator Core", ""), _number(cells["Duration(us)"]) * 1e-6,
        _number(cells.get("Wait Time(us)", "")) * 1e-6, int(_number(blocks)),
        cells.get("HF32 Eligible", "").upper() == "YES",
    )  # fmt: skip


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # N/A, or an empty cell
        return 0.0


def kernel_totals(rows: Iterable[KernelRow]) -> tuple[KernelTotal, ...]:
    """Kernels of one type added up, the most time first; the note says where HF32 was at work."""
    groups: dict[str, list[KernelRow]] = {}
    for row in rows:
        groups.setdefault(row.type or row.name, []).append(row)
    total = sum(row.seconds for members in groups.values() for row in members)
    found = [_total(name, members, total) for name, members in groups.items()]
    return tuple(sorted(found, key=lambda kernel: (-kernel.seconds, kernel.name)))


def _total(name: str, members: list[KernelRow], total: float) -> KernelTotal:
    seconds = sum(row.seconds for row in members)
    cores = ", ".join(sorted({row.core for row in members if row.core and row.core != "N/A"}))
    note = f"{cores}{'; ' if cores else ''}HF32" if any(row.is_hf32 for row in members) else cores
    return KernelTotal(name, len(members), seconds, seconds / total if total else 0.0, note)


def profile_npu(run: Callable[[], Any]) -> tuple[KernelTotal, ...]:
    """Run under torch_npu's profiler and read what it wrote. Raises TraceFormatError when it wrote nothing."""
    import torch_npu

    tools = torch_npu.profiler
    with tempfile.TemporaryDirectory(prefix="align-profile-") as folder:
        config = tools._ExperimentalConfig(profiler_level=tools.ProfilerLevel.Level1, data_simplification=True)
        with tools.profile(
            activities=[tools.ProfilerActivity.CPU, tools.ProfilerActivity.NPU], experimental_config=config,
            on_trace_ready=tools.tensorboard_trace_handler(folder),
        ):  # fmt: skip
            run()
        found = sorted(Path(folder).rglob(_FILE))
        if not found:
            raise TraceFormatError(
                f"torch_npu.profiler wrote no {_FILE}", "check that CANN's msprof works on this machine"
            )
        return kernel_totals(row for path in found for row in read_kernel_details(path))
