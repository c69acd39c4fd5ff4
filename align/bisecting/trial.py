"""Run a plan and say good, bad or cannot tell: the predicate of every search.

A trial dumps nothing. The judged values of the reference and the baseline's error are held once; each trial collects
its own values, measures them against the reference and asks the policy. `drift` is the worst relative L2 of the judged
nodes, or what the user's metric returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from align.compare.judge import judge
from align.compare.measures import measure
from align.compare.model import Comparison, Coverage, Measures, NodeComparison, Pairing, Status
from align.compare.policy import Policy
from align.dumpers.choice import Plan
from align.dumpers.dtypes import RawTensor
from align.dumpers.errors import AlignError, TargetError, UndecidedError
from align.dumpers.families import op_class_of
from align.dumpers.model import NodeKey, NodeKind
from align.execute import Outcome, digest_of
from align.session import Session
from align.taps.collect import Collect
from align.workload import find_target

Metric = Callable[[Any, Any], float]


@dataclass(frozen=True, slots=True)
class Criterion:
    """What is judged, and by what: nodes that a glob names (none: the results), a policy, or a metric with a limit.

    With a metric (an error: larger is worse), a plan is bad above `max_error`; 0 means 1.5 times the baseline's.
    """

    policy: Policy
    nodes: tuple[str, ...] = ()
    metric: str = ""
    max_error: float = 0.0
    has_baseline: bool = True


@dataclass(frozen=True, slots=True)
class TrialResult:
    """What one plan did: verdict, drift, seconds, and the reason in words."""

    status: Status
    drift: float
    seconds: float
    why: str
    digest: str


class Trials:
    """The predicate of a search over plans of one session. `prepare` makes the reference and baseline runs."""

    def __init__(self, session: Session, criterion: Criterion) -> None:
        self.session = session
        self._criterion = criterion
        self._metric = load_metric(criterion.metric) if criterion.metric else None
        self._reference: dict[NodeKey, RawTensor] = {}
        self._reference_result: Any = None
        self._baseline: dict[NodeKey, Measures] = {}
        self._limit = criterion.max_error
        self.count = 0

    def prepare(self, baseline: Plan) -> TrialResult:
        """Run the reference (which surveys the sites) and the baseline; return the baseline's result."""
        collect = Collect(self._criterion.nodes)
        outcome = self.session.survey([collect], on_value=collect.on_value)
        self._reference, self._reference_result = collect.values, outcome.result
        if not self._reference:
            raise UndecidedError(
                f"nothing to judge: no node matches {self._criterion.nodes}", "give a glob over module paths or calls"
            )
        values, ran = self._collect(baseline)
        if self._criterion.has_baseline:
            self._baseline = {
                key: measure(values[key], self._reference[key]) for key in self._reference if key in values
            }
        if self._metric is not None and self._limit == 0.0:
            self._limit = 1.5 * self._user_error(ran.result)
        return self._judged(values, ran)

    def run(self, plan: Plan) -> TrialResult:
        """Run a plan. A run that fails is UNKNOWN with its error in `why`; only Ctrl-C and wrong use pass through."""
        self.count += 1
        try:
            values, outcome = self._collect(plan)
        except UndecidedError as exc:
            return TrialResult(Status.UNKNOWN, math.nan, math.nan, exc.problem, "")
        except AlignError:
            raise
        except Exception as exc:  # a kernel of the user's own may raise anything; a trial must not end the search
            return TrialResult(Status.UNKNOWN, math.nan, math.nan, f"{type(exc).__name__}: {exc}", "")
        return self._judged(values, outcome)

    def _collect(self, plan: Plan) -> tuple[dict[NodeKey, RawTensor], Outcome]:
        collect = Collect(self._criterion.nodes)
        taps = [collect] if self._criterion.nodes else []
        outcome, _ = self.session.run(plan, taps, on_value=collect.on_value)
        return collect.values, outcome

    def _judged(self, values: Mapping[NodeKey, RawTensor], outcome: Outcome) -> TrialResult:
        digest = digest_of(outcome.result)
        if self._metric is not None:
            error = self._user_error(outcome.result)
            bad = not error <= self._limit
            why = f"{self._criterion.metric} {error:.4g}, allowed {self._limit:.4g}"
            return TrialResult(Status.DRIFT if bad else Status.PASS, error, outcome.seconds, why, digest)
        nodes = tuple(self._compared(order, key, values.get(key)) for order, key in enumerate(self._reference))
        comparison = Comparison(nodes, Coverage(len(nodes), len(nodes), 0, 0, 0, 0), self._criterion.has_baseline)
        judgement = judge(comparison, self._criterion.policy, outputs=tuple(self._reference))
        drift = max((node.candidate.rel_l2 for node in nodes if node.candidate is not None), default=math.nan)
        return TrialResult(judgement.status, drift, outcome.seconds, judgement.why, digest)

    def _compared(self, order: int, key: NodeKey, value: RawTensor | None) -> NodeComparison:
        reference = self._reference[key]
        dtype = value.dtype if value is not None else reference.dtype
        kind = NodeKind.MODULE
        op_class = op_class_of(key.op, dtype)
        if value is None:
            return NodeComparison(
                key, order, kind, op_class, key.op, dtype, reference.shape, Pairing.MISSING, problem="not in this run"
            )
        if value.shape != reference.shape:
            problem = f"shape {value.shape} against {reference.shape}"
            return NodeComparison(
                key, order, kind, op_class, key.op, dtype, value.shape, Pairing.EXACT, problem=problem
            )
        return NodeComparison(
            key, order, kind, op_class, key.op, dtype, value.shape, Pairing.EXACT, measure(value, reference), self._baseline.get(key)
        )  # fmt: skip

    def _user_error(self, result: Any) -> float:
        assert self._metric is not None
        try:
            return float(self._metric(result, self._reference_result))
        except Exception as exc:
            raise TargetError(
                f"{self._criterion.metric} raised {type(exc).__name__}: {exc}",
                "it is called as metric(candidate, reference)",
            ) from exc


def load_metric(text: str) -> Metric:
    """The user's function of (candidate result, reference result). Raises TargetError when it is not there."""
    return find_target(text).build
