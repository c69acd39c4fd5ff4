"""Book every call's time under its op, its module and its kind of work."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from align.dumpers.choice import Plan
from align.dumpers.families import Family, family_of
from align.dumpers.wire import CallId
from align.plan import PlannedSite
from align.profiling.layout import Moment
from align.profiling.values import CallTime, Group, SiteGain, TinyCalls
from align.taps.clock import Interval

# A chain counts as the kind of its heaviest part.
_WEIGHT = (Family.CONVOLUTION, Family.MATMUL, Family.ATTENTION, Family.NORMALISATION, Family.ACTIVATION, Family.OTHER)


@dataclass(frozen=True, slots=True)
class Booking:
    """Under which operator calls of fused sites are booked."""

    operators: Mapping[CallId, str]
    families: Mapping[str, Family]


def booking_of(sites: Iterable[PlannedSite], plan: Plan, *, whole_chains: bool = False) -> Booking:
    """Book the output call of every site that the plan fuses under its operator; with `whole_chains` all its calls."""
    operators: dict[CallId, str] = {}
    families: dict[str, Family] = {}
    for planned in sites:
        if planned.choice in plan.choices and planned.kernel is not None:
            name = planned.site.operator
            families.setdefault(name, family_of_site(name, [op for _, op, _ in planned.match.calls]))
            operators.update(
                (ident, name) for ident in (planned.match.calls if whole_chains else planned.match.calls[-1:])
            )
    return Booking(operators, families)


def family_of_site(operator: str, ops: Iterable[str]) -> Family:
    """The kind of work of a catalog operator: by its name, else that of its heaviest call."""
    named = family_of(operator)
    if named is not Family.OTHER:
        return named
    if "norm" in operator:
        return Family.NORMALISATION
    if "softmax" in operator:
        return Family.ATTENTION
    found = {family_of(op) for op in ops}
    return next((family for family in _WEIGHT if family in found), Family.OTHER)


def call_times(rounds: Sequence[Sequence[Interval]], booking: Booking) -> tuple[CallTime, ...]:
    """Means over the middle rounds of every call that computed something, in order of execution.

    Medians call by call would add up to less than any round takes, since each round has its slow calls elsewhere.
    """
    gathered: dict[Moment, list[Interval]] = {}
    for intervals in middle(rounds):
        for interval in intervals:
            gathered.setdefault((interval.step, interval.ident), []).append(interval)
    return tuple(_call_time(moment, found, booking) for moment, found in gathered.items() if not found[0].is_stand_in)


def middle(rounds: Sequence[Sequence[Interval]]) -> Sequence[Sequence[Interval]]:
    """The rounds without the fastest and slowest quarter, at least one each, by the time of all their calls."""
    ordered = sorted(rounds, key=lambda intervals: sum(interval.device_seconds for interval in intervals))
    cut = max(1, len(ordered) // 4) if len(ordered) >= 3 else 0
    return ordered[cut : len(ordered) - cut]


def _call_time(moment: Moment, found: Sequence[Interval], booking: Booking) -> CallTime:
    step, ident = moment
    path, op, index = ident
    site = booking.operators.get(ident, "")
    family = booking.families[site] if site else family_of(op)
    host = statistics.fmean(interval.host_seconds for interval in found)
    device = statistics.fmean(interval.device_seconds for interval in found)
    return CallTime(step, f"{path}/{op}#{index}", path, op, family, site, host, device)


def rebooked(calls: Iterable[CallTime], booking: Booking) -> tuple[CallTime, ...]:
    """The same times under another booking."""
    names = {f"{path}/{op}#{index}": site for (path, op, index), site in booking.operators.items()}
    found = []
    for call in calls:
        site = names.get(call.name, "")
        family = booking.families[site] if site else family_of(call.op)
        found.append(
            CallTime(call.step, call.name, call.path, call.op, family, site, call.host_seconds, call.device_seconds)
        )
    return tuple(found)


# -- groups -----------------------------------------------------------------------------------------------------------


def grouped(calls: Sequence[CallTime], name: Callable[[CallTime], str]) -> tuple[Group, ...]:
    """Calls of one name added up, the most time first."""
    total = sum(call.device_seconds for call in calls)
    groups: dict[str, list[CallTime]] = {}
    for call in calls:
        groups.setdefault(name(call), []).append(call)
    found = [_group(label, members, total) for label, members in groups.items()]
    return tuple(sorted(found, key=lambda group: (-group.seconds, group.name)))


def _group(name: str, members: Sequence[CallTime], total: float) -> Group:
    seconds = sum(call.device_seconds for call in members)
    return Group(
        name, seconds, sum(call.host_seconds for call in members), seconds / total if total else 0.0, len(members)
    )


def op_label(call: CallTime) -> str:
    """The op; for a fused site its operator, marked."""
    return f"{call.site} (fused)" if call.site else call.op


def path_label(call: CallTime) -> str:
    """The module in whose forward the call stands."""
    return call.path or "(outside modules)"


def call_label(call: CallTime) -> str:
    """The call's name, over all steps."""
    return call.name


def family_label(call: CallTime) -> str:
    """The kind of work."""
    return call.family.value


# -- tiny calls -------------------------------------------------------------------------------------------------------


def tiny_calls(calls: Sequence[CallTime], *, limit_seconds: float, fewest: int) -> TinyCalls | None:
    """Calls that end sooner than it costs to start them, if there are many: at least `fewest`."""
    small = [call for call in calls if call.device_seconds < limit_seconds]
    if len(small) < fewest:
        return None
    busiest = max(grouped(small, path_label), key=lambda group: group.count)
    times = [call.device_seconds for call in small]
    return TinyCalls(
        len(small), len(calls), limit_seconds, statistics.median(times), sum(times), busiest.name, busiest.count
    )


# -- sites ------------------------------------------------------------------------------------------------------------


def site_gains(
    sites: Iterable[PlannedSite], plan: Plan, baseline: Sequence[CallTime], candidate: Sequence[CallTime]
) -> tuple[SiteGain, ...]:  # fmt: skip
    """Per operator that the plan fuses: what its calls took in both plans, greatest gain first."""
    before, after, runs = _seconds_by_name(baseline), _seconds_by_name(candidate), _counts_by_name(candidate)
    groups: dict[str, list[PlannedSite]] = {}
    for planned in sites:
        if planned.choice in plan.choices and planned.kernel is not None:
            groups.setdefault(planned.site.operator, []).append(planned)
    found = [
        SiteGain(
            name, len(members), sum(runs.get(member.site.output, 0) for member in members),
            sum(before.get(call, 0.0) for member in members for call in member.site.calls),
            sum(after.get(call, 0.0) for member in members for call in member.site.calls),
            sum(member.site.interior_nbytes * runs.get(member.site.output, 0) for member in members),
        )
        for name, members in groups.items()
    ]  # fmt: skip
    return tuple(sorted(found, key=lambda gain: gain.candidate_seconds - gain.baseline_seconds))


def _seconds_by_name(calls: Iterable[CallTime]) -> dict[str, float]:
    found: dict[str, float] = {}
    for call in calls:
        found[call.name] = found.get(call.name, 0.0) + call.device_seconds
    return found


def _counts_by_name(calls: Iterable[CallTime]) -> dict[str, int]:
    found: dict[str, int] = {}
    for call in calls:
        found[call.name] = found.get(call.name, 0) + 1
    return found
