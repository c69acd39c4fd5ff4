"""Run a plan and say good, bad or cannot tell: the predicate of every search.

A trial dumps nothing. The judged values of the reference and the baseline's error are held once; each trial collects
its own values, measures them against the reference and asks the policy. `drift` is the worst relative L2 of the judged
nodes, or what the user's metric returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from align.compare.judge import judge
from align.compare.measures import measure
from align.compare.model import Comparison, Coverage, Judgement, Measures, NodeComparison, Pairing, Status, Verdict
from align.compare.policy import Overrides, Policy
from align.dumpers.choice import Plan
from align.dumpers.dtypes import RawTensor
from align.dumpers.errors import AlignError, TargetError, UndecidedError, UsageError
from align.dumpers.families import op_class_of
from align.dumpers.model import NodeKey, NodeKind, OpClass
from align.execute import Outcome, digest_of
from align.session import Session
from align.taps.collect import Collect
from align.workload import find_target

Metric = Callable[[Any, Any], float]


@dataclass(frozen=True, slots=True)
class Criterion:
    """What is judged, and by what: nodes that a glob names (none: the results), a policy, or a metric with a limit.

    limit         of the metric; NaN leaves it to the baseline (see `Scale`)
    has_baseline  whether errors are set beside the baseline's, or judged by themselves
    """

    policy: Policy
    nodes: tuple[str, ...] = ()
    metric: str = ""
    limit: float = math.nan
    has_baseline: bool = True
    overrides: Overrides = ()


@dataclass(frozen=True, slots=True)
class Scale:
    """How a user's metric is read: an error (smaller is better) or a score (larger is better), and its limit."""

    limit: float
    is_score: bool

    def allows(self, value: float) -> bool:
        """Whether a value is good enough; NaN is not."""
        return value >= self.limit if self.is_score else value <= self.limit


def scale_of(perfect: float, baseline: float, limit: float) -> Scale:
    """Read a metric from its value of the reference against itself (`perfect`) and of the baseline.

    Without a limit of the user's, a candidate may be 1.5 times as far from perfect as the baseline; of a measure
    without a perfect value, such as PSNR, it may lose 20 log10(1.5) = 3.52 dB.
    """
    is_score = perfect > baseline
    if math.isnan(limit):
        limit = perfect + _ALLOWED * (baseline - perfect) if math.isfinite(perfect) else baseline - _DECIBELS
    return Scale(limit, is_score)


_ALLOWED = 1.5
_DECIBELS = 20.0 * math.log10(_ALLOWED)


@dataclass(frozen=True, slots=True)
class TrialResult:
    """What one plan did: verdict, drift, seconds, and the reason in words."""

    status: Status
    drift: float
    seconds: float
    why: str
    digest: str


def unknown(why: str) -> TrialResult:
    """A trial that gave no answer."""
    return TrialResult(Status.UNKNOWN, math.nan, math.nan, why, "")


class Ends:
    """What trials are measured against: reference values, the baseline's errors and dtypes, the scale of a metric."""

    __slots__ = ("baseline", "dtypes", "reference", "scale")

    def __init__(self) -> None:
        self.reference: dict[NodeKey, RawTensor] = {}
        self.scale = Scale(math.nan, False)
        self.baseline: dict[NodeKey, Measures] = {}
        self.dtypes: dict[NodeKey, str] = {}


