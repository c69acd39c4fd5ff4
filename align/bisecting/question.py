"""What is asked: the plan with every suspect on, the suspects, and what a suspect's being off puts into a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from align.dumpers.choice import Choice, ChoiceKind, Plan
from align.dumpers.errors import UsageError
from align.session import Session


class Topic(StrEnum):
    """What kind of choices are searched; `BY_CALL` is precision, call by call."""

    CHOICES = "choices"
    PRECISION = "precision"
    BY_CALL = "precision by call"

    @property
    def is_precision(self) -> bool:
        """Whether float32 is asked for, rather than the guilty choice."""
        return self is not Topic.CHOICES


@dataclass(frozen=True, slots=True)
class Question:
    """The plan with every suspect on, and the suspects.

    off   for suspects that are no choices of a plan: the choice that their being off puts in (a module's low precision
          is what is usual; switched off, `precision:float32` is on)
    """

    everything: Plan
    suspects: tuple[Choice, ...]
    off: Mapping[Choice, Choice] = field(default_factory=dict)
    topic: Topic = Topic.CHOICES

    @property
    def all_on(self) -> frozenset[str]:
        """Every suspect, by its text."""
        return frozenset(map(str, self.suspects))


def plan_with(question: Question, on: frozenset[str]) -> Plan:
    """The plan with exactly these suspects (by their texts) on."""
    chosen = question.everything.choices - set(question.suspects)
    for suspect in question.suspects:
        if str(suspect) in on:
            chosen |= {suspect} - question.off.keys()
        elif suspect in question.off:
            chosen |= {question.off[suspect]}
    return question.everything.with_choices(chosen)


def ask(session: Session, topic: Topic) -> Question:
    """The question of a topic about a surveyed session. Raises UsageError when there is nothing to search."""
    return precision_question(session, topic) if topic.is_precision else choice_question(session)


def choice_question(session: Session) -> Question:
    """Which of the candidate's choices is guilty? Of a second target without any: which of its modules?"""
    candidate = session.candidate_plan()
    suspects = candidate.choices - session.baseline_plan().choices
    parts = session.variant_parts
    if not suspects and not parts:
        remedy = "see `align ops TARGET` for what this device can fuse"
        if session.settings.candidate:
            remedy = "its modules, weights and attributes equal the baseline's: is it the variant you meant?"
        raise UsageError("baseline and candidate do not differ in any choice", remedy)
    return Question(candidate, tuple(sorted({*suspects, *parts})), parts)


def precision_question(session: Session, topic: Topic) -> Question:
    """Which modules, or single calls, must stay in float32? The plan is the candidate's without what the catalog fuses,
    unless fusions were asked for: whether they are right is another question."""
    candidate = session.candidate_plan()
    if not session.settings.fuse and not session.settings.plan:
        candidate = candidate.with_choices(c for c in candidate.choices if c.kind is not ChoiceKind.FUSION)
    low = str(session.executor.low).removeprefix("torch.")
    if low == "float32":
        raise UsageError(
            "the run is in float32 already", "choose --dtype float16 or bfloat16, or leave it to the device"
        )
    sites = session.computing_calls if topic is Topic.BY_CALL else session.computing_paths
    off = {Choice(ChoiceKind.PRECISION, low, site): Choice(ChoiceKind.PRECISION, "float32", site) for site in sites}
    return Question(candidate, tuple(off), off, topic)
