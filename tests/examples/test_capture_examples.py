"""The examples run as they stand, and their traces hold what they are to show."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from align.dumpers.model import RunStatus, Storage
from align.dumpers.store import Trace

ROOT = Path(__file__).parents[2]


def run_example(name: str, path: Path) -> str:
    command = [sys.executable, str(ROOT / "examples" / name), str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_token_of_a_transformers_generate_is_a_step(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    out = run_example("capture_generate.py", tmp_path / "generate.h5")
    with Trace.open(tmp_path / "generate.h5") as trace:
        assert trace.status is RunStatus.COMPLETE
        assert {record.key.step for record in trace.nodes} == set(range(5))
        assert {record.storage for record in trace.nodes} == {Storage.STATISTICS}
        calls = [
            {r.key.call_name for r in trace.nodes if r.key.step == step and r.key.path == "model.layers.0.mlp"}
            for step in range(5)
        ]
        shapes = [r.shape for r in trace.nodes if r.key.call_name == "model.layers.1/forward#0"]
    assert all(calls[0] == other for other in calls)
    assert (
        "model.layers.0.mlp/silu#0" in calls[0]
        or any("silu" in name for name in calls[0])
        or "model.layers.0.mlp/forward#0" in calls[0]
    )
    assert shapes == [(1, 4, 32), *[(1, 1, 32)] * 4]
    assert "model.layers.0.mlp/forward#0:0@4" in out


def test_every_denoising_step_of_a_diffusers_pipeline_is_a_step(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    out = run_example("capture_pipeline.py", tmp_path / "pipeline.h5")
    with Trace.open(tmp_path / "pipeline.h5") as trace:
        assert trace.status is RunStatus.COMPLETE
        assert {record.key.step for record in trace.nodes} == set(range(4))
        assert {record.key.path for record in trace.nodes} == {
            "unet",
            "unet.down_blocks.0",
            "unet.down_blocks.1",
            "unet.mid_block",
            "unet.up_blocks.0",
            "unet.up_blocks.1",
        }
        for record in trace.nodes:
            assert record.storage is Storage.TENSOR
            assert trace.read(record.key).shape == record.shape
    assert "unet/forward#0:sample@3" in out
