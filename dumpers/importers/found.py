"""What every importer yields: the nodes of one run of another tool's dump, in order, values read when asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from align.dumpers.dtypes import RawTensor
from align.dumpers.errors import UsageError
from align.dumpers.model import NodeKey, NodeKind, RunStatus, Statistics, TraceHeader


class DumpFormat(StrEnum):
    """Formats that can be opened."""

    TRACE = "trace"
    MSPROBE = "msprobe"
    POLYGRAPHY = "polygraphy"
    ARRAYS = "numpy"
    SAFETENSORS = "safetensors"


class UnreadableValuesError(Exception):
    """The values of one tensor cannot be read: the importer keeps the rest, and says why."""


class FoundNode(NamedTuple):
    """One tensor of a dump. `load` reads its values and may raise UnreadableValuesError; None when none were kept."""

    key: NodeKey
    kind: NodeKind
    type_name: str
    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], RawTensor] | None = None
    statistics: Statistics | None = None
    digest: str = ""
    note: str = ""


class FoundDump(NamedTuple):
    """One run of one rank: `documents` are (name, text) pairs worth keeping, `warnings` what was not taken over."""

    format: DumpFormat
    header: TraceHeader
    nodes: Iterable[FoundNode]
    status: RunStatus = RunStatus.COMPLETE
    documents: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ImportSummary:
    """What an import took over: `tensors` with values, `described` by statistics only, `bare` with neither."""

    format: DumpFormat
    source: Path
    destination: Path
    nodes: int
    tensors: int
    described: int
    bare: int
    status: RunStatus
    warnings: tuple[str, ...] = ()


def split_part(source: str | os.PathLike[str]) -> tuple[Path, str]:
    """Path and the part of a dump that holds several runs: `results.json#onnxrt-runner`, `dump#rank3`."""
    path = Path(source)
    if path.exists() or "#" not in str(source):
        return path, ""
    text, _, part = str(source).rpartition("#")
    return Path(text), part


def choose_part(path: Path, part: str, parts: Iterable[str]) -> str:
    """The one part there is, or the one asked for. Raises UsageError with the parts when that does not decide."""
    known = list(parts)
    if part in known or (not part and len(known) == 1):
        return part or known[0]
    listing = ", ".join(known) or "none"
    problem = f"no part {part!r} in {path}" if part else f"{path} holds {len(known)} runs"
    raise UsageError(f"{problem}: {listing}", f"name one, for example {path}#{known[0] if known else 'rank0'}")


def named_key(name: str, step: int = 0) -> NodeKey:
    """Key of an array known by a name only: the name itself if it is a key, else the output of a module so named."""
    try:
        return NodeKey.parse(name)
    except UsageError:
        return NodeKey(name, "forward", 0, "0", step)
