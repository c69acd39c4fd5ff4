"""Read .npy and .npz files and folders of them: an array's name is a module path, or a whole node key.

A folder is read in the natural order of names (`block.2` before `block.10`), an archive in the order it was written.
"""

from __future__ import annotations

import contextlib
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from align.dumpers.dtypes import DTYPES, Array, RawTensor
from align.dumpers.errors import TraceFormatError
from align.dumpers.importers.found import DumpFormat, FoundDump, FoundNode, UnreadableValuesError, named_key
from align.dumpers.model import NodeKind, TraceHeader

_READ_ERRORS = (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile)


def read_arrays(path: Path) -> FoundDump:
    """All arrays of a file or folder, each read when asked for. Objects, texts, records are left out and named."""
    nodes, warnings = [], []
    for name, load in _sources(path):
        try:
            nodes.append(found_array(name, load()))
        except UnreadableValuesError as exc:
            warnings.append(f"{name} left out: {exc}")
    if not nodes and not warnings:
        raise TraceFormatError(f"no arrays in {path}", "give a .npy or .npz file, or a folder of them")
    header = TraceHeader(path.stem, "imported", "unknown", common_dtype(nodes), 0)
    return FoundDump(DumpFormat.ARRAYS, header, nodes, warnings=tuple(warnings))


def found_array(name: str, source: Source, step: int = 0) -> FoundNode:
    """A node for an array of this name. Raises UnreadableValuesError when its dtype is not one of ours."""
    dtype, shape, note = source.dtype, source.shape, ""
    text = "bfloat16" if is_void16(dtype) else dtype.newbyteorder("=").name
    if is_void16(dtype):
        note = "2-byte values without a dtype of numpy's, taken for bfloat16"
    if text not in DTYPES or dtype.hasobject:
        raise UnreadableValuesError(f"dtype {dtype} is no tensor dtype")
    return FoundNode(named_key(name, step), NodeKind.MODULE, "", text, shape, source.read, note=note)


def is_void16(dtype: np.dtype[Any]) -> bool:
    """Whether this is how numpy stores what it does not know, two bytes wide (ml_dtypes' bfloat16 becomes `V2`)."""
    return dtype.kind == "V" and dtype.itemsize == 2 and dtype.names is None and dtype.subdtype is None


class Source:
    """One array somewhere on disk: dtype and shape known, values read by `read`."""

    def __init__(self, path: Path, member: str = "") -> None:
        self._path, self._member = path, member
        try:
            with self._opened() as file:
                self.shape, self.dtype = _read_header(file)
        except _READ_ERRORS as exc:
            raise UnreadableValuesError(str(exc)) from exc

    def read(self) -> RawTensor:
        """The values in native byte order, mapped from the file where they lie in a file of their own."""
        try:
            if self._member:
                with np.load(self._path, allow_pickle=False) as archive:
                    return native(archive[self._member])
            mode: Literal["r"] | None = None if 0 in self.shape else "r"  # nothing cannot be mapped
            return native(np.load(self._path, mmap_mode=mode, allow_pickle=False))
        except _READ_ERRORS as exc:
            raise UnreadableValuesError(str(exc)) from exc

    @contextlib.contextmanager
    def _opened(self) -> Iterator[IO[bytes]]:
        if not self._member:
            with self._path.open("rb") as file:
                yield file
            return
        with zipfile.ZipFile(self._path) as archive, archive.open(f"{self._member}.npy") as member:
            yield member


def native(array: Array) -> RawTensor:
    """An array as bits of one of our dtypes, in native byte order and C order."""
    if is_void16(array.dtype):
        return RawTensor(np.ascontiguousarray(array).view(np.uint16), "bfloat16")
    plain = np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C")
    return RawTensor(plain, plain.dtype.name)


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    return shape, dtype


def _sources(path: Path) -> Iterator[tuple[str, Any]]:
    """(name, way to open it) of every array below a path."""
    if path.is_dir():
        files = [file for file in path.rglob("*") if file.suffix in (".npy", ".npz") and file.is_file()]
        for file in sorted(files, key=lambda file: natural_order(str(file.relative_to(path)))):
            yield from _file_sources(file, _relative_name(file, path))
    else:
        yield from _file_sources(path, "" if zipfile.is_zipfile(path) else path.stem)


def _file_sources(file: Path, name: str) -> Iterator[tuple[str, Any]]:
    if not zipfile.is_zipfile(file):
        yield name, lambda: Source(file)
        return
    with zipfile.ZipFile(file) as archive:
        members = [member.removesuffix(".npy") for member in archive.namelist() if member.endswith(".npy")]
    for member in members:
        yield f"{name}.{member}" if name else member, lambda member=member: Source(file, member)


def _relative_name(file: Path, root: Path) -> str:
    parts = file.relative_to(root).with_suffix("").parts
    return "/".join(parts) if ":" in parts[-1] and "#" in parts[-1] else ".".join(parts)


def natural_order(text: str) -> list[tuple[int, int, str]]:
    """Sort key under which numbers inside names count as numbers."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", text) if part]


def common_dtype(nodes: list[FoundNode]) -> str:
    """The floating dtype most nodes have; empty without any."""
    floating = [node.dtype for node in nodes if node.dtype in DTYPES and DTYPES[node.dtype].format is not None]
    return max(sorted(set(floating)), key=floating.count, default="")
