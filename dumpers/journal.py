"""A file that is always at its last commit, whatever kills the process: the storage below a trace.

HDF5 writes through `SealedFile`. What is appended goes straight to the file, where the last commit does not look; what
would change bytes below the sealed end waits in memory. `seal` writes those pages as one record to `<path>.journal`
(made whole by a rename), copies them into the file and removes the record. A process killed before the rename leaves
the old commit, one killed after it leaves a record that any later opening applies again. A record carries a checksum
and a fingerprint of its file, so a torn record, or one that belongs to another file, is ignored.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import zlib
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

from align.dumpers.errors import TraceBusyError, TraceError

try:
    import fcntl
except ImportError:  # not a Unix: two writers are then not kept apart
    fcntl = None  # type: ignore[assignment]

PAGE = 512
_MAGIC = b"ALIGNJ01"
_HEAD = struct.Struct("<8sQQ16sQ")  # magic, sealed end, place and bytes of the fingerprint, number of pages
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


class SealedFile:
    """The file object HDF5 writes to. A failed write is remembered, and nothing touches the file after it."""

    def __init__(self, path: Path, file: FileIO, draft: Path | None = None) -> None:
        self.path = path
        self.failure: OSError | None = None
        self.fingerprint = (0, bytes(16))
        self._file = file
        self._draft = draft  # where the file lies until its first commit
        self._pages: dict[int, bytearray] = {}
        self._sealed = 0 if draft else file.seek(0, os.SEEK_END)
        self._end = self._sealed
        self._position = 0
        self._owner = os.getpid()

    @classmethod
    def create(cls, path: Path, *, overwrite: bool) -> SealedFile:
        """Begin a new file, which appears at `path` with its first `seal`; an old one stays until then.

        Raises TraceBusyError when another process writes this path, TraceError when the folder cannot be written or
        the file exists and `overwrite` is false.
        """
        draft = path.with_name(f".{path.name}.part")
        try:
            file = _open_locked(draft, path)
            try:
                _refuse_existing(path, overwrite=overwrite)
                file.truncate(0)
            except BaseException:
                draft.unlink(missing_ok=True)
                file.close()
                raise
        except OSError as exc:
            raise write_error(path, 0, exc) from exc
        return cls(path, file, draft)

    # what h5py's file-object driver calls

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position; HDF5 asks for the end to learn the size."""
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._end}[whence]
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def write(self, buffer: Any) -> int:
        """Append to the file, or keep in memory what lies below the sealed end."""
        view = memoryview(buffer).cast("B")
        if self.failure is None and os.getpid() == self._owner:  # a forked child must not write its parent's file
            below = min(max(self._sealed - self._position, 0), len(view))
            if below:
                self._keep(self._position, view[:below])
            if below < len(view):
                self._append(self._position + below, view[below:])
        self._position += len(view)
        self._end = max(self._end, self._position)
        return len(view)

    def readinto(self, buffer: Any) -> int:
        """Read the file as it will be after the next commit."""
        view = memoryview(buffer).cast("B")
        count = _read_at(self._file, self._position, view)
        view[count:] = bytes(len(view) - count)
        for page in _page_numbers(self._position, len(view)) if self._pages else ():
            if page in self._pages:  # only what lies below the sealed end: the rest of a page may be old
                _overlap(view, self._position, self._pages[page][: max(0, self._sealed - page * PAGE)], page * PAGE)
        self._position += len(view)
        return len(view)

    def read(self, size: int) -> bytes:
        """Read `size` bytes."""
        buffer = bytearray(size)
        self.readinto(buffer)
        return bytes(buffer)

    def truncate(self, size: int) -> int:
        """Set the size; the file itself never becomes shorter than its last commit before the next one."""
        self._end = size
        if self.failure is None and os.getpid() == self._owner:
            try:
                self._file.truncate(max(size, self._sealed))
            except OSError as exc:
                self._fail(exc)
        return size

    def flush(self) -> None:
        """Do nothing: only `seal` commits."""

    # commit

    def seal(self) -> None:
        """Commit all that was written. Raises TraceError, with the last commit kept, when any write has failed."""
        if self.failure is None and os.getpid() == self._owner:
            try:
                self._commit()
            except OSError as exc:
                self._fail(exc)
        if self.failure is not None:
            raise write_error(self.path, self._end, self.failure) from self.failure

    def _commit(self) -> None:
        pages = {number: bytes(page) for number, page in self._pages.items()}
        if pages:
            self._write_record(pages)
            apply_pages(self._file, pages, self._sealed)
        if self._end < self._sealed:
            self._file.truncate(self._end)
        self._sealed = self._end
        self._pages.clear()
        if pages:
            journal_path(self.path).unlink(missing_ok=True)
        if self._draft is not None:
            os.replace(self._draft, self.path)
            journal_path(self.path).unlink(missing_ok=True)  # left by an older file of this name
            self._draft = None

    def _write_record(self, pages: dict[int, bytes]) -> None:
        final = journal_path(self.path)
        part = final.with_name(final.name + ".part")
        try:
            part.write_bytes(encode_record(pages, self._sealed, self.fingerprint))
            os.replace(part, final)
        except OSError:
            part.unlink(missing_ok=True)
            raise

    def close(self) -> None:
        """Close without committing; a file that never was committed disappears."""
        if os.getpid() == self._owner and not self._file.closed:
            if self._draft is not None:
                self._draft.unlink(missing_ok=True)
            self._file.close()

    def _keep(self, offset: int, view: memoryview) -> None:
        for number in _page_numbers(offset, len(view)):
            if number not in self._pages:
                page = bytearray(PAGE)
                _read_at(self._file, number * PAGE, memoryview(page))
                self._pages[number] = page
            _overlap(memoryview(self._pages[number]), number * PAGE, view, offset)

    def _append(self, offset: int, view: memoryview) -> None:
        try:
            _write_at(self._file, offset, view)
        except OSError as exc:
            self._fail(exc)

    def _fail(self, exc: OSError) -> None:
        self.failure = exc
        with contextlib.suppress(OSError):
            self._file.truncate(self._sealed)  # give back what was written for nothing: the disk may be full


