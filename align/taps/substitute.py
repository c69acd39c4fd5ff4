"""Run each site of the catalog in the form the plan asks for: fused kernel, unfused form, or as written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from align.dumpers.choice import Site
from align.dumpers.naming import map_tensors, walk_tensors
from align.dumpers.placeholder import Placeholder, PlaceholderReadError
from align.dumpers.wire import PASS, Call, CallId, Tap
from align.operators.base import Fixed, Kernel, Match, Take
from align.taps.autocast import as_autocast


class Form(Enum):
    """How a site is run."""

    FUSED = "fused"
    UNFUSED = "unfused"


@dataclass(frozen=True, slots=True)
class Substitution:
    """One site that does not run as written: which form, and the kernel if it is the fused one."""

    site: Site
    match: Match
    form: Form
    kernel: Kernel | None = None


class _Work:
    """A site at run time: the canonical arguments gathered so far."""

    __slots__ = ("arguments", "last", "substitution", "takes")

    def __init__(self, substitution: Substitution) -> None:
        self.substitution = substitution
        self.arguments: dict[str, Any] = {}
        self.last = substitution.match.calls[-1]
        self.takes: dict[CallId, list[tuple[str, Take]]] = {}
        for name, binding in substitution.match.binding.items():
            if isinstance(binding, Take):
                self.takes.setdefault(binding.call, []).append((name, binding))

    def gather(self, call: Call) -> None:
        for name, take in self.takes.get(call.ident, ()):
            self.arguments[name] = take.of(call)

    def run(self) -> tuple[dict[str, Any], Any]:
        match, kernel = self.substitution.match, self.substitution.kernel
        fixed = {name: item.value for name, item in match.binding.items() if isinstance(item, Fixed)}
        arguments = fixed | self.arguments
        self.arguments = {}
        if kernel is None:
            return arguments, match.operator.unfused(**arguments)
        return arguments, kernel.run(**as_autocast(match.operator.name, arguments))


class Substitute(Tap):
    """Replace sites by the form the plan asks for. Interior calls of a fused chain yield placeholders."""

    def __init__(self, substitutions: Mapping[str, Substitution] | tuple[Substitution, ...]) -> None:
        items = substitutions.values() if isinstance(substitutions, Mapping) else substitutions
        self._work: dict[CallId, _Work] = {}
        self._kept: dict[CallId, _Work] = {}
        for item in items:
            work = _Work(item)
            calls = item.match.calls if item.form is Form.FUSED else item.match.calls[-1:]
            if item.form is Form.UNFUSED and len(item.match.calls) > 1:
                calls = item.match.calls
            for ident in calls:
                self._work[ident] = work
            for ident in item.match.kept:
                self._kept[ident] = work
        self._stand_ins: dict[Any, Any] = {}
        self.ran: dict[str, int] = {}

    def begin(self) -> None:
        """Be ready for another run of the same plan."""
        self.ran = {}
        for work in self._work.values():
            work.arguments = {}

    def execute(self, call: Call) -> Any:
        work = self._work.get(call.ident)
        if work is None:
            kept = self._kept.get(call.ident)
            if kept is not None:
                kept.gather(call)
            return PASS
        work.gather(call)
        if call.ident != work.last:
            return self._stand_in(call, work)
        name = work.substitution.site.name
        self.ran[name] = self.ran.get(name, 0) + 1
        arguments, result = work.run()
        self.observe(work.substitution, arguments, result)
        return _deliver(call, work.substitution.match.shape_result(result))

    def observe(self, substitution: Substitution, arguments: Mapping[str, Any], result: Any) -> None:
        """See a site's canonical arguments and result; here nothing, for subclasses."""

    def _stand_in(self, call: Call, work: _Work) -> Any:
        """What an interior call returns; one placeholder serves every call with arguments of the same shapes."""
        key = (
            call.ident,
            *(_look_of(value) for value in call.args),
            *(_look_of(value) for value in call.kwargs.values()),
        )
        made = self._stand_ins.get(key)
        if made is None:
            made = self._stand_ins[key] = self._make_stand_in(call, work.substitution.site.name)
        return made

    def _make_stand_in(self, call: Call, site: str) -> Any:
        args, kwargs = map_tensors((call.args, call.kwargs), _meta)
        if kwargs.get("device") is not None:
            kwargs = kwargs | {"device": "meta"}
        like = call.func(*args, **kwargs)
        device = next((tensor.device for _, tensor in walk_tensors((call.args, call.kwargs))), torch.device("cpu"))
        return map_tensors(like, lambda tensor: Placeholder(tensor, device, site))

    def next_step(self, step: int) -> None:
        for work in self._work.values():
            work.arguments = {}

    def fail(self, call: Call, error: BaseException) -> None:
        for work in self._work.values():
            work.arguments = {}
        if isinstance(error, PlaceholderReadError) and not error.reader:
            error.reader = str(call)


def _look_of(value: Any) -> Any:
    """What the look of a call's output may depend on: placeholders by identity, as there is one for each look."""
    if isinstance(value, Placeholder):
        return id(value)
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.device
    if isinstance(value, (tuple, list)):
        return tuple(_look_of(item) for item in value)
    return value if isinstance(value, _PLAIN) else id(value)


_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta")


def _deliver(call: Call, result: Any) -> Any:
    """Hand over the result; an in-place last call must also have written it into the tensor it was called on."""
    target = call.args[0] if call.args else None
    writes = call.op.endswith("_") or call.kwargs.get("inplace") is True
    if (
        writes
        and isinstance(target, torch.Tensor)
        and not isinstance(target, Placeholder)
        and isinstance(result, torch.Tensor)
    ):
        return target.copy_(result)
    return result
