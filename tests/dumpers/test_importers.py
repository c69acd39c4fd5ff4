"""numpy files and safetensors become traces with their dtypes and bits; what is damaged is said in two lines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from align.dumpers.dtypes import widen
from align.dumpers.errors import AlignError, TraceFormatError
from align.dumpers.importers import DumpFormat, detect, import_dump, open_any
from align.dumpers.model import NodeKey, RunStatus, Storage
from align.dumpers.store import Trace


def write_safetensors(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, place + len(content)]}
        place += len(content)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(content for *_, content in tensors.values()))


def imported(source: Path | str, tmp_path: Path) -> Trace:
    import_dump(source, tmp_path / "imported.h5", overwrite=True)
    return Trace.open(tmp_path / "imported.h5")


def test_an_npz_archive_keeps_order_dtypes_and_bits(tmp_path: Path) -> None:
    arrays = {
        "unet.mid": np.arange(6, dtype=np.float32).reshape(2, 3),
        "unet.up.0": np.array([1.5, -2.0], np.float16),
        "mask": np.array([[True], [False]]),
        "ids": np.arange(3),
        "scalar": np.array(3.0),
        "z": np.array([1 + 2j], np.complex64),
    }
    np.savez(tmp_path / "run.npz", **arrays)
    with imported(tmp_path / "run.npz", tmp_path) as trace:
        assert [record.key.path for record in trace.nodes] == list(arrays)
        for record in trace.nodes:
            raw, expected = trace.read(record.key), arrays[record.key.path]
            assert (raw.dtype, raw.shape) == (expected.dtype.name, expected.shape)
            assert raw.bits.tobytes() == expected.tobytes()
            assert record.storage is Storage.TENSOR
            assert record.statistics is not None
        assert trace.header.dtype == "complex64" or trace.header.dtype in ("float16", "float32", "float64")
        assert trace.status is RunStatus.COMPLETE


def test_a_folder_of_npy_is_read_in_natural_order_by_module_path(tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    (folder / "block").mkdir(parents=True)
    for name in ("block/10.npy", "block/2.npy", "conv.npy"):
        np.save(folder / name, np.ones(2, np.float32))
    with imported(folder, tmp_path) as trace:
        assert [str(record.key) for record in trace.nodes] == [
            "block.2/forward#0:0",
            "block.10/forward#0:0",
            "conv/forward#0:0",
        ]


def test_an_array_named_by_a_node_key_has_that_key(tmp_path: Path) -> None:
    key = NodeKey("unet.mid", "softmax", 3, "0", 2)
    np.savez(tmp_path / "keys.npz", **{str(key): np.ones(2)})
    with imported(tmp_path / "keys.npz", tmp_path) as trace:
        assert trace.nodes[0].key == key


def test_a_single_npy_is_named_by_its_file(tmp_path: Path) -> None:
    np.save(tmp_path / "logits.npy", np.ones((2, 2), np.float32))
    with imported(tmp_path / "logits.npy", tmp_path) as trace:
        assert trace.nodes[0].key == NodeKey("logits", "forward")


def test_big_endian_fortran_and_empty_arrays_are_read_right(tmp_path: Path) -> None:
    arrays = {
        "big": np.arange(4, dtype=">f4"),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "empty": np.zeros((0, 3), np.float32),
    }
    folder = tmp_path / "dump"
    folder.mkdir()
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    with imported(folder, tmp_path) as trace:
        for name, array in arrays.items():
            raw = trace.read(NodeKey(name, "forward"))
            assert raw.shape == array.shape
            np.testing.assert_array_equal(raw.bits, array)


def test_two_byte_voids_are_taken_for_bfloat16_with_a_note(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([0x3F80, 0xC000], np.uint16).view("V2"))
    with imported(tmp_path / "x.npy", tmp_path) as trace:
        record = trace.nodes[0]
        np.testing.assert_array_equal(widen(trace.read(record.key)), [1.0, -2.0])
        assert "taken for bfloat16" in record.note


def test_pickled_objects_texts_and_torn_files_are_left_out_with_a_warning(tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    folder.mkdir()
    np.save(folder / "good.npy", np.ones(2))
    np.save(folder / "objects.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    np.save(folder / "text.npy", np.array(["a", "bc"]))
    (folder / "torn.npy").write_bytes((folder / "good.npy").read_bytes()[:40])
    summary = import_dump(folder, tmp_path / "out.h5")
    assert (summary.nodes, summary.tensors) == (1, 1)
    assert len(summary.warnings) == 3
    assert any(warning.startswith("objects left out") for warning in summary.warnings)


def test_safetensors_keeps_every_dtype_bit_for_bit(tmp_path: Path) -> None:
    tensors = {
        "a": ("F32", (2,), np.array([1.0, -0.0], np.float32).tobytes()),
        "b": ("BF16", (2, 1), np.array([0x3F80, 0x7FC0], np.uint16).tobytes()),
        "c": ("F8_E4M3", (3,), bytes([0x38, 0x7E, 0xFF])),
        "d": ("BOOL", (2,), bytes([1, 0])),
        "e": ("I64", (), np.array(7).tobytes()),
        "f": ("F16", (0, 4), b""),
    }
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with imported(tmp_path / "model.safetensors", tmp_path) as trace:
        names = ["float32", "bfloat16", "float8_e4m3fn", "bool", "int64", "float16"]
        assert sorted(record.dtype for record in trace.nodes) == sorted(names)
        for name, (_, shape, content) in tensors.items():
            raw = trace.read(NodeKey(name, "forward"))
            assert (raw.shape, raw.bits.tobytes()) == (shape, content)


def test_a_file_of_the_safetensors_package_is_read_the_same(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors.numpy")
    tensors = {
        "w": np.arange(6, dtype=np.float32).reshape(2, 3),
        "n": np.array([1, 2], np.int8),
        "h": np.ones(3, np.float16),
    }
    package.save_file(tensors, tmp_path / "x.safetensors")
    with imported(tmp_path / "x.safetensors", tmp_path) as trace:
        for name, array in tensors.items():
            np.testing.assert_array_equal(trace.read(NodeKey(name, "forward")).bits, array)


def test_shards_of_a_folder_are_one_run(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for number in (1, 2):
        write_safetensors(folder / f"m-0000{number}-of-2.safetensors", {f"w{number}": ("U8", (1,), bytes([number]))})
    with imported(folder, tmp_path) as trace:
        assert [record.key.path for record in trace.nodes] == ["w1", "w2"]


@pytest.mark.parametrize(
    ("header", "body"),
    [
        ('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', b"1234"),
        ('{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}', b"12345678"),
        ('{"a":{"dtype":"F32","shape":[2],"data_offsets":[-8,0]}}', b"12345678"),
        ('{"a":{"dtype":"F32"}}', b""),
        ('{"a":', b""),
    ],
)
def test_a_damaged_safetensors_file_is_refused_in_two_lines(tmp_path: Path, header: str, body: bytes) -> None:
    file = tmp_path / "bad.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode() + body)
    with pytest.raises(TraceFormatError) as caught:
        import_dump(file, tmp_path / "out.h5")
    assert str(caught.value).count("\n") == 1
    assert not (tmp_path / "out.h5").exists()


def test_detect_looks_at_content_not_at_names(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.ones(1))
    (tmp_path / "x.npz").rename(tmp_path / "npz.bin")
    np.save(tmp_path / "x.npy", np.ones(1))
    (tmp_path / "x.npy").rename(tmp_path / "npy.dat")
    write_safetensors(tmp_path / "weights", {"a": ("U8", (1,), b"x")})
    (tmp_path / "notes.json").write_text('{"some": "thing"}')
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    found = {path.name: detect(path) for path in tmp_path.iterdir()}
    assert found == {
        "npz.bin": DumpFormat.ARRAYS, "npy.dat": DumpFormat.ARRAYS, "weights": DumpFormat.SAFETENSORS,
        "notes.json": None, "empty": None, "folder": None,
    }  # fmt: skip
    assert detect(tmp_path / "absent") is None


@pytest.mark.parametrize("name", ["absent", "notes.txt"])
def test_what_is_no_dump_is_refused_with_the_formats_there_are(tmp_path: Path, name: str) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(AlignError, match="msprobe, polygraphy, numpy, safetensors"):
        import_dump(tmp_path / name, tmp_path / "out.h5")


def test_an_existing_trace_is_not_overwritten_unasked(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones(1))
    import_dump(tmp_path / "x.npy", tmp_path / "out.h5")
    with pytest.raises(AlignError):
        import_dump(tmp_path / "x.npy", tmp_path / "out.h5")
    assert import_dump(tmp_path / "x.npy", tmp_path / "out.h5", overwrite=True).nodes == 1


def test_open_any_opens_a_trace_as_it_is(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones(1))
    import_dump(tmp_path / "x.npy", tmp_path / "out.h5")
    with open_any(tmp_path / "out.h5") as trace:
        assert trace.path == tmp_path / "out.h5"


def test_open_any_imports_beside_and_again_only_after_a_change(tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    folder.mkdir()
    np.save(folder / "x.npy", np.ones(1))
    with open_any(folder) as trace:
        assert trace.path == tmp_path / "dump.imported.h5"
        assert len(trace.nodes) == 1
    written = trace.path.stat().st_mtime_ns
    with open_any(folder) as trace:
        assert trace.path.stat().st_mtime_ns == written
    np.save(folder / "y.npy", np.ones(1))
    with open_any(folder) as trace:
        assert len(trace.nodes) == 2


def test_numpy_files_and_safetensors_are_imported_without_torch(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones(1))
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from align.dumpers.importers import import_dump\n"
        f"print(import_dump({str(tmp_path / 'x.npy')!r}, {str(tmp_path / 'out.h5')!r}).tensors)\n"
    )
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=root, env=_environment(root)
    )
    assert done.stdout.strip() == "1", done.stderr


def _environment(root: str) -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": root}


def test_what_was_imported_and_from_where_stands_in_the_trace(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones(1))
    with imported(tmp_path / "x.npy", tmp_path) as trace:
        facts = json.loads(trace.document("import"))
    assert facts["format"] == "numpy"
    assert facts["source"] == str(tmp_path / "x.npy")


def test_digests_of_imported_tensors_hold(tmp_path: Path) -> None:
    np.savez(tmp_path / "run.npz", a=np.ones(3), b=np.arange(4))
    with imported(tmp_path / "run.npz", tmp_path) as trace:
        assert all(is_whole for _, is_whole in trace.verify())
