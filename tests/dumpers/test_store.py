"""A trace reads back what was written, with and without us, in whatever state its writer left it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from align.dumpers import journal, schema
from align.dumpers.dtypes import DTYPES, RawTensor, float8_table
from align.dumpers.errors import TraceBusyError, TraceError, TraceFormatError, UsageError
from align.dumpers.model import NodeKey, NodeKind, NodeRecord, OpClass, RunStatus, Storage, TraceHeader
from align.dumpers.statistics import describe, digest
from align.dumpers.store import COMPRESSIONS, Trace, TraceWriter

HEADER = TraceHeader("toy:build", "baseline", "cpu", "bfloat16", 7, environment=(("torch", "2.13"), ("A", "é = x\n")))
ROOT = Path(__file__).parents[2]


def _bits(dtype: str, *shape: int, seed: int = 0) -> RawTensor:
    carrier = np.dtype(DTYPES[dtype].carrier)
    extra = (2,) if dtype == "complex32" else ()
    codes = np.random.default_rng(seed).integers(
        0, 2 if dtype == "bool" else 256, (*shape, *extra, carrier.itemsize), np.uint8
    )
    return RawTensor(np.ascontiguousarray(codes).view(carrier).reshape((*shape, *extra)), dtype)


def _record(key: NodeKey, raw: RawTensor, order: int = 0, **fields: Any) -> NodeRecord:
    values: dict[str, Any] = {"storage": Storage.TENSOR, "statistics": describe(raw), "digest": digest(raw), **fields}
    return NodeRecord(key, order, NodeKind.MODULE, "Linear", raw.dtype, raw.shape, **values)


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path: Path, dtype: str, compression: str) -> None:
    shapes = [(), (0, 3), (5,), (3, 4, 5), (70_001,)]
    with TraceWriter.create(tmp_path / "t.h5", HEADER, compression=compression) as writer:
        for order, shape in enumerate(shapes):
            raw = _bits(dtype, *shape)
            writer.put(_record(NodeKey("m", "forward", order), raw, order), raw)
    with Trace.open(tmp_path / "t.h5") as trace:
        for order, shape in enumerate(shapes):
            back, raw = trace.read(NodeKey("m", "forward", order)), _bits(dtype, *shape)
            assert (back.dtype, back.shape) == (dtype, shape)
            assert back.bits.tobytes() == raw.bits.tobytes()
        assert [good for _, good in trace.verify()] == [True] * len(shapes)
        key, raw = NodeKey("m", "forward", 3), _bits(dtype, 3, 4, 5)
        assert trace.read_rows(key, 1, 3).bits.tobytes() == raw.bits[1:3].tobytes()
        flat = raw.bits.reshape((60, *raw.bits.shape[3:]))
        assert trace.read_flat(key, 7, 44).bits.tobytes() == flat[7:44].tobytes()


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    raw = _bits("float32", 2, 3)
    first = _record(NodeKey("", "forward"), raw, 0)
    second = NodeRecord(
        NodeKey("a.b/c", "conv2d", 2, "out.0", 3, 1), 1, NodeKind.CALL, "torch.conv2d", "bfloat16", (), "npu:0",
        OpClass.SENSITIVE, (first.key, NodeKey("elsewhere", "add", 1), first.key), Storage.FUSED, None, "",
        "conv@a/b#0", "näher\0bei",
    )  # fmt: skip
    with TraceWriter.create(tmp_path / "t.h5", HEADER) as writer:
        writer.put(first, raw)
        writer.commit()
        writer.put(second, None)
    with Trace.open(tmp_path / "t.h5") as trace:
        assert trace.header == HEADER
        assert trace.status is RunStatus.COMPLETE
        assert trace.nodes[0] == first
        assert trace.nodes[1].note == "näher\N{SYMBOL FOR NULL}bei"
        assert trace.nodes[1].producers == second.producers
        assert trace.record(second.key).site == second.site


def test_nodes_are_listed_by_order_not_by_arrival(tmp_path: Path) -> None:
    raw = _bits("float32", 1)
    with TraceWriter.create(tmp_path / "t.h5", HEADER) as writer:
        for order in (2, 0, 1):
            writer.put(_record(NodeKey("m", "f", order), raw, order, storage=Storage.STATISTICS), None)
    with Trace.open(tmp_path / "t.h5") as trace:
        assert [record.order for record in trace.nodes] == [0, 1, 2]


def test_identical_content_is_stored_once(tmp_path: Path) -> None:
    raw = _bits("float32", 1000)
    with TraceWriter.create(tmp_path / "t.h5", HEADER) as writer:
        for call in range(50):
            writer.put(_record(NodeKey("m", "forward", call), raw, call), raw)
    assert (tmp_path / "t.h5").stat().st_size < 10 * raw.bits.nbytes + 100_000
    with h5py.File(tmp_path / "t.h5") as file:
        assert file["tensors/m/forward#0:0"] == file["tensors/m/forward#49:0"]
    with Trace.open(tmp_path / "t.h5") as trace:
        assert all(good for _, good in trace.verify())


def test_plain_h5py_reads_a_trace_without_us(tmp_path: Path) -> None:
    brain = RawTensor(np.array([0x3FC0, 0xC000, 0x0001, 0x7F80], np.uint16), "bfloat16")
    eight = RawTensor(np.arange(0x70, dtype=np.uint8), "float8_e4m3fn")
    flags = RawTensor(np.array([True, False]), "bool")
    with TraceWriter.create(tmp_path / "t.h5", HEADER) as writer:
        writer.put(_record(NodeKey("unet.mid", "forward"), brain), brain)
        writer.put(_record(NodeKey("", "add", 1, "a/b", 2), eight), eight)
        writer.put(_record(NodeKey("", "gt"), flags), flags)
        writer.put_document("plan", "ä\n")
    with h5py.File(tmp_path / "t.h5") as file:
        np.testing.assert_array_equal(file["tensors/unet.mid/forward#0:0"][:], np.float32([1.5, -2, 2.0**-133, np.inf]))
        assert file["tensors/unet.mid/forward#0:0"].id.get_type().get_size() == 2
        np.testing.assert_array_equal(file["tensors/(model)/add#1:a%2Fb@2"][:], float8_table("float8_e4m3fn")[:0x70])
        assert file["tensors/(model)/gt#0:0"][:].tolist() == [True, False]
        assert file["documents/plan"].asstr()[()] == "ä\n"
        assert (file.attrs["format"], file.attrs["status"], file.attrs["seed"]) == ("align-trace", "complete", 7)
        pool = file["nodes/text"][:].tobytes().decode().split("\0")
        assert pool[file["nodes/table"]["path"][0]] == "unet.mid"


def test_documents_are_replaced_and_named(tmp_path: Path) -> None:
    with TraceWriter.create(tmp_path / "t.h5", HEADER) as writer:
        writer.put_document("plan", "old")
        writer.commit()
        writer.put_document("plan", "new and longer")
        writer.put_document("a/b", "")
    with Trace.open(tmp_path / "t.h5") as trace:
        assert sorted(trace.documents) == ["a/b", "plan"]
        assert (trace.document("plan"), trace.document("a/b")) == ("new and longer", "")
        with pytest.raises(UsageError, match="no document 'sites'"):
            trace.document("sites")


def test_wrong_keys_are_answered_with_the_nearest(tmp_path: Path) -> None:
    raw = _bits("float32", 1)
    with TraceWriter.create(tmp_path / "t.h5", HEADER) as writer:
        writer.put(_record(NodeKey("unet.mid", "forward"), raw, storage=Storage.STATISTICS), None)
        with pytest.raises(UsageError, match="stored already"):
            writer.put(_record(NodeKey("unet.mid", "forward"), raw), None)
    with Trace.open(tmp_path / "t.h5") as trace:
        with pytest.raises(UsageError, match=r"the nearest is unet\.mid/forward#0:0"):
            trace.read(NodeKey("unet.mit", "forward"))
        with pytest.raises(UsageError, match="kept as statistics"):
            trace.read(NodeKey("unet.mid", "forward"))


@pytest.mark.parametrize(
    ("raised", "status"),
    [(ValueError, RunStatus.FAILED), (KeyboardInterrupt, RunStatus.INTERRUPTED), (None, RunStatus.COMPLETE)],
)
def test_trace_says_how_the_run_ended(tmp_path: Path, raised: type[BaseException] | None, status: RunStatus) -> None:
    def run() -> None:
        with TraceWriter.create(tmp_path / "t.h5", HEADER) as writer:
            raw = _bits("float32", 4)
            writer.put(_record(NodeKey("m", "forward"), raw), raw)
            if raised is not None:
                raise raised

    if raised is None:
        run()
    else:
        with pytest.raises(raised):
            run()
    with Trace.open(tmp_path / "t.h5") as trace:
        assert (trace.status, len(trace.nodes)) == (status, 1)


def test_a_trace_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    raw = _bits("float32", 4)
    with TraceWriter.create(tmp_path / "t.h5", HEADER) as writer:
        writer.put(_record(NodeKey("m", "forward"), raw), raw)
        writer.commit()
        writer.put(_record(NodeKey("m", "forward", 1), raw, 1), raw)
        with Trace.open(tmp_path / "t.h5") as trace:
            assert (trace.status, len(trace.nodes)) == (RunStatus.INCOMPLETE, 1)
            assert trace.read(NodeKey("m", "forward")).bits.tobytes() == raw.bits.tobytes()


def test_two_writers_on_one_path_are_told_apart(tmp_path: Path) -> None:
    with TraceWriter.create(tmp_path / "t.h5", HEADER), pytest.raises(TraceBusyError):
        TraceWriter.create(tmp_path / "t.h5", HEADER, overwrite=True)
    with pytest.raises(TraceError, match="exists already"):
        TraceWriter.create(tmp_path / "t.h5", HEADER)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.95])
def test_a_truncated_file_is_named_as_one(tmp_path: Path, share: float) -> None:
    path = _written(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(TraceFormatError, match="not a readable trace"), Trace.open(path) as trace:
        assert trace.nodes


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.h5").write_text("no HDF5")
    with pytest.raises(TraceFormatError):
        Trace.open(tmp_path / "text.h5")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = 1
    with pytest.raises(TraceFormatError, match="no trace"):
        Trace.open(tmp_path / "other.h5")
    with pytest.raises(TraceError, match="no trace at"):
        Trace.open(tmp_path / "missing.h5")
    path = _written(tmp_path)
    with h5py.File(path, "r+") as file:
        file.attrs["version"] = 99
    with pytest.raises(TraceFormatError, match="version 99"):
        Trace.open(path)


def test_changed_bytes_are_found_by_verify(tmp_path: Path) -> None:
    path = _written(tmp_path)
    with h5py.File(path, "r+") as file:
        file["tensors/m/forward#3:0"][5] += 1
    with Trace.open(path) as trace:
        assert [key.call for key, good in trace.verify() if not good] == [3]


def _written(folder: Path) -> Path:
    path = folder / "t.h5"
    with TraceWriter.create(path, HEADER) as writer:
        for call in range(10):
            raw = _bits("int32", 500, seed=call)
            writer.put(_record(NodeKey("m", "forward", call), raw, call), raw)
    return path


def test_a_pending_record_is_applied_or_laid_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    writer = TraceWriter.create(tmp_path / "t.h5", HEADER)
    for call in range(5):
        raw = _bits("float32", 300, seed=call)
        writer.put(_record(NodeKey("m", "forward", call), raw, call), raw)
    with monkeypatch.context() as patch:
        patch.setattr(journal, "apply_pages", die)
        with pytest.raises(KeyboardInterrupt):
            writer.commit()
    writer._abandon()
    with monkeypatch.context() as patch:
        patch.setattr(journal, "repair", lambda _: (_ for _ in ()).throw(PermissionError(errno.EACCES, "read-only")))
        with Trace.open(tmp_path / "t.h5") as trace:
            assert len(list(trace.verify())) == 5
            assert all(good for _, good in trace.verify())
            assert trace.read_flat(NodeKey("m", "forward", 4), 0, 300).bits.tobytes() == raw.bits.tobytes()
    assert journal.journal_path(tmp_path / "t.h5").exists()
    with Trace.open(tmp_path / "t.h5") as trace:
        assert len(trace.nodes) == 5
    assert not journal.journal_path(tmp_path / "t.h5").exists()
    with h5py.File(tmp_path / "t.h5") as file:
        assert len(file["nodes/table"]) == 5


def test_a_full_disk_is_named_and_loses_nothing_sealed(tmp_path: Path) -> None:
    code = """
