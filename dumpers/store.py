"""The trace file: writing one through the journal, reading one from any state. The only file that imports h5py.

What has been committed is readable whatever happens to the writer later. Every foreign error becomes a TraceError here.
The layout is in `schema` and, for people, in docs/format.md.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import os
import threading
import weakref
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import h5py
import numpy as np
from h5py import h5d, h5p, h5s, h5t, h5z

from align.dumpers import journal, schema
from align.dumpers.dtypes import DTYPES, Array, RawTensor, dtype_of
from align.dumpers.errors import InterruptedRun, TraceError, TraceFormatError, UsageError
from align.dumpers.model import NodeKey, NodeRecord, RunStatus, Storage, TraceHeader

COMPRESSIONS = ("none", "gzip", "lz4", "zstd", "blosc2")
_CHUNK_BYTES = 1 << 20
_H5_ERRORS = (OSError, RuntimeError, ValueError, KeyError, TypeError)
_TEXT_FIELDS = ("workload", "role", "device", "dtype", "level", "created")
_NUMBER_FIELDS = ("seed", "rank", "world_size")


class TraceWriter:
    """Write one trace: records and tensors, sealed at every `commit`. Safe to call from several threads."""

    def __init__(self, path: Path, sealed: journal.SealedFile, header: TraceHeader, compression: str) -> None:
        self.path = path
        self._sealed = sealed
        self._rank = header.rank
        self._compression = compression
        self._lock = threading.RLock()
        self._packer = schema.RowPacker()
        self._groups: dict[tuple[str, str], Any] = {}
        self._written: dict[tuple[str, str, tuple[int, ...]], bytes] = {}
        self._is_open = True
        with self._translated():
            # earliest: the one format that needs no consistency flag, so that a killed writer leaves a file that opens
            # whole pages: unaligned tensors are slower to write and cannot be mapped
            pages = {"meta_block_size": 1 << 14, "alignment_threshold": 1 << 16, "alignment_interval": 4096}
            self._file = h5py.File(sealed, "w", libver="earliest", **pages)
            self._abandon = weakref.finalize(self, _abandon, self._file, sealed)
            self._lay_out(header)
        self._layout = _contiguous()
        self.commit()

    @classmethod
    def create(
        cls, path: str | os.PathLike[str], header: TraceHeader, *, overwrite: bool = False, compression: str = "none"
    ) -> TraceWriter:
        """Begin a trace at `path`; it can be opened from now on, and says `incomplete` until closed.

        Raises TraceBusyError when another writer has the path, TraceError when it cannot be written or exists already,
        UsageError when the compression is unknown or its package missing.
        """
        if compression not in COMPRESSIONS:
            raise UsageError(f"unknown compression {compression!r}", f"choose one of {', '.join(COMPRESSIONS)}")
        if compression not in ("none", "gzip"):
            _filters()
        target = Path(path)
        return cls(target, journal.SealedFile.create(target, overwrite=overwrite), header, compression)

    def put(self, record: NodeRecord, raw: RawTensor | None) -> None:
        """Store a record, complete as it is, and the tensor or the sampled values it speaks of."""
        with self._lock, self._translated():
            self._packer.add(record)
            if raw is not None:
                self._put_tensor(record, raw)

    def put_document(self, name: str, text: str) -> None:
        """Store a text under `documents`, in place of an older one of that name."""
        content = text.encode("utf-8", "surrogatepass")
        with self._lock, self._translated():
            group, link = self._file["documents"], schema.escape(name)
            if link in group:
                del group[link]
            kind = h5py.string_dtype("utf-8", max(1, len(content)))
            group.create_dataset(link, data=np.array(content, kind), dtype=kind)

    def commit(self) -> None:
        """Seal everything stored so far: it survives whatever happens next. Raises TraceError when it cannot."""
        with self._lock, self._translated():
            nodes = self._file["nodes"]
            rows, text, producers = self._packer.take()
            _extend(nodes["table"], rows)
            _extend(nodes["text"], np.frombuffer(text, np.uint8))
            _extend(nodes["producers"], producers)
            self._file.flush()
            self._sealed.seal()

    def close(self, status: RunStatus) -> None:
        """Commit, note how the run ended, and let the file go. A second call does nothing."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            try:
                self._finish(status)
            finally:
                self._abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(status_after(exc))

    def _finish(self, status: RunStatus) -> None:
        with self._translated():
            self._file.attrs["status"] = str(status)
        self.commit()
        with self._translated():
            self._file.close()
            self._sealed.seal()

    def _lay_out(self, header: TraceHeader) -> None:
        attributes = self._file.attrs
        attributes.update({"format": schema.FORMAT, "version": schema.VERSION, "status": str(RunStatus.INCOMPLETE)})
        for name in (*_TEXT_FIELDS, *_NUMBER_FIELDS):
            attributes[name] = getattr(header, name)
        for name in ("tensors", "samples", "documents", "nodes"):
            self._file.create_group(name)
        nodes = self._file["nodes"]
        for name, kind, chunk in (
            ("table", schema.ROW, 128),
            ("text", np.uint8, 1 << 13),
            ("producers", np.int64, 512),
        ):
            nodes.create_dataset(name, shape=(0,), maxshape=(None,), chunks=(chunk,), dtype=kind)
        if header.environment:
            pairs = [[text.encode() for text in pair] for pair in header.environment]
            length = max(1, *(len(text) for pair in pairs for text in pair))
            kind = h5py.string_dtype("utf-8", length)
            self._file.create_dataset("environment", data=np.array(pairs, kind), dtype=kind)
        identity = os.urandom(16)
        mark = self._file.create_dataset("identity", data=np.frombuffer(identity, np.uint8))
        self._sealed.fingerprint = (mark.id.get_offset(), identity)

    def _put_tensor(self, record: NodeRecord, raw: RawTensor) -> None:
        place = "samples" if record.storage is Storage.SAMPLE else "tensors"
        group = self._group(place, record.key.path)
        name = schema.dataset_name(record.key, self._rank).encode()
        content = (record.digest, raw.dtype, tuple(raw.shape))
        if place == "tensors" and record.digest:
            first = self._written.setdefault(content, self._address(place, record.key.path, name))
            if first != self._address(place, record.key.path, name):
                group.links.create_hard(name, self._file.id, first)
                return
        kind, bits = _file_type(raw.dtype), np.require(raw.bits, requirements=("C", "A"))
        space = h5s.create_simple(tuple(raw.shape)) if raw.shape else h5s.create(h5s.SCALAR)
        dataset = h5d.create(group, name, kind, space, self._creation(raw))
        offset = dataset.get_offset()
        if (
            offset is not None and bits.size
        ):  # allocated in one piece: past HDF5's own copying, which costs as much as the write
            self._sealed.seek(offset)
            self._sealed.write(bits.reshape(-1).view(np.uint8))
        elif bits.size:
            dataset.write(h5s.ALL, h5s.ALL, bits, kind)

    def _address(self, place: str, path: str, name: bytes) -> bytes:
        return f"/{place}/{schema.group_name(path)}/".encode() + name

    def _group(self, place: str, path: str) -> Any:
        group = self._groups.get((place, path))
        if group is None:
            if len(self._groups) > 1000:
                self._groups.clear()  # open objects cost memory
            parent, link = self._file[place], schema.group_name(path)
            group = self._groups[place, path] = (parent[link] if link in parent else parent.create_group(link)).id
        return group

    def _creation(self, raw: RawTensor) -> Any:
        if self._compression == "none" or raw.bits.size == 0 or not raw.shape:
            return self._layout
        return _compressed(self._compression, raw)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn a failed write, or what HDF5 makes of one, into the TraceError that names path and remedy."""
        try:
            yield
        except _H5_ERRORS as exc:
            cause = self._sealed.failure
            if cause is None:
                raise TraceError(f"cannot write {self.path}: {exc}", "report this: the trace was not in order") from exc
            raise journal.write_error(self.path, self._sealed.tell(), cause) from exc
        if self._sealed.failure is not None:
            raise journal.write_error(self.path, self._sealed.tell(), self._sealed.failure)


class Trace:
    """A trace opened for reading: header, records, tensors, documents; nothing is read before it is asked for."""

    def __init__(self, path: Path, file: h5py.File, source: Any) -> None:
        self.path = path
        self._file = file
        self._source = source  # an object with seek and readinto over the same bytes
        with self._translated():
            self._check_format()
            self.header = self._read_header()
            self.status = RunStatus(self._text("status"))
            self.documents: tuple[str, ...] = tuple(_unescape(name) for name in file["documents"])

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Trace:
        """Open a trace in whatever state its writer left it; an unfinished commit is completed first.

        Raises TraceError when there is no file, TraceFormatError when it is not a trace or was cut off.
        """
        place = Path(path)
        if not place.is_file():
            raise TraceError(
                f"no trace at {place}", "give the path of a file that `align run` or `align.capture` wrote"
            )
        try:
            file, source = _open_file(place)
        except _H5_ERRORS as exc:
            raise _format_error(place, exc) from exc
        try:
            return cls(place, file, source)
        except BaseException:
            file.close()
            source.close()
            raise

    @cached_property
    def nodes(self) -> tuple[NodeRecord, ...]:
        """All records, in order of completion."""
        with self._translated():
            nodes = self._file["nodes"]
            rows, text, producers = nodes["table"][:], nodes["text"][:].tobytes(), nodes["producers"][:].tolist()
            records = schema.unpack_rows(rows, text, producers)
        orders = rows["order"]
        return records if (orders[1:] >= orders[:-1]).all() else tuple(sorted(records, key=lambda record: record.order))

    @cached_property
    def _records(self) -> dict[NodeKey, NodeRecord]:
        return {record.key: record for record in self.nodes}

    def record(self, key: NodeKey) -> NodeRecord:
        """The record of a node. Raises UsageError with the nearest key when there is none."""
        try:
            return self._records[key]
        except KeyError:
            raise UsageError(f"no node {key} in {self.path}", self._nearest(key)) from None

    def read(self, key: NodeKey) -> RawTensor:
        """The bits of a kept tensor, or the 1-D values of a sampled one (see `schema.sample_positions`)."""
        with self._opened(key) as (dataset, name):
            bits = np.empty(_carried_shape(dataset.shape, name), DTYPES[name].carrier)
            if bits.size:
                dataset.read(h5s.ALL, h5s.ALL, bits, _file_type(name))
        return RawTensor(bits, name)

    def read_rows(self, key: NodeKey, start: int, stop: int) -> RawTensor:
        """Rows `start` to `stop` along the first axis of a kept tensor."""
        with self._opened(key) as (dataset, name):
            if not dataset.shape:
                raise UsageError(f"{key} is a scalar and has no rows", "read it whole")
            first, last, _ = slice(start, stop).indices(dataset.shape[0])
            return RawTensor(self._slab(dataset, name, first, max(first, last)), name)

    def read_flat(self, key: NodeKey, start: int, stop: int) -> RawTensor:
        """Elements `start` to `stop` of a kept tensor, flattened: reads only these, for tensors of any size."""
        with self._opened(key) as (dataset, name):
            shape = dataset.shape or (1,)
            first, last, _ = slice(start, stop).indices(math.prod(shape))
            last = max(first, last)
            offset = dataset.get_offset()
            if offset is not None:
                return RawTensor(self._stretch(offset, name, first, last), name)
            width = max(1, math.prod(shape[1:]))
            rows = self._slab(dataset, name, first // width, -(-last // width))
            flat = rows.reshape(_carried_shape((-1,), name))
        return RawTensor(flat[first - first // width * width :][: last - first], name)

    def document(self, name: str) -> str:
        """A document's text. Raises UsageError with the names there are."""
        if name not in self.documents:
            raise UsageError(f"no document {name!r} in {self.path}", f"it has: {', '.join(self.documents) or 'none'}")
        with self._translated():
            text: bytes = self._file["documents"][schema.escape(name)][()]
        return text.decode("utf-8", "surrogatepass")

    def verify(self) -> Iterator[tuple[NodeKey, bool]]:
        """Read every kept tensor again and tell whether its digest still holds."""
        from align.dumpers.statistics import digest

        for record in self.nodes:
            if record.storage is Storage.TENSOR and record.digest:
                try:
                    yield record.key, digest(self.read(record.key)) == record.digest
                except TraceFormatError:
                    yield record.key, False

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_format(self) -> None:
        found = self._file.attrs.get("format")
        if found != schema.FORMAT:
            raise TraceFormatError(
                f"{self.path} is HDF5 but no trace", "give a file that `align run` or `align.capture` wrote"
            )
        version = int(self._file.attrs["version"])
        if version > schema.VERSION:
            raise TraceFormatError(
                f"{self.path} has format version {version}, this reads {schema.VERSION}", "update align"
            )

    def _read_header(self) -> TraceHeader:
        texts = {name: self._text(name) for name in _TEXT_FIELDS}
        numbers = {name: int(self._file.attrs[name]) for name in _NUMBER_FIELDS}
        pairs = self._file["environment"].asstr()[:] if "environment" in self._file else []
        environment = tuple((str(name), str(value)) for name, value in pairs)
        return TraceHeader(**texts, **numbers, environment=environment)  # type: ignore[arg-type]

    def _text(self, name: str) -> str:
        value = self._file.attrs[name]
        return value.decode() if isinstance(value, bytes) else str(value)

    def _nearest(self, key: NodeKey) -> str:
        same = [str(other) for other in self._records if other.path == key.path or other.call_name == key.call_name]
        known = same or [str(other) for other in self._records][:5000]
        close = difflib.get_close_matches(str(key), known, 1, 0.0)
        return f"the nearest is {close[0]}" if close else "the trace has no nodes"

    @contextlib.contextmanager
    def _opened(self, key: NodeKey) -> Iterator[tuple[Any, str]]:
        record = self.record(key)
        if record.storage not in (Storage.TENSOR, Storage.SAMPLE):
            raise UsageError(
                f"{key} has no values in {self.path}: kept as {record.storage}", "run again with --keep tensors"
            )
        place = "samples" if record.storage is Storage.SAMPLE else "tensors"
        name = schema.dataset_name(key, self.header.rank)
        with self._translated():
            dataset = h5d.open(self._file.id, f"/{place}/{schema.group_name(key.path)}/{name}".encode())
            _need_filters(dataset, self.path)
            yield dataset, _dtype_name(dataset, record.dtype)

    def _slab(self, dataset: Any, name: str, first: int, last: int) -> Array:
        shape = (last - first, *dataset.shape[1:]) if dataset.shape else ()
        bits = np.empty(_carried_shape(shape, name), DTYPES[name].carrier)
        if bits.size:
            space = dataset.get_space()
            if dataset.shape:
                space.select_hyperslab((first, *(0 for _ in shape[1:])), shape)
            memory = h5s.create_simple(shape) if shape else h5s.create(h5s.SCALAR)
            dataset.read(memory, space, bits, _file_type(name))
        return bits

    def _stretch(self, offset: int, name: str, first: int, last: int) -> Array:
        bits = np.empty(_carried_shape((last - first,), name), DTYPES[name].carrier)
        self._source.seek(offset + first * DTYPES[name].itemsize)
        view = memoryview(bits.reshape(-1).view(np.uint8).data)
        while len(view):
            count = self._source.readinto(view)
            if not count:
                raise OSError("the file ends within a tensor")
            view = view[count:]
        return bits

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (*_H5_ERRORS, IndexError) as exc:
            raise _format_error(self.path, exc) from exc


