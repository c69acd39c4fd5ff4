"""Find the first bad node of a plan: where, in execution order, its values leave those of the reference.

Three runs (reference, baseline, the plan) keep a thinned copy of every node, so memory stays bounded; a node is judged
by the policy of the search, beside the baseline.
"""

from __future__ import annotations

from dataclasses import replace

from align.bisecting.trial import Criterion, Trials
from align.compare.model import Status
from align.compare.policy import Method, Policy
from align.dumpers.choice import Plan
from align.dumpers.model import NodeKey
from align.session import Session

SAMPLE = 4096
"""Elements kept of a node: enough for ratios of errors, and 5,000 nodes stay within 80 MB a run."""


def first_bad_node(session: Session, criterion: Criterion, plan: Plan) -> str:
    """`path/op#call: why` of the first node at fault in a run of the plan; "" when none is, or its run fails."""
    trials = Trials(
        session, replace(criterion, policy=_for_nodes(criterion.policy), nodes=("*",), metric=""), sample=SAMPLE
    )
    trials.prepare(session.baseline_plan())
    verdicts = trials.verdicts(plan)
    bad = next((verdict for verdict in verdicts if verdict.status in _BAD), None)
    return f"{name_of(bad.key)}: {bad.why}" if bad is not None else ""


_BAD = (Status.NONFINITE, Status.COLLAPSED, Status.MISMATCH, Status.DRIFT)


def _for_nodes(policy: Policy) -> Policy:
    """The spread of perturbed runs is known of results only; nodes are judged by ratios."""
    return replace(policy, method=Method.RATIO) if policy.method is Method.SPREAD else policy


def name_of(key: NodeKey) -> str:
    """A node in words: its call, and the step where it is not the first."""
    step = f" in step {key.step}" if key.step else ""
    return f"{key.path}/{key.op}#{key.call}{step}"
