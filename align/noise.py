"""The `auto` tolerance: perturb the baseline K times, measure every node on the fly, turn the spread into limits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from align.compare.measures import measure
from align.compare.model import Comparison, Coverage, NodeComparison, Pairing
from align.compare.tolerance import NoiseFloors, floors_of_runs
from align.dumpers.choice import Plan
from align.dumpers.model import NodeRecord, Storage
from align.dumpers.observe import NoDataflow, Observe, Selection
from align.dumpers.store import Trace
from align.dumpers.tensors import to_raw
from align.dumpers.wire import Tap, Wire
from align.progress import Stage
from align.session import Session
from align.taps.perturb import Perturb


class MeasureSink:
    """Measure every node against a reference trace as it comes, and store nothing."""

    def __init__(self, reference: Trace) -> None:
        self._reference = reference
        self._kept = {record.key for record in reference.nodes if record.storage is Storage.TENSOR}
        self.nodes: list[NodeComparison] = []

    def submit(self, record: NodeRecord, tensor: torch.Tensor) -> None:
        """Measure a node that the reference has too."""
        if record.key not in self._kept:
            return
        reference = self._reference.read(record.key)
        mine = to_raw(tensor)
        if mine.shape != reference.shape:
            return
        self.nodes.append(
            NodeComparison(
                record.key,
                record.order,
                record.kind,
                record.op_class,
                record.type_name,
                record.dtype,
                record.shape,
                Pairing.EXACT,
                measure(mine, reference),
            )
        )

    def submit_bare(self, record: NodeRecord) -> None:
        """A node without data has no measure."""

    def comparison(self) -> Comparison:
        """What was measured."""
        count = len(self.nodes)
        return Comparison(tuple(self.nodes), Coverage(count, count, 0, 0, 0, 0), has_baseline=False)


@dataclass(frozen=True, slots=True)
class Traces:
    """What perturbed runs are measured against, and the plain baseline that an equal run is compared with."""

    reference: Trace
    baseline: Trace


def measure_floors(
    session: Session, plan: Plan, selection: Selection, traces: Traces, runs: int, stage: Stage
) -> NoiseFloors:
    """Run the plan perturbed `runs` times, and once as it is, and return every node's limit.

    The unperturbed run measures nondeterminism: its difference from the recorded baseline is the
    floor under all figures.
    """
    perturbed = []
    for run in range(runs):
        perturbed.append(_measured(session, plan, selection, traces.reference, [Perturb(seed=1000 + run)]))
        stage.reach(run + 1)
    return floors_of_runs(perturbed, _measured(session, plan, selection, traces.baseline, []))


def _measured(session: Session, plan: Plan, selection: Selection, reference: Trace, taps: list[Tap]) -> Comparison:
    sink = MeasureSink(reference)
    observe = Observe(sink, selection, dataflow=NoDataflow())

    def on_value(value: object, wire: Wire) -> None:
        observe.record_result(value, wire.step)

    session.run(plan, [*taps, observe], on_value=on_value)
    return sink.comparison()
