"""Say where the time went between two plans: whether the hot spot went away, or only moved."""

from __future__ import annotations

from collections.abc import Sequence

from align.profiling.booking import family_label, grouped
from align.profiling.values import CallTime, Group, HotSpot
from align.reports.numbers import percent, seconds

MOVED = 0.5
"""Share of what was gained that must be lost elsewhere for "moved" to be said."""
NOISE = 0.02
"""Share of all time below which a part that grew or shrank is not spoken of."""


def hot_spot(baseline: Sequence[CallTime], candidate: Sequence[CallTime]) -> HotSpot:
    """Compare kinds of work; both plans must be booked alike, or a fusion would look like a move."""
    before = {group.name: group for group in grouped(baseline, family_label)}
    after = {group.name: group for group in grouped(candidate, family_label)}
    if not before or not after:
        return HotSpot("", 0.0, "", 0.0, 0.0, 0.0, "nothing was timed")
    top, new = next(iter(before.values())), next(iter(after.values()))
    changes = {name: _seconds(after, name) - _seconds(before, name) for name in {**before, **after}}
    floor = NOISE * sum(group.seconds for group in before.values())
    gained = sum(-change for change in changes.values() if change < -floor)
    lost = sum(change for change in changes.values() if change > floor)
    grown = max(changes, key=lambda name: changes[name])
    shrunk = min(changes, key=lambda name: changes[name])
    told = _sentence(gained, lost, _change(shrunk, changes), _change(grown, changes))
    return HotSpot(top.name, top.share, new.name, new.share, gained, lost, f"{told}; {_largest(top, new)}")


def _seconds(groups: dict[str, Group], name: str) -> float:
    return groups[name].seconds if name in groups else 0.0


def _change(name: str, changes: dict[str, float]) -> str:
    change = changes[name]
    return f"{name} {'+' if change > 0 else '-'}{seconds(abs(change))}"


def _sentence(gained: float, lost: float, shrunk: str, grown: str) -> str:
    if gained == 0.0 and lost == 0.0:
        return "no kind of work became faster or slower"
    if gained == 0.0:
        return f"nothing became faster; slower: {grown}"
    if lost >= MOVED * gained:
        return f"the time only moved: {shrunk}, but {grown}"
    if lost > 0.0:
        return f"time was saved ({shrunk}); some was lost again ({grown})"
    return f"time was saved ({shrunk}), and no kind of work became slower"


def _largest(before: Group, after: Group) -> str:
    if before.name == after.name:
        return f"the largest part is still {after.name} ({percent(before.share)} before, {percent(after.share)} after)"
    return (
        f"the largest part was {before.name} ({percent(before.share)}), now it is {after.name} ({percent(after.share)})"
    )
