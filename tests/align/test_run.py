"""`align run` from the outside: what it prints, writes and exits with, on a model of a few milliseconds."""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

import align as package
from align.dumpers.dtypes import RawTensor
from align.dumpers.model import NodeKey, Storage
from align.dumpers.store import Trace
from align.html_report import error_map

FAST = ("--no-timing",)


@pytest.fixture(scope="module")
def done(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "out"
    package.run(tiny, out=folder, device="cpu", budget_seconds=0.2, min_rounds=3)
    return folder


def test_a_run_leaves_three_traces_their_plans_and_a_report(done: Path) -> None:
    names = {path.name for path in done.iterdir()}
    traces = {f"{role}.h5" for role in ("reference", "baseline", "candidate")}
    assert traces | {"candidate.plan.json", "comparison.json", "report.html", "report.json", "sites.json"} <= names


def test_keys_are_the_same_in_all_three_runs(done: Path) -> None:
    keys = []
    for role in ("reference", "baseline", "candidate"):
        with Trace.open(done / f"{role}.h5") as trace:
            keys.append([record.key for record in trace.nodes])
    assert keys[0] == keys[1] == keys[2]


def test_the_candidate_says_which_nodes_its_kernels_swallowed(done: Path) -> None:
    with Trace.open(done / "candidate.h5") as trace:
        fused = {str(record.key): record.site for record in trace.nodes if record.storage is Storage.FUSED}
    assert fused["conv/conv2d#0:0"].startswith("conv_bn_act_add@")
    with Trace.open(done / "baseline.h5") as trace:
        assert not [record for record in trace.nodes if record.storage is Storage.FUSED]


def test_the_reference_is_float32_with_exactly_the_low_precision_weights(done: Path) -> None:
    with Trace.open(done / "reference.h5") as trace:
        assert {record.dtype for record in trace.nodes if record.dtype.startswith(("bf", "float"))} == {"float32"}
        assert trace.header.role == "reference"


def test_a_trace_holds_the_dataflow(done: Path) -> None:
    with Trace.open(done / "reference.h5") as trace:
        norm = trace.record(NodeKey("norm", "batch_norm"))
        assert norm.producers == (NodeKey("conv", "forward"),)


def test_plain_h5py_reads_a_tensor_by_its_module_path(done: Path) -> None:
    with h5py.File(done / "reference.h5") as file:
        values = file["tensors/conv/conv2d#0:0"][()]
    assert values.shape == (2, 8, 6, 6)


def test_json_is_one_object_with_every_fused_nodes_errors(align, tiny: str) -> None:  # type: ignore[no-untyped-def]
    ended = align("run", tiny, "--device", "cpu", "--json", *FAST)
    body = json.loads(ended.out)
    assert (ended.code, body["schema_version"]) == (0, 1)
    sites = {node["site"]: node for node in body["nodes"] if node["site"] and node["candidate"]}
    assert any(site.startswith("conv_bn_act_add@") for site in sites)
    assert all(
        node["candidate"]["rel_l2"] is not None and node["baseline"]["rel_l2"] is not None for node in sites.values()
    )


def test_the_verdict_is_the_first_line(align, tiny: str) -> None:  # type: ignore[no-untyped-def]
    ended = align("run", tiny, "--device", "cpu", *FAST)
    assert "PASS" in ended.out.splitlines()[0]


def test_quiet_prints_one_line(align, tiny: str) -> None:  # type: ignore[no-untyped-def]
    ended = align("run", tiny, "--device", "cpu", "--quiet", *FAST)
    assert len(ended.out.splitlines()) == 1


def test_fuse_globs_choose_the_sites(align, tiny: str) -> None:  # type: ignore[no-untyped-def]
    body = json.loads(align("run", tiny, "--device", "cpu", "--fuse", "attention*", "--json", *FAST).out)
    states = {row["choice"].partition("@")[0]: row["state"] for row in body["choices"]}
    assert states["fusion:attention"] == "on"
    assert states["fusion:conv_bn_act_add"] == "off"


def test_only_the_runs_asked_for_are_made(align, tiny: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    ended = align("run", tiny, "--device", "cpu", "--fused", "--out", "only", *FAST)
    assert ended.code == 0
    assert {path.name for path in (tmp_path / "only").glob("*.h5")} == {"reference.h5", "candidate.h5"}


def test_without_a_reference_the_baseline_is_what_the_candidate_is_compared_with(
    align, tiny: str, tmp_path: Path
) -> None:  # type: ignore[no-untyped-def]
    ended = align("run", tiny, "--device", "cpu", "--no-reference", "--out", "two", *FAST)
    assert ended.code == 0, ended.err
    assert {path.name for path in (tmp_path / "two").glob("*.h5")} == {"baseline.h5", "candidate.h5"}


def test_an_existing_run_folder_is_never_overwritten_without_force(align, tiny: str) -> None:  # type: ignore[no-untyped-def]
    assert align("run", tiny, "--device", "cpu", "--out", "mine", "-q", *FAST).code == 0
    refused = align("run", tiny, "--device", "cpu", "--out", "mine", "-q", *FAST)
    assert refused.code == 2
    assert "run folder exists already: mine" in refused.err
    assert align("run", tiny, "--device", "cpu", "--out", "mine", "-q", "--force", *FAST).code == 0


def test_force_refuses_to_empty_a_folder_that_is_not_ours(align, tiny: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("years of work")
    assert align("run", tiny, "--device", "cpu", "--out", "precious", "--force", *FAST).code == 2
    assert (tmp_path / "precious" / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--device", "warp"), "unknown device 'warp'"),
        (("--device", "cuda"), "device 'cuda' cannot be used"),
        (("--dtype", "float12"), "unknown floating dtype 'float12'"),
        (("--policy", "cann-l9"), "unknown policy 'cann-l9'"),
        (("--fuse", "atention"), "no choice matches 'atention'"),
        (("--plan", "nowhere.json"), "cannot read plan nowhere.json"),
    ],
)
def test_wrong_use_ends_in_two_lines_and_exit_code_2(align, tiny: str, words: tuple[str, ...], problem: str) -> None:  # type: ignore[no-untyped-def]
    if words[1] == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    ended = align("run", tiny, *words, *FAST)
    assert ended.code == 2
    assert problem in ended.err.splitlines()[0]
    assert len(ended.err.splitlines()) == 2


def broken(tmp_path: Path, body: str) -> str:
    path = tmp_path / "broken.py"
    path.write_text(
        "import torch\nfrom torch import nn\n"
        f"class M(nn.Module):\n    def forward(self, x):\n        {body}\n"
        "def build():\n    return M(), torch.ones(2)\n"
    )
    return f"{path}:build"


def test_a_model_that_raises_is_cannot_tell_and_its_trace_is_kept(align, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    ended = align(
        "run", broken(tmp_path, "x = x + 1; raise ValueError('no luck')"), "--device", "cpu", "--out", "run", *FAST
    )
    assert ended.code == 3
    assert "raised ValueError: no luck" in ended.err
    with Trace.open(tmp_path / "run" / "reference.h5") as trace:
        assert (str(trace.status), [str(record.key) for record in trace.nodes]) == ("failed", ["/add#0:0"])


def test_a_model_without_tensors_in_its_result_is_told_so(align, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    ended = align("run", broken(tmp_path, "return 'nothing'"), "--device", "cpu", *FAST)
    assert ended.code == 2
    assert "returned no tensor" in ended.err


def test_ctrl_c_closes_the_trace_and_exits_130(align, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    ended = align(
        "run", broken(tmp_path, "x = x + 1; raise KeyboardInterrupt"), "--device", "cpu", "--out", "run", *FAST
    )
    assert ended.code == 130
    with Trace.open(tmp_path / "run" / "reference.h5") as trace:
        assert str(trace.status) == "interrupted"


def test_check_turns_drift_into_exit_code_1(align, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "two.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class M(nn.Module):\n"
        "    def __init__(self, scale):\n        super().__init__(); self.scale = scale; self.lin = nn.Linear(64, 64)\n"
        "    def forward(self, x):\n        return self.lin(x) * self.scale\n"
        "def build():\n    return M(1.0), torch.randn(16, 64)\n"
        "def fused():\n    return M(1.1), torch.randn(16, 64)\n"
    )
    words = ("run", "two.py:build", "--candidate", "two.py:fused", "--device", "cpu", "-q", *FAST)
    assert align(*words).code == 0
    assert align(*words, "--check").code == 1


def test_hard_coded_casts_do_not_make_the_reference_low_precision(align, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    target = broken(tmp_path, "return (x.to(torch.bfloat16) * 3).half() + torch.zeros(2, dtype=torch.float16)")
    body = json.loads(align("run", target, "--device", "cpu", "--json", *FAST).out)
    assert any("3 low-precision casts in the model were widened" in note for note in body["notes"])


def test_a_plan_file_reproduces_the_candidate_it_was_written_for(align, tiny: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    align("run", tiny, "--device", "cpu", "--fuse", "attention*", "--out", "first", "-q", *FAST)
    plan = tmp_path / "first" / "candidate.plan.json"
    align("run", tiny, "--device", "cpu", "--plan", plan, "--out", "second", "-q", *FAST)
    assert plan.read_text() == (tmp_path / "second" / "candidate.plan.json").read_text()


def test_gradients_of_outputs_and_parameters_are_nodes_like_others(tiny: str, tmp_path: Path) -> None:
    report = package.run(tiny, out=tmp_path / "run", device="cpu", enabled=False, grad="sum", dtype="float32")
    with Trace.open(tmp_path / "run" / "reference.h5") as reference:
        keys = {str(record.key) for record in reference.nodes}
    assert {"out/linear#0:grad.0", "out/parameter#0:grad.weight", "conv/parameter#0:grad.weight"} <= keys
    gradients = [node for node in report.comparison.nodes if node.key.slot.startswith("grad.")]
    assert gradients
    assert all(node.candidate is not None for node in gradients)
    assert {row.reason for row in report.choices if row.state.value == "unavailable"} == {"its kernel has no gradient"}


def test_a_model_without_gradients_is_told_so(align, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    ended = align("run", broken(tmp_path, "return x + 1"), "--device", "cpu", "--grad", "sum", *FAST)
    assert ended.code == 2
    assert "no gradient leads back from the scalar" in ended.err


def test_include_and_inputs_choose_what_is_recorded(align, tiny: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    ended = align("run", tiny, "--device", "cpu", "--include", "out*", "--inputs", "--out", "run", "-q", *FAST)
    assert ended.code == 0, ended.err
    with Trace.open(tmp_path / "run" / "baseline.h5") as trace:
        keys = [str(record.key) for record in trace.nodes if record.key.op != "output"]
    assert "out/linear#0:in.0" in keys
    assert all(key.startswith("out/") for key in keys)


def test_equal_infinities_are_no_error_in_the_error_map() -> None:
    values = np.array([[1.0, -np.inf], [np.inf, 2.0]], dtype=np.float32)
    cells, _, _ = error_map(RawTensor(values, "float32"), RawTensor(values, "float32"))
    assert cells == ((0.0, 0.0), (0.0, 0.0))


def test_an_origin_says_what_it_introduces_and_what_its_error_looks_like(align, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "two.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class M(nn.Module):\n"
        "    def __init__(self, scale):\n"
        "        super().__init__(); torch.manual_seed(0); self.scale = scale\n"
        "        self.a = nn.Linear(64, 64); self.b = nn.Linear(64, 64)\n"
        "    def forward(self, x):\n        return self.b(torch.relu(self.a(x) * self.scale))\n"
        "def build():\n    return M(1.0), torch.randn(16, 64)\n"
        "def fused():\n    return M(1.5), torch.randn(16, 64)\n"
    )
    words = ("run", "two.py:build", "--candidate", "two.py:fused", "--device", "cpu", "--json", *FAST)
    origins = json.loads(align(*words).out)["origins"]
    assert [card["node"] for card in origins] == ["/mul#0:0"]
    assert origins[0]["introduced"] == pytest.approx(0.5, rel=0.05)
    assert origins[0]["looks_like"].startswith("factor:")


def test_growth_over_the_steps_is_told(align) -> None:  # type: ignore[no-untyped-def]
    body = json.loads(align("run", "demo", "--device", "cpu", "--level", "module", "--json", *FAST).out)
    assert any(note.startswith("error of /output#0:0 over the steps:") for note in body["notes"])


def test_policy_auto_measures_its_own_tolerance(align, tiny: str) -> None:  # type: ignore[no-untyped-def]
    body = json.loads(align("run", tiny, "--device", "cpu", "--policy", "auto", "--json", *FAST).out)
    assert body["verdict"]["policy"] == "auto"
    assert body["verdict"]["status"] == "pass"
    assert body["floors"]["/output#0:0"] > 0.0