def status_after(exc: BaseException | None) -> RunStatus:
    """How a run ended that left a `with` block by this exception."""
    if exc is None:
        return RunStatus.COMPLETE
    return RunStatus.INTERRUPTED if isinstance(exc, (KeyboardInterrupt, InterruptedRun)) else RunStatus.FAILED


def _abandon(file: h5py.File, sealed: journal.SealedFile) -> None:
    """Let go of a file without committing: at the end of `close`, or of a program that never called it."""
    sealed.failure = sealed.failure or OSError("closed")
    with contextlib.suppress(*_H5_ERRORS):
        file.close()
    sealed.close()


def _open_file(path: Path) -> tuple[h5py.File, Any]:
    record = journal.pending_record(path)
    if record is not None and not journal.is_being_written(path):
        try:
            journal.repair(path)
            record = None
        except OSError:
            pass  # a folder that is not ours to write: read with the pages laid over the file
    if record is None:
        return h5py.File(path, "r", locking=False), path.open("rb", buffering=0)
    patched = journal.patched_file(path, *record)
    return h5py.File(patched, "r"), patched


def _format_error(path: Path, exc: BaseException) -> TraceFormatError:
    reason = str(exc).splitlines()[0] if str(exc) else type(exc).__name__
    return TraceFormatError(
        f"{path} is not a readable trace: {reason}", "copy it again if it was cut off, or record it anew"
    )


