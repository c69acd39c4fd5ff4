"""What a bisect found, as values."""

from __future__ import annotations

import math
from dataclasses import dataclass

from align.bisecting.bisection import Fault
from align.bisecting.question import Question
from align.bisecting.trial import TrialResult
from align.compare.search import Outcome
from align.compare.search import Status as Found
from align.dumpers.choice import Plan
from align.reports.model import CulpritCard

FEW = 4
"""Culprits, and members of one, that are looked into one by one; more name no one."""


@dataclass(frozen=True, slots=True)
class Verdicts:
    """The ends of the search and the plans that come out of it; None for what was never run."""

    nothing: TrialResult | None
    everything: TrialResult | None
    largest_passing: Plan | None
    smallest_failing: Plan | None
    kept: TrialResult | None = None


@dataclass(frozen=True, slots=True)
class BisectResult:
    """What a bisect found. `share_of_gain`: what the largest passing plan keeps of the speed-up, NaN if unknown.

    fault  DRIFT where results were judged; CRASH where the candidate fails to run, and what makes it was sought
    """

    outcome: Outcome
    verdicts: Verdicts
    cards: tuple[CulpritCard, ...]
    question: Question
    fault: Fault = Fault.DRIFT
    share_of_gain: float = math.nan
    notes: tuple[str, ...] = ()
    is_interrupted: bool = False

    @property
    def status(self) -> Found:
        """How the search ended."""
        return self.outcome.status

    @property
    def is_spread(self) -> bool:
        """Whether no small set explains the drift: many culprits, or one of many members."""
        return len(self.cards) > FEW or any(len(card.choices) >= FEW for card in self.cards)
