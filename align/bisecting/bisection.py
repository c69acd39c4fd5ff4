"""Search for the choices that make the candidate drift: rank by local error, toggle, shrink.

The suspects are the choices that differ between baseline and candidate; the predicate is a trial; the search is
`align.compare.search`. Every trial passes through `Bisection.run_all`, which asks the journal first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from align.bisecting.journal import Journal
from align.bisecting.question import Question, plan_with
from align.bisecting.trial import TrialResult
from align.bisecting.workers import Workers
from align.compare.model import Status
from align.compare.search import Answer, Outcome, Reply, Rules, Search, Suspect, expect_probes
from align.dumpers.choice import Choice, ChoiceKind, Plan
from align.session import Session
from align.taps.shadow import local_errors

On = frozenset[str]
OnTrial = Callable[[int, int, str], None]
"""(trials done, trials expected, what the last one said)"""


@dataclass(frozen=True, slots=True)
class BisectOptions:
    """What the search may spend and how much proof it gives. `repeats` come on top of the first answer."""

    max_trials: int = 400
    repeats: int = 2
    audits: int = 4
    is_ranked: bool = True
    is_priced: bool = True


class Fault(Enum):
    """What is searched for: results that are wrong, or runs that fail."""

    DRIFT = "drift"
    CRASH = "crash"


@dataclass(slots=True)
class Bisection:
    """One bisect under way: the question, the workers, and every result so far."""

    session: Session
    question: Question
    workers: Workers
    journal: Journal
    options: BisectOptions
    on_trial: OnTrial
    results: dict[On, list[TrialResult]] = field(default_factory=dict)
    trials: int = 0
    is_interrupted: bool = False
    _said: int = 0

    def plan(self, on: On) -> Plan:
        """The plan with exactly these suspects on."""
        return plan_with(self.question, on)

    def run_all(self, sets: Sequence[On]) -> list[TrialResult]:
        """Results of sets of suspects, in their order: from the journal while it has them, else by running."""
        told = {index: result for index, on in enumerate(sets) if (result := self.journal.replay(on)) is not None}
        missing = [index for index in range(len(sets)) if index not in told]
        ran = self.workers.answer([self.plan(sets[index]) for index in missing]) if missing else []
        for index, result in zip(missing, ran, strict=True):
            self.journal.record(sets[index], result)
            told[index] = result
        self.trials += len(ran)
        for index, on in enumerate(sets):
            self.results.setdefault(on, []).append(told[index])
        return [told[index] for index in range(len(sets))]

    def result(self, on: On) -> TrialResult:
        """The first result of a set, running it if nobody has."""
        return self.results[on][0] if on in self.results else self.run_all([on])[0]

    def search(self, ranking: Mapping[Choice, float], fault: Fault) -> Outcome:
        """Search to the end; after Ctrl-C, what is known so far is the outcome. What an earlier search ran is known."""
        width = self.workers.width
        rules = Rules(
            width=width, max_probes=self.options.max_trials, repeats=self.options.repeats, audits=self.options.audits
        )
        accused = [Suspect(str(choice), _path(choice), ranking.get(choice, 0.0)) for choice in self.question.suspects]
        known = {on: Reply(answer_of(results[0], fault), results[0].why) for on, results in self.results.items()}
        search = Search(accused, lambda sets: self._replies(sets, fault), rules=rules, known=known)
        try:
            return search.run()
        except KeyboardInterrupt:
            self.is_interrupted = True
            return search.best_so_far()

    def _replies(self, sets: Sequence[On], fault: Fault) -> list[Reply]:
        replies = []
        for on, result in zip(sets, self.run_all(sets), strict=True):
            answer = answer_of(result, fault)
            replies.append(Reply(answer, result.why))
            self._said += 1
            said = f"{len(on)} of {len(self.question.suspects)} on: {answer.value}, drift {result.drift:.3g}"
            self.on_trial(self._said, max(self.expected, self._said), said)
        return replies

    @property
    def expected(self) -> int:
        """Trials of a search for one culprit: probes, repeats of both ends, the culprit and the plan, audits."""
        probes = expect_probes(len(self.question.suspects)) + 4 * self.options.repeats + self.options.audits
        return min(probes, self.options.max_trials)


def answer_of(result: TrialResult, fault: Fault = Fault.DRIFT) -> Answer:
    """Good, bad or unknown. Where a failing run is what is searched for, any result is good and none is bad."""
    is_unknown = result.status in (Status.UNKNOWN, Status.REFERENCE_SUSPECT)
    if fault is Fault.CRASH:
        return Answer.BAD if result.status is Status.UNKNOWN else Answer.GOOD
    if is_unknown:
        return Answer.UNKNOWN
    return Answer.BAD if result.status.is_fault else Answer.GOOD


def _path(choice: Choice) -> tuple[str, ...]:
    return tuple(choice.site.partition("/")[0].split("."))


def rank(session: Session, question: Question) -> dict[Choice, float]:
    """Local error of every fused site, from one shadow pass over the candidate; empty where it cannot be shadowed."""
    if not any(choice.kind is ChoiceKind.FUSION for choice in question.suspects):
        return {}
    try:
        errors = local_errors(session, question.everything)
    except Exception:  # the candidate itself crashes: the search finds out which choice does it
        return {}
    return {error.choice: error.excess for error in errors}
