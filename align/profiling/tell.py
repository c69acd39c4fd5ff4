"""Tell a profile in the terminal and as JSON: which plan is faster, what stands out, then the tables behind it.

Nothing is wider than 100 columns, and every name goes through `one_line`: it may hold anything.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from align.dumpers.families import Family
from align.profiling.remarks import merged_trips, trip_text
from align.profiling.values import Group, PlanProfile, Profile, Shape
from align.reports.ledger import quantiles_line, speed_line
from align.reports.machine import plain
from align.reports.model import Confidence
from align.reports.numbers import UNKNOWN, count, figure, nbytes, plural, seconds, shape, times
from align.reports.text import one_line, shorten

SCHEMA_VERSION = 1
WIDTH = 100
_STYLES = {
    Confidence.FASTER: "bold green",
    Confidence.SLOWER: "bold red",
    Confidence.SAME: "bold",
    Confidence.CANNOT_TELL: "bold yellow",
}
_NAME = 44


def print_profile(profile: Profile, console: Console, *, top: int = 12) -> None:
    """The result of `align profile`."""
    _print_head(profile, console)
    _print_remarks(profile, console)
    _print_pair(console, "Kinds of work", "", profile, _families(profile))
    _print_pair(
        console,
        "Top operations",
        "fused sites under their operator",
        profile,
        _paired(profile.baseline.by_op, profile.candidate.by_op)[:top],
    )
    _print_pair(
        console,
        "Top modules",
        "calls in their own forward",
        profile,
        _paired(profile.baseline.by_path, profile.candidate.by_path)[:top],
    )
    _print_pair(
        console,
        "Top calls",
        "over all steps",
        profile,
        _paired(profile.baseline.by_call, profile.candidate.by_call)[:top],
    )
    _print_sites(profile, console)
    _print_kernels(profile, console, top)
    _print_layouts(profile.candidate, console)
    _print_memory(profile, console)
    _print_shapes(profile.shapes, console)
    _print_steps(profile, console)
    _print_costs(profile, console)


# -- parts ------------------------------------------------------------------------------------------------------------


def _print_head(profile: Profile, console: Console) -> None:
    timing = profile.timing
    _line(console, speed_line(timing), _STYLES[timing.confidence])
    where = f"{profile.workload} on {profile.device} ({profile.chip}), {profile.dtype}"
    _line(console, f"  {shorten(one_line(where), WIDTH - 2)}", "dim")
    for plan, quantiles in ((profile.baseline, timing.baseline), (profile.candidate, timing.candidate)):
        _line(
            console, f"  {plan.plan.role:<10} {seconds(plan.seconds):>8}  {quantiles_line(quantiles)}; {_where(plan)}"
        )
    for warning in timing.warnings:
        _line(console, f"  warning: {warning}", "yellow")


def _where(plan: PlanProfile) -> str:
    return f"{plural(plan.calls, 'call')} {seconds(plan.device_seconds)}, Python {seconds(plan.between_seconds)}"


def _print_remarks(profile: Profile, console: Console) -> None:
    _title(console, "What stands out", "")
    told = ""
    for remark in profile.remarks:
        _line(console, f"  {remark.subject}{f' ({remark.plan})' if remark.plan else ''}: {remark.text}")
        if remark.remedy not in ("", told):
            _line(console, f"    {remark.remedy}", "dim")
        told = remark.remedy


Pair = tuple[str, Group | None, Group | None]


def _families(profile: Profile) -> list[Pair]:
    return _paired(profile.baseline.families, profile.candidate.families)


def _paired(baseline: Sequence[Group], candidate: Sequence[Group]) -> list[Pair]:
    """Groups of one name side by side, those first that take most time in either plan."""
    before, after = {group.name: group for group in baseline}, {group.name: group for group in candidate}
    pairs: list[Pair] = [(name, before.get(name), after.get(name)) for name in {**before, **after}]
    return sorted(pairs, key=lambda pair: -max(group.seconds for group in pair[1:] if group is not None))


def _print_pair(console: Console, title: str, remark: str, profile: Profile, pairs: Iterable[Pair]) -> None:
    _title(console, title, remark)
    table = _table("", "baseline", "share", "calls", "candidate", "share", "calls", "change")
    for name, before, after in pairs:
        style = "yellow" if name == Family.MOVEMENT and profile.candidate.movement_share > 0.1 else ""
        change = (after.seconds if after else 0.0) - (before.seconds if before else 0.0)
        sign = "+" if change > 0 else "-"
        table.add_row(
            Text(shorten(one_line(name), _NAME), style),
            *_cells(before),
            *_cells(after),
            f"{sign}{seconds(abs(change))}",
        )
    console.print(table, width=_room(console))


def _cells(group: Group | None) -> tuple[str, str, str]:
    if group is None:
        return UNKNOWN, UNKNOWN, UNKNOWN
    return seconds(group.seconds), _share(group.share), count(group.count)


def _share(share: float) -> str:
    return f"{100 * share:.1f} %"


def _print_sites(profile: Profile, console: Console) -> None:
    if not profile.sites:
        return
    gain = profile.baseline.device_seconds - profile.candidate.device_seconds
    speed = f"{seconds(abs(gain))} {'faster' if gain > 0 else 'slower'}"
    told = f"{nbytes(profile.saved_nbytes)} of interior tensors not written a run, calls {speed}"
    _title(console, "Fused sites", told)
    table = _table("operator", "sites", "runs", "unfused", "fused", "gain", "not written")
    for site in profile.sites:
        factor = site.baseline_seconds / site.candidate_seconds if site.candidate_seconds else math.nan
        row = (count(site.sites), count(site.runs), seconds(site.baseline_seconds), seconds(site.candidate_seconds))
        table.add_row(Text(one_line(site.operator)), *row, times(factor), nbytes(site.saved_nbytes))
    console.print(table, width=_room(console))


def _print_kernels(profile: Profile, console: Console, top: int) -> None:
    for plan in (profile.baseline, profile.candidate):
        if plan.kernels:
            _title(console, f"Kernels, {plan.plan.role}", "by the device's own profiler")
            table = _table("kernel", "time", "share", "count", "note")
            for kernel in plan.kernels[:top]:
                name = Text(shorten(one_line(kernel.name), _NAME))
                table.add_row(
                    name,
                    seconds(kernel.seconds),
                    _share(kernel.share),
                    count(kernel.count),
                    Text(shorten(one_line(kernel.note), 20)),
                )
            console.print(table, width=_room(console))


def _print_layouts(plan: PlanProfile, console: Console) -> None:
    trips = merged_trips(plan.round_trips)
    if trips:
        _title(console, "Changed and changed back", f"{plan.plan.role}; axes by number, before -> between")
        for trip in trips[:8]:
            _line(console, f"  {trip_text(trip)}")
        if len(trips) > 8:
            _line(console, f"  and {count(len(trips) - 8)} more", "dim")
    if plan.waits:
        _title(console, "Synchronising calls", plan.plan.role)
        for wait in plan.waits[:8]:
            _line(console, f"  {wait.op} at {wait.line} in {wait.path or 'no module'}, {plural(wait.count, 'time')}")


def _print_memory(profile: Profile, console: Console) -> None:
    before, after = profile.baseline.memory, profile.candidate.memory
    whose = "of the process" if profile.device == "cpu" else "of the device"
    _title(console, "Memory", f"peak {whose}; outputs of calls alive together; largest of them in the candidate")
    for role, memory in (("baseline", before), ("candidate", after)):
        _line(console, f"  {role:<10} {nbytes(memory.peak_nbytes):>8}  outputs {nbytes(memory.live_peak_nbytes)}")
    for tensor in after.largest[:5]:
        _line(
            console, f"    {nbytes(tensor.nbytes):>8}  {shorten(tensor.name, 60)}  {shape(tensor.shape)} {tensor.dtype}"
        )


def _print_shapes(shapes: Sequence[Shape], console: Console) -> None:
    _title(console, "Input shapes", "first run and median of later ones; relative L2 against the reference")
    table = _table("inputs", "cold base", "cold cand", "warm base", "warm cand", "speed-up", "err base", "err cand")
    for row in shapes:
        warm = (
            (seconds(row.timing.baseline.median), seconds(row.timing.candidate.median))
            if row.timing
            else (UNKNOWN, UNKNOWN)
        )
        speed = _speed(row)
        name = Text(shorten(one_line(row.name if row.name == row.inputs else f"{row.name}: {row.inputs}"), 26))
        cold = (seconds(row.cold_baseline_seconds), seconds(row.cold_candidate_seconds))
        table.add_row(name, *cold, *warm, speed, figure(row.error_baseline), figure(row.error_candidate))
    console.print(table, width=_room(console))
    for row in shapes:
        if row.note:
            _line(console, f"  {row.name}: {row.note}", "yellow")


def _speed(row: Shape) -> str:
    if row.timing is None:
        return UNKNOWN
    return f"{times(row.timing.speedup)}{' ?' if row.timing.confidence is Confidence.CANNOT_TELL else ''}"


def _print_steps(profile: Profile, console: Console) -> None:
    if not profile.steps:
        return
    total = [
        sum(values)
        for values in zip(*((step.baseline_seconds, step.candidate_seconds) for step in profile.steps), strict=True)
    ]
    _title(
        console,
        "Steps",
        f"baseline {seconds(total[0])} in all, candidate {seconds(total[1])}; relative L2 of what each yields",
    )
    table = _table("step", "baseline", "candidate", "err base", "err cand", "ratio")
    for step in profile.steps if len(profile.steps) <= 12 else (*profile.steps[:6], *profile.steps[-6:]):
        ratio = step.error_candidate / step.error_baseline if step.error_baseline > 0 else math.nan
        errors = (figure(step.error_baseline), figure(step.error_candidate), times(ratio))
        table.add_row(str(step.index), seconds(step.baseline_seconds), seconds(step.candidate_seconds), *errors)
    console.print(table, width=_room(console))


def _print_costs(profile: Profile, console: Console) -> None:
    _title(console, "The tool's own cost", "")
    inside, whole = seconds(profile.clock_seconds_per_call), seconds(profile.clock_total_seconds_per_call)
    apart = f"in {plural(profile.rounds, 'round')} apart from the timed ones"
    _line(console, f"  clock: {inside} a call, already taken off; {whole} in all, {apart}")
    own = f"baseline {seconds(profile.baseline.tool_seconds)}, candidate {seconds(profile.candidate.tool_seconds)}"
    _line(console, f"  in the timed rounds: {own}; without it the speed-up is about {times(profile.own_speedup)}")
    for note in profile.notes:
        _line(console, f"  note: {note}", "yellow")


# -- lines ------------------------------------------------------------------------------------------------------------


def _table(*heads: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for index, head in enumerate(heads):
        table.add_column(head, justify="left" if index == 0 or head == "note" else "right", no_wrap=True)
    return table


def _title(console: Console, title: str, remark: str) -> None:
    console.print()
    text = Text(title, "bold")
    console.print(text.append(f"  {one_line(remark)}" if remark else "", "not bold dim"), width=_room(console))


def _line(console: Console, text: str, style: str = "") -> None:
    body = text.lstrip(" ")
    indent = len(text) - len(body)
    shown = Text(one_line(body) if "  " not in body else body, style)
    console.print(Padding(shown, (0, 0, 0, indent), expand=False), width=_room(console))


def _room(console: Console) -> int:
    return min(WIDTH, console.width)


def to_json(profile: Profile) -> str:
    """The profile as one object; `schema_version` grows whenever a key changes its meaning or goes."""
    body: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "tool": "align", **plain(profile)}
    body["saved_nbytes"] = profile.saved_nbytes
    body["own_speedup"] = plain(profile.own_speedup)
    for plan in (profile.baseline, profile.candidate):
        body[plan.plan.role]["movement_share"] = plan.movement_share
    return json.dumps(body, indent=1, allow_nan=False)
