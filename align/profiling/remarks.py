"""Say what in a profile is worth doing something about."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from align.dumpers.families import Family, family_of
from align.profiling.values import Group, HotSpot, PlanProfile, Remark, RoundTrip, Turning
from align.reports.numbers import count, nbytes, percent, plural, seconds

MOVEMENT_LIMIT = 0.1
"""Share of data movement above which it is called out."""
WORTH_SAYING = 0.005
"""Share of the calls' time from which round trips of mere views are called out."""
_MOST = 3

_REMEDIES = {
    Turning.AXES: "keep one layout through the module, or use the operator's own layout argument (attention: BSND)",
    Turning.MEMORY: "choose one memory format for the whole chain",
    Turning.DTYPE: "keep one dtype through the chain, or use an operator that widens inside",
}


def remarks_on(baseline: PlanProfile, candidate: PlanProfile, spot: HotSpot, kind: str) -> tuple[Remark, ...]:
    """Remarks on the candidate, which is what will run; on the baseline only where its case is not the candidate's."""
    found = [Remark("hot spot", "", spot.sentence)]
    for profile in (candidate, baseline):
        found.extend(_movement(profile))
    for profile in (candidate,):
        found.extend(_trips(profile))
        found.extend(_tiny(profile, kind))
        found.extend(_waits(profile, kind))
    return tuple(found)


def _movement(profile: PlanProfile) -> Iterator[Remark]:
    share = profile.movement_share
    text = f"data movement takes {percent(share)} of the calls' time"
    if share > MOVEMENT_LIMIT:
        ops = ", ".join(f"{group.name} {percent(group.share)}" for group in _moving(profile))
        yield Remark(
            "data movement",
            profile.plan.role,
            f"{text}, above {percent(MOVEMENT_LIMIT)}: {ops}",
            "see the layout changes below",
        )
    else:
        yield Remark("data movement", profile.plan.role, text)


def _moving(profile: PlanProfile) -> list[Group]:
    return [group for group in profile.by_op if family_of(group.name) is Family.MOVEMENT][:_MOST]


def _trips(profile: PlanProfile) -> Iterator[Remark]:
    floor = WORTH_SAYING * profile.device_seconds
    merged = [trip for trip in merged_trips(profile.round_trips) if trip.copied_nbytes or trip.seconds >= floor]
    layouts = [trip for trip in merged if trip.turning is not Turning.DTYPE]
    casts = [trip for trip in merged if trip.turning is Turning.DTYPE]
    for trip in (*layouts[:_MOST], *casts[:1]):
        yield Remark("layout", profile.plan.role, trip_text(trip), _REMEDIES[trip.turning])


def merged_trips(trips: Iterable[RoundTrip]) -> tuple[RoundTrip, ...]:
    """Trips of modules that differ by a number only (`blocks.*.attn`) as one; those that copy first, then by time."""
    groups: dict[tuple[Turning, str, str, str, str], list[RoundTrip]] = {}
    for trip in trips:
        key = (trip.turning, _starred(trip.first), _starred(trip.last), trip.layout, trip.other_layout)
        groups.setdefault(key, []).append(trip)
    found = [
        RoundTrip(
            *_names(key, members),
            sum(m.count for m in members),
            sum(m.seconds for m in members),
            sum(m.copied_nbytes for m in members),
        )
        for key, members in groups.items()
    ]
    return tuple(sorted(found, key=lambda trip: (trip.copied_nbytes == 0, -trip.seconds, trip.first)))


def _names(key: tuple[Turning, str, str, str, str], members: list[RoundTrip]) -> tuple[Turning, str, str, str, str]:
    if len(members) > 1:
        return key
    only = members[0]
    return only.turning, only.first, only.last, only.layout, only.other_layout


def _starred(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=[./])", "*", name)


def trip_text(trip: RoundTrip) -> str:
    """A round trip in one line: what is turned, where, how often, and what that costs."""
    copied = f"{nbytes(trip.copied_nbytes)} copied" if trip.copied_nbytes else "views only"
    first, last = trip.first.rpartition("/"), trip.last.rpartition("/")
    where = f"{first[0]} ({first[2]}, {last[2]})" if first[0] == last[0] else f"{trip.first} to {trip.last}"
    cost = f"{plural(trip.count, 'time')}, {seconds(trip.seconds)}, {copied}"
    return f"{trip.turning} {trip.layout} -> {trip.other_layout} and back in {where}: {cost}"


def _tiny(profile: PlanProfile, kind: str) -> Iterator[Remark]:
    tiny = profile.tiny
    if tiny is not None:
        text = (
            f"{count(tiny.count)} of {count(tiny.of)} calls take under {seconds(tiny.limit_seconds)} "
            f"(median {seconds(tiny.median_seconds)}, {seconds(tiny.seconds)} in all), "
            f"{count(tiny.path_count)} of them in {tiny.path}: host-bound"
        )
        yield Remark("tiny calls", profile.plan.role, text, "fuse them, or capture the step as one graph")
    if kind != "cpu" and profile.seconds > 0 and profile.device_seconds < 0.7 * profile.seconds:
        share = percent(profile.device_seconds / profile.seconds)
        yield Remark(
            "host-bound",
            profile.plan.role,
            f"the device works {share} of the time; the rest it waits for the host",
            "fewer, larger calls",
        )


def _waits(profile: PlanProfile, kind: str) -> Iterator[Remark]:
    verb = "would wait on an accelerator" if kind == "cpu" else "waits for the device"
    for wait in profile.waits[:_MOST]:
        text = f"{wait.op} at {wait.line} {verb}, {plural(wait.count, 'time')} a run"
        yield Remark(
            "synchronising", profile.plan.role, text, "keep the value on the device, or read it once at the end"
        )