import resource, sys
sys.path.insert(0, sys.argv[2])
from test_store import *
from test_store import _bits, _record
resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))
writer = TraceWriter.create(sys.argv[1], HEADER)
try:
    for call in range(100):
        raw = _bits("float32", 25_000, seed=call)
        writer.put(_record(NodeKey("m", "forward", call), raw, call), raw)
        writer.commit()
except TraceError as error:
    print(call, str(error).replace(chr(10), " | "))
    writer.close(RunStatus.FAILED) if len(sys.argv) > 3 else None
"""
    command = [sys.executable, "-c", code, str(tmp_path / "t.h5"), str(Path(__file__).parent)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr
    count, _, text = run.stdout.partition(" ")
    assert "File too large" in text
    assert "free space" in text
    with Trace.open(tmp_path / "t.h5") as trace:
        assert len(trace.nodes) == int(count) > 10
        assert all(good for _, good in trace.verify())
        assert trace.status is RunStatus.INCOMPLETE


def test_a_program_that_never_closes_leaves_its_last_commit(tmp_path: Path) -> None:
    code = """
import sys
sys.path.insert(0, sys.argv[2])
from test_store import *
from test_store import _bits, _record
writer = TraceWriter.create(sys.argv[1], HEADER)
for call in range(3):
    raw = _bits("float32", 10, seed=call)
    writer.put(_record(NodeKey("m", "forward", call), raw, call), raw)
    writer.commit() if call == 1 else None
