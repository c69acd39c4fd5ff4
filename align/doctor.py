"""Say what this machine has for align, what is missing, and how to get it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from align.devices.base import Device, Flag
from align.devices.cpu import Cpu
from align.devices.cuda import Cuda
from align.devices.npu import Npu
from align.environment import VARIABLES, version_of
from align.operators.registry import catalog

_SET_ENV = "source /usr/local/Ascend/ascend-toolkit/set_env.sh"
_DRIVER = Path("/usr/local/Ascend/driver/version.info")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the examination: what was looked at, what was found, and the remedy if something is missing."""

    subject: str
    found: str
    is_good: bool = True
    remedy: str = ""


def examine() -> tuple[Finding, ...]:
    """Look at packages, devices, CANN, driver, kernels and variables; nothing is changed."""
    return (*_packages(), *_torch_npu(), *_devices(), *_cann(), *_driver(), *_kernels(), *_variables())


# -- packages ---------------------------------------------------------------------------------------------------------


def _packages() -> Iterator[Finding]:
    for name in ("torch", "numpy", "h5py", "numba"):
        found = version_of(name)
        yield Finding(name, found or "missing", bool(found), "" if found else f"pip install {name}")
    for name, extra in (("hdf5plugin", "compression"), ("scikit-learn", "attribution"), ("ray", "cluster")):
        found = version_of(name)
        remedy = "" if found else f"pip install 'npu-align[{extra}]'"
        yield Finding(name, found or "not installed (optional)", True, remedy)


def _torch_npu() -> Iterator[Finding]:
    found, host = version_of("torch-npu"), version_of("torch")
    if not found:
        yield Finding("torch-npu", "not installed (needed on Ascend only)", True, "pip install 'npu-align[npu]'")
    elif _release(found) != _release(host):
        remedy = f"the two go by the same release: pip install torch-npu=={_release(host)}.*"
        yield Finding("torch-npu", f"{found}, which is not for torch {host}", False, remedy)
    else:
        yield Finding("torch-npu", found)


def _release(version: str) -> str:
    return ".".join(version.split(".")[:2])


# -- devices ----------------------------------------------------------------------------------------------------------


def _devices() -> Iterator[Finding]:
    for device in (Npu(), Cuda(), Cpu()):
        reason = device.why_unavailable()
        if reason:
            is_expected = device.kind != "npu" or not version_of("torch-npu")
            yield Finding(f"device {device.kind}", f"not usable: {reason}", is_expected, _remedy_of(device))
        else:
            yield Finding(f"device {device.kind}", f"{device.name()}; dtypes {', '.join(_dtypes(device))}")
            yield from (_flag(flag) for flag in device.flags().values())


def _remedy_of(device: Device) -> str:
    if device.kind != "npu" or not version_of("torch-npu"):
        return ""
    return f"install CANN and {_SET_ENV}; until then use --device cpu"


def _flag(flag: Flag) -> Finding:
    value = flag.read()
    advice = f"; most exact: {flag.exact}" if flag.exact not in ("", value) else ""
    if flag.narrows and advice:
        advice = f"; {flag.exact} in runs, unless a plan says otherwise"
    return Finding(f"  {flag.name}", f"{value} (set {flag.when}{advice})")


def _dtypes(device: Device) -> list[str]:
    names = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    return [str(dtype).removeprefix("torch.") for dtype in names if not device.why_no_dtype(dtype)]


# -- CANN and driver --------------------------------------------------------------------------------------------------


def _cann() -> Iterator[Finding]:
    home = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME")
    wanted = bool(version_of("torch-npu"))
    if not home:
        yield Finding("CANN", "ASCEND_HOME_PATH is not set", not wanted, f"on an Ascend machine: {_SET_ENV}")
    elif not Path(home).is_dir():
        yield Finding("CANN", f"{home} (ASCEND_HOME_PATH) is no folder", False, _SET_ENV)
    else:
        version = cann_version(Path(home))
        remedy = "" if version else "check that the toolkit is complete: it tells no version"
        yield Finding("CANN", f"{version or 'unknown version'} in {home}", bool(version), remedy)


def cann_version(home: Path) -> str:
    """The version that a toolkit's folder tells, in whichever file its release keeps it; "" if in none."""
    for pattern in ("version.cfg", "*/ascend_toolkit_install.info", "ascend_toolkit_install.info", "*/version.info"):
        for path in sorted(home.glob(pattern))[:8]:
            found = re.search(r"(?im)^[a-z_]*version[a-z_]*=\[?(?:[^:\]\n]*:)?([0-9][^\]:\s]*)", _text(path))
            if found:
                return found[1]
    return ""


def _driver() -> Iterator[Finding]:
    tool = shutil.which("npu-smi")
    version = re.search(r"(?im)^version=(\S+)", _text(_DRIVER))
    told = f"version {version[1]}; " if version else ""
    if tool is None:
        remedy = "" if version else "install the Ascend driver and firmware, if this machine has an NPU"
        yield Finding("driver", f"{told}npu-smi not found", True, remedy)
        return
    done = subprocess.run([tool, "info"], capture_output=True, text=True, timeout=20, check=False)  # noqa: S603 - a fixed command
    lines = [line.strip("|+-= ") for line in (done.stdout or done.stderr).splitlines()]
    first = next((line for line in lines if line), "npu-smi says nothing")
    is_good = done.returncode == 0
    yield Finding("driver", told + first, is_good, "" if is_good else "run `npu-smi info` by hand")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


# -- kernels and variables --------------------------------------------------------------------------------------------


def _kernels() -> Iterator[Finding]:
    for name, kinds in kernels_by_operator().items():
        text = f"fused kernels on {', '.join(kinds)}" if kinds else "no fused kernel, unfused form only"
        yield Finding(f"operator {name}", text)


def kernels_by_operator() -> Mapping[str, tuple[str, ...]]:
    """The kinds of device on which each operator of the catalog has a fused kernel."""
    names = sorted({operator.name for operator in catalog()})
    return {
        name: tuple(sorted({kind for operator in catalog() if operator.name == name for kind in operator.kernels}))
        for name in names
    }


def _variables() -> Iterator[Finding]:
    for name in VARIABLES:
        if name in os.environ:
            yield Finding(f"${name}", os.environ[name])
    if os.environ.get("ASCEND_LAUNCH_BLOCKING") == "1":
        yield Finding("  timing", "every launch waits: no time means anything", False, "unset ASCEND_LAUNCH_BLOCKING")
