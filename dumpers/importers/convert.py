"""Write another tool's dump as a trace, and open any dump as one; what cannot be taken over is said, never dropped."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from align.dumpers.dtypes import RawTensor
from align.dumpers.errors import AlignError, TraceError
from align.dumpers.families import op_class_of
from align.dumpers.importers.detect import detect, read_dump
from align.dumpers.importers.found import (
    DumpFormat,
    FoundDump,
    FoundNode,
    ImportSummary,
    UnreadableValuesError,
    split_part,
)
from align.dumpers.model import NodeKey, NodeKind, NodeRecord, Storage
from align.dumpers.statistics import describe, digest
from align.dumpers.store import Trace, TraceWriter

_DOCUMENT = "import"
_COMMIT_BYTES = 1 << 28


def import_dump(
    source: str | os.PathLike[str], destination: str | os.PathLike[str], *, overwrite: bool = False
) -> ImportSummary:
    """Write the dump at `source` (`dump#rank3`, `results.json#runner` where it holds several runs) as a trace.

    Raises TraceFormatError when it is no dump we read, UsageError when a part must be named, TraceError when the
    destination exists or cannot be written. A torn dump gives a trace that says `incomplete`.
    """
    place, _ = split_part(source)
    dump = read_dump(source)
    writer = TraceWriter.create(destination, dump.header, overwrite=overwrite)
    with writer:
        summary = _write(dump, writer, place, Path(destination))
        writer.put_document(_DOCUMENT, _provenance(source, summary))
        for name, text in dump.documents:
            writer.put_document(name, text)
        writer.close(dump.status)
    return summary


def open_any(path: str | os.PathLike[str]) -> Trace:
    """Open a trace, or any dump as one: imported beside itself (`name.imported.h5`), used again while unchanged.

    Where the folder cannot be written, the trace goes to the system's folder for temporary files.
    """
    place, part = split_part(path)
    if detect(place) in (DumpFormat.TRACE, None) and place.is_file():
        return Trace.open(place)
    name = f"{place.absolute().name}{'.' + part if part else ''}.imported.h5".replace("/", "_")
    for folder in (place.absolute().parent, Path(tempfile.gettempdir())):
        cached = folder / name
        if not _is_current(cached, path):
            try:
                import_dump(path, cached, overwrite=True)
            except TraceError as exc:
                if isinstance(exc.__cause__, OSError) and folder == place.absolute().parent:
                    continue
                raise
        return Trace.open(cached)
    raise TraceError(f"cannot write a trace of {place}", "import it with `align import` to a place of your choice")


def _write(dump: FoundDump, writer: TraceWriter, source: Path, destination: Path) -> ImportSummary:
    counts = dict.fromkeys(Storage, 0)
    warnings = list(dump.warnings)
    pending = 0
    for record, raw in _records(dump, warnings):
        writer.put(record, raw)
        counts[record.storage] += 1
        pending += raw.bits.nbytes if raw is not None else 0
        if pending >= _COMMIT_BYTES:
            writer.commit()
            pending = 0
    return ImportSummary(
        dump.format, source, destination, sum(counts.values()), counts[Storage.TENSOR], counts[Storage.STATISTICS],
        counts[Storage.ABSENT], dump.status, tuple(warnings),
    )  # fmt: skip


def _records(dump: FoundDump, warnings: list[str]) -> Iterator[tuple[NodeRecord, RawTensor | None]]:
    """Records in order, with values where they can be read; producers are the nodes whose content an input repeats."""
    seen: dict[tuple[str, str, tuple[int, ...]], NodeKey] = {}
    sources: list[NodeKey] = []
    call = ""
    for order, node in enumerate(dump.nodes):
        record, raw = _record(node, order, warnings)
        here = f"{node.key.call_name}@{node.key.step}"
        if here != call:
            call, sources = here, []
        if node.kind is NodeKind.INPUT:
            source = seen.get((record.digest, record.dtype, record.shape))
            sources += [source] if source is not None and source not in sources else []
        else:
            record = _with_producers(record, sources)
            if _is_telling(record):
                seen[record.digest, record.dtype, record.shape] = node.key
        yield record, raw


def _with_producers(record: NodeRecord, sources: list[NodeKey]) -> NodeRecord:
    return replace(record, producers=tuple(sources)) if sources else record


def _is_telling(record: NodeRecord) -> bool:
    """Whether equal content means the same tensor: not for constants and single numbers."""
    seen = record.statistics
    return bool(record.digest) and math.prod(record.shape) > 1 and (seen is None or seen.minimum != seen.maximum)


def _record(node: FoundNode, order: int, warnings: list[str]) -> tuple[NodeRecord, RawTensor | None]:
    raw, note = None, node.note
    if node.load is not None:
        try:
            raw = node.load()
        except UnreadableValuesError as exc:
            note = f"{note}; values not read: {exc}" if note else f"values not read: {exc}"
            warnings.append(f"{node.key}: {exc}")
    elif "is missing" in note:
        warnings.append(f"{node.key}: {note}")
    statistics = describe(raw) if raw is not None else node.statistics
    storage = Storage.TENSOR if raw is not None else Storage.STATISTICS if statistics else Storage.ABSENT
    dtype, shape = (raw.dtype, tuple(raw.shape)) if raw is not None else (node.dtype, node.shape)
    operation = node.key.op if node.kind is NodeKind.CALL else node.type_name.rpartition(".")[2]
    return NodeRecord(
        node.key, order, node.kind, node.type_name, dtype, shape, "unknown", op_class_of(operation, dtype),
        storage=storage, statistics=statistics, digest=digest(raw) if raw is not None else node.digest, note=note,
    ), raw  # fmt: skip


def _provenance(source: str | os.PathLike[str], summary: ImportSummary) -> str:
    facts = {
        "format": str(summary.format), "source": str(source), "state": _state(split_part(source)[0]),
        "warnings": list(summary.warnings), "tensors": summary.tensors, "described": summary.described,
    }  # fmt: skip
    return json.dumps(facts, indent=1)


def _state(place: Path) -> list[int]:
    """Number of files, their bytes and the newest change: another state is another dump."""
    base = place.parent if place.is_file() and place.name in ("dump.json", "debug.json") else place
    files = [base] if base.is_file() else [file for file in base.rglob("*") if file.is_file()]
    found = [file.stat() for file in files if not file.name.endswith(".imported.h5")]
    return [len(found), sum(entry.st_size for entry in found), max((entry.st_mtime_ns for entry in found), default=0)]


def _is_current(cached: Path, source: str | os.PathLike[str]) -> bool:
    """Whether this is a finished import of the source as it is now."""
    if not cached.is_file():
        return False
    try:
        with Trace.open(cached) as trace:
            facts = json.loads(trace.document(_DOCUMENT))
    except (AlignError, ValueError):
        return False
    return bool(facts.get("state") == _state(split_part(source)[0]) and facts.get("source") == str(source))
