"""Start a Python process in which the real torch_npu runs on the simulated device.

Invariant: everything that must be in place before a process starts (library path, autoload switch, queue) is in
`environment`; nothing here changes the calling process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

RIG = Path(__file__).resolve().parent
if __package__ in {None, ""}:
    # Run as a file: Python put this folder first on the path, where `build` and `memory` would be top-level names.
    sys.path[0] = str(RIG.parent)

from npu_rig.build import build  # noqa: E402  (the path above comes first)

CHECKOUT = RIG.parents[1]
SITE = RIG / "site"
INSIDE = RIG / "inside"
CACHE_VARIABLE = "NPU_RIG_CACHE"
# The outer pytest does not collect check_*.py; the one on the rig collects nothing else.
CHECKS = (
    "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-o", "python_files=check_*.py",
    # torch_npu's own copy.deepcopy of a storage trips over it.
    "-W", "ignore:TypedStorage is deprecated:UserWarning",
)  # fmt: skip


def default_cache() -> Path:
    """Return the folder that keeps the built runtime between runs: $NPU_RIG_CACHE, or one for this user."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen) if chosen else Path(tempfile.gettempdir()) / f"npu-rig-{os.getuid()}"


def environment(cache: Path, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return `base` plus what a process on the rig needs, building the runtime under `cache` if it is not there."""
    runtime = build(cache)
    added = {
        "LD_LIBRARY_PATH": _joined(str(runtime), base.get("LD_LIBRARY_PATH", "")),
        "PYTHONPATH": _joined(str(SITE), str(CHECKOUT), base.get("PYTHONPATH", "")),
        # Without it, `import torch` imports torch_npu by itself, before the code under test asks for it.
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        # torch_npu prints a warning when it is told of no CANN folder.
        "ASCEND_HOME_PATH": str(runtime),
        "ASCEND_OPP_PATH": str(runtime / "opp"),
        # Our kernels run when they are called; torch_npu's own copies must not wait in a queue behind them.
        "TASK_QUEUE_ENABLE": "0",
        # Every trace and report of a run here says so.
        "ALIGN_NOTE": "simulated NPU of tests/npu_rig: no figure is an NPU's",
        # torch_npu's C++ warnings tell of the chip and CANN, which are simulated.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    return {**base, **added}


def run_python(
    args: Sequence[str],
    *,
    cache: Path | None = None,
    extra: Mapping[str, str] | None = None,
    cwd: Path = CHECKOUT,
    timeout: float = 600.0,
) -> subprocess.CompletedProcess[str]:
    """Run `python *args` on the rig and return its exit code and captured text; never raises on a failing child.

    `args` is what follows the interpreter: ["-m", "pytest", ...], ["-m", "align", "run", ...] or ["script.py", ...].
    """
    variables = {**environment(cache if cache is not None else default_cache()), **(extra or {})}
    return subprocess.run(
        [sys.executable, *args], cwd=cwd, env=variables, capture_output=True, text=True, timeout=timeout, check=False
    )


def _joined(*parts: str) -> str:
    return os.pathsep.join(part for part in parts if part)


def main() -> int:
    """Run the rest of the command line as a Python command on the rig, with its output shown as it comes."""
    return subprocess.run([sys.executable, *sys.argv[1:]], env=environment(default_cache()), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
