"""Keep the values of a few nodes in memory: what a trial is judged by, without a trace."""

from __future__ import annotations

import fnmatch
from typing import Any

import torch

from align.dumpers.dtypes import RawTensor
from align.dumpers.model import OUTPUT_OP, NodeKey
from align.dumpers.naming import walk_tensors
from align.dumpers.placeholder import Placeholder
from align.dumpers.tensors import has_data, snapshot
from align.dumpers.wire import Call, Tap, Wire


class Collect(Tap):
    """Copy the outputs of calls and modules that a glob names; final results are given by `on_value`.

    globs    over call names (`path/op#call`) or module paths; none keeps the workload's results only
    at_most  elements kept of each tensor, evenly spaced in memory order; 0 keeps all
    Nodes that a fused kernel swallowed are listed in `swallowed` with their site.
    """

    def __init__(self, globs: tuple[str, ...], *, at_most: int = 0) -> None:
        self._globs = globs
        self._at_most = at_most
        self._wanted: dict[str, bool] = {}
        self.values: dict[NodeKey, RawTensor] = {}
        self.swallowed: dict[NodeKey, str] = {}

    def leave(self, call: Call, output: Any) -> Any:
        return self.finish(call, output)

    def finish(self, call: Call, output: Any) -> Any:
        name = str(call)
        if name not in self._wanted:
            self._wanted[name] = any(
                fnmatch.fnmatchcase(text, glob) for text in (name, call.path) for glob in self._globs
            )
        if self._wanted[name]:
            path, op, index = call.ident
            for slot, tensor in walk_tensors(output):
                self._keep(NodeKey(path, op, index, slot, call.step), tensor)
        return output

    def on_value(self, value: Any, wire: Wire) -> None:
        """Keep what the workload yields or returns, if no glob narrows the choice down."""
        if not self._globs:
            for slot, tensor in walk_tensors(value):
                self._keep(NodeKey("", OUTPUT_OP, 0, slot, wire.step), tensor)

    def _keep(self, key: NodeKey, tensor: torch.Tensor) -> None:
        if isinstance(tensor, Placeholder):
            self.swallowed[key] = tensor.site
        elif has_data(tensor):
            self.values[key] = snapshot(self._thinned(tensor)).wait()

    def _thinned(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._at_most or tensor.layout is not torch.strided or tensor.numel() <= self._at_most:
            return tensor
        return tensor.reshape(-1)[:: -(-tensor.numel() // self._at_most)]