class Trials:
    """The predicate of a search over plans of one session. `prepare` makes the reference and baseline runs.

    sample   elements kept of each judged tensor; 0 keeps all
    """

    def __init__(self, session: Session, criterion: Criterion, *, sample: int = 0) -> None:
        self._sample = sample
        self.session = session
        self.criterion = criterion
        self._metric = load_metric(criterion.metric) if criterion.metric else None
        self._reference_result: Any = None
        self._above: tuple[NodeComparison, ...] = ()
        self.ends = Ends()

    # -- the ends ---------------------------------------------------------------------------------------------------

    def prepare(self, baseline: Plan) -> TrialResult:
        """Run the reference (which surveys the sites) and the baseline; return the baseline's result."""
        ends = self.ends
        ends.reference = self._survey()
        if not ends.reference:
            asked = " ".join(self.criterion.nodes) or "the results"
            raise UsageError(
                f"nothing to judge: no node matches {asked}",
                "give a glob over module paths (`unet.mid.*`) or calls (`*/softmax#0`)",
            )
        collected, ran = self._collect(baseline)
        ends.dtypes = {key: value.dtype for key, value in collected.values.items()}
        if self.criterion.has_baseline:
            known = ((key, collected.values.get(key), value) for key, value in ends.reference.items())
            ends.baseline = {
                key: measure(ours, value)
                for key, ours, value in known
                if ours is not None and ours.shape == value.shape
            }
        if self._metric is not None:
            ends.scale = scale_of(self._value(self._reference_result), self._value(ran.result), self.criterion.limit)
        return self._judged(collected, ran)

    def adopt(self, ends: Ends) -> None:
        """Survey, and measure against what another process has found: here the environment may be the candidate's."""
        self._survey()
        self.ends = ends

    def _survey(self) -> dict[NodeKey, RawTensor]:
        collect = Collect(self.criterion.nodes, at_most=self._sample)
        outcome = self.session.survey([collect] if self.criterion.nodes else [], on_value=collect.on_value)
        self._reference_result = outcome.result if self._metric is not None else None
        self._above = (
            () if self.criterion.nodes else _exact_chain(self.session.depth - 1, str(self.session.executor.low))
        )
        return collect.values

    # -- trials -----------------------------------------------------------------------------------------------------

    def run(self, plan: Plan) -> TrialResult:
        """Run a plan. A run that fails is UNKNOWN with its error in `why`; only Ctrl-C passes through."""
        try:
            return self._judged(*self._collect(plan))
        except AlignError as exc:
            return unknown(exc.problem)
        except Exception as exc:  # a kernel of the user's own may raise anything; a trial must not end the search
            return unknown(f"{type(exc).__name__}: {exc}")

    def digest(self, plan: Plan, *, is_observed: bool) -> str:
        """Digest of a plan's result, with or without the tap that collects nodes."""
        collect = Collect(self.criterion.nodes, at_most=self._sample)
        outcome, _ = self.session.run(plan, [collect] if is_observed else [])
        return digest_of(outcome.result)

    def _collect(self, plan: Plan) -> tuple[Collect, Outcome]:
        collect = Collect(self.criterion.nodes, at_most=self._sample)
        taps = [collect] if self.criterion.nodes else []
        outcome, _ = self.session.run(plan, taps, on_value=collect.on_value)
        return collect, outcome

    def _judged(self, collect: Collect, outcome: Outcome) -> TrialResult:
        digest = digest_of(outcome.result)
        if self._metric is not None:
            return self._judged_by_metric(outcome, digest)
        nodes, judgement = self._judgement(collect)
        verdicts = self._own(judgement)
        drift = max((_drift(node.candidate) for node in nodes if node.candidate is not None), default=math.nan)
        return TrialResult(judgement.status, drift, outcome.seconds, _why(verdicts), digest)

    def _judgement(self, collect: Collect) -> tuple[tuple[NodeComparison, ...], Judgement]:
        above = self._above
        nodes = tuple(self._compared(order, key, collect) for order, key in enumerate(self.ends.reference, len(above)))
        comparison = Comparison(
            (*above, *nodes), Coverage(len(nodes), len(nodes), 0, 0, 0, 0), self.criterion.has_baseline
        )
        told = self.criterion
        return nodes, judge(comparison, told.policy, overrides=told.overrides, outputs=tuple(self.ends.reference))

    def _own(self, judgement: Judgement) -> tuple[Verdict, ...]:
        return judgement.verdicts[len(self._above) :]

    def verdicts(self, plan: Plan) -> tuple[Verdict, ...]:
        """Verdicts of a plan's judged nodes in execution order. A run that fails raises."""
        collect, _ = self._collect(plan)
        return self._own(self._judgement(collect)[1])

    def _judged_by_metric(self, outcome: Outcome, digest: str) -> TrialResult:
        value, scale = self._value(outcome.result), self.ends.scale
        status = Status.PASS if scale.allows(value) else Status.DRIFT
        name, bound = self.criterion.metric.rpartition(":")[2], "at least" if scale.is_score else "at most"
        return TrialResult(
            status, value, outcome.seconds, f"{name} is {value:.4g}; allowed: {bound} {scale.limit:.4g}", digest
        )

    def _compared(self, order: int, key: NodeKey, collect: Collect) -> NodeComparison:
        """A node beside the reference's, by the limits of the dtype it has in the baseline: float32 somewhere inside
        does not make the rest exact."""
        ends, value = self.ends, collect.values.get(key)
        reference = ends.reference[key]
        dtype = ends.dtypes.get(key, value.dtype if value is not None else reference.dtype)
        head = key, order, NodeKind.MODULE, op_class_of(key.op, dtype), key.op, dtype
        if value is None:
            site = collect.swallowed.get(key, "")
            pairing = Pairing.FUSED_AWAY if site else Pairing.MISSING
            return NodeComparison(*head, reference.shape, pairing, problem="" if site else "not in this run", site=site)
        if value.shape != reference.shape:
            return NodeComparison(
                *head, value.shape, Pairing.EXACT, problem=f"shape {value.shape} against {reference.shape}"
            )
        return NodeComparison(*head, value.shape, Pairing.EXACT, measure(value, reference), ends.baseline.get(key))

    def _value(self, result: Any) -> float:
        assert self._metric is not None
        try:
            return float(self._metric(result, self._reference_result))
        except Exception as exc:
            raise TargetError(
                f"{self.criterion.metric} raised {type(exc).__name__}: {exc}",
                "it is called as metric(candidate, reference)",
            ) from exc


