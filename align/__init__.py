"""Find which fusion or precision choice changed a model's numbers: the public facade, importing nothing heavy until used."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

# In a checkout `dumpers`, `compare` and `reports` lie beside `align`; installed, they lie inside it.
_CHECKOUT = Path(__file__).resolve().parent.parent
if (_CHECKOUT / "dumpers" / "model.py").is_file() and not (Path(__file__).parent / "dumpers").exists():
    __path__.append(str(_CHECKOUT))

__version__ = "0.1.0"

if TYPE_CHECKING:
    from align.api import bisect, capture, choice, compare_traces, run

_LAZY = {
    "bisect": "align.api",
    "capture": "align.api",
    "choice": "align.api",
    "compare_traces": "align.api",
    "run": "align.api",
}

__all__ = ["bisect", "capture", "choice", "compare_traces", "run"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'align' has no attribute {name!r}")
