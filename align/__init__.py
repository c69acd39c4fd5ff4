"""Find which fusion or precision choice changed a model's numbers: the facade, importing nothing heavy until used."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

# In a checkout `dumpers`, `compare` and `reports` lie beside `align`; installed, they lie inside it.
_CHECKOUT = Path(__file__).resolve().parent.parent
if (_CHECKOUT / "dumpers" / "model.py").is_file() and not (Path(__file__).parent / "dumpers").exists():
    __path__.append(str(_CHECKOUT))

__version__ = "0.1.0"

if TYPE_CHECKING:
    from align import compare
    from align.api import bisect, capture, choice, fuses_module, replaces_call, run

_LAZY = ("bisect", "capture", "choice", "fuses_module", "replaces_call", "run")

__all__ = ["bisect", "capture", "choice", "compare", "fuses_module", "replaces_call", "run"]


def _spare_torch_npu() -> None:
    """Keep `import torch` from loading torch_npu, which fails without CANN; the npu device loads it when asked for."""
    if "torch" not in sys.modules:
        os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


def __getattr__(name: str) -> Any:
    if name in __all__:
        _spare_torch_npu()
    if name == "compare":  # a package that can be called: align.compare(candidate, reference)
        return import_module("align.compare")
    if name in _LAZY:
        return getattr(import_module("align.api"), name)
    raise AttributeError(f"module 'align' has no attribute {name!r}")
