"""Hold one workload, its survey and its plans, and run any plan of it: `run`, `bisect`, `gate`, `profile` share it.

The survey rides on the reference run. The candidate may be the same model with fused kernels at chosen sites, the same
builder with its declared choices on, or a second target of the user's; in the last two cases the catalog's sites run
as written unless asked for, since the survey speaks of the first model only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from align.choices import switched
from align.devices import select_device
from align.devices.base import Device
from align.devices.select import select_dtype
from align.dumpers.choice import Choice, ChoiceKind, Plan
from align.dumpers.errors import UsageError
from align.dumpers.families import Family, family_of
from align.dumpers.rng import AlignRandom
from align.dumpers.survey import CallGraph, Survey
from align.dumpers.wire import CallId, Tap, Wire
from align.execute import Executor, Outcome, RunOptions
from align.operators.registry import catalog
from align.own import module_fusions
from align.plan import PlannedSite, choose, flags_of, plan_sites, substitutions, user_choices_of
from align.scalar import scalar_named
from align.settings import RunSettings
from align.taps.cast import SitePrecision, WidenReference
from align.taps.module_swap import ModuleSwap
from align.taps.substitute import Substitute
from align.taps.transplant import Transplant, baseline_mode, is_transplant, parts_of
from align.taps.unfuse import UnfuseCalls
from align.workload import Target, Workload, find_target

OnValue = Callable[[Any, Wire], None]


def ignore_value(value: Any, wire: Wire) -> None:
    """Do nothing with what a step yields."""


class Session:
    """A surveyed workload. Call `survey` once, before any plan is run. `find` turns texts into targets."""

    def __init__(self, settings: RunSettings, *, find: Callable[[str], Target] = find_target) -> None:
        self.settings = settings
        self.device: Device = select_device(settings.device)
        keeps = settings.dtype == "as-built"
        self.dtype: torch.dtype | None = None if keeps else select_dtype(settings.dtype, self.device)
        self.target: Target = find(settings.target)
        self._second: Target | None = find(settings.candidate) if settings.candidate else None
        scalar = scalar_named(settings.grad) if settings.grad else None
        self._options = RunOptions(settings.seed, settings.steps, settings.weights, scalar)
        self._executors: dict[frozenset[str] | str, Executor] = {}
        self._inputs = ""
        self.sites: tuple[PlannedSite, ...] = ()
        self._substitutes: dict[Plan, Substitute] = {}
        self.widened: dict[str, int] = {}
        self.computing_paths: tuple[str, ...] = ()
        self.computing_calls: tuple[str, ...] = ()
        self.depth = 1
        self._asked: tuple[str, ...] = ()
        self.executor = self._executor(frozenset())

    # -- the reference ------------------------------------------------------------------------------------------------

    def survey(self, taps: Sequence[Tap] = (), *, on_value: OnValue = ignore_value) -> Outcome:
        """Make the reference run and find the sites; `taps` see the finished calls."""
        survey, widen = Survey(), WidenReference()
        executor = self.executor

        def note(value: Any, wire: Wire) -> None:
            survey.note_outside(value, wire.step)
            on_value(value, wire)

        random = AlignRandom(self.settings.seed, executor.low)
        with switched(frozenset()) as asked:
            steering = [random, widen, UnfuseCalls(catalog()), ModuleSwap(module_fusions(), frozenset()), survey]
            outcome = executor.run_reference([*steering, *taps], on_value=note)
        self._asked = tuple(sorted(asked))
        self.widened = widen.widened
        self.computing_calls = _computing_calls(survey.graph)
        self.depth = _depth_of(survey.graph)
        self.computing_paths = tuple(dict.fromkeys(f"{name.partition('/')[0]}/*" for name in self.computing_calls))
        self._substitutes.clear()
        self.sites = self._differentiable(plan_sites(survey.graph, catalog(), self.device, executor.low))
        return outcome

    def _differentiable(self, sites: tuple[PlannedSite, ...]) -> tuple[PlannedSite, ...]:
        """With gradients asked for, only kernels that are torch's own calls stay: the others have no backward."""
        if self._options.scalar is None:
            return sites
        return tuple(
            site
            if site.kernel is None or site.kernel.is_native
            else replace(site, kernel=None, reason="its kernel has no gradient")
            for site in sites
        )

    @contextmanager
    def on_inputs(self, name: str) -> Iterator[None]:
        """Survey and run on one of the target's `input_sets` for the context; then all is as before."""
        before = self._inputs, self.sites, self.widened, self.computing_paths, self.computing_calls, self._asked
        self.executor.use_inputs(name)
        self._inputs = name
        try:
            yield
        finally:
            self._inputs, self.sites, self.widened, self.computing_paths, self.computing_calls, self._asked = before
            self._substitutes.clear()
            self.executor.use_inputs(self._inputs)

    # -- plans --------------------------------------------------------------------------------------------------------

    @property
    def is_own_candidate(self) -> bool:
        """Whether the user supplies the fused variant: a second target, or choices declared or asked for in code."""
        return self._second is not None or bool(self.user_choices)

    @property
    def variant_parts(self) -> dict[Choice, Choice]:
        """Parts in which the user's second target differs from the first, with the choice that takes the first's."""
        if self._second is None:
            return {}
        candidate = self._executor("second")
        candidate.place_low()
        self.executor.place_low()
        return parts_of(candidate.workload.model, self.executor.workload.model)

    @property
    def user_choices(self) -> tuple[str, ...]:
        """Names the user declared, asked for in code, or registered as module fusions."""
        return (*self.target.choices, *self._asked, *(fusion.name for fusion in module_fusions()))

    @property
    def fusions(self) -> tuple[Choice, ...]:
        """The fusion choices that this device has kernels for."""
        return tuple(planned.choice for planned in self.sites if planned.kernel is not None)

    def baseline_plan(self) -> Plan:
        """Everything unfused."""
        return Plan("baseline", self.device.kind, self._dtype_name())

    def candidate_plan(self) -> Plan:
        """Everything that is asked for fused, or exactly the choices of the plan file that the settings name."""
        settings = self.settings
        if settings.plan:
            return self._plan_from_file(Path(settings.plan))
        user = frozenset(Choice(ChoiceKind.USER, name) for name in self.user_choices)
        if self.is_own_candidate and not settings.fuse:
            chosen = choose(user, (), settings.no_fuse) if user and settings.no_fuse else user
        else:
            chosen = choose((*self.fusions, *user), settings.fuse, settings.no_fuse)
        extra = frozenset(
            [
                *(Choice.parse(f"precision:{text}") for text in settings.precision),
                *(Choice.parse(f"flag:{text}") for text in settings.flags),
            ]
        )
        return self._checked(Plan("candidate", self.device.kind, self._dtype_name(), chosen | extra))

    def _checked(self, plan: Plan) -> Plan:
        self.device.check_flags(flags_of(plan))
        return plan

    def late_flags(self, plan: Plan) -> dict[str, str]:
        """Flags of a plan that only a process which has yet to start can have; such a plan cannot be run here."""
        return self.device.late_flags(flags_of(plan))

    def flags_in_force(self, plan: Plan) -> dict[str, str]:
        """The device's flags that are set while a plan runs: float32 kept whole, and the plan's own."""
        return self.device.float32_flags() | flags_of(plan)

    def _plan_from_file(self, path: Path) -> Plan:
        try:
            told = Plan.from_json(path.read_text(encoding="utf-8"))
        except OSError as exc:
            raise UsageError(
                f"cannot read plan {path}: {exc.strerror}", "give a plan file that `align run` or `align bisect` wrote"
            ) from exc
        known = {*self.fusions, *(Choice(ChoiceKind.USER, name) for name in self.user_choices)}
        catalogued = (
            c for c in told.choices if c.kind in (ChoiceKind.FUSION, ChoiceKind.USER) and not is_transplant(c)
        )
        strange = sorted(c for c in catalogued if c not in known)
        if strange:
            raise UsageError(
                f"{path}: {strange[0]} does not exist in this workload",
                "the plan is of another model, device or version",
            )
        return self._checked(Plan("candidate", self.device.kind, self._dtype_name(), told.choices))

    def _dtype_name(self) -> str:
        return str(self.executor.low).removeprefix("torch.")

    # -- running ------------------------------------------------------------------------------------------------------

    def run(
        self,
        plan: Plan,
        taps: Sequence[Tap] = (),
        *,
        on_value: OnValue = ignore_value,
        substitute: Substitute | None = None,
    ) -> tuple[Outcome, Substitute]:
        """Run a plan; the tap that ran its sites tells how often each one did. `substitute` replaces the usual tap."""
        executor = self._executor_of(plan)
        if substitute is None:
            substitute = self._substitute_of(plan) if executor is self.executor else Substitute(())
        steering: list[Tap] = [AlignRandom(self.settings.seed, self.executor.low)]
        if any(choice.kind is ChoiceKind.PRECISION for choice in plan.choices):
            steering.append(SitePrecision(plan.choices, executor.low))
        if module_fusions():
            steering.append(ModuleSwap(module_fusions(), user_choices_of(plan)))
        steering.append(substitute)
        if any(is_transplant(choice) for choice in plan.choices):
            self.executor.place_low()
            steering.append(Transplant(plan.choices, self.executor.workload.model))
        with (
            switched(user_choices_of(plan)),
            baseline_mode(plan.choices, executor.workload.model, self.executor.workload.model),
        ):
            outcome = executor.run_low([*steering, *taps], on_value=on_value, sees_calls=True, flags=flags_of(plan))
        return outcome, substitute

    def _substitute_of(self, plan: Plan) -> Substitute:
        """The tap for a plan, kept between runs: it remembers what its stand-ins look like."""
        if plan not in self._substitutes:
            self._substitutes[plan] = Substitute(substitutions(self.sites, plan))
        tap = self._substitutes[plan]
        tap.begin()
        return tap

    def workload_of(self, plan: Plan) -> Workload:
        """The workload that a plan runs: the target's, its variant with the plan's choices, or the second one's."""
        return self.executor.workload if plan.role == "reference" else self._executor_of(plan).workload

    def _executor_of(self, plan: Plan) -> Executor:
        if self._second is not None and plan.role != "baseline":
            return self._executor("second")
        return self._executor(user_choices_of(plan) & frozenset(self.target.choices))

    def _executor(self, which: frozenset[str] | str) -> Executor:
        if which not in self._executors:
            if isinstance(which, str):
                assert self._second is not None
                workload = self._second.load(self.settings.seed)
            else:
                workload = self.target.load(self.settings.seed, which)
            self._executors[which] = Executor(workload, self.device, self.dtype, self._options)
        executor = self._executors[which]
        executor.use_inputs(self._inputs)
        return executor


def _computing_calls(graph: CallGraph) -> tuple[str, ...]:
    """Names (`path/op#call`) of the calls that compute something, in execution order."""
    computing = (call for call in graph if family_of(call.op) is not Family.MOVEMENT)
    return tuple(dict.fromkeys(call.name for call in computing))


def _depth_of(graph: CallGraph) -> int:
    """The most computing calls that lie behind one another on the way through one step."""
    above: dict[tuple[int, CallId], int] = {}
    deepest = 1
    for call in graph:
        depth = above.get((call.step, call.ident), 0) + (family_of(call.op) is not Family.MOVEMENT)
        deepest = max(deepest, depth)
        for step, reader in graph.reader_ids(call):
            if step == call.step:
                above[step, reader] = max(above.get((step, reader), 0), depth)
    return deepest
