"""Cold and warm latency, and accuracy, of every set of inputs that a target gives.

Sites are looked for anew under each set: a kernel may refuse a shape, and the model may go another way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from align.compare.measures import measure
from align.dumpers.choice import Plan
from align.dumpers.errors import AlignError
from align.dumpers.naming import walk_tensors
from align.dumpers.tensors import snapshot
from align.profiling.values import Shape, Step
from align.progress import Reporter
from align.reports.numbers import shape as shape_text
from align.session import Session
from align.timing import TimingOptions, measure_rounds, summarise


def measure_shapes(session: Session, options: TimingOptions, progress: Reporter) -> tuple[Shape, ...]:
    """One row for each of the target's `input_sets`; the session is left as it was."""
    names = tuple(session.executor.workload.input_sets or ())
    rows = []
    with progress.stage("input shapes", len(names)) as stage:
        for done, name in enumerate(names):
            with session.on_inputs(name):
                rows.append(_measure(session, name, options))
            stage.reach(done + 1)
    return tuple(rows)


def _measure(session: Session, name: str, options: TimingOptions) -> Shape:
    inputs = inputs_text(session)
    try:
        reference = session.survey().result
        plans = session.baseline_plan(), session.candidate_plan()
        cold = [session.run(plan)[0] for plan in plans]
        timing = summarise(
            measure_rounds(lambda: _seconds(session, plans[0]), lambda: _seconds(session, plans[1]), options)
        )
    except AlignError as exc:  # one shape that fails must not take the others' figures away
        return Shape(name, inputs, note=exc.problem)
    errors = [distance(outcome.result, reference) for outcome in cold]
    return Shape(name, inputs, cold[0].seconds, cold[1].seconds, timing, errors[0], errors[1])


def _seconds(session: Session, plan: Plan) -> float:
    return session.run(plan)[0].seconds


def inputs_text(session: Session) -> str:
    """The shapes of the inputs: `1x4x24x24, 1x64`."""
    workload = session.executor.workload
    tensors = [tensor for _, tensor in walk_tensors((list(workload.args), dict(workload.kwargs)))]
    return ", ".join(shape_text(tuple(tensor.shape)) for tensor in tensors) or "no tensors"


def distance(value: Any, reference: Any) -> float:
    """Relative L2 of a result against the reference's, the worst over its tensors; NaN when they do not correspond."""
    ours, theirs = (dict(walk_tensors(item)) for item in (value, reference))
    if not ours or ours.keys() != theirs.keys():
        return float("nan")
    errors = []
    for slot, tensor in ours.items():
        if tensor.shape != theirs[slot].shape:
            return float("nan")
        if tensor.is_floating_point():
            errors.append(measure(snapshot(tensor).wait(), snapshot(theirs[slot]).wait()).rel_l2)
    return max(errors, default=0.0)


def step_rows(
    seconds: tuple[Sequence[float], Sequence[float]],
    values: tuple[Sequence[Any], Sequence[Any]],
    reference: Sequence[Any],
) -> tuple[Step, ...]:
    """Latency and distance of every step of a loop; what follows the last `yield` is the last row."""
    rows = []
    for index, (before, after) in enumerate(zip(*seconds, strict=False)):
        errors = [
            distance(side[index], reference[index]) if index < min(len(side), len(reference)) else float("nan")
            for side in values
        ]
        rows.append(Step(index, before, after, errors[0], errors[1]))
    return tuple(rows) if len(rows) > 1 else ()
