"""What needs a process of its own on the rig: flags that latch at first use or at start, and a whole run on the NPU.

Everything else about operators runs inside the rig: `tests/npu_rig/inside/check_{catalog,baseline,diffusers,flags}.py`,
which `test_rig.py` starts.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
if str(TESTS) not in sys.path:
    sys.path.append(str(TESTS))

from npu_rig import build, launch  # noqa: E402  (the path above comes first)

pytestmark = pytest.mark.skipif(bool(build.missing()), reason=build.missing() or "the rig is there")
TARGETS = launch.INSIDE / "targets.py"

LATE = """
import torch
from align.devices.npu import Npu, load_torch_npu
load_torch_npu()
device, name, value = Npu(), "{name}", "{value}"
device.prepare({{name: value}})
torch.ones(2, device="npu").add(1)
with device.set_flags({{name: value, "npu.conv.allow_hf32": "off"}}):
    print(device.flags()[name].read(), device.flags()["npu.conv.allow_hf32"].read())
print(device.flags()[name].read(), device.flags()["npu.conv.allow_hf32"].read())
"""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("npu.ACL_PRECISION_MODE", "allow_fp32_to_fp16"),
        ("npu.mm_bmm_format_nd", "off"),
        ("npu.deterministic", "on"),
        ("npu.env.TORCH_NPU_USE_COMPATIBLE_IMPL", "1"),
    ],
)
def test_a_late_flag_holds_in_a_fresh_process(name: str, value: str) -> None:
    extra = {name.removeprefix("npu.env."): value} if name.startswith("npu.env.") else {}
    child = launch.run_python(["-c", LATE.format(name=name, value=value)], extra=extra)
    assert child.stdout.splitlines() == [f"{value} off", f"{value} on"], child.stderr


BASELINE = """
from align.session import Session
from align.settings import RunSettings
session = Session(RunSettings(target="{target}:plain_torch", device="npu", dtype="float32"))
session.survey()
session.run(session.baseline_plan())
"""


def test_a_whole_process_that_runs_a_baseline_sees_no_fused_kernel(tmp_path: Path) -> None:
    log = tmp_path / "calls.txt"
    child = launch.run_python(["-c", BASELINE.format(target=TARGETS)], extra={"NPU_RIG_CALLS": str(log)})
    assert child.returncode == 0, child.stderr
    calls = log.read_text().split()
    assert "aten::softmax.int" in calls or "aten::_softmax" in calls
    # Moving the model to the device casts formats; that is no arithmetic.
    assert {name for name in calls if name.startswith("npu::")} <= {"npu::npu_format_cast", "npu::_npu_dtype_cast"}
    assert [name for name in calls if "gelu" in name] == []
