"""Pair, measure, judge and locate: reads traces and arrays, never runs a model, needs no torch.

The module itself is the Python API of comparing:

    import align
    result = align.compare("out/candidate.h5", "out/reference.h5", "out/baseline.h5", policy="cann-l1")
    result.judgement.status, result.judgement.why, result.comparison.nodes

Paths name trace files or folders with one trace a rank; open traces do too. Keyword arguments: `rules` (rename
rules), `select` (which nodes), `overrides` ((glob, policy) pairs), `floors` (for the `auto` policy). The result holds
the values `Comparison` and `Judgement`. Nothing of the engine is imported before the first call.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from align.compare.source import TraceSource
    from align.compare.traces import Compared

    Place = TraceSource | str | Path


class _CallableModule(ModuleType):
    """`align.compare` as a function: a module's type is the one place where Python looks for `__call__`."""

    def __call__(
        self, candidate: Place, reference: Place, baseline: Place | None = None, policy: str = "cann-l1", **options: Any
    ) -> Compared:
        """Compare two or three traces and judge them; see the module's text."""
        from align.compare.traces import compare

        return compare(candidate, reference, baseline, policy, **options)


sys.modules[__name__].__class__ = _CallableModule