def patched_file(path: Path, pages: dict[int, bytes], sealed: int) -> SealedFile:
    """Read a file with a record's pages laid over it, where the folder does not allow to apply them."""
    patched = SealedFile(path, FileIO(path))
    patched._pages = {number: bytearray(page) for number, page in pages.items()}
    patched._sealed = sealed
    return patched


def journal_path(path: Path) -> Path:
    """Where the record of an unfinished commit lies."""
    return path.with_name(path.name + ".journal")


def encode_record(pages: dict[int, bytes], sealed: int, fingerprint: tuple[int, bytes]) -> bytes:
    """Bytes of one record: head, (page number, page) pairs, CRC-32 of all before."""
    head = _HEAD.pack(_MAGIC, sealed, fingerprint[0], fingerprint[1], len(pages))
    body = b"".join(struct.pack("<Q", number) + page for number, page in sorted(pages.items()))
    return head + body + struct.pack("<I", zlib.crc32(head + body))


def pending_record(path: Path) -> tuple[dict[int, bytes], int] | None:
    """Pages and sealed end of a complete record that belongs to the file at `path`; None when there is none."""
    try:
        text = journal_path(path).read_bytes()
    except FileNotFoundError:
        return None
    if len(text) < _HEAD.size + 4 or zlib.crc32(text[:-4]) != struct.unpack("<I", text[-4:])[0]:
        return None
    magic, sealed, place, fingerprint, count = _HEAD.unpack_from(text)
    if magic != _MAGIC or len(text) != _HEAD.size + count * (8 + PAGE) + 4:
        return None
    with FileIO(path) as file:
        here = bytearray(16)
        _read_at(file, place, memoryview(here))
        if bytes(here) != fingerprint or file.seek(0, os.SEEK_END) < sealed:
            return None
    entries = (_HEAD.size + i * (8 + PAGE) for i in range(count))
    return {struct.unpack_from("<Q", text, at)[0]: text[at + 8 : at + 8 + PAGE] for at in entries}, sealed


def apply_pages(file: FileIO, pages: dict[int, bytes], sealed: int) -> None:
    """Write pages into a file, up to the sealed end: the last page may reach over it into newer bytes."""
    for number, page in pages.items():
        start = number * PAGE
        _write_at(file, start, memoryview(page)[: max(0, min(PAGE, sealed - start))])


def repair(path: Path) -> None:
    """Apply a pending record to the file and remove it; a torn or foreign one stays ignored. Raises OSError."""
    record = pending_record(path)
    if record is not None:
        with FileIO(path, "r+") as file:
            apply_pages(file, *record)
        journal_path(path).unlink(missing_ok=True)


def is_being_written(path: Path) -> bool:
    """Whether a live process holds the file as its writer."""
    if fcntl is None:
        return False
    with FileIO(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
    return False


def write_error(path: Path, nbytes: int, exc: OSError) -> TraceError:
    """Say that a trace could not be written, how far it had come, and what to do."""
    problem = f"cannot write {path} beyond {nbytes} bytes: {exc.strerror or exc}"
    if exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return TraceError(
            problem, "free space, or keep less (--keep stats, --max-bytes); what was committed is readable"
        )
    return TraceError(problem, "choose a folder that exists and can be written")


def _open_locked(draft: Path, path: Path) -> FileIO:
    """Open the draft as its only writer. Raises TraceBusyError when another process has it."""
    while True:
        file = FileIO(os.open(draft, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644), "r+")
        _lock(file, path)
        try:
            if os.path.samestat(os.fstat(file.fileno()), os.stat(draft)):
                return file
        except FileNotFoundError:
            pass
        file.close()  # another writer finished with this draft between our open and our lock


def _refuse_existing(path: Path, *, overwrite: bool) -> None:
    if not path.exists():
        return
    with FileIO(path) as old:
        _lock(old, path)
    if not overwrite:
        raise TraceError(f"{path} exists already", "choose another name, or allow overwriting it")


def _lock(file: FileIO, path: Path) -> None:
    """Lock for as long as the file is open; the system drops the lock of a killed process."""
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        file.close()
        raise TraceBusyError(
            f"another process is writing {path}", "wait for it to end, or choose another path"
        ) from exc
    except OSError as exc:
        if exc.errno not in _NO_LOCKS:  # some network file systems have no locks
            raise


def _page_numbers(offset: int, count: int) -> Iterator[int]:
    return iter(range(offset // PAGE, -(-(offset + count) // PAGE)))


def _overlap(target: memoryview, target_offset: int, source: Any, source_offset: int) -> None:
    """Copy into `target` the part of `source` that lies at the same place in the file."""
    start = max(target_offset, source_offset)
    stop = min(target_offset + len(target), source_offset + len(source))
    if start < stop:
        target[start - target_offset : stop - target_offset] = source[start - source_offset : stop - source_offset]


def _read_at(file: FileIO, offset: int, view: memoryview) -> int:
    file.seek(offset)
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])
        if not count:
            break
        done += count
    return done


def _write_at(file: FileIO, offset: int, view: memoryview) -> None:
    file.seek(offset)
    while len(view):
        view = view[file.write(view) :]
