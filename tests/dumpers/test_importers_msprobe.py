"""msprobe's dumps become traces: keys, nested slots, statistics, checksums, torn files, missing tensors, pickles."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from align.dumpers.errors import AlignError, TraceFormatError, UsageError
from align.dumpers.importers import DumpFormat, detect, import_dump
from align.dumpers.importers.msprobe_keys import OPERATORS, CallNames
from align.dumpers.importers.msprobe_leaves import dtype_name, statistics_of
from align.dumpers.model import NodeKey, NodeKind, NodeRecord, RunStatus, Storage
from align.dumpers.store import Trace


def leaf(shape: list[int], dtype: str = "torch.float32", **more: Any) -> dict[str, Any]:
    return {
        "type": "torch.Tensor",
        "dtype": dtype,
        "shape": shape,
        "Max": 2.0,
        "Min": -1.0,
        "Mean": 0.5,
        "Norm": 3.0,
        **more,
    }


def forward(*outputs: Any, inputs: tuple[Any, ...] = (), **kwargs: Any) -> dict[str, Any]:
    return {"input_args": list(inputs), "input_kwargs": kwargs, "output": list(outputs)}


def write(folder: Path, data: dict[str, Any], **top: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    content = {"task": "statistics", "level": "mix", "framework": "pytorch", "dump_data_dir": None, **top, "data": data}
    (folder / "dump.json").write_text(json.dumps(content, indent=1))
    return folder


def save_npy(folder: Path, name: str, values: Any) -> str:
    (folder / "dump_tensor_data").mkdir(parents=True, exist_ok=True)
    np.save(folder / "dump_tensor_data" / name, values)
    return name


def records(source: Path | str, tmp_path: Path) -> dict[str, NodeRecord]:
    import_dump(source, tmp_path / "out.h5", overwrite=True)
    with Trace.open(tmp_path / "out.h5") as trace:
        return {str(record.key): record for record in trace.nodes}


def test_module_and_function_keys_become_node_keys(tmp_path: Path) -> None:
    root = write(
        tmp_path / "dump/step0/proc12",
        {
            "Functional.relu.0.forward": forward(leaf([2]), inputs=(leaf([2]),)),
            "Module.conv1.Conv2d.forward.0": forward(
                leaf([2]), inputs=(leaf([2]), {"type": "int", "value": 3}), mask=leaf([1])
            ),
            "Tensor.__add__.0.forward": forward(leaf([2])),
            "Module.layers.0.attn.Attention.backward.0": {"input": [leaf([2])], "output": [None, leaf([3])]},
            "Module.conv1.Conv2d.parameters_grad.0": {"weight": [leaf([4])]},
            "loss.0.debug": leaf([]),
        },
    )
    found = records(root, tmp_path)
    assert list(found) == [
        "/relu#0:in.0", "/relu#0:0", "conv1/forward#0:in.0", "conv1/forward#0:in.mask", "conv1/forward#0:0",
        "/add#0:0", "layers.0.attn/backward#0:0", "layers.0.attn/backward#0:in.1", "conv1/parameters_grad#0:weight",
        "loss/debug#0:0",
    ]  # fmt: skip
    kinds = [record.kind for record in found.values()]
    assert kinds[:3] == [NodeKind.INPUT, NodeKind.CALL, NodeKind.INPUT]
    assert kinds[4] is NodeKind.MODULE
    assert kinds[6:9] == [NodeKind.GRADIENT] * 3
    assert found["conv1/forward#0:0"].type_name == "Conv2d"
    assert found["/relu#0:0"].note.startswith("msprobe Functional.relu.0.forward")


def test_slots_of_nested_outputs_are_those_of_our_own_traces(tmp_path: Path) -> None:
    nested = forward(leaf([1]), {"k": [leaf([2]), None], "n": {"type": "int", "value": 3}})
    lone = forward({"last_hidden_state": leaf([3])})
    root = write(tmp_path / "d", {"Module.a.Two.forward.0": nested, "Module.b.Enc.forward.0": lone})
    assert list(records(root, tmp_path)) == ["a/forward#0:0", "a/forward#0:1.k.0", "b/forward#0:last_hidden_state"]


def test_functions_count_within_their_module_so_that_a_fused_one_shifts_no_other(tmp_path: Path) -> None:
    parents = {"Functional.gelu.7.forward": "Module.block.1.GELU.forward.0", "Module.block.1.GELU.forward.0": None}
    names = CallNames(parents)
    name = names.name("Functional.gelu.7.forward")
    assert name is not None
    assert (name.path, name.op, name.call) == ("block.1", "gelu", 0)
    backward = names.name("Functional.gelu.7.backward")
    assert backward is not None
    assert (backward.path, backward.op, backward.call) == ("block.1", "gelu.backward", 0)


def test_functions_of_two_prefixes_never_share_a_key() -> None:
    names = CallNames({})
    found = [names.name(f"{prefix}.relu.0.forward") for prefix in ("Functional", "Torch")]
    assert [(name.op, name.call) for name in found if name] == [("relu", 0), ("relu", 1)]


def test_operators_are_named_as_our_own_traces_name_them() -> None:
    naming = pytest.importorskip("align.dumpers.naming")
    for name, ours in OPERATORS.items():
        assert naming._ALIASES[name] == ours


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("torch.bfloat16", "bfloat16"),
        ("Float32", "float32"),
        ("BFloat16", "bfloat16"),
        ("Bool", "bool"),
        ("torch.float8_e4m3fn", "float8_e4m3fn"),
        ("torch.quint4x2", "quint4x2"),
    ],
)
def test_dtypes_of_torch_and_mindspore_have_our_names(text: str, name: str) -> None:
    assert dtype_name(text) == name


def test_statistics_only_dumps_keep_their_statistics(tmp_path: Path) -> None:
    found = records(write(tmp_path / "d", {"Module.a.ReLU.forward.0": forward(leaf([2, 5], md5="a8ff04be"))}), tmp_path)
    record = found["a/forward#0:0"]
    assert (record.storage, record.shape, record.digest) == (Storage.STATISTICS, (2, 5), "crc32:a8ff04be")
    assert record.statistics is not None
    assert (record.statistics.count, record.statistics.minimum, record.statistics.maximum) == (10, -1.0, 2.0)
    assert record.statistics.std == pytest.approx(math.sqrt(9 / 10 - 0.25))


def test_bare_nan_and_infinity_are_read_and_counted(tmp_path: Path) -> None:
    bad = leaf([4], Max=math.inf, Min=-math.inf, Mean=math.nan, Norm=math.inf)
    root = write(
        tmp_path / "d",
        {"Module.a.X.forward.0": forward(bad), "Module.b.X.forward.0": forward(leaf([4], Max=math.nan, Min=math.nan))},
    )
    assert "Infinity" in (root / "dump.json").read_text()
    found = records(root, tmp_path)
    first, second = (found[f"{path}/forward#0:0"].statistics for path in "ab")
    assert first is not None
    assert second is not None
    assert (first.posinf, first.neginf, first.nan, math.isnan(first.maximum)) == (1, 1, 0, True)
    assert (second.nan, second.posinf) == (1, 0)


def test_missing_statistics_and_xor_checksums(tmp_path: Path) -> None:
    bare = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2], "md5": "0x0123456789abcdef"}
    nulls = leaf([2], Max=None, Min=None, Mean=None, Norm=None)
    found = records(write(tmp_path / "d", {"Module.a.X.forward.0": forward(bare, nulls)}), tmp_path)
    assert found["a/forward#0:0"].digest == "xor:0x0123456789abcdef"
    assert [record.storage for record in found.values()] == [Storage.ABSENT] * 2


def test_norm_of_a_scalar_may_be_negative() -> None:
    statistics = statistics_of(leaf([], Max=-3.0, Min=-3.0, Mean=-3.0, Norm=-3.0))
    assert statistics is not None
    assert (statistics.l2, statistics.absmax, statistics.std) == (3.0, 3.0, 0.0)


def test_fake_and_distributed_tensors_and_peer_operations_are_walked(tmp_path: Path) -> None:
    peer = {"class_type": "torch.distributed.P2POp", "tensor": leaf([2]), "op": "isend", "peer": 1}
    entry = forward(
        {**leaf([2]), "type": "DTensor"},
        {**leaf([2]), "type": "FakeTensor"},
        peer,
        {"type": "slice", "value": [leaf([9])]},
    )
    assert list(records(write(tmp_path / "d", {"Distributed.x.0.forward": entry}), tmp_path)) == [
        "/x#0:0",
        "/x#0:1",
        "/x#0:2.tensor",
    ]


def test_a_half_written_dump_keeps_what_is_whole_and_says_incomplete(tmp_path: Path) -> None:
    root = write(tmp_path / "d", {f"Module.m{i}.X.forward.0": forward(leaf([i + 1], Max=math.nan)) for i in range(6)})
    text = (root / "dump.json").read_text()
    seen = set()
    for length in range(text.index('"data"'), len(text), 97):
        (root / "dump.json").write_text(text[:length])
        summary = import_dump(root, tmp_path / "out.h5", overwrite=True)
        assert summary.status is RunStatus.INCOMPLETE
        assert "breaks off" in summary.warnings[0]
        seen.add(summary.nodes)
    assert seen == set(range(6)) or seen == set(range(7))
    with Trace.open(tmp_path / "out.h5") as trace:
        assert trace.status is RunStatus.INCOMPLETE


@pytest.mark.parametrize("text", ["", "[1]", "nonsense", "3"])
def test_a_dump_json_that_is_none_is_refused_in_two_lines(tmp_path: Path, text: str) -> None:
    (tmp_path / "dump.json").write_text(text)
    with pytest.raises(TraceFormatError) as caught:
        import_dump(tmp_path / "dump.json", tmp_path / "out.h5")
    assert str(caught.value).count("\n") == 1


def test_old_files_may_lack_framework_level_and_data(tmp_path: Path) -> None:
    (tmp_path / "dump.json").write_text('{"task": "tensor"}')
    assert import_dump(tmp_path / "dump.json", tmp_path / "out.h5").nodes == 0


def test_tensors_of_mindspore_are_read_from_npy_and_missing_ones_are_said(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    name = save_npy(folder, "Cell.net.Dense.forward.0.output.0.npy", np.array([1.0, 2.0], np.float32))
    here = {**leaf([2], "Float32", data_name=name), "type": "mindspore.Tensor"}
    gone = leaf([2], data_name="Cell.net.Dense.forward.0.output.1.npy")
    outside = leaf([2], data_name="../dump.json")
    write(folder, {"Cell.net.Dense.forward.0": forward(here, gone, outside)}, task="tensor", framework="mindspore")
    summary = import_dump(folder, tmp_path / "out.h5")
    assert (summary.tensors, summary.described, len(summary.warnings)) == (1, 2, 2)
    with Trace.open(tmp_path / "out.h5") as trace:
        assert trace.read(NodeKey("net", "forward")).bits.tolist() == [1.0, 2.0]
        assert "is missing" in trace.record(NodeKey("net", "forward", slot="1")).note


def test_the_folder_beside_counts_not_the_one_written_down(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    name = save_npy(folder, "x.npy", np.zeros(2, np.float32))
    write(
        folder,
        {"Module.a.X.forward.0": forward(leaf([2], data_name=name))},
        dump_data_dir="/elsewhere/on/another/machine",
    )
    assert import_dump(folder, tmp_path / "out.h5").tensors == 1


def test_steps_are_steps_and_ranks_are_parts(tmp_path: Path) -> None:
    entry = {"Module.a.X.forward.0": forward(leaf([2]))}
    for step in (0, 1, 10):
        for rank in (0, 3):
            write(tmp_path / f"dump/step{step}/rank{rank}", entry)
    write(tmp_path / "dump/step0/proc99", entry)
    assert detect(tmp_path / "dump") is DumpFormat.MSPROBE
    with pytest.raises(UsageError, match="rank0, rank3"):
        import_dump(tmp_path / "dump", tmp_path / "out.h5")
    found = records(f"{tmp_path / 'dump'}#rank3", tmp_path)
    assert list(found) == ["a/forward#0:0%3", "a/forward#0:0@1%3", "a/forward#0:0@10%3"]
    assert list(records(tmp_path / "dump/step10/rank0", tmp_path)) == ["a/forward#0:0@10"]
    assert list(records(tmp_path / "dump/step1/rank0/dump.json", tmp_path)) == ["a/forward#0:0@1"]


def test_a_run_started_anew_is_one_run(tmp_path: Path) -> None:
    entry = {"Module.a.X.forward.0": forward(leaf([2]))}
    write(tmp_path / "dump/step0/proc1", entry)
    write(tmp_path / "dump/step1/proc2", entry)
    assert list(records(tmp_path / "dump", tmp_path)) == ["a/forward#0:0", "a/forward#0:0@1"]


def test_producers_are_the_nodes_whose_content_an_input_repeats(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    first = save_npy(folder, "a.npy", np.arange(3, dtype=np.float32))
    second = save_npy(folder, "b.npy", np.arange(3, dtype=np.float32) * 2)
    write(
        folder,
        {
            "Module.a.X.forward.0": forward(leaf([3], data_name=first)),
            "Module.b.X.forward.0": forward(leaf([3], data_name=second), inputs=(leaf([3], data_name=first),)),
        },
    )
    assert records(folder, tmp_path)["b/forward#0:0"].producers == (NodeKey("a", "forward"),)


def test_stack_and_construct_are_kept_as_documents(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", {"Module.a.X.forward.0": forward(leaf([2]))})
    (folder / "stack.json").write_text('{"0": [["Module.a.X.forward.0"], ["File x.py, line 3"]]}')
    import_dump(folder, tmp_path / "out.h5")
    with Trace.open(tmp_path / "out.h5") as trace:
        assert "line 3" in trace.document("step0.stack.json")


def test_entries_of_no_known_form_are_said(tmp_path: Path) -> None:
    summary = import_dump(write(tmp_path / "d", {"what is this": {}}), tmp_path / "out.h5")
    assert summary.warnings == ("entry what is this left out: its name has no known form",)


torch = pytest.importorskip("torch")


def save_pt(folder: Path, name: str, value: Any) -> str:
    (folder / "dump_tensor_data").mkdir(parents=True, exist_ok=True)
    torch.save(value, folder / "dump_tensor_data" / name)
    return name


def test_pt_files_keep_bfloat16_bits(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    tensor = torch.tensor([[1.0, -2.5]], dtype=torch.bfloat16)
    name = save_pt(folder, "Module.a.X.forward.0.output.0.pt", tensor)
    write(folder, {"Module.a.X.forward.0": forward(leaf([1, 2], "torch.bfloat16", data_name=name))})
    import_dump(folder, tmp_path / "out.h5")
    with Trace.open(tmp_path / "out.h5") as trace:
        raw = trace.read(NodeKey("a", "forward"))
        assert (raw.dtype, raw.bits.tolist()) == ("bfloat16", [[0x3F80, 0xC020]])


class RunsCode:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('code of a pickle ran')",)


def test_a_pickle_that_would_run_code_is_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    name = save_pt(folder, "evil.pt", RunsCode())
    write(folder, {"Module.a.X.forward.0": forward(leaf([2], data_name=name))})
    summary = import_dump(folder, tmp_path / "out.h5")
    assert (summary.tensors, summary.described) == (0, 1)
    assert "evil.pt" in summary.warnings[0]


def test_torn_pt_files_and_other_objects_leave_the_statistics(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    other = save_pt(folder, "list.pt", [1, 2])
    torn = save_pt(folder, "torn.pt", torch.ones(100))
    file = folder / "dump_tensor_data" / torn
    file.write_bytes(file.read_bytes()[:200])
    write(folder, {"Module.a.X.forward.0": forward(leaf([2], data_name=other), leaf([100], data_name=torn))})
    summary = import_dump(folder, tmp_path / "out.h5")
    assert (summary.tensors, summary.described, len(summary.warnings)) == (0, 2, 2)


class NpuTensor:
    """Pickles as torch_npu pickles a tensor that lies on a device."""

    def __init__(self, tensor: Any, rebuild: Any) -> None:
        self.tensor, self.rebuild = tensor, rebuild

    def __reduce__(self) -> Any:
        storage = torch.storage.TypedStorage(
            wrap_storage=self.tensor.untyped_storage(), dtype=self.tensor.dtype, _internal=True
        )
        return self.rebuild, (storage, 0, tuple(self.tensor.shape), self.tensor.stride(), False, {}, True)


@pytest.fixture
def torch_npu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for torch_npu while the file is written; gone when it is read."""
    names = ["torch_npu", "torch_npu.utils", "torch_npu.utils.storage"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))

    def _rebuild_npu_tensor(*_: Any) -> Any:
        raise AssertionError("the device's own function must not run")

    _rebuild_npu_tensor.__module__ = names[-1]
    _rebuild_npu_tensor.__qualname__ = "_rebuild_npu_tensor"
    sys.modules[names[-1]]._rebuild_npu_tensor = _rebuild_npu_tensor  # type: ignore[attr-defined]
    return _rebuild_npu_tensor


def test_tensors_saved_from_an_npu_are_read_without_torch_npu(
    tmp_path: Path, torch_npu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "d"
    name = save_pt(folder, "npu.pt", NpuTensor(torch.arange(6.0).reshape(2, 3), torch_npu))
    for module in ("torch_npu", "torch_npu.utils", "torch_npu.utils.storage"):
        monkeypatch.delitem(sys.modules, module)
    write(folder, {"Module.a.X.forward.0": forward(leaf([2, 3], data_name=name))})
    assert import_dump(folder, tmp_path / "out.h5").warnings == ()
    with Trace.open(tmp_path / "out.h5") as trace:
        assert trace.read(NodeKey("a", "forward")).bits.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_pt_files_without_torch_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from align.dumpers.importers import torch_files

    folder = tmp_path / "d"
    name = save_pt(folder, "x.pt", torch.ones(2))
    write(folder, {"Module.a.X.forward.0": forward(leaf([2], data_name=name))})
    torch_files.import_torch.cache_clear()
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(AlignError, match=r"needs torch.*\npip install torch"):
        import_dump(folder, tmp_path / "out.h5")
