"""A baseline runs no fused kernel, a candidate runs the fused ones; a model's own torch_npu calls run in both ways."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from npu_rig.calls import rig_calls

from align.dumpers.errors import UndecidedError
from align.dumpers.naming import walk_tensors
from align.session import Session
from align.settings import RunSettings

TARGETS = Path(__file__).with_name("targets.py")


class Runs:
    """One workload: its reference, baseline and candidate results, and the kernels the device saw in each."""

    def __init__(self, name: str, dtype: str) -> None:
        self.session = Session(RunSettings(target=f"{TARGETS}:{name}", device="npu", dtype=dtype))
        with rig_calls() as self.reference_calls:
            self.reference = self._first(self.session.survey().result)
        self.baseline, self.baseline_calls = self._run(self.session.baseline_plan())
        self.candidate, self.candidate_calls = self._run(self.session.candidate_plan())

    def _run(self, plan: Any) -> tuple[torch.Tensor, list[str]]:
        with rig_calls() as calls:
            outcome, _ = self.session.run(plan)
            result = self._first(outcome.result)
        return result, list(calls)

    @staticmethod
    def _first(result: Any) -> torch.Tensor:
        return next(tensor for _, tensor in walk_tensors(result)).detach().cpu().float()

    def error(self, result: torch.Tensor) -> float:
        return float((result - self.reference).norm() / self.reference.norm())


@cache
def runs(name: str, dtype: str) -> Runs:
    return Runs(name, dtype)


def _fused(calls: list[str]) -> list[str]:
    return [
        name
        for name in calls
        if name.startswith("npu::npu_") or "gelu" in name or "attention" in name or "layer_norm" in name
    ]


WORKLOADS = ["own_calls", "plain_torch", "unet"]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_no_fused_kernel_runs_in_a_baseline(name: str, dtype: str) -> None:
    assert _fused(runs(name, dtype).baseline_calls) == []


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_both_runs_stay_close_to_the_reference(name: str, dtype: str) -> None:
    found = runs(name, dtype)
    limit = {"float16": 5e-3, "bfloat16": 4e-2}[dtype]
    assert 0 < found.error(found.baseline) < limit
    assert 0 < found.error(found.candidate) < limit


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_reference_runs_on_the_cpu_alone(name: str) -> None:
    assert [call for call in runs(name, "float16").reference_calls if call.startswith("npu::")] == []


def test_a_candidate_runs_the_models_own_calls_as_written() -> None:
    calls = runs("own_calls", "bfloat16").candidate_calls
    assert [name.removeprefix("npu::") for name in calls if name.startswith("npu::npu_")] == [
        "npu_rms_norm", "npu_apply_rotary_pos_emb", "npu_fusion_attention", "npu_add_rms_norm", "npu_swiglu",
    ]  # fmt: skip


def test_every_own_call_is_a_site_of_its_own_name() -> None:
    sites = [planned.site.operator for planned in runs("own_calls", "bfloat16").session.sites]
    assert sites == ["rms_norm", "rotary", "attention", "add_rms_norm", "swiglu"]


def test_a_glob_over_the_fields_name_switches_an_own_call_off() -> None:
    settings = RunSettings(target=f"{TARGETS}:own_calls", device="npu", dtype="bfloat16", no_fuse=("attention",))
    session = Session(settings)
    session.survey()
    with rig_calls() as calls:
        session.run(session.candidate_plan())
    assert "npu::npu_rms_norm" in calls
    assert "npu::npu_fusion_attention" not in calls


def test_plain_torch_is_left_to_torch_npus_own_kernels() -> None:
    calls = runs("plain_torch", "float16").candidate_calls
    assert calls.count("npu::npu_fusion_attention_v3") == 2  # SDPA, and the one inside nn.MultiheadAttention


def test_float32_means_float32_in_the_baseline() -> None:
    found = runs("plain_torch", "float32")
    assert found.error(found.baseline) < 1e-5


def test_an_unknown_call_is_an_error_that_names_it() -> None:
    session = Session(RunSettings(target=f"{TARGETS}:unknown", device="npu", dtype="bfloat16"))
    with pytest.raises(UndecidedError, match="npu_sort_v2 runs on an NPU only") as caught:
        session.survey()
    assert "docs/operators.md" in str(caught.value)
