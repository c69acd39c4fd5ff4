"""Make a child Python use the NPU rig: give torch_npu its kernels as soon as it has been imported.

Found by the interpreter because launch.py puts this folder on PYTHONPATH. The code under test imports torch_npu when
and where it likes, and notices nothing. Costs nothing in a process that never imports torch_npu.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from types import ModuleType

RIG = Path(__file__).resolve().parents[1]


class _InstallingLoader(Loader):
    """Run torch_npu's own loader, then register the rig's kernels."""

    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        from npu_rig.install import install

        install()


class _RigFinder(MetaPathFinder):
    """Find `npu_rig` (a folder without __init__.py) and wrap the loader of `torch_npu`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "npu_rig":
            found = importlib.machinery.ModuleSpec(fullname, None, is_package=True)
            found.submodule_search_locations = [str(RIG)]
            return found
        if fullname != "torch_npu":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _InstallingLoader(spec.loader)
        return spec


def _run_shadowed() -> None:
    """Run the sitecustomize that this one hides, if the machine has one."""
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


sys.meta_path.insert(0, _RigFinder())
_run_shadowed()
