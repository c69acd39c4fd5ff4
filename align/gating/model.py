"""What the gate finds: one check a limit, with the figure, the limit and one line of reason; and what they come to."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from align.reports.model import RunReport


class Outcome(StrEnum):
    """What became of a limit."""

    OK = "ok"
    MISSED = "missed"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True, slots=True)
class Check:
    """One limit that was checked. `name` says which; `value` and `limit` are its figures; `details` name more nodes."""

    name: str
    outcome: Outcome
    value: float
    limit: float
    reason: str
    details: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """`limit unet.* rel_l2: 0.034 at unet.mid/linear#0:0, limit 0.02`."""
        return f"{self.name}: {self.reason}"


@dataclass(frozen=True, slots=True)
class GateResult:
    """All checks of one run, and remarks that decide nothing (what got better, what was not checked)."""

    report: RunReport
    checks: tuple[Check, ...]
    remarks: tuple[str, ...] = ()

    @property
    def outcome(self) -> Outcome:
        """Missed if any limit is; else cannot tell if any check cannot; else ok."""
        found = {check.outcome for check in self.checks}
        return next((outcome for outcome in (Outcome.MISSED, Outcome.CANNOT_TELL) if outcome in found), Outcome.OK)

    @property
    def exit_code(self) -> int:
        """0 ok, 1 missed, 3 cannot tell."""
        return {Outcome.OK: 0, Outcome.MISSED: 1, Outcome.CANNOT_TELL: 3}[self.outcome]

    @property
    def sentence(self) -> str:
        """`PASS: 6 limits kept`, `FAIL: 2 of 6 limits missed`, `CANNOT TELL: 1 of 6 limits`."""
        total = f"{len(self.checks)} {'limit' if len(self.checks) == 1 else 'limits'}"
        hit = sum(check.outcome is self.outcome for check in self.checks)
        words = {
            Outcome.OK: f"PASS: {total} kept", Outcome.MISSED: f"FAIL: {hit} of {total} missed",
            Outcome.CANNOT_TELL: f"CANNOT TELL: {hit} of {total} undecided",
        }  # fmt: skip
        return words[self.outcome]
