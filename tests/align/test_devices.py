"""The seam to devices: what is there, flags that are put back, and flags that come too late."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from align.devices.base import Device, Flag, When, autocast, process_environment, variable
from align.devices.cpu import Cpu
from align.devices.npu import Npu
from align.devices.select import available_devices, select_device, select_dtype
from align.dumpers.errors import DeviceError, UsageError


class Switches(Device):
    """A device whose switches are entries of a dict."""

    kind = "toy"

    def __init__(self) -> None:
        self.values = {"toy.fast": "on", "toy.layout": "nd", "toy.late": "off"}
        self.written: list[str] = []

    def why_unavailable(self) -> str:
        return ""

    def flags(self) -> dict[str, Flag]:
        def flag(name: str, values: tuple[str, ...], when: When, *, narrows: bool = False) -> Flag:
            def write(value: str) -> None:
                self.written.append(name)
                self.values[name] = value

            return Flag(name, values, values[-1], when, lambda: self.values[name], write, narrows)

        return {
            "toy.fast": flag("toy.fast", ("on", "off"), When.ANY_TIME, narrows=True),
            "toy.layout": flag("toy.layout", ("nz", "nd"), When.ANY_TIME),
            "toy.late": flag("toy.late", ("off", "on"), When.BEFORE_FIRST_OP),
        }


def test_flags_are_set_for_the_context_and_put_back_after_an_error() -> None:
    device = Switches()

    def fail() -> None:
        with device.set_flags({"toy.fast": "off", "toy.layout": "nz"}):
            assert device.values == {"toy.fast": "off", "toy.layout": "nz", "toy.late": "off"}
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert device.values == {"toy.fast": "on", "toy.layout": "nd", "toy.late": "off"}


def test_a_flag_that_has_the_wanted_value_is_not_written() -> None:
    device = Switches()
    with device.set_flags({"toy.layout": "nd"}):
        pass
    assert device.written == []


def test_float32_is_kept_whole_and_other_flags_are_left_alone() -> None:
    assert Switches().float32_flags() == {"toy.fast": "off"}
    assert Switches().exact_flags() == {"toy.fast": "off", "toy.layout": "nd"}
    assert Cpu().float32_flags() == {"cpu.float32_matmul_precision": "highest"}


def test_late_flags_are_those_that_are_not_in_force_and_cannot_be_set_any_time() -> None:
    device = Switches()
    assert device.late_flags({"toy.fast": "off", "toy.late": "on"}) == {"toy.late": "on"}
    device.prepare({"toy.fast": "off", "toy.late": "on"})
    assert device.late_flags({"toy.late": "on"}) == {}
    assert device.values["toy.fast"] == "on"


@pytest.mark.parametrize(
    ("wanted", "problem", "remedy"),
    [
        ({"toy.fats": "on"}, "toy has no flag 'toy.fats'", "did you mean toy.fast?"),
        ({"unheard.of": "on"}, "toy has no flag 'unheard.of'", "flags here: toy.fast, toy.layout, toy.late"),
        ({"toy.fast": "maybe"}, "flag toy.fast cannot be 'maybe'", "values: on, off"),
    ],
)
def test_an_unknown_flag_or_value_is_named(wanted: dict[str, str], problem: str, remedy: str) -> None:
    with pytest.raises(UsageError) as caught:
        Switches().check_flags(wanted)
    assert (caught.value.problem, caught.value.remedy) == (problem, remedy)


def test_a_variable_is_read_but_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    flag = variable("toy", "TOY_MODE", ("default", "1"), "default", "")
    monkeypatch.delenv("TOY_MODE", raising=False)
    assert flag.read() == "default"
    flag.write("default")
    with pytest.raises(UsageError, match="at process start only"):
        flag.write("1")
    assert "TOY_MODE" not in os.environ
    assert process_environment({flag.name: "1", "toy.fast": "on"}) == {"TOY_MODE": "1"}
    assert process_environment({flag.name: "default"}) == {"TOY_MODE": ""}


def test_autocast_of_a_run_is_put_back_and_forgets_cast_weights() -> None:
    linear, x = torch.nn.Linear(4, 4, bias=False), torch.ones(1, 4)
    usual = torch.get_autocast_dtype("cpu")
    flag = autocast("cpu")
    with torch.no_grad():
        flag.write("float16")
        assert flag.read() == "float16"
        assert linear(x).dtype is torch.float16
        linear.weight.data = torch.zeros(4, 4)
        flag.write("float16")
        assert linear(x).abs().max() == 0
        flag.write("off")
    assert flag.read() == "off"
    assert torch.get_autocast_dtype("cpu") is usual
    assert linear(x).dtype is torch.float32


@pytest.mark.parametrize("name", sorted(name for name, flag in Cpu().flags().items() if flag.when is When.ANY_TIME))
def test_every_cpu_flag_takes_its_values_and_is_put_back(name: str) -> None:
    flag = Cpu().flags()[name]
    before = flag.read()
    for value in flag.values:
        with Cpu().set_flags({name: value}):
            assert flag.read() == value
        assert flag.read() == before


def test_the_cpu_is_always_there_and_last() -> None:
    assert available_devices()[-1].kind == "cpu"
    assert select_device("auto").kind in {"npu", "cuda", "cpu"}


@pytest.mark.parametrize(
    ("action", "problem"),
    [
        (lambda: select_device("tpu"), "unknown device 'tpu'"),
        (lambda: select_dtype("int8", Cpu()), "unknown floating dtype 'int8'"),
        (lambda: select_dtype("float8_e4m3fn", Cpu()), "unknown floating dtype 'float8_e4m3fn'"),
    ],
)
def test_a_device_or_dtype_that_is_not_there_is_named(action: object, problem: str) -> None:
    assert callable(action)
    with pytest.raises(DeviceError) as caught:
        action()
    assert caught.value.problem == problem


def test_a_torch_npu_that_cannot_be_loaded_is_a_reason_and_not_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text("raise OSError('libhccl.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    monkeypatch.delitem(sys.modules, "torch_npu")
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    reason = Npu().why_unavailable()
    assert reason == ("torch_npu cannot be loaded (ASCEND_HOME_PATH unset): libhccl.so: cannot open shared object file")
    with pytest.raises(DeviceError, match="libhccl"):
        select_device("npu")


BROKEN = """
[torch.backends]
torch_npu = torch_npu:_autoload
"""
USE = """
import align
align.run
import torch, sys
assert "torch_npu" not in sys.modules
from align.devices import available_devices
assert [device.kind for device in available_devices()][-1] == "cpu"
assert align.compare
"""


def test_the_library_works_where_torch_npu_is_installed_without_cann(tmp_path: Path) -> None:
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text("raise OSError('libhccl.so: not there')")
    info = tmp_path / "torch_npu-2.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-npu\nVersion: 2.13.0\n")
    (info / "entry_points.txt").write_text(BROKEN)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).resolve().parents[2]), *filter(None, sys.path)])
    environment = {key: value for key, value in os.environ.items() if key != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    environment["PYTHONPATH"] = path
    plain = subprocess.run(
        [sys.executable, "-c", "import torch"], env=environment, capture_output=True, text=True, check=False
    )
    assert "libhccl.so" in plain.stderr  # what a user meets without us
    ours = subprocess.run([sys.executable, "-c", USE], env=environment, capture_output=True, text=True, check=False)
    assert (ours.returncode, ours.stderr) == (0, "")
