"""Name the choices that make the candidate drift: rank by local error, toggle, shrink, prove, price.

The suspects are the choices that differ between baseline and candidate; the predicate is a trial; the search is
`align.compare.search`. What comes out is written as plan files and a settings snippet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from align.bisecting.journal import Journal
from align.bisecting.trial import TrialResult, Trials
from align.bisecting.workers import WorkerOptions, Workers
from align.compare.model import Status
from align.compare.search import Answer, Outcome, Reply, Rules, Search, Suspect, expect_probes
from align.compare.search import Status as Found
from align.dumpers.choice import Choice, ChoiceKind, Plan
from align.dumpers.errors import UsageError
from align.reports.model import CulpritCard, Timing
from align.session import Session
from align.timing import TimingOptions, measure_rounds, summarise

OnTrial = Callable[[int, int, str], None]
"""(trials done, expected, what the last one said)"""


@dataclass(frozen=True, slots=True)
class BisectOptions:
    """What the search may spend and how much proof it gives."""

    max_trials: int = 400
    repeats: int = 3
    audits: int = 4
    ranked: bool = True
    price: bool = True
    workers: WorkerOptions = WorkerOptions()


@dataclass(frozen=True, slots=True)
class Verdicts:
    """The ends of the search and the plans that come out of it."""

    baseline: TrialResult
    candidate: TrialResult
    largest_passing: Plan | None
    smallest_failing: Plan | None


@dataclass(frozen=True, slots=True)
class Question:
    """What is searched: the plan with every suspect on, and the suspects. `off` are the choices that a suspect's being off puts in."""

    everything: Plan
    suspects: tuple[Choice, ...]
    off: Mapping[Choice, Choice] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BisectResult:
    """What a bisect found. `share_of_gain` is the part of the speed-up that the largest passing plan keeps."""

    outcome: Outcome
    verdicts: Verdicts
    cards: tuple[CulpritCard, ...]
    question: Question
    share_of_gain: float = math.nan
    notes: tuple[str, ...] = ()

    @property
    def status(self) -> Found:
        """How the search ended."""
        return self.outcome.status


@dataclass(slots=True)
class Bisection:
    """One bisect under way: the question, the trials, the workers, and every result so far."""

    trials: Trials
    workers: Workers
    options: BisectOptions
    question: Question
    journal: Journal
    on_trial: OnTrial
    results: dict[frozenset[str], TrialResult] = field(default_factory=dict)

    @property
    def session(self) -> Session:
        """The session whose plans are tried."""
        return self.trials.session

    def plan(self, on: frozenset[str]) -> Plan:
        """The plan with exactly these suspects on."""
        return plan_with(self.question, on)

    def result(self, on: frozenset[str]) -> TrialResult:
        """What the plan of a set did, running it if the search has not (its answer may have come from the journal)."""
        if on not in self.results:
            self.results[on] = self.trials.run(self.plan(on))
        return self.results[on]

    def probe_many(self, sets: Sequence[frozenset[str]]) -> list[Reply]:
        """Answer sets of suspects by running their plans."""
        replies = []
        for on, result in zip(sets, self.workers.answer([self.plan(on) for on in sets]), strict=True):
            self.results[on] = result
            replies.append(Reply(answer_of(result), result.why))
            said = f"{len(on)} of {len(self.question.suspects)} on: {answer_of(result).value}, drift {result.drift:.3g}"
            self.on_trial(len(self.results), expect_probes(len(self.question.suspects)), said)
        return replies

    def search(self, ranking: Mapping[Choice, float]) -> Outcome:
        """Search to the end; on Ctrl-C what is known so far is in the raised error's stead the result."""
        accused = [
            Suspect(str(c), tuple(c.site.partition("/")[0].split(".")), ranking.get(c, 0.0))
            for c in self.question.suspects
        ]
        rules = Rules(
            width=max(1, self.options.workers.jobs), max_probes=self.options.max_trials, repeats=self.options.repeats, audits=self.options.audits
        )  # fmt: skip
        search = Search(accused, self.probe_many, rules=rules, known=self.journal.known(), record=self.journal.record)
        try:
            return search.run()
        except KeyboardInterrupt:
            return search.best_so_far()


def answer_of(result: TrialResult) -> Answer:
    """Good, bad or unknown."""
    if result.status in (Status.UNKNOWN, Status.REFERENCE_SUSPECT):
        return Answer.UNKNOWN
    return Answer.BAD if result.status.is_fault else Answer.GOOD


def plan_with(question: Question, on: frozenset[str]) -> Plan:
    """The plan with exactly these suspects (by their texts) on."""
    fixed = question.everything.choices - set(question.suspects)
    if question.off:
        chosen = {off for choice, off in question.off.items() if str(choice) not in on}
    else:
        chosen = {choice for choice in question.suspects if str(choice) in on}
    return question.everything.with_choices(fixed | chosen)


