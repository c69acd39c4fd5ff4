"""The words a search speaks: suspects, answers, rules and the outcome. Values only; nothing here asks anything."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from align.dumpers.errors import UsageError

Choices: TypeAlias = frozenset[str]
"""The choices that are on in one trial; all others are off."""


class Answer(Enum):
    """What one trial said."""

    GOOD = "good"
    BAD = "bad"
    UNKNOWN = "unknown"


class Status(Enum):
    """How a search ended."""

    FOUND = "found"
    NO_CULPRIT = "no culprit"
    CANNOT_TELL = "cannot tell"
    BUDGET_SPENT = "budget spent"


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer with its reason; the reason matters where the answer is UNKNOWN (the error of a crashed trial)."""

    answer: Answer
    reason: str = ""


ProbeOne: TypeAlias = Callable[[Choices], Answer | Reply]
ProbeMany: TypeAlias = Callable[[Sequence[Choices]], Sequence[Answer | Reply]]


@dataclass(frozen=True, slots=True)
class Suspect:
    """One choice that may be guilty.

    path: the module path, outermost first; siblings are kept together when a set is split.
    score: higher is more suspicious (a local error); it orders the search and never decides the answer.
    cost: what switching the choice off loses (seconds or any unit); negative costs count as free.
    """

    choice: str
    path: tuple[str, ...] = ()
    score: float = 0.0
    cost: float = 1.0

    def __post_init__(self) -> None:
        if math.isnan(self.cost):
            raise UsageError(f"the cost of {self.choice!r} is NaN", "give a number; 1.0 where it was not measured")


@dataclass(frozen=True, slots=True)
class Rules:
    """What a search may spend and how sure it must be.

    width: trials that may run at once. max_probes: trials in all, repeats included.
    repeats: how often both ends and the final claims are asked again. audits: extra trials spent on looking for
    choices that mask each other, which no monotone search would ever meet.
    noise: the assumed share of wrong answers until repeats show another; 0 says that trials are deterministic.
    max_answers: a flaky set is given up as UNKNOWN after so many answers.
    """

    width: int = 1
    max_probes: int = 1000
    repeats: int = 0
    audits: int = 0
    noise: float = 0.05
    max_answers: int = 64

    def __post_init__(self) -> None:
        if self.width < 1 or self.max_probes < 0 or self.repeats < 0 or self.audits < 0 or self.max_answers < 1:
            raise UsageError(f"a count in {self} is too small", "width and max_answers start at 1, the others at 0")
        if not 0.0 <= self.noise < 0.5:
            raise UsageError(f"noise={self.noise} is outside [0, 0.5)", "answers must be right more often than wrong")


@dataclass(frozen=True, slots=True)
class Probe:
    """One answered trial, as the journal keeps it. `repeat` is true where the set had been answered before."""

    number: int
    on: Choices
    answer: Answer
    reason: str
    repeat: bool


@dataclass(frozen=True, slots=True)
class Evidence:
    """How often one decisive set gave the answer that is claimed for it: `agreeing` of `asked` times."""

    on: Choices
    answer: Answer
    agreeing: int
    asked: int


@dataclass(frozen=True, slots=True)
class Unknown:
    """A set whose answer could not be told, and why."""

    on: Choices
    reason: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a search found.

    culprits: minimal failing sets: each fails with only its own choices on, and no set with one of them less fails.
    Every set that passes leaves out a member of each; where a culprit has several members, one of them is enough.
    masked: minimal failing sets inside `largest_passing`, where another choice hides them.
    largest_passing: asked and GOOD; with `optimal` no cheaper set of choices can be switched off, provided that
    switching more on never repairs (`monotone` says whether an answer spoke against that).
    switch_off: the choices outside `largest_passing`. None stands for "no such set is known".
    verified: every culprit was asked and failed, every set with one member less was asked and did not fail, and
    `largest_passing` was asked and passed. minimal: none of those smaller sets was UNKNOWN.
    confidence: the chance that the ends, the culprits and the plan are all answered right, if answers are wrong with
    the rate `noise` (assumed, raised to what the repeats showed); 0.0 where nothing is claimed.
    probes counts distinct sets asked, confirmations the repeats.
    """

    status: Status
    reason: str
    culprits: tuple[Choices, ...]
    masked: tuple[Choices, ...]
    largest_passing: Choices | None
    smallest_failing: Choices | None
    switch_off: Choices
    probes: int
    confirmations: int
    confidence: float
    noise: float
    evidence: tuple[Evidence, ...]
    unknown: tuple[Unknown, ...]
    verified: bool
    minimal: bool
    monotone: bool
    optimal: bool
    flaky: bool