"""
    command = [sys.executable, "-c", code, str(tmp_path / "t.h5"), str(Path(__file__).parent)]
    run = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")
    with Trace.open(tmp_path / "t.h5") as trace:
        assert (trace.status, len(trace.nodes)) == (RunStatus.INCOMPLETE, 2)


def test_missing_compression_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hdf5plugin", None)
    with pytest.raises(UsageError, match="hdf5plugin") as caught:
        TraceWriter.create(tmp_path / "t.h5", HEADER, compression="zstd")
    assert "pip install" in caught.value.remedy
    with pytest.raises(UsageError, match="unknown compression"):
        TraceWriter.create(tmp_path / "t.h5", HEADER, compression="rar")


def test_odd_names_stay_apart() -> None:
    paths = ["", "(model)", "a.b", "a/b", "a%2Fb", ".", "..", "a\0b"]
    names = [schema.group_name(path) for path in paths]
    assert len(set(names)) == len(paths)
    assert not any("/" in name or "\0" in name or name in (".", "..") for name in names)


def test_sample_positions_are_fixed_sorted_and_distinct() -> None:
    key = NodeKey("m", "forward")
    for count in (0, 1, 4096, 5000, 10**10):
        positions = schema.sample_positions(key, count)
        assert len(positions) == min(count, schema.SAMPLE_SIZE)
        assert (np.diff(positions) > 0).all()
        assert not len(positions) or 0 <= positions[0] <= positions[-1] < count
    assert (
        schema.sample_positions(key, 10**6)[:3].tolist()
        == schema.sample_positions(NodeKey("m", "forward", rank=3), 10**6)[:3].tolist()
    )
    assert (schema.sample_positions(key, 10**6) != schema.sample_positions(NodeKey("n", "forward"), 10**6)).any()
    assert schema.sample_positions(key, 10**6)[:3].tolist() == PINNED


PINNED = [149, 327, 698]


def test_reading_a_trace_needs_no_torch() -> None:
    code = "import sys, align.dumpers.store, align.dumpers.statistics; sys.exit('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    assert run.returncode == 0


def _killed(folder: Path, mode: str) -> list[tuple[Path, int]]:
    command = [sys.executable, str(Path(__file__).with_name("killed_writers.py")), str(folder), mode, "2024"]
    run = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True
    )
    return [(Path(path), count) for path, count in map(json.loads, run.stdout.splitlines())]


@pytest.mark.parametrize("mode", ["moments", "operations"])
def test_a_killed_writer_leaves_every_sealed_node(tmp_path: Path, mode: str) -> None:
    seen = set()
    for path, committed in _killed(tmp_path, mode):
        if not path.exists():
            assert committed == 0  # killed before the trace began
            continue
        with_record = journal.journal_path(path).exists()
        seen.add((with_record, committed > 0))
        with Trace.open(path) as trace:
            assert len(trace.nodes) >= committed
            assert all(good for _, good in trace.verify())
            assert trace.status is RunStatus.INCOMPLETE
            assert [record.order for record in trace.nodes] == list(range(len(trace.nodes)))
        with h5py.File(path) as file:  # and without us, after at most one repair
            assert len(file["nodes/table"]) == len(trace.nodes)
        TraceWriter.create(path, HEADER, overwrite=True).close(RunStatus.COMPLETE)  # no lock stays behind
    assert (False, True) in seen
    if mode == "operations":
        assert (True, True) in seen  # some were killed between the record and its removal
