"""Run a module's fused or unfused form instead of its forward, as the plan says: fusions that the user registered."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from functools import partial

from align.dumpers.wire import Call, Tap
from align.own import ModuleFusion


class ModuleSwap(Tap):
    """Replace the forward of modules. `on` holds the names of the fusions that are on."""

    def __init__(self, fusions: Iterable[ModuleFusion], on: frozenset[str]) -> None:
        self._fusions = tuple(fusions)
        self._on = on
        self._chosen: dict[str, ModuleFusion | None] = {}

    def enter(self, call: Call) -> None:
        if call.path not in self._chosen:
            self._chosen[call.path] = next((f for f in self._fusions if fnmatch.fnmatchcase(call.path, f.glob)), None)
        fusion = self._chosen[call.path]
        if fusion is None:
            return
        form = fusion.fused if fusion.name in self._on else fusion.unfused
        if form is not None:
            call.func = partial(form, call.module)
