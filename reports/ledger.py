"""Sum up what was fused and what it gave: choices by operator, and the sentences on time and memory; pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from align.reports.model import ChoiceRow, ChoiceState, Confidence, Quantiles, RunReport, Timing
from align.reports.numbers import count, figure, interval, nbytes, plural, seconds, times
from align.reports.summary import Finding


@dataclass(frozen=True, slots=True)
class OperatorRow:
    """All choices of one kind and name: how many sites are on, off, unavailable; what they save; their worst error."""

    kind: str
    name: str
    rows: tuple[ChoiceRow, ...]

    def count(self, state: ChoiceState) -> int:
        """Number of sites in this state."""
        return sum(row.state is state for row in self.rows)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why sites are unavailable or off, each reason once."""
        return tuple(dict.fromkeys(row.reason for row in self.rows if row.reason and row.state is not ChoiceState.ON))

    @property
    def interior_nbytes(self) -> int:
        """Bytes of interior tensors that the sites that are on do not write."""
        return sum(row.interior_nbytes for row in self.rows if row.state is ChoiceState.ON)

    @property
    def seconds_saved(self) -> float:
        """Sum over the sites that are on and were timed; NaN if none was."""
        known = [row.seconds_saved for row in self.rows if row.state is ChoiceState.ON]
        known = [value for value in known if not math.isnan(value)]
        return sum(known) if known else math.nan

    @property
    def worst(self) -> ChoiceRow | None:
        """The site that is on and furthest above its baseline error."""
        measured = [row for row in self.rows if row.state is ChoiceState.ON and not math.isnan(row.candidate_error)]
        return max(measured, key=excess, default=None)


def excess(row: ChoiceRow) -> float:
    """Candidate's error over the baseline's at the site; 1 if both are zero, the error itself without a baseline."""
    if math.isnan(row.baseline_error):
        return row.candidate_error
    if row.baseline_error == 0.0:
        return 1.0 if row.candidate_error == 0.0 else math.inf
    return row.candidate_error / row.baseline_error


def operator_rows(choices: Iterable[ChoiceRow]) -> tuple[OperatorRow, ...]:
    """Choices grouped by kind and name, in the order in which they first appear."""
    groups: dict[tuple[str, str], list[ChoiceRow]] = {}
    for row in choices:
        groups.setdefault((row.choice.kind.value, row.choice.name), []).append(row)
    return tuple(OperatorRow(kind, name, tuple(rows)) for (kind, name), rows in groups.items())


def fused_line(choices: Sequence[ChoiceRow]) -> str:
    """`21 of 38 sites fused, 2 unavailable`; counts fusions only."""
    fusions = [row for row in choices if row.choice.kind.value == "fusion"]
    unavailable = sum(row.state is ChoiceState.UNAVAILABLE for row in fusions)
    line = f"{count(sum(row.state is ChoiceState.ON for row in fusions))} of {plural(len(fusions), 'site')} fused"
    return line + (f", {count(unavailable)} unavailable" if unavailable else "")


def speed_line(timing: Timing) -> str:
    """Which run is faster, in one sentence that admits when it cannot be told."""
    bounds = f"95 % interval {interval(timing.low, timing.high)}"
    if timing.confidence is Confidence.FASTER:
        return f"candidate is {times(timing.speedup)} faster than baseline ({bounds})"
    if timing.confidence is Confidence.SLOWER:
        factor = 1.0 / timing.speedup if timing.speedup else math.inf
        return f"candidate is {times(factor)} slower than baseline (speed-up {figure(timing.speedup)}, {bounds})"
    if timing.confidence is Confidence.SAME:
        return f"candidate and baseline are equally fast (speed-up {figure(timing.speedup)}, {bounds})"
    return f"cannot tell which is faster (speed-up {figure(timing.speedup)}, {bounds})"


def quantiles_line(quantiles: Quantiles) -> str:
    """`p10-p90 405 ms - 431 ms, 20 rounds`."""
    spread = f"{seconds(quantiles.p10)} - {seconds(quantiles.p90)}"
    return f"p10-p90 {spread}, {plural(quantiles.rounds, 'round')}"


def timing_findings(timing: Timing) -> tuple[Finding, ...]:
    """Medians, speed-up, memory and the tool's own cost, one line each; unknown figures are left out."""
    lines = [
        Finding("baseline", seconds(timing.baseline.median), quantiles_line(timing.baseline)),
        Finding("candidate", seconds(timing.candidate.median), quantiles_line(timing.candidate)),
        Finding("speed-up", times(timing.speedup), speed_line(timing)),
    ]
    if not math.isnan(timing.peak_bytes_baseline) or not math.isnan(timing.peak_bytes_candidate):
        remark = f"baseline {nbytes(timing.peak_bytes_baseline)}"
        lines.append(Finding("peak memory", nbytes(timing.peak_bytes_candidate), remark))
    if not math.isnan(timing.wire_seconds_per_call):
        remark = f"the tool's own cost, {plural(timing.calls, 'call')}"
        lines.append(Finding("wire per call", seconds(timing.wire_seconds_per_call), remark))
    return tuple(lines)


def written_files(report: RunReport) -> tuple[str, ...]:
    """All files of the run, each once: traces, pictures, others; relative to its folder."""
    traces = [role.trace for role in report.roles if role.trace]
    pictures = [path for _, path in report.pictures]
    return tuple(dict.fromkeys([*traces, *pictures, *report.files]))
