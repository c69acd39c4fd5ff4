"""Say what this machine has for align, what is missing, and how to get it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from align.devices.base import Device
from align.devices.cpu import Cpu
from align.devices.cuda import Cuda
from align.devices.npu import Npu
from align.environment import VARIABLES, version_of
from align.operators.registry import catalog


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the examination: what was looked at, what was found, and the remedy if something is missing."""

    subject: str
    found: str
    is_good: bool = True
    remedy: str = ""


def examine() -> tuple[Finding, ...]:
    """Look at packages, devices, CANN, driver, kernels and variables; nothing is changed."""
    return (*_packages(), *_devices(), *_cann(), *_kernels(), *_variables())


def _packages() -> Iterator[Finding]:
    for name in ("torch", "numpy", "h5py", "numba"):
        yield Finding(name, version_of(name) or "missing", bool(version_of(name)), f"pip install {name}")
    for name, extra in (
        ("torch-npu", "npu"),
        ("hdf5plugin", "compression"),
        ("scikit-learn", "attribution"),
        ("ray", "cluster"),
    ):
        found = version_of(name)
        yield Finding(
            name, found or "not installed (optional)", True, "" if found else f"pip install 'npu-align[{extra}]'"
        )


def _devices() -> Iterator[Finding]:
    for device in (Npu(), Cuda(), Cpu()):
        reason = device.why_unavailable()
        if reason:
            yield Finding(f"device {device.kind}", f"not usable: {reason}", device.kind != "cpu", "")
        else:
            yield Finding(f"device {device.kind}", f"{device.name()}; dtypes {', '.join(_dtypes(device))}")
            for flag in device.flags().values():
                yield Finding(f"  flag {flag.name}", f"{flag.read()} (exact FP32 wants {flag.exact}; set {flag.when})")


def _dtypes(device: Device) -> list[str]:
    names = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    return [str(dtype).removeprefix("torch.") for dtype in names if not device.why_no_dtype(dtype)]


def _cann() -> Iterator[Finding]:
    home = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME")
    if not home:
        yield Finding(
            "CANN",
            "ASCEND_HOME_PATH is not set",
            True,
            "on an Ascend machine: source /usr/local/Ascend/ascend-toolkit/set_env.sh",
        )
    else:
        versions = sorted(Path(home).glob("**/version.info"))[:1]
        text = versions[0].read_text(errors="replace").strip().splitlines()[0] if versions else "no version.info"
        yield Finding("CANN", f"{home}: {text}", bool(versions), "check that the toolkit is complete")
    tool = shutil.which("npu-smi")
    if tool is None:
        yield Finding(
            "driver", "npu-smi not found", True, "install the Ascend driver and firmware, if this machine has an NPU"
        )
    else:
        done = subprocess.run([tool, "info"], capture_output=True, text=True, timeout=20, check=False)  # noqa: S603 - a fixed command
        yield Finding(
            "driver",
            (done.stdout or done.stderr).strip().splitlines()[0],
            done.returncode == 0,
            "run npu-smi info by hand",
        )


def _kernels() -> Iterator[Finding]:
    for name in sorted({operator.name for operator in catalog()}):
        kinds = sorted({kind for operator in catalog() if operator.name == name for kind in operator.kernels})
        yield Finding(
            f"operator {name}",
            f"fused kernels on {', '.join(kinds)}" if kinds else "no fused kernel, unfused form only",
        )


def _variables() -> Iterator[Finding]:
    for name in VARIABLES:
        if name in os.environ:
            yield Finding(f"${name}", os.environ[name])
