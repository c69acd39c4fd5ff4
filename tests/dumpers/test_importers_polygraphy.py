"""Polygraphy's saved results become traces: one runner a run, one iteration a step, its own encoding read by us."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from align.dumpers.errors import TraceFormatError, UsageError
from align.dumpers.importers import DumpFormat, detect, import_dump, open_any
from align.dumpers.model import NodeKey
from align.dumpers.store import Trace


def encoded(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    text = base64.b64encode(stream.getvalue()).decode()
    return {"values": {"array": text, "polygraphy_class": "ndarray"}, "polygraphy_class": "LazyArray"}


def results(*runners: tuple[str, list[dict[str, Any]]]) -> str:
    runs = [
        [
            name,
            [
                {"outputs": feed, "runtime": 0.1, "runner_name": name, "polygraphy_class": "IterationResult"}
                for feed in feeds
            ],
        ]
        for name, feeds in runners
    ]
    return json.dumps({"lst": runs, "polygraphy_class": "RunResults"}, indent=4)


FEEDS = [{"/conv/out": encoded(np.full((2, 3), step, np.float32)), "ids": encoded(np.arange(4))} for step in range(2)]


def test_iterations_are_steps_and_outputs_are_nodes(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_text(results(("trt-runner", FEEDS)))
    assert detect(file) is DumpFormat.POLYGRAPHY
    summary = import_dump(file, tmp_path / "out.h5")
    assert (summary.nodes, summary.tensors, summary.warnings) == (4, 4, ())
    with Trace.open(tmp_path / "out.h5") as trace:
        raw = trace.read(NodeKey("/conv/out", "forward", step=1))
        assert (raw.dtype, raw.bits.tolist()) == ("float32", [[1.0] * 3] * 2)
        assert trace.header.role == "trt-runner"
        assert trace.header.dtype == "float32"


def test_one_of_several_runners_must_be_named(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_text(results(("onnxrt", FEEDS[:1]), ("trt", FEEDS)))
    with pytest.raises(UsageError, match="onnxrt, trt"):
        import_dump(file, tmp_path / "out.h5")
    with pytest.raises(UsageError, match="no part 'other'"):
        import_dump(f"{file}#other", tmp_path / "out.h5")
    assert import_dump(f"{file}#onnxrt", tmp_path / "out.h5").nodes == 2
    with open_any(f"{file}#trt") as trace:
        assert len(trace.nodes) == 4


def test_older_marks_formatted_arrays_and_archives_are_read(tmp_path: Path) -> None:
    stream = io.BytesIO()
    np.savez(stream, np.array([3.0]))
    mark = "polygraphy_serialized_json_type"
    feed = {
        "old": {"array": encoded(np.ones(2))["values"]["array"], "__polygraphy_encoded_ndarray": mark},
        "formatted": {"array": encoded(np.ones(2))["values"], "shape": [2], "polygraphy_class": "FormattedArray"},
        "archive": {"array": base64.b64encode(stream.getvalue()).decode(), "polygraphy_class": "ndarray"},
        "latin": {"array": _npy(np.array([1.0, 2.0])).decode("latin-1"), "polygraphy_class": "ndarray"},
    }
    (tmp_path / "r.json").write_text(results(("r", [feed])))
    assert import_dump(tmp_path / "r.json", tmp_path / "out.h5").warnings == ()
    with Trace.open(tmp_path / "out.h5") as trace:
        values = {record.key.path: trace.read(record.key).bits.tolist() for record in trace.nodes}
    assert values == {"old": [1, 1], "formatted": [1, 1], "archive": [3], "latin": [1, 2]}


def _npy(array: np.ndarray[Any, Any]) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def test_saved_inputs_are_a_run_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "inputs.json").write_text(json.dumps([{"x": encoded(np.ones(2))["values"]}]))
    assert import_dump(tmp_path / "inputs.json", tmp_path / "out.h5").nodes == 1


def test_torch_tensors_are_read_with_weights_only(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    stream = io.BytesIO()
    torch.save(torch.tensor([1.0, 2.0], dtype=torch.bfloat16), stream)
    feed = {"t": {"tensor": base64.b64encode(stream.getvalue()).decode(), "polygraphy_class": "Tensor"}}
    (tmp_path / "r.json").write_text(results(("r", [feed])))
    import_dump(tmp_path / "r.json", tmp_path / "out.h5")
    with Trace.open(tmp_path / "out.h5") as trace:
        assert trace.nodes[0].dtype == "bfloat16"


def test_an_unreadable_output_is_left_out_with_a_warning(tmp_path: Path) -> None:
    feed = {"bad": {"array": "AAAA", "polygraphy_class": "ndarray"}, "good": encoded(np.ones(2))}
    (tmp_path / "r.json").write_text(results(("r", [feed])))
    summary = import_dump(tmp_path / "r.json", tmp_path / "out.h5")
    assert summary.nodes == 1
    assert summary.warnings[0].startswith("bad of iteration 0 left out")


def test_a_torn_file_is_refused_in_two_lines(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text('{"polygraphy_class": "RunResults", "lst": [["a", [')
    with pytest.raises(TraceFormatError) as caught:
        import_dump(tmp_path / "r.json", tmp_path / "out.h5")
    assert str(caught.value).count("\n") == 1
