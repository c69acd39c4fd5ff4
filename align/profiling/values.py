"""What a profile found, as frozen values; times in seconds, sizes in bytes, NaN where nobody could tell."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from align.dumpers.choice import Plan
from align.dumpers.families import Family
from align.reports.model import Timing


@dataclass(frozen=True, slots=True)
class CallTime:
    """One call of a plan: means over the middle rounds. `site` is the fused operator that ran there, or empty."""

    step: int
    name: str
    path: str
    op: str
    family: Family
    site: str
    host_seconds: float
    device_seconds: float


@dataclass(frozen=True, slots=True)
class Group:
    """Calls that share a name (an op, a module path, a kind of work): time, share of all calls' time, and count."""

    name: str
    seconds: float
    host_seconds: float
    share: float
    count: int


@dataclass(frozen=True, slots=True)
class TinyCalls:
    """How many calls are shorter than `limit_seconds`, their time in all, and the module that makes most of them."""

    count: int
    of: int
    limit_seconds: float
    median_seconds: float
    seconds: float
    path: str
    path_count: int


class Turning(StrEnum):
    """What of a tensor is changed and changed back."""

    AXES = "axes"
    MEMORY = "memory order"
    DTYPE = "dtype"


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """A tensor laid out another way and back: from `first` to `last` (`path/op`), how often, and what the moves cost.

    `copied_nbytes` counts what the moves really copied; views copy nothing and cost host time only.
    """

    turning: Turning
    first: str
    last: str
    layout: str
    other_layout: str
    count: int
    seconds: float
    copied_nbytes: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """A line of user code that makes the host wait for the device: the function, the line, the module, how often."""

    op: str
    line: str
    path: str
    count: int


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """A call's output that was alive at the peak."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of one run: the device's own peak, and that of call outputs alive together (no kernels' work space)."""

    peak_nbytes: float
    live_peak_nbytes: int
    largest: tuple[LiveTensor, ...]


@dataclass(frozen=True, slots=True)
class KernelTotal:
    """A device kernel as the device's own profiler counts it."""

    name: str
    count: int
    seconds: float
    share: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class PlanProfile:
    """Where one plan's time and memory went.

    seconds          median of whole rounds without the clock
    device_seconds, host_seconds   sums over all calls
    between_seconds  host time outside all calls: Python, and on an accelerator waiting for the device
    tool_seconds     our own part of `seconds`: naming calls, standing in for what fused sites swallow
    """

    plan: Plan
    seconds: float
    device_seconds: float
    host_seconds: float
    between_seconds: float
    tool_seconds: float
    calls: int
    by_op: tuple[Group, ...]
    by_path: tuple[Group, ...]
    by_call: tuple[Group, ...]
    families: tuple[Group, ...]
    tiny: TinyCalls | None
    round_trips: tuple[RoundTrip, ...]
    waits: tuple[Waiting, ...]
    memory: Memory
    kernels: tuple[KernelTotal, ...] = ()

    @property
    def movement_share(self) -> float:
        """Share of the calls' time that only moves data."""
        return next((group.share for group in self.families if group.name == Family.MOVEMENT), 0.0)


@dataclass(frozen=True, slots=True)
class SiteGain:
    """The sites of one operator that the candidate fuses: time of the same calls in both plans, bytes not written."""

    operator: str
    sites: int
    runs: int
    baseline_seconds: float
    candidate_seconds: float
    saved_nbytes: int


@dataclass(frozen=True, slots=True)
class HotSpot:
    """The largest part of the time before and after, and how much of what some parts gained others lost again."""

    before: str
    before_share: float
    after: str
    after_share: float
    gained_seconds: float
    lost_seconds: float
    sentence: str


@dataclass(frozen=True, slots=True)
class Shape:
    """One set of inputs: first and later latency of both plans, and their relative L2 against the reference."""

    name: str
    inputs: str
    cold_baseline_seconds: float = math.nan
    cold_candidate_seconds: float = math.nan
    timing: Timing | None = None
    error_baseline: float = math.nan
    error_candidate: float = math.nan
    note: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the loop: latency of both plans and relative L2 of what it yields against the reference's."""

    index: int
    baseline_seconds: float
    candidate_seconds: float
    error_baseline: float
    error_candidate: float


@dataclass(frozen=True, slots=True)
class Remark:
    """Something worth doing: which plan it is about, what was seen, and what can be done."""

    subject: str
    plan: str
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Profile:
    """Everything `align profile` found. `clock_seconds_per_call` is already taken off the calls' times."""

    workload: str
    device: str
    chip: str
    dtype: str
    timing: Timing
    baseline: PlanProfile
    candidate: PlanProfile
    sites: tuple[SiteGain, ...]
    hot_spot: HotSpot
    shapes: tuple[Shape, ...]
    steps: tuple[Step, ...]
    remarks: tuple[Remark, ...]
    clock_seconds_per_call: float
    clock_total_seconds_per_call: float
    rounds: int
    notes: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def own_speedup(self) -> float:
        """The speed-up with the tool's own part taken off both plans: an estimate of what a user would see."""
        before, after = (1.0 - plan.tool_seconds / plan.seconds for plan in (self.baseline, self.candidate))
        return self.timing.speedup * before / after if before > 0 and after > 0 else math.nan

    @property
    def saved_nbytes(self) -> int:
        """Bytes that the fused plan does not write: interior tensors of its sites, over the whole run."""
        return sum(site.saved_nbytes for site in self.sites)
