"""Change the dtype in which calls run: widen the whole reference, or keep chosen sites in another precision."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from align.dumpers.choice import Choice, ChoiceKind
from align.dumpers.naming import map_tensors
from align.dumpers.wire import Call, Tap

LOW = frozenset({torch.float16, torch.bfloat16})
_CASTS = frozenset({"to", "type", "half", "bfloat16", "view_dtype"})


class WidenReference(Tap):
    """Keep a reference run in float32 whatever the model's code asks for, and count what had to be widened.

    Casts to float16 or bfloat16, `dtype=` arguments, inner autocast regions and stray low-precision tensors (attributes
    that are neither parameters nor buffers) are widened. Casts to integer and 8-bit types are the model's own meaning
    and stay.
    """

    def __init__(self) -> None:
        self.widened: dict[str, int] = {}

    def prepare(self, call: Call) -> None:
        if call.op in {"half", "bfloat16"}:
            call.func, call.args = torch.Tensor.float, call.args[:1]
            self._count(call)
        elif any(item in LOW for item in call.args if isinstance(item, torch.dtype)):
            call.args = tuple(torch.float32 if isinstance(item, torch.dtype) and item in LOW else item for item in call.args)
            self._count(call)
        if call.kwargs.get("dtype") in LOW:
            call.kwargs = call.kwargs | {"dtype": torch.float32}
            self._count(call)
        if not call.op.endswith("_"):
            args, kwargs = map_tensors((call.args, call.kwargs), _float32)
            if args is not call.args or kwargs is not call.kwargs:
                call.args, call.kwargs = args, kwargs
                self._count(call)
        if torch.is_autocast_enabled("cpu"):
            call.func = partial(_without_autocast, call.func)
            self._count(call)

    def _count(self, call: Call) -> None:
        name = str(call)
        self.widened[name] = self.widened.get(name, 0) + 1


def _float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in LOW else tensor


def _without_autocast(func: Any, *args: Any, **kwargs: Any) -> Any:
    with torch.autocast("cpu", enabled=False):
        return func(*args, **kwargs)


class PrecisionRegions(Tap):
    """Run chosen sites in another dtype. A module site computes its whole inside in it and casts back on leaving.

    A choice's site is a module path, a call name (`path/op#call`) or a glob over either.
    """

    def __init__(self, choices: Iterable[Choice]) -> None:
        self._sites = tuple((c.site, getattr(torch, c.name)) for c in choices if c.kind is ChoiceKind.PRECISION)
        self._dtypes: dict[str, torch.dtype | None] = {}
        self._regions: list[tuple[torch.dtype, torch.dtype | None]] = []
        self._restore: dict[int, torch.dtype] = {}

    def _chosen(self, name: str) -> torch.dtype | None:
        if name not in self._dtypes:
            hits = [(len(site), dtype) for site, dtype in self._sites if name == site or fnmatch.fnmatchcase(name, site)]
            self._dtypes[name] = max(hits, key=lambda hit: hit[0])[1] if hits else None
        return self._dtypes[name]

    def enter(self, call: Call) -> None:
        dtype = self._chosen(call.path)
        if dtype is not None:
            self._regions.append((dtype, _lowest(call.args, call.kwargs)))

    def leave(self, call: Call, output: Any) -> Any:
        if self._chosen(call.path) is None:
            return output
        dtype, outside = self._regions.pop()
        if self._regions or outside is None:
            return output
        return map_tensors(output, lambda tensor: tensor.to(outside) if tensor.dtype == dtype else tensor)

    def prepare(self, call: Call) -> None:
        dtype = self._chosen(str(call))
        if dtype is None and self._regions:
            dtype = self._regions[-1][0]
        elif dtype is not None and not self._regions:
            outside = _lowest(call.args, call.kwargs)
            if outside is not None:
                self._restore[id(call)] = outside
        if dtype is None or call.op.endswith("_"):
            return
        wanted = dtype
        call.args, call.kwargs = map_tensors(
            (call.args, call.kwargs), lambda tensor: tensor.to(wanted) if tensor.dtype in LOW or _is_other(tensor, wanted) else tensor
        )
        call.args = tuple(wanted if isinstance(item, torch.dtype) and item in LOW else item for item in call.args)
        if call.kwargs.get("dtype") in LOW:
            call.kwargs = call.kwargs | {"dtype": wanted}

    def finish(self, call: Call, output: Any) -> Any:
        outside = self._restore.pop(id(call), None)
        if outside is None:
            return output
        return map_tensors(output, lambda tensor: tensor.to(outside) if tensor.is_floating_point() else tensor)

    def fail(self, call: Call, error: BaseException) -> None:
        self._restore.pop(id(call), None)
        if call.module is not None and self._regions and self._chosen(call.path) is not None:
            self._regions.pop()


def _is_other(tensor: torch.Tensor, wanted: torch.dtype) -> bool:
    return wanted in LOW and tensor.dtype == torch.float32


def _lowest(*values: Any) -> torch.dtype | None:
    """Dtype of the first floating tensor in the arguments: what the outputs go back to."""
    found: list[torch.dtype] = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            found.append(tensor.dtype)
        return tensor

    map_tensors(values, look)
    return found[0] if found else None
