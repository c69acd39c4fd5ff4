"""One role of a three-way run in a process of its own: what this process answers to the one that does the whole run.

The parent calls `record` first, then `once` as often as it wants rounds timed. Everything is set up anew here from
settings and plan, flags first: some hold only if they are set before anything else happens on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from align.devices import select_device
from align.dumpers.choice import Plan
from align.dumpers.model import NodeKey
from align.plan import flags_of
from align.progress import Silent
from align.reports.model import RoleRow
from align.settings import Settings
from align.three_way import Job, Round, environment_of, run_role, timed


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a role left: its trace and pictures are in the run folder."""

    rows: tuple[RoleRow, ...]
    outputs: tuple[NodeKey, ...]
    pictures: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    ran: dict[str, dict[str, int]]
    nodes: int
    environment: tuple[tuple[str, str], ...]


_jobs: list[Job] = []


def record(settings: Settings, folder: Path, plan: Plan) -> Recorded:
    """Survey the workload again and run one role of it into the run folder."""
    select_device(settings.run.device).prepare(flags_of(plan))
    job = Job(settings, folder, (plan.role,), Silent())
    outcome = job.session.survey()
    if (folder / "reference.png").exists():
        job.album.add("reference", outcome.result)
    run_role(job, plan)
    _jobs[:] = [job]
    environment = environment_of(job.session, plan)
    return Recorded(
        tuple(job.rows), tuple(job.outputs), tuple(job.pictures), tuple(job.notes), job.ran, job.nodes, environment
    )


def once(plan: Plan) -> Round:
    """One round of the recorded role, not observed."""
    return timed(_jobs[0].session, plan)
