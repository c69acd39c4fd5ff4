"""What `align doctor` says of machines that have, lack, or half have what an NPU needs."""

from pathlib import Path

import pytest

from align import doctor
from align.doctor import Finding, cann_version, examine


def findings(subject: str) -> list[Finding]:
    return [finding for finding in examine() if finding.subject == subject]


def test_nothing_that_is_there_has_a_remedy() -> None:
    for name in ("torch", "numpy", "h5py", "numba"):
        assert findings(name)[0].is_good
        assert findings(name)[0].remedy == ""


def test_the_cpu_is_usable_and_lists_its_dtypes_and_flags() -> None:
    assert "float32" in findings("device cpu")[0].found
    assert findings("  cpu.float32_matmul_precision")[0].found.startswith("highest (set any time")


def test_a_missing_package_comes_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version_of", lambda name: "" if name in {"ray", "torch-npu", "numba"} else "2.13.0")
    assert findings("ray")[0] == Finding("ray", "not installed (optional)", True, "pip install 'npu-align[cluster]'")
    assert findings("torch-npu")[0].remedy == "pip install 'npu-align[npu]'"
    assert findings("numba")[0] == Finding("numba", "missing", False, "pip install numba")


def test_a_torch_npu_of_another_release_is_bad_news(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version_of", lambda name: "2.7.1" if name == "torch-npu" else "2.13.0+cpu")
    found = findings("torch-npu")[0]
    assert (found.is_good, found.found) == (False, "2.7.1, which is not for torch 2.13.0+cpu")
    assert "torch-npu==2.13.*" in found.remedy


@pytest.mark.parametrize(
    ("name", "content", "version"),
    [
        ("version.cfg", "# version: 1.0\nruntime_running_version=[8.2.RC1:8.2.0]\n", "8.2.0"),
        ("aarch64-linux/ascend_toolkit_install.info", "package_name=Ascend-cann-toolkit\nversion=8.1.RC1\n", "8.1.RC1"),
        ("opp/version.info", "Version=7.5.0.1.129\n", "7.5.0.1.129"),
        ("readme.txt", "Version=1\n", ""),
    ],
)
def test_the_version_of_cann_is_found_where_its_release_keeps_it(
    tmp_path: Path, name: str, content: str, version: str
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    assert cann_version(tmp_path) == version


def test_a_toolkit_that_is_named_but_not_there_is_bad_news(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "gone"))
    assert not findings("CANN")[0].is_good
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert findings("CANN")[0].found == f"unknown version in {tmp_path}"
    monkeypatch.delenv("ASCEND_HOME_PATH")
    monkeypatch.delenv("ASCEND_TOOLKIT_HOME", raising=False)
    assert "set_env.sh" in findings("CANN")[0].remedy


def test_the_driver_tells_its_first_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "npu-smi"
    tool.write_text("#!/bin/sh\nprintf '+-----+\\n| npu-smi 24.1.rc2   Version: 24.1.rc2 |\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert findings("driver")[0].found.endswith("npu-smi 24.1.rc2   Version: 24.1.rc2")
    tool.write_text("#!/bin/sh\nexit 3\n")
    assert findings("driver")[0] == Finding("driver", "npu-smi says nothing", False, "run `npu-smi info` by hand")


def test_variables_that_matter_are_listed_and_blocking_launches_are_pointed_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ALIGN_NOTE", "bench 3")
    monkeypatch.setenv("ASCEND_LAUNCH_BLOCKING", "1")
    assert findings("$ALIGN_NOTE")[0].found == "bench 3"
    assert not findings("  timing")[0].is_good


def test_every_operator_says_where_it_has_a_kernel() -> None:
    kernels = doctor.kernels_by_operator()
    assert "npu" in kernels["attention"]
    assert findings("operator attention")[0].found == f"fused kernels on {', '.join(kernels['attention'])}"
