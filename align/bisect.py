"""Name the choices that make the candidate drift: rank by local error, toggle, shrink, prove, price.

The suspects are the choices that differ between baseline and candidate; the predicate is a trial; the search is
`align.compare.search`. What comes out is written as plan files and a settings snippet.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from align.compare.model import Status
from align.compare.search import Answer, Outcome, Probe, Reply, Rules, Search, Suspect, expect_probes
from align.compare.search import Status as Found
from align.dumpers.choice import Choice, ChoiceKind, Plan
from align.dumpers.errors import UndecidedError, UsageError
from align.plan import choose
from align.session import Session
from align.timing import TimingOptions, measure_rounds, summarise
from align.trial import Criterion, TrialResult, Trials
from align.workers import WorkerOptions, Workers, start_workers
from align.reports.model import CulpritCard, Timing

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
class BisectResult:
    """What a bisect found. `share_of_gain` is the part of the speed-up that the largest passing plan keeps."""

    outcome: Outcome
    verdicts: Verdicts
    cards: tuple[CulpritCard, ...]
    suspects: tuple[Choice, ...]
    share_of_gain: float = math.nan
    notes: tuple[str, ...] = ()

    @property
    def status(self) -> Found:
        """How the search ended."""
        return self.outcome.status


@dataclass(slots=True)
class Bisection:
    """One bisect under way. Holds the mapping between suspects' texts and choices, the journal, and the workers."""

    session: Session
    trials: Trials
    workers: Workers
    options: BisectOptions
    candidate: Plan
    suspects: tuple[Choice, ...]
    journal: Journal
    on_trial: OnTrial
    results: dict[frozenset[str], TrialResult] = field(default_factory=dict)

    def plan(self, on: frozenset[str], role: str = "candidate") -> Plan:
        """The plan with exactly these suspects on."""
        fixed = self.candidate.choices - set(self.suspects)
        by_text = {str(choice): choice for choice in self.suspects}
        return Plan(role, self.candidate.device, self.candidate.dtype, frozenset(by_text[text] for text in on) | fixed)

    def probe_many(self, sets: Sequence[frozenset[str]]) -> list[Reply]:
        """Answer sets of suspects by running their plans."""
        results = self.workers.answer([self.plan(on) for on in sets])
        replies = []
        for on, result in zip(sets, results, strict=True):
            self.results[on] = result
            replies.append(Reply(answer_of(result), result.why))
            self.on_trial(len(self.results), expect_probes(len(self.suspects)), f"{len(on)} on: {answer_of(result).value}, drift {result.drift:.3g}")
        return replies

    def search(self, ranking: Mapping[Choice, float]) -> Outcome:
        """Search to the end; on Ctrl-C what is known so far is in the raised error's stead the result."""
        accused = [Suspect(str(c), tuple(c.site.partition("/")[0].split(".")), ranking.get(c, 0.0)) for c in self.suspects]
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


class Journal:
    """Every answered trial, one JSON line each, so that a killed bisect goes on where it stopped."""

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self._name = name

    def known(self) -> dict[frozenset[str], Reply]:
        """Answers of an earlier bisect of the same plan."""
        answers: dict[frozenset[str], Reply] = {}
        if not self._path.is_file():
            return answers
        for line in self._path.read_text(encoding="utf-8").splitlines():
            try:
                entry = json.loads(line)
                if entry["bisect"] == self._name and entry["answer"] != Answer.UNKNOWN.value:
                    answers[frozenset(entry["on"])] = Reply(Answer(entry["answer"]), str(entry["reason"]))
            except (ValueError, KeyError, TypeError):
                continue  # the line under way when the process was killed
        return answers

    def record(self, probe: Probe) -> None:
        """Append an answer."""
        entry = {"bisect": self._name, "on": sorted(probe.on), "answer": probe.answer.value, "reason": probe.reason}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def suspects_of(candidate: Plan, baseline: Plan) -> tuple[Choice, ...]:
    """The choices that differ between candidate and baseline."""
    return tuple(sorted(candidate.choices ^ baseline.choices))


