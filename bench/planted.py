"""Plant a faulty kernel at one site of any workload, as a fused kernel with a bug would be: what a bisect has to find.

Every site of the catalog gets a kernel on this device: its own, or, where there is none, its unfused form, so that all
operators can be tried on a CPU. One site then gets a faulty one. A fault is a subtly wrong form of the operator, made
by wrong arguments or by a wrong last step; which faults an operator can have depends on its arguments.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch

from align.dumpers.naming import map_tensors
from align.operators.base import Bound, Kernel, Operator
from align.plan import PlannedSite, plan_sites

Form = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of bug: whether an operator with these arguments can have it, and its form."""

    name: str
    fits: Callable[[Operator, Bound], bool]
    break_form: Callable[[Operator], Form]


def _with(operator: Operator, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Form:
    return lambda **arguments: operator.unfused(**change(arguments))


def _without_scale(operator: Operator) -> Form:
    """Attention without 1 / sqrt(d); an int8 product with half its scale; anything else a quarter too large."""
    if operator.name == "attention":
        return _with(operator, lambda arguments: arguments | {"scale": 1.0})
    if operator.name == "quant_linear":
        return _with(operator, lambda arguments: arguments | {"weight_scale": arguments["weight_scale"] * 0.5})
    return lambda **arguments: map_tensors(operator.unfused(**arguments), lambda tensor: tensor * 1.25)


def _with_wrong_eps(operator: Operator) -> Form:
    """eps of the size of the variance, as when it is added to the standard deviation, or taken from another layer."""
    return _with(operator, lambda arguments: arguments | {"eps": 0.3})


def _with_wrong_mask(operator: Operator) -> Form:
    """True read as "leave out" where it means "attend"; an added mask subtracted."""

    def turned(mask: torch.Tensor) -> torch.Tensor:
        return mask.logical_not() if mask.dtype is torch.bool else -mask

    def change(arguments: dict[str, Any]) -> dict[str, Any]:
        if arguments.get("is_causal"):
            extents = arguments["query"].shape[-2], arguments["key"].shape[-2]
            return arguments | {"is_causal": False, "mask": torch.ones(extents, dtype=torch.bool).triu()}
        return arguments | {"mask": turned(arguments["mask"])}

    return _with(operator, change)


def _without_tail(operator: Operator) -> Form:
    """The last columns are not written, as by a loop over full tiles only."""

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        result = tensor.clone()
        result[..., -max(1, tensor.shape[-1] // 8) :] = 0
        return result

    return lambda **arguments: map_tensors(operator.unfused(**arguments), cut)


def _in_narrow_sums(operator: Operator) -> Form:
    """Sums carried with five bits of mantissa, as partial sums that are stored too narrow between tiles."""

    def narrow(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        mantissa, exponent = torch.frexp(tensor.float())
        return torch.ldexp((mantissa * 16).round() / 16, exponent).to(tensor.dtype)

    return lambda **arguments: map_tensors(operator.unfused(**arguments), narrow)


def _has_mask(operator: Operator, bound: Bound) -> bool:
    return operator.name == "attention" and (bound.get("mask") is not None or bool(bound.get("is_causal")))


FAULTS = (
    Fault("missing scale", lambda operator, bound: True, _without_scale),
    Fault("wrong eps", lambda operator, bound: bound.get("eps") is not None, _with_wrong_eps),
    Fault("narrow sums", lambda operator, bound: True, _in_narrow_sums),
    Fault("mask polarity", _has_mask, _with_wrong_mask),
    Fault("tail columns", lambda operator, bound: True, _without_tail),
)


@dataclass(frozen=True, slots=True)
class Plant:
    """Where which fault goes: operators by name (one of their sites each, drawn by the seed)."""

    faults: Mapping[str, str]
    seed: int = 0


def faults_of(planned: PlannedSite, bound: Bound) -> tuple[str, ...]:
    """Names of the faults that a site can have."""
    return tuple(fault.name for fault in FAULTS if fault.fits(planned.match.operator, bound))


@contextmanager
def planted(plant: Plant) -> Iterator[list[str]]:
    """Plant for the context, in this process; yields the choices that are guilty, once a workload was surveyed."""
    guilty: list[str] = []

    def plan(graph: Any, operators: Any, device: Any, dtype: torch.dtype) -> tuple[PlannedSite, ...]:
        sites = tuple(_with_kernel(site) for site in plan_sites(graph, operators, device, dtype))
        bounds = {site.site.name: site.match.bound(graph, graph.steps_of(site.match.calls[-1])[0]) for site in sites}
        chosen = _chosen(sites, bounds, plant)
        guilty[:] = [str(site.choice) for site in sites if site.site.name in chosen]
        return tuple(_broken(site, chosen[site.site.name]) if site.site.name in chosen else site for site in sites)

    with patch("align.session.plan_sites", plan):
        yield guilty


def _with_kernel(site: PlannedSite) -> PlannedSite:
    """The site with its own kernel, or with its unfused form as one; native kernels are called too."""
    if site.kernel is not None:
        return replace(site, kernel=replace(site.kernel, is_native=False))
    return replace(site, kernel=Kernel(site.match.operator.unfused, "the unfused form"), reason="")


def _chosen(sites: Sequence[PlannedSite], bounds: Mapping[str, Bound], plant: Plant) -> dict[str, str]:
    """The faults by name of their site."""
    dice = random.Random(plant.seed)
    chosen: dict[str, str] = {}
    for operator, fault in plant.faults.items():
        of_kind = [site for site in sites if site.match.operator.name == operator]
        fitting = [site.site.name for site in of_kind if fault in faults_of(site, bounds[site.site.name])]
        free = [name for name in fitting if name not in chosen]
        if free:
            chosen[dice.choice(free)] = fault
    return chosen


def _broken(site: PlannedSite, name: str) -> PlannedSite:
    fault = next(fault for fault in FAULTS if fault.name == name)
    return replace(site, kernel=Kernel(fault.break_form(site.match.operator), name))
