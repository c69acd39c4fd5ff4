"""Local error of every fused site in one pass: its fused output beside the FP32 unfused form of the very same inputs.

Local means introduced here, not inherited: both sides read this run's own inputs. The unfused form in the run's dtype
is taken too, so that ordinary rounding at the site is known: `excess` is the fused kernel's error over it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from align.compare.measures import measure
from align.compare.model import ratio
from align.compare.signature import diagnose
from align.dumpers.choice import Choice, Plan, Site
from align.dumpers.dtypes import RawTensor
from align.dumpers.naming import map_tensors, walk_tensors
from align.dumpers.tensors import snapshot
from align.dumpers.wire import Call
from align.operators.base import Operator
from align.plan import PlannedSite, substitutions
from align.session import Session
from align.taps.substitute import Form, Substitute, Substitution


@dataclass(frozen=True, slots=True)
class LocalError:
    """Worst local error of a site over all its calls in a run, as relative L2 against the FP32 form."""

    choice: Choice
    fused: float
    unfused: float

    @property
    def excess(self) -> float:
        """Fused over unfused local error; a fused site at ordinary rounding is about 1."""
        return ratio(self.fused, self.unfused) if math.isfinite(self.fused) else math.inf


class Shadow(Substitute):
    """Run sites fused, and each one's unfused form beside it from the same inputs."""

    def __init__(self, items: tuple[Substitution, ...], *, keep: str = "") -> None:
        super().__init__(items)
        self._keep = keep
        self.errors: dict[str, tuple[float, float]] = {}
        self.kept: tuple[RawTensor, RawTensor, RawTensor, tuple[RawTensor, ...]] | None = None
        self.arguments: Mapping[str, Any] = {}
        self._before: Mapping[str, Any] = {}

    def execute(self, call: Call) -> Any:
        work = self._work.get(call.ident)
        if work is not None and call.ident == work.last and work.substitution.form is Form.FUSED:
            work.gather(call)
            self._before = _fresh(work.arguments)  # a kernel that works in place overwrites what it was given
        return super().execute(call)

    def observe(self, substitution: Substitution, arguments: Mapping[str, Any], result: Any) -> None:
        if substitution.form is not Form.FUSED:
            return
        arguments = {**arguments, **self._before}
        operator = substitution.match.operator
        fused, exact, plain = (
            _first(result),
            _first(in_float32(operator, arguments)),
            _first(operator.unfused(**_fresh(arguments))),
        )
        site = substitution.site
        if fused.shape != exact.shape:
            self.errors[site.name] = (math.inf, 0.0)
            return
        errors = (measure(fused, exact).rel_l2, measure(plain, exact).rel_l2)
        if not math.isfinite(errors[0]) or measure(fused, exact).mismatched:
            errors = (math.inf, errors[1])
        worst = self.errors.get(site.name, (-1.0, 0.0))
        if errors[0] >= worst[0]:
            self.errors[site.name] = errors
            if site.name == self._keep:
                inputs = tuple(snapshot(tensor).wait() for _, tensor in walk_tensors(dict(arguments)))
                self.kept = (fused, exact, plain, inputs)
                self.arguments = _fresh(arguments)


def in_float32(operator: Operator, arguments: Mapping[str, Any]) -> Any:
    """The unfused form on the CPU in float32, from exactly widened copies of the arguments."""
    wide = {
        name: map_tensors(
            value,
            lambda tensor: (
                tensor.detach().cpu().float() if tensor.is_floating_point() else tensor.detach().cpu().clone()
            ),
        )
        for name, value in arguments.items()
    }
    return operator.unfused(**wide)


def _fresh(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: map_tensors(value, lambda tensor: tensor.detach().clone()) for name, value in arguments.items()}


def _first(value: Any) -> RawTensor:
    tensor = next(tensor for _, tensor in walk_tensors(value))
    return snapshot(tensor).wait()


def shadow_pass(session: Session, plan: Plan, *, keep: str = "") -> Shadow:
    """Run the plan with every fused site shadowed."""
    items = substitutions(session.sites, plan, with_native=True)
    shadow = Shadow(items, keep=keep)
    session.run(plan, substitute=shadow)
    return shadow


def local_errors(session: Session, plan: Plan) -> tuple[LocalError, ...]:
    """Local errors of all fused sites of a plan, worst excess first."""
    shadow = shadow_pass(session, plan)
    by_name: dict[str, Site] = {planned.site.name: planned.site for planned in session.sites}
    errors = [LocalError(by_name[name].choice, fused, unfused) for name, (fused, unfused) in shadow.errors.items()]
    return tuple(sorted(errors, key=lambda error: -error.excess))


def diagnose_site(session: Session, plan: Plan, choice: Choice) -> str:
    """What kind of error a fused site makes on its own inputs, in a sentence."""
    planned: PlannedSite | None = next((item for item in session.sites if item.choice == choice), None)
    if planned is None:
        return ""
    kept = shadow_pass(session, plan, keep=planned.site.name).kept
    if kept is None:
        return ""
    fused, exact, plain, inputs = kept
    found = diagnose(fused, exact, baseline=plain, inputs=inputs)
    return f"{found[0].kind}: {found[0].evidence}" if found else ""
