"""The rig itself: it builds, leaves the parent process alone, and every check inside it passes.

One child runs all checks, since importing torch_npu takes seconds.
"""

from __future__ import annotations

import os
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
if str(TESTS) not in sys.path:
    sys.path.append(str(TESTS))

from npu_rig import build, launch  # noqa: E402  (the path above comes first)

pytestmark = pytest.mark.skipif(bool(build.missing()), reason=build.missing() or "the rig is there")
CHECKS = sorted(path.stem for path in launch.INSIDE.glob("check_*.py"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Share one built runtime between the tests of this module."""
    return tmp_path_factory.mktemp("npu-rig")


@pytest.fixture(scope="module")
def outcomes(cache: Path) -> dict[str, list[tuple[str, str]]]:
    """Run every check in one child: file -> (test, failure text or empty)."""
    report = cache / "checks.xml"
    child = launch.run_python([*launch.CHECKS, f"--junitxml={report}", str(launch.INSIDE)], cache=cache)
    assert report.exists(), child.stdout + child.stderr
    return _read(report)


def _read(report: Path) -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        problem = case.find("failure") if case.find("failure") is not None else case.find("error")
        text = "" if problem is None else problem.text or "failed"
        file = case.get("classname", "").rpartition(".")[2]
        found.setdefault(file, []).append((case.get("name", ""), text))
    return found


@pytest.mark.parametrize("file", CHECKS)
def test_every_check_inside_the_rig_passes(file: str, outcomes: dict[str, list[tuple[str, str]]]) -> None:
    assert outcomes.get(file), f"{file} ran no test: {sorted(outcomes)}"
    assert [f"{name}\n{text}" for name, text in outcomes[file] if text] == []


def test_building_twice_compiles_once(cache: Path) -> None:
    folder = build.build(cache)
    before = (folder / build.RUNTIME).stat().st_mtime_ns
    assert build.build(cache) == folder
    assert (folder / build.RUNTIME).stat().st_mtime_ns == before
    assert {name for name in build.EMPTY if (folder / name).exists()} == set(build.EMPTY)


def test_the_environment_of_the_parent_is_left_alone(cache: Path) -> None:
    before = dict(os.environ)
    child = launch.environment(cache)
    assert dict(os.environ) == before
    assert child["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"


def test_a_child_logs_its_kernels_to_a_file_and_returns_its_exit_code(cache: Path, tmp_path: Path) -> None:
    log, script = tmp_path / "calls.txt", tmp_path / "script.py"
    script.write_text(
        "import torch, torch_npu\nprint(torch.ones(2, device='npu').add(1).sum().item())\nraise SystemExit(3)"
    )
    child = launch.run_python([str(script)], cache=cache, extra={"NPU_RIG_CALLS": str(log)})
    assert (child.returncode, child.stdout.strip()) == (3, "4.0"), child.stderr
    assert log.read_text().split() == ["aten::ones", "aten::add.Tensor", "aten::sum"]


def test_torch_without_torch_npu_imports_on_the_rig_as_anywhere(cache: Path) -> None:
    code = "import sys, torch; assert 'torch_npu' not in sys.modules; assert not hasattr(torch, 'npu')"
    child = launch.run_python(["-c", code], cache=cache)
    assert child.returncode == 0, child.stderr
