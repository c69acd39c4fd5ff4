"""A sealed file is always at its last commit, and a pending record completes an unfinished one."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from align.dumpers import journal
from align.dumpers.errors import TraceBusyError, TraceError
from align.dumpers.journal import SealedFile


def _write_at(file: SealedFile, offset: int, content: bytes) -> None:
    file.seek(offset)
    file.write(content)


@pytest.fixture
def sealed(tmp_path: Path) -> Iterator[SealedFile]:
    file = SealedFile.create(tmp_path / "a", overwrite=False)
    _write_at(file, 0, b"x" * 1500)
    file.fingerprint = (0, b"x" * 16)
    file.seal()
    yield file
    file.close()


def test_file_appears_with_its_first_commit(tmp_path: Path) -> None:
    file = SealedFile.create(tmp_path / "a", overwrite=False)
    file.write(b"begun")
    assert not (tmp_path / "a").exists()
    file.seal()
    assert (tmp_path / "a").read_bytes() == b"begun"
    file.close()


def test_file_that_is_never_committed_leaves_nothing(tmp_path: Path) -> None:
    file = SealedFile.create(tmp_path / "a", overwrite=False)
    file.write(b"begun")
    file.close()
    assert list(tmp_path.iterdir()) == []


def test_changes_below_the_sealed_end_wait_for_the_commit(sealed: SealedFile) -> None:
    _write_at(sealed, 1490, b"y" * 20)
    assert sealed.path.read_bytes()[:1500] == b"x" * 1500
    sealed.seek(1480)
    assert sealed.read(30) == b"x" * 10 + b"y" * 20
    sealed.seal()
    assert sealed.path.read_bytes() == b"x" * 1490 + b"y" * 20
    assert not journal.journal_path(sealed.path).exists()


def test_bytes_appended_after_a_page_was_kept_are_read_back_new(sealed: SealedFile) -> None:
    _write_at(sealed, 1499, b"y")
    _write_at(sealed, 1500, b"z" * 10)
    sealed.seek(1498)
    assert sealed.read(12) == b"xy" + b"z" * 10


def test_file_never_gets_shorter_than_its_last_commit(sealed: SealedFile) -> None:
    sealed.truncate(100)
    assert sealed.path.stat().st_size == 1500
    sealed.seal()
    assert sealed.path.stat().st_size == 100


def _record(sealed: SealedFile, fingerprint: tuple[int, bytes] = (0, b"x" * 16)) -> bytes:
    return journal.encode_record({1: b"n" * journal.PAGE}, 1500, fingerprint)


def test_a_complete_record_is_applied(sealed: SealedFile) -> None:
    journal.journal_path(sealed.path).write_bytes(_record(sealed))
    sealed.close()
    journal.repair(sealed.path)
    assert sealed.path.read_bytes() == b"x" * 512 + b"n" * 512 + b"x" * 476
    assert not journal.journal_path(sealed.path).exists()


@pytest.mark.parametrize("length", [0, 10, 100, -1])
def test_a_torn_record_is_ignored(sealed: SealedFile, length: int) -> None:
    journal.journal_path(sealed.path).write_bytes(_record(sealed)[:length])
    journal.repair(sealed.path)
    assert sealed.path.read_bytes() == b"x" * 1500


def test_a_record_of_another_file_is_ignored(sealed: SealedFile) -> None:
    journal.journal_path(sealed.path).write_bytes(_record(sealed, (0, b"other file bytes")))
    journal.repair(sealed.path)
    assert sealed.path.read_bytes() == b"x" * 1500


def test_second_writer_is_refused_and_the_first_goes_on(sealed: SealedFile) -> None:
    with pytest.raises(TraceBusyError, match="another process is writing"):
        SealedFile.create(sealed.path, overwrite=True)
    _write_at(sealed, 1500, b"more")
    sealed.seal()
    assert sealed.path.read_bytes().endswith(b"more")
    assert journal.is_being_written(sealed.path)


def test_second_writer_is_refused_before_the_first_commit(tmp_path: Path) -> None:
    first = SealedFile.create(tmp_path / "a", overwrite=False)
    with pytest.raises(TraceBusyError):
        SealedFile.create(tmp_path / "a", overwrite=True)
    first.close()


def test_lock_of_a_killed_writer_does_not_block(tmp_path: Path) -> None:
    code = "import os, signal, sys\nfrom pathlib import Path\nfrom align.dumpers.journal import SealedFile\n"
    code += "f = SealedFile.create(Path(sys.argv[1]), overwrite=False); f.write(b'old'); f.seal()\n"
    code += "os.kill(os.getpid(), signal.SIGKILL)\n"
    root = Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a")], env={**os.environ, "PYTHONPATH": str(root)}, check=False
    )
    assert (tmp_path / "a").read_bytes() == b"old"
    assert not journal.is_being_written(tmp_path / "a")
    SealedFile.create(tmp_path / "a", overwrite=True).close()


def test_existing_file_is_not_overwritten_unasked(sealed: SealedFile) -> None:
    sealed.close()
    with pytest.raises(TraceError, match="exists already"):
        SealedFile.create(sealed.path, overwrite=False)
    assert [entry.name for entry in sealed.path.parent.iterdir()] == ["a"]


def test_old_file_stays_until_the_new_one_is_committed(sealed: SealedFile) -> None:
    sealed.close()
    new = SealedFile.create(sealed.path, overwrite=True)
    new.write(b"new")
    assert sealed.path.read_bytes() == b"x" * 1500
    new.seal()
    assert sealed.path.read_bytes() == b"new"
    new.close()


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"missing/a.*\n?.*choose a folder"):
        SealedFile.create(tmp_path / "missing" / "a", overwrite=False)


@pytest.mark.parametrize("target", ["_write_at", "os.replace"])
def test_full_disk_keeps_the_last_commit(sealed: SealedFile, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(journal if target == "_write_at" else os, target.removeprefix("os."), full)
    _write_at(sealed, 10, b"changed")
    _write_at(sealed, 1500, b"more")
    with pytest.raises(TraceError, match="No space left") as caught:
        sealed.seal()
    assert "free space" in caught.value.remedy
    monkeypatch.undo()
    _write_at(sealed, 0, b"after")
    with pytest.raises(TraceError):
        sealed.seal()
    assert sealed.path.read_bytes() == b"x" * 1500
    assert [entry.name for entry in sealed.path.parent.iterdir()] == ["a"]


def test_forked_child_does_not_write_its_parents_file(sealed: SealedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        _write_at(sealed, 1500, b"child")
        sealed.seal()
    assert sealed.path.read_bytes() == b"x" * 1500