def _exact_chain(length: int, dtype: str) -> tuple[NodeComparison, ...]:
    """Nodes without error that stand before the results for the calls behind them: limits grow with depth."""
    one = RawTensor(np.ones(1, np.float32), "float32")
    perfect, dtype = measure(one, one), dtype.removeprefix("torch.")
    keys = (NodeKey("", "call", index) for index in range(min(length, DEEPEST)))
    return tuple(
        NodeComparison(key, order, NodeKind.CALL, OpClass.ORDINARY, "", dtype, (1,), Pairing.EXACT, perfect, perfect)
        for order, key in enumerate(keys)
    )


def _drift(measures: Measures) -> float:
    """Relative L2; infinite where NaN or Inf stand on one side only, which the measure leaves out."""
    return math.inf if measures.mismatched or math.isnan(measures.rel_l2) else measures.rel_l2


DEEPEST = 64
"""Depth beyond which no limit grows (`align.compare.judge_rules`)."""


def _why(verdicts: Sequence[Verdict]) -> str:
    """The first fault; without any, what came nearest to its limit."""
    faults = [verdict for verdict in verdicts if verdict.status.is_fault]
    several = len(verdicts) > 1
    if faults:
        return (
            f"{len(faults)} of {len(verdicts)} nodes at fault, first {faults[0].key.call_name}: {faults[0].why}"
            if several
            else faults[0].why
        )
    told = [verdict for verdict in verdicts if verdict.status is Status.PASS]
    if len(told) < len(verdicts) or not told:
        return next(
            (verdict.why for verdict in verdicts if verdict.status is not Status.PASS and verdict.why),
            "nothing was judged",
        )
    nearest = max(told, key=lambda verdict: verdict.value / verdict.limit if verdict.limit else 0.0)
    return f"{len(told)} nodes within their limits; nearest to one: {nearest.why}" if several else nearest.why


def load_metric(text: str) -> Metric:
    """The user's function of (candidate result, reference result). Raises TargetError when it is not there."""
    return find_target(text).build


def require_same(observed: str, unobserved: str) -> None:
    """Blame nobody where looking changes what is seen. Raises UndecidedError."""
    if observed != unobserved:
        raise UndecidedError(
            "the candidate's results change when nodes are observed, so no choice can be blamed by them",
            "judge the results instead (without --nodes), or other nodes",
        )
