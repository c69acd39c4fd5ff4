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
_DTYPE_NAMES = ("dtype", "out_dtype", "output_dtype", "dst_dtype", "dst_type", "y_dtype")
"""Keywords that name the dtype of a result, in torch and in torch_npu, which also takes torch's number of a dtype."""
_LOW_NUMBERS = frozenset({5, 15})  # c10::ScalarType Half and BFloat16
_LOW_BY_DEFAULT = {"npu_anti_quant": "dst_dtype"}
"""Calls whose result is float16 unless a keyword says otherwise."""


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
            call.args = tuple(
                torch.float32 if isinstance(item, torch.dtype) and item in LOW else item for item in call.args
            )
            self._count(call)
        low = [name for name in _DTYPE_NAMES if _is_low(call.kwargs.get(name), call.op)]
        if call.op in _LOW_BY_DEFAULT and call.kwargs.get(_LOW_BY_DEFAULT[call.op]) is None:
            low.append(_LOW_BY_DEFAULT[call.op])
        if low:
            call.kwargs = call.kwargs | dict.fromkeys(low, torch.float32)
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


def _is_low(value: Any, op: str) -> bool:
    if isinstance(value, torch.dtype):
        return value in LOW
    return op.startswith("npu_") and isinstance(value, int) and value in _LOW_NUMBERS


def _float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in LOW else tensor


def _without_autocast(func: Any, *args: Any, **kwargs: Any) -> Any:
    with torch.autocast("cpu", enabled=False):
        return func(*args, **kwargs)


class SitePrecision(Tap):
    """Run the calls at chosen sites in another dtype, as autocast would: a call's inputs are cast to its own precision.

    A choice's site is a module path (all calls inside), a call name (`path/op#call`) or a glob over either; the longest
    that fits holds. Results stay in that dtype until a call outside reads them, so nothing is rounded within a site.
    """

    def __init__(self, choices: Iterable[Choice], low: torch.dtype) -> None:
        self._low = low
        self._sites = tuple((c.site, getattr(torch, c.name)) for c in choices if c.kind is ChoiceKind.PRECISION)
        self._dtypes: dict[str, torch.dtype | None] = {}

    def _chosen(self, call: Call) -> torch.dtype | None:
        name = str(call)
        if name not in self._dtypes:
            fits = [(len(site), dtype) for site, dtype in self._sites if _is_inside(name, call.path, site)]
            self._dtypes[name] = max(fits, key=lambda fit: fit[0])[1] if fits else None
        return self._dtypes[name]

    def prepare(self, call: Call) -> None:
        dtype = self._chosen(call)
        if call.op.endswith("_"):
            return
        if dtype is None:
            call.args, call.kwargs = map_tensors((call.args, call.kwargs), _narrowed)
            return
        wanted = dtype
        call.args, call.kwargs = map_tensors((call.args, call.kwargs), lambda tensor: _in_precision(tensor, wanted))
        call.args = tuple(wanted if isinstance(item, torch.dtype) and item in LOW else item for item in call.args)
        if call.kwargs.get("dtype") in LOW:
            call.kwargs = call.kwargs | {"dtype": wanted}

    def finish(self, call: Call, output: Any) -> Any:
        dtype = self._chosen(call)
        if dtype is not None:
            map_tensors(output, lambda tensor: _marked(tensor, dtype, self._low))
        return output


_MARK = "_align_outside_dtype"


def _is_inside(name: str, path: str, site: str) -> bool:
    return (
        path == site
        or path.startswith(site + ".")
        or fnmatch.fnmatchcase(name, site)
        or fnmatch.fnmatchcase(path, site)
    )


def _in_precision(tensor: torch.Tensor, wanted: torch.dtype) -> torch.Tensor:
    if tensor.dtype in LOW or (tensor.dtype is torch.float32 and wanted in LOW):
        return tensor.to(wanted)
    return tensor


def _marked(tensor: torch.Tensor, dtype: torch.dtype, outside: torch.dtype) -> torch.Tensor:
    if tensor.dtype is dtype:
        tensor.__dict__[_MARK] = outside
    return tensor


def _narrowed(tensor: torch.Tensor) -> torch.Tensor:
    outside = tensor.__dict__.get(_MARK)
    return tensor if outside is None or outside is tensor.dtype else tensor.to(outside)