def bisect_session(
    session: Session, criterion: Criterion, options: BisectOptions, folder: Path, on_trial: OnTrial
) -> BisectResult:
    """Find the culprits of a session's candidate."""
    trials = Trials(session, criterion)
    baseline = session.baseline_plan()
    base_result = trials.prepare(baseline)
    candidate = session.candidate_plan()
    suspects = suspects_of(candidate, baseline)
    if not suspects:
        raise UsageError("baseline and candidate do not differ in any choice", "see `align ops` for what this device can fuse")
    workers = start_workers(trials, session.settings, criterion, options.workers)
    journal = Journal(folder / "bisect.journal.jsonl", f"{session.settings.target} {candidate.digest}")
    bisection = Bisection(session, trials, workers, options, candidate, suspects, journal, on_trial)
    try:
        ranking = rank(bisection) if options.ranked else {}
        outcome = bisection.search(ranking)
        return _conclude(bisection, outcome, base_result)
    finally:
        workers.close()


def rank(bisection: Bisection) -> dict[Choice, float]:
    """Local error of every fused site, from one shadow pass over the candidate; empty where sites cannot be shadowed."""
    from align.taps.shadow import local_errors

    if bisection.session.is_own_candidate:
        return {}
    try:
        errors = local_errors(bisection.session, bisection.candidate)
    except UndecidedError:  # the candidate itself crashes: the search finds out which choice does it
        return {}
    return {error.choice: error.excess for error in errors}


def _conclude(bisection: Bisection, outcome: Outcome, base_result: TrialResult) -> BisectResult:
    everything = frozenset(str(choice) for choice in bisection.suspects)
    full = bisection.results.get(everything) or bisection.trials.run(bisection.candidate)
    largest = bisection.plan(outcome.largest_passing) if outcome.largest_passing is not None else None
    smallest = bisection.plan(outcome.smallest_failing) if outcome.smallest_failing is not None else None
    cards = tuple(_card(bisection, culprit, outcome) for culprit in outcome.culprits)
    share = math.nan
    if outcome.status is Found.FOUND and largest is not None and bisection.options.price:
        cards = tuple(_priced(bisection, card) for card in cards)
        share = _share_of_gain(bisection, largest)
    return BisectResult(outcome, Verdicts(base_result, full, largest, smallest), cards, bisection.suspects, share)


def _card(bisection: Bisection, culprit: frozenset[str], outcome: Outcome) -> CulpritCard:
    choices = tuple(sorted(Choice.parse(text) for text in culprit))
    evidence = next((item for item in outcome.evidence if item.on == culprit and item.answer is Answer.BAD), None)
    alone = bisection.results.get(culprit) or bisection.trials.run(bisection.plan(culprit))
    without = bisection.results.get(frozenset()) or bisection.trials.run(bisection.plan(frozenset()))
    text = f"with nothing else on, {alone.why}"
    reproduced, attempts = (evidence.agreeing, evidence.asked) if evidence else (1, 1)
    return CulpritCard(choices, choices[0].site, text, signature_of(bisection, choices), alone.drift, without.drift, reproduced, attempts)


def signature_of(bisection: Bisection, choices: Sequence[Choice]) -> str:
    """What kind of error the first culprit site makes, judged on its own inputs; empty where it cannot be shadowed."""
    from align.taps.shadow import diagnose_site

    fusions = [choice for choice in choices if choice.kind is ChoiceKind.FUSION]
    if not fusions or bisection.session.is_own_candidate:
        return ""
    return diagnose_site(bisection.session, bisection.candidate, fusions[0])


def _priced(bisection: Bisection, card: CulpritCard) -> CulpritCard:
    """Add what switching the culprit off costs: seconds a run, with an interval."""
    from dataclasses import replace

    without = choose(bisection.candidate.choices, (), ()) - set(card.choices)
    timing = _compare_plans(bisection, bisection.candidate.with_choices(without), bisection.candidate)
    scale = timing.candidate.median
    return replace(
        card, seconds_cost=timing.baseline.median - timing.candidate.median,
        seconds_low=(timing.low - 1.0) * scale, seconds_high=(timing.high - 1.0) * scale,
    )  # fmt: skip


def _share_of_gain(bisection: Bisection, largest: Plan) -> float:
    """Gain of the largest passing plan over the gain of the whole candidate, both against the baseline."""
    baseline = bisection.plan(frozenset(), "baseline")
    whole = _compare_plans(bisection, baseline, bisection.candidate)
    kept = _compare_plans(bisection, baseline, largest)
    gain = whole.baseline.median - whole.candidate.median
    return (kept.baseline.median - kept.candidate.median) / gain if gain > 0 else math.nan


def _compare_plans(bisection: Bisection, first: Plan, second: Plan) -> Timing:
    options = TimingOptions(min_rounds=5, max_rounds=15, budget_seconds=3.0)

    def once(plan: Plan) -> float:
        return bisection.session.run(plan)[0].seconds

    return summarise(measure_rounds(lambda: once(first), lambda: once(second), options))
