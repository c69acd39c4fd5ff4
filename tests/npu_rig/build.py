"""Build the stand-in ACL runtime that torch_npu loads on the rig.

Invariant: the libraries answer every name that the installed torch_npu links or looks up, except aclnn kernels.
Needs gcc and binutils (nm, strings); downloads nothing, imports neither torch nor torch_npu.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("acl_stub.c")
RUNTIME = "libascendcl.so"
# libop_plugin_atb.so and mspti are loaded on demand only, and stay absent as on a machine without those packages.
EMPTY = (
    "libhccl.so",
    "libacl_op_compiler.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
    "libruntime.so",
    "libopapi.so",
)
# torch_npu refuses a CANN folder without these, and reads its version from the info file.
CANN_FOLDERS = ("runtime", "compiler", "opp")
CANN_VERSION = "9.0.0"
TOOLS = ("gcc", "nm", "strings")
_OURS = re.compile(r"(?:acl(?!nn)[A-Za-z]|rt[A-Z]|Hccl[A-Z]|Msprof[A-Z]|Aml[A-Z])[A-Za-z0-9]*\Z")
_DEFINED = re.compile(r"^(?:[a-z][\w ]*?[ *])(\w+)\(", re.MULTILINE)


class RigUnavailable(Exception):
    """The rig cannot be built or run here; the text says what is missing."""


def missing() -> str:
    """Say in one phrase what the rig needs and does not find, or return an empty string."""
    tools = [tool for tool in TOOLS if shutil.which(tool) is None]
    if tools:
        return f"the NPU rig needs {', '.join(tools)} (install gcc and binutils)"
    if importlib.util.find_spec("torch_npu") is None:
        return "the NPU rig needs torch-npu (pip install torch-npu==2.13.0)"
    return ""


def build(cache: Path) -> Path:
    """Return a folder under `cache` that holds the libraries, building it once per torch_npu version and source.

    Raises RigUnavailable if a tool or the package is missing, CalledProcessError if the compiler refuses.
    """
    reason = missing()
    if reason:
        raise RigUnavailable(reason)
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / f"acl-{_key()}"
    with (cache / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            work = cache / f"{folder.name}.partial"
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            _compile(work)
            _make_cann_home(work)
            os.replace(work, folder)
    return folder


def torch_npu_binaries() -> list[Path]:
    """List the shared objects of the installed torch_npu that the runtime must satisfy."""
    spec = importlib.util.find_spec("torch_npu")
    if spec is None or spec.origin is None:
        raise RigUnavailable(missing())
    package = Path(spec.origin).parent
    return sorted([*package.glob("_C*.so"), *(package / "lib").glob("lib*.so")])


def _key() -> str:
    version = importlib.metadata.version("torch-npu")
    digest = hashlib.sha256(SOURCE.read_bytes() + Path(__file__).read_bytes()).hexdigest()[:12]
    return f"{version}-{digest}"


def _compile(folder: Path) -> None:
    written = set(_DEFINED.findall(SOURCE.read_text()))
    rest = sorted(_wanted_names() - written)
    generated = folder / "generated.c"
    generated.write_text("".join(f"long {name}(void) {{ return 0; }}\n" for name in rest))
    _gcc(folder / RUNTIME, str(SOURCE), str(generated))
    nothing = folder / "nothing.c"
    nothing.write_text("typedef int nothing;\n")
    for name in EMPTY:
        # --no-as-needed keeps the link to the runtime, so that dlsym on this library's handle finds the names.
        _gcc(folder / name, str(nothing), f"-L{folder}", "-Wl,--no-as-needed", "-lascendcl")


def _make_cann_home(folder: Path) -> None:
    for name in CANN_FOLDERS:
        (folder / name).mkdir()
    (folder / "ascend_toolkit_install.info").write_text(f"version={CANN_VERSION}\n")


def _gcc(output: Path, *arguments: str) -> None:
    flags = ("-shared", "-fPIC", "-O1", "-w", f"-Wl,-soname,{output.name}")
    subprocess.run(["gcc", *flags, "-o", str(output), *arguments], check=True, capture_output=True, text=True)


def _wanted_names() -> set[str]:
    names: set[str] = set()
    for binary in torch_npu_binaries():
        undefined = _lines("nm", "-D", "--undefined-only", str(binary))
        names.update(line.split()[-1].split("@")[0] for line in undefined if line.strip())
        # Names that are looked up by dlsym are plain strings in the binary.
        names.update(line for line in _lines("strings", "-a", str(binary)))
    return {name for name in names if _OURS.match(name)}


def _lines(*command: str) -> list[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