def _extend(dataset: h5py.Dataset, new: Array) -> None:
    if len(new):
        old = dataset.shape[0]
        dataset.resize((old + len(new),))
        dataset[old:] = new


@cache
def _file_type(name: str) -> Any:
    """The HDF5 type of a dtype; written and read as it is, without conversion, so every bit stays."""
    dtype = dtype_of(name)
    if name == "complex32":
        kind = h5t.create(h5t.COMPOUND, 4)
        kind.insert(b"r", 0, h5t.IEEE_F16LE)
        kind.insert(b"i", 2, h5t.IEEE_F16LE)
        return kind
    limits = dtype.format
    if limits is None or dtype.carrier[0] != "u" or limits.mantissa_bits == 0:  # HDF5 has no float without a sign bit
        return h5t.py_create(np.dtype(dtype.carrier), logical=True)
    kind = h5t.IEEE_F16LE.copy()
    kind.set_fields(limits.bits - 1, limits.mantissa_bits, limits.exponent_bits, 0, limits.mantissa_bits)
    kind.set_precision(limits.bits)
    kind.set_size(limits.bits // 8)
    kind.set_ebias(limits.bias)
    return kind


def _dtype_name(dataset: Any, recorded: str) -> str:
    """Name of the dtype whose bits a dataset holds: the recorded one if it fits, else the one HDF5 tells."""
    kind = dataset.get_type()
    for name in (recorded, *DTYPES):
        if name in DTYPES and kind.equal(_file_type(name)):
            return name
    raise OSError(f"unknown type of dataset for dtype {recorded}")


def _carried_shape(shape: tuple[int, ...], name: str) -> tuple[int, ...]:
    return (*shape, 2) if name == "complex32" else shape


def _contiguous() -> Any:
    layout = h5p.create(h5p.DATASET_CREATE)
    layout.set_layout(h5d.CONTIGUOUS)
    layout.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    layout.set_fill_time(h5d.FILL_TIME_NEVER)
    return layout


def _compressed(compression: str, raw: RawTensor) -> Any:
    layout = h5p.create(h5p.DATASET_CREATE)
    layout.set_chunk(_chunk_shape(tuple(raw.shape), DTYPES[raw.dtype].itemsize))
    layout.set_fill_time(h5d.FILL_TIME_NEVER)
    if compression == "gzip":
        layout.set_shuffle()
        layout.set_deflate(1)
        return layout
    plugin = _filters()
    if compression != "blosc2":  # which shuffles by itself
        layout.set_shuffle()
    # blosc2's own default codec left activations at their full size
    chosen = {"lz4": plugin.LZ4(), "zstd": plugin.Zstd(), "blosc2": plugin.Blosc2(cname="zstd", clevel=3)}[compression]
    layout.set_filter(chosen["compression"], h5z.FLAG_OPTIONAL, chosen["compression_opts"])
    return layout


def _chunk_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Whole trailing axes as far as a chunk allows, so that rows are read without touching others."""
    room = max(1, _CHUNK_BYTES // itemsize)
    chunk: list[int] = []
    for extent in reversed(shape):
        chunk.append(max(1, min(extent, room)))
        room //= chunk[-1]
    return tuple(reversed(chunk))


def _filters() -> Any:
    try:
        import hdf5plugin
    except ImportError as exc:
        remedy = 'pip install "npu-align[compression]", or use compression none or gzip'
        raise UsageError("this compression needs the package hdf5plugin, which is not installed", remedy) from exc
    return hdf5plugin


def _need_filters(dataset: Any, path: Path) -> None:
    layout = dataset.get_create_plist()
    for number in range(layout.get_nfilters()):
        if not h5z.filter_avail(layout.get_filter(number)[0]):
            _filters()
            return


def _unescape(name: str) -> str:
    for mark in "\0/%":
        name = name.replace(f"%{ord(mark):02X}", mark)
    return ".." if name == "%2E%2E" else name
