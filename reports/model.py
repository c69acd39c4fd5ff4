"""All that can be told of a run, as frozen values: what `align/` decides and every report shows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from align.compare.model import Comparison, Judgement
from align.dumpers.choice import Choice, Plan


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Seconds of repeated rounds: median, 10th and 90th percentile, and how many rounds stand behind them."""

    median: float
    p10: float
    p90: float
    rounds: int


class Confidence(StrEnum):
    """Whether a timing comparison has a winner."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True, slots=True)
class Timing:
    """Baseline and candidate timed in interleaved rounds, in seconds; `speedup` = baseline / candidate.

    `low` and `high` bound the speed-up (bootstrap, 95 %). Peak memory in bytes, NaN where the device does not
    tell. `wire_seconds_per_call` is the tool's own cost. `warnings` name why a figure is doubtful.
    """

    baseline: Quantiles
    candidate: Quantiles
    speedup: float
    low: float
    high: float
    confidence: Confidence
    peak_bytes_baseline: float = math.nan
    peak_bytes_candidate: float = math.nan
    wire_seconds_per_call: float = math.nan
    calls: int = 0
    warnings: tuple[str, ...] = ()
    step_seconds_baseline: tuple[float, ...] = ()
    step_seconds_candidate: tuple[float, ...] = ()


class ChoiceState(StrEnum):
    """What became of a choice in the candidate run."""

    ON = "on"
    OFF = "off"  # not asked for
    UNAVAILABLE = "unavailable"  # this device has no kernel, or the kernel refuses these inputs


@dataclass(frozen=True, slots=True)
class ChoiceRow:
    """One line of the ledger: a choice, what it did to its node, and what it saves.

    `candidate_error` and `baseline_error` are relative L2 of the site's output against the reference, NaN if unknown.
    """

    choice: Choice
    state: ChoiceState
    reason: str = ""
    node: str = ""
    candidate_error: float = math.nan
    baseline_error: float = math.nan
    interior_nbytes: int = 0
    seconds_saved: float = math.nan


@dataclass(frozen=True, slots=True)
class RoleRow:
    """One of the runs: role, plan, its trace file, and how it went."""

    role: str
    plan: Plan
    trace: str
    seconds: float
    nodes: int
    output_digest: str
    output_digest_unobserved: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CulpritCard:
    """One culprit with its evidence, for reports."""

    choices: tuple[Choice, ...]
    site: str
    evidence: str
    signature: str
    drift_with: float
    drift_without: float
    reproduced: int
    attempts: int
    seconds_cost: float = math.nan
    seconds_low: float = math.nan
    seconds_high: float = math.nan


@dataclass(frozen=True, slots=True)
class OriginCard:
    """More of a node where drift begins: relative L2 in excess of the baseline's that it introduces and inherits.

    `looks_like` is what kind of error it is, with evidence; empty if no hypothesis fits or none was tried.
    """

    node: str
    introduced: float
    inherited: float
    looks_like: str = ""


@dataclass(frozen=True, slots=True)
class NodeFloor:
    """The spread that rounding alone explains at a node: a high quantile of perturbed baseline runs' relative L2."""

    node: str
    rel_l2: float


@dataclass(frozen=True, slots=True)
class RunReport:
    """Everything `align run` found out, ready to be told. Paths are relative to the run folder."""

    workload: str
    folder: str
    roles: tuple[RoleRow, ...]
    comparison: Comparison
    judgement: Judgement
    choices: tuple[ChoiceRow, ...] = ()
    timing: Timing | None = None
    culprits: tuple[CulpritCard, ...] = ()
    floors: tuple[NodeFloor, ...] = ()
    origins: tuple[OriginCard, ...] = ()
    pictures: tuple[tuple[str, str], ...] = ()
    files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = field(default=())
    command: str = ""