def fusion_question(session: Session) -> Question:
    """Which of the candidate's choices is guilty? Raises UsageError when it has none."""
    candidate = session.candidate_plan()
    suspects = tuple(sorted(candidate.choices - session.baseline_plan().choices))
    if not suspects:
        raise UsageError(
            "baseline and candidate do not differ in any choice", "see `align ops TARGET` for what this device can fuse"
        )
    return Question(candidate, suspects)


def precision_question(session: Session) -> Question:
    """Which modules must stay in float32? A suspect is a module's low precision; switched off, it computes in float32."""
    candidate = session.candidate_plan()
    low = str(session.executor.low).removeprefix("torch.")
    suspects = tuple(Choice(ChoiceKind.PRECISION, low, path) for path in session.computing_paths)
    off = {choice: Choice(ChoiceKind.PRECISION, "float32", choice.site) for choice in suspects}
    return Question(candidate, suspects, off)


def bisect_session(
    trials: Trials, question: Question, workers: Workers, journal: Journal, options: BisectOptions, on_trial: OnTrial
) -> BisectResult:
    """Search, prove and price. `trials` must be prepared."""
    bisection = Bisection(trials, workers, options, question, journal, on_trial)
    outcome = bisection.search(rank(bisection) if options.ranked else {})
    return _conclude(bisection, outcome)


def rank(bisection: Bisection) -> dict[Choice, float]:
    """Local error of every fused site, from one shadow pass over the candidate; empty where sites cannot be shadowed."""
    from align.taps.shadow import local_errors

    session, question = bisection.session, bisection.question
    if session.is_own_candidate or question.off:
        return {}
    try:
        errors = local_errors(session, question.everything)
    except Exception:  # the candidate itself crashes: the search finds out which choice does it
        return {}
    return {error.choice: error.excess for error in errors}


def _conclude(bisection: Bisection, outcome: Outcome) -> BisectResult:
    everything = bisection.result(frozenset(map(str, bisection.question.suspects)))
    nothing = bisection.result(frozenset())
    largest = bisection.plan(outcome.largest_passing) if outcome.largest_passing is not None else None
    smallest = bisection.plan(outcome.smallest_failing) if outcome.smallest_failing is not None else None
    cards = tuple(_card(bisection, culprit, outcome, nothing) for culprit in outcome.culprits)
    share = math.nan
    if outcome.status is Found.FOUND and largest is not None and bisection.options.price:
        cards = tuple(_priced(bisection, card) for card in cards)
        share = _share_of_gain(bisection, largest)
    return BisectResult(outcome, Verdicts(nothing, everything, largest, smallest), cards, bisection.question, share)


def _card(bisection: Bisection, culprit: frozenset[str], outcome: Outcome, nothing: TrialResult) -> CulpritCard:
    choices = tuple(sorted(Choice.parse(text) for text in culprit))
    evidence = next((item for item in outcome.evidence if item.on == culprit and item.answer is Answer.BAD), None)
    alone = bisection.result(culprit)
    reproduced, attempts = (evidence.agreeing, evidence.asked) if evidence else (1, 1)
    text = f"with nothing else on, {alone.why}"
    return CulpritCard(
        choices,
        choices[0].site,
        text,
        signature_of(bisection, choices),
        alone.drift,
        nothing.drift,
        reproduced,
        attempts,
    )


def signature_of(bisection: Bisection, choices: Sequence[Choice]) -> str:
    """What kind of error the first culprit site makes on its own inputs; empty where it cannot be shadowed."""
    from align.taps.shadow import diagnose_site

    fusions = [choice for choice in choices if choice.kind is ChoiceKind.FUSION]
    if not fusions or bisection.session.is_own_candidate:
        return ""
    return diagnose_site(bisection.session, bisection.question.everything, fusions[0])


def _priced(bisection: Bisection, card: CulpritCard) -> CulpritCard:
    """Add what switching the culprit off costs: seconds a run, with an interval."""
    everything = frozenset(map(str, bisection.question.suspects))
    without = bisection.plan(everything - set(map(str, card.choices)))
    timing = compare_plans(bisection.session, without, bisection.plan(everything))
    scale = timing.candidate.median
    return replace(
        card,
        seconds_cost=(timing.speedup - 1.0) * scale,
        seconds_low=(timing.low - 1.0) * scale,
        seconds_high=(timing.high - 1.0) * scale,
    )


def _share_of_gain(bisection: Bisection, largest: Plan) -> float:
    """Gain of the largest passing plan over the gain of everything, both against nothing; NaN where there is no gain."""
    nothing = bisection.plan(frozenset())
    whole = compare_plans(bisection.session, nothing, bisection.question.everything)
    kept = compare_plans(bisection.session, nothing, largest)
    if whole.low <= 1.0:
        return math.nan
    return (1.0 - 1.0 / kept.speedup) / (1.0 - 1.0 / whole.speedup)


def compare_plans(session: Session, first: Plan, second: Plan) -> Timing:
    """Time two plans of a session in alternating rounds."""
    options = TimingOptions(min_rounds=5, max_rounds=15, budget_seconds=3.0)

    def once(plan: Plan) -> float:
        return session.run(plan)[0].seconds

    return summarise(measure_rounds(lambda: once(first), lambda: once(second), options))
