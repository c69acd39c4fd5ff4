"""Tell what kind of dump lies at a path, from its content, reading a few kilobytes at most."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path

from align.dumpers.errors import TraceFormatError
from align.dumpers.importers.arrays import read_arrays
from align.dumpers.importers.found import DumpFormat, FoundDump, split_part
from align.dumpers.importers.msprobe import find_steps, read_msprobe
from align.dumpers.importers.polygraphy import read_polygraphy
from align.dumpers.importers.safetensors import read_safetensors

_ENDS = 4096
_HDF5 = b"\x89HDF\r\n\x1a\n"


def detect(path: str | os.PathLike[str]) -> DumpFormat | None:
    """The format of a file or folder (`#part` is left aside); None when it is none we read."""
    place, _ = split_part(path)
    if place.is_dir():
        return _detect_folder(place)
    return _detect_file(place) if place.is_file() else None


def read_dump(path: str | os.PathLike[str]) -> FoundDump:
    """The dump at a path, not yet its values. Raises TraceFormatError with the formats there are."""
    place, part = split_part(path)
    read = _READERS.get(detect(place))
    if read is None:
        known = ", ".join(str(form) for form in DumpFormat)
        problem = f"nothing to import at {place}" if place.exists() else f"there is nothing at {place}"
        raise TraceFormatError(problem, f"formats that can be read: {known}")
    return read(place, part)


_READERS: dict[DumpFormat | None, Callable[[Path, str], FoundDump]] = {
    DumpFormat.MSPROBE: read_msprobe,
    DumpFormat.POLYGRAPHY: read_polygraphy,
    DumpFormat.ARRAYS: lambda path, _: read_arrays(path),
    DumpFormat.SAFETENSORS: lambda path, _: read_safetensors(path),
}


def _detect_folder(path: Path) -> DumpFormat | None:
    if find_steps(path):
        return DumpFormat.MSPROBE
    if next(path.glob("*.safetensors"), None):
        return DumpFormat.SAFETENSORS
    has_arrays = any(file.suffix in (".npy", ".npz") for file in path.rglob("*"))
    return DumpFormat.ARRAYS if has_arrays else None


def _detect_file(path: Path) -> DumpFormat | None:
    head, tail = _ends(path)
    if head.startswith(_HDF5):
        return DumpFormat.TRACE
    if head.startswith(b"\x93NUMPY"):
        return DumpFormat.ARRAYS
    if head.startswith(b"PK") and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return DumpFormat.ARRAYS if any(name.endswith(".npy") for name in archive.namelist()) else None
    if head[8:9] == b"{" and 2 <= int.from_bytes(head[:8], "little") < path.stat().st_size:
        return DumpFormat.SAFETENSORS
    return _detect_json(path, head + tail) if head.lstrip()[:1] in (b"{", b"[") else None


def _detect_json(path: Path, ends: bytes) -> DumpFormat | None:
    if b'"polygraphy_class"' in ends or b"__polygraphy_encoded_" in ends:
        return DumpFormat.POLYGRAPHY
    is_msprobe = path.name in ("dump.json", "debug.json") or (b'"task"' in ends and b'"data"' in ends)
    return DumpFormat.MSPROBE if is_msprobe else None


def _ends(path: Path) -> tuple[bytes, bytes]:
    """First and last few kilobytes."""
    try:
        with path.open("rb") as file:
            head = file.read(_ENDS)
            file.seek(max(0, path.stat().st_size - _ENDS))
            return head, file.read(_ENDS)
    except OSError:
        return b"", b""
