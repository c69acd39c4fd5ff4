"""Decide what each run switches: which sites exist, which kernels they can have here, which choices are on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from align.devices.base import Device
from align.dumpers.choice import Choice, ChoiceKind, Plan, Site
from align.dumpers.errors import UsageError
from align.dumpers.survey import CallGraph
from align.operators.base import Kernel, Match, Operator
from align.operators.registry import find_sites, site_of, why_unfused
from align.taps.substitute import Form, Substitution


@dataclass(frozen=True, slots=True)
class PlannedSite:
    """A site with the kernel it gets on the device, or the reason why it gets none."""

    site: Site
    match: Match
    kernel: Kernel | None
    reason: str

    @property
    def choice(self) -> Choice:
        """The choice that switches this site."""
        return self.site.choice


def plan_sites(
    graph: CallGraph, operators: Iterable[Operator], device: Device, dtype: torch.dtype
) -> tuple[PlannedSite, ...]:
    """Find the sites of a surveyed run and ask each one's kernel whether it can run here in this dtype."""
    planned = []
    for match in find_sites(graph, operators, device.kind, dtype):
        reason = why_unfused(match, graph, device.kind, dtype)
        kernel = None if reason else match.operator.kernels[device.kind]
        planned.append(PlannedSite(site_of(match, graph, dtype), match, kernel, reason))
    return tuple(planned)


def choose(choices: Iterable[Choice], fuse: Sequence[str], no_fuse: Sequence[str]) -> frozenset[Choice]:
    """Choices that are on: those a `fuse` glob selects (all without one) and no `no_fuse` glob does.

    Raises UsageError for a glob that selects nothing, with the names there are.
    """
    available = tuple(choices)
    for glob in (*fuse, *no_fuse):
        if not any(choice.is_selected_by(glob) for choice in available):
            names = sorted({choice.name for choice in available})
            raise UsageError(
                f"no choice matches {glob!r}", f"names found in this workload: {', '.join(names) or 'none'}"
            )
    chosen = (c for c in available if not fuse or any(c.is_selected_by(glob) for glob in fuse))
    return frozenset(c for c in chosen if not any(c.is_selected_by(glob) for glob in no_fuse))


def substitutions(sites: Iterable[PlannedSite], plan: Plan, *, with_native: bool = False) -> tuple[Substitution, ...]:
    """What has to run other than as written so that the run is the plan's.

    `with_native` also lists fused sites that run as written, for taps that want to see every fused site.
    """
    needed = []
    for planned in sites:
        operator = planned.match.operator
        if planned.choice in plan.choices and planned.kernel is not None:
            if with_native or not (planned.match.is_written_fused and planned.kernel.is_native):
                needed.append(Substitution(planned.site, planned.match, Form.FUSED, planned.kernel))
        elif planned.match.is_written_fused or plan.device.partition(":")[0] in operator.fused_anyway:
            needed.append(Substitution(planned.site, planned.match, Form.UNFUSED))
    return tuple(needed)


def flags_of(plan: Plan) -> dict[str, str]:
    """The device flags a plan sets: `flag:name=value` choices."""
    flags = {}
    for choice in plan.choices:
        if choice.kind is ChoiceKind.FLAG:
            name, _, value = choice.name.partition("=")
            flags[name] = value
    return flags


def user_choices_of(plan: Plan) -> frozenset[str]:
    """Names that the user's own builder or code declares and that are on."""
    return frozenset(choice.name for choice in plan.choices if choice.kind is ChoiceKind.USER)
