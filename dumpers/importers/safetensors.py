"""Read .safetensors files by mapping them: eight bytes of length, a JSON header, one buffer.

Read here rather than through the package of that name: its numpy side has no bfloat16 and no float8, its raw side
takes the whole file as bytes, and the format is these few lines. Every offset is checked before it is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from align.dumpers.dtypes import RawTensor, dtype_of
from align.dumpers.errors import TraceFormatError
from align.dumpers.importers.arrays import common_dtype, natural_order
from align.dumpers.importers.found import DumpFormat, FoundDump, FoundNode, named_key
from align.dumpers.model import NodeKind, TraceHeader

_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64", "U8": "uint8",
    "U16": "uint16", "U32": "uint32", "U64": "uint64", "BOOL": "bool", "C64": "complex64",
}  # fmt: skip
_LONGEST_HEADER = 100_000_000


def read_safetensors(path: Path) -> FoundDump:
    """All tensors of a file, or of a folder of shards, in the order they lie in. Raises TraceFormatError if damaged."""
    files = sorted(path.glob("*.safetensors"), key=lambda file: natural_order(file.name)) if path.is_dir() else [path]
    nodes: list[FoundNode] = []
    warnings: list[str] = []
    documents: list[tuple[str, str]] = []
    for file in files:
        header, start = read_header(file)
        metadata = header.pop("__metadata__", None)
        if metadata:
            documents.append((f"{file.name}.json", json.dumps(metadata, indent=1)))
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            if entry["dtype"] in _NAMES:
                nodes.append(_found(file, start, name, entry))
            else:
                warnings.append(f"{name} left out: dtype {entry['dtype']} is not known here")
    trace_header = TraceHeader(path.stem, "imported", "unknown", common_dtype(nodes), 0)
    return FoundDump(DumpFormat.SAFETENSORS, trace_header, nodes, documents=tuple(documents), warnings=tuple(warnings))


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """The JSON header, with every tensor's extent checked against the file, and where the buffer starts."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, _LONGEST_HEADER):
            raise _damaged(file, f"the header says it is {length} bytes long, the file has {size}")
        try:
            header = json.loads(stream.read(length))
            for name, entry in header.items():
                if name != "__metadata__":
                    _check(file, name, entry, size - 8 - length)
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise _damaged(file, f"its header cannot be read: {exc}") from exc
    return header, 8 + length


def _check(file: Path, name: str, entry: dict[str, Any], room: int) -> None:
    begin, end = entry["data_offsets"]
    if not 0 <= begin <= end <= room:
        raise _damaged(file, f"{name} lies at bytes {begin} to {end} of {room}")
    count = 1
    for extent in entry["shape"]:
        count *= int(extent)
    known = _NAMES.get(entry["dtype"])
    if known and count * dtype_of(known).itemsize != end - begin:
        raise _damaged(file, f"{name} of shape {entry['shape']} has {end - begin} bytes")


def _damaged(file: Path, why: str) -> TraceFormatError:
    return TraceFormatError(f"{file} is no whole safetensors file: {why}", "copy or write the file again")


def _found(file: Path, start: int, name: str, entry: dict[str, Any]) -> FoundNode:
    dtype, shape = _NAMES[entry["dtype"]], tuple(int(extent) for extent in entry["shape"])
    load: Callable[[], RawTensor] = partial(_read, file, start + entry["data_offsets"][0], dtype, shape)
    return FoundNode(named_key(name), NodeKind.MODULE, "", dtype, shape, load)


def _read(file: Path, offset: int, dtype: str, shape: tuple[int, ...]) -> RawTensor:
    """Map the values; the format is little-endian and row-major, as memory is."""
    carrier = np.dtype(dtype_of(dtype).carrier)
    if 0 in shape:
        return RawTensor(np.zeros(shape, carrier), dtype)
    flat = np.memmap(file, carrier.newbyteorder("<"), "r", offset, shape or (1,))
    return RawTensor(np.asarray(flat).reshape(shape).astype(carrier, copy=False), dtype)
