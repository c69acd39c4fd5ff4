"""Find which choices make a run bad: minimal failing sets, and the largest set of choices that passes.

The search knows opaque choices and a predicate of three answers; nothing of models. Every claim in its outcome was
asked; inference from other answers only saves probes. The loop is that of implicit hitting sets: switch off the
cheapest cover of the failing sets found so far, ask whether the rest passes, and where it does not, shrink it to a
further failing set. For k independent culprits among n it costs 2 + k (ceil(log2 n) + 2) probes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from align.compare.search_cover import Cover, find_cover
from align.compare.search_ledger import BudgetSpentError, Ledger, TooNoisyError, ignore_probe
from align.compare.search_order import Order
from align.compare.search_shrink import Shrinker
from align.compare.search_values import (
    Answer,
    Choices,
    Evidence,
    Outcome,
    Probe,
    ProbeMany,
    ProbeOne,
    Reply,
    Rules,
    Status,
    Suspect,
    Unknown,
)
from align.dumpers.errors import UsageError

__all__ = [
    "Answer",
    "Choices",
    "Evidence",
    "Outcome",
    "Probe",
    "Reply",
    "Rules",
    "Search",
    "Status",
    "Suspect",
    "Unknown",
    "expect_probes",
    "find_culprits",
    "one_by_one",
]

SHARED_FACTOR, SHARED_START = 4, 8
"""More failing sets than this many a switched-off choice, and eight: they overlap so much that guilt is shared, and
proving the best plan would mean to list them all. The search then grows a passing plan instead."""

FLAKY_START = 20
"""Repeats of both ends once answers were seen to differ: a first estimate of how noisy they are."""

TOO_NOISY = "the same choices pass and fail too often to tell one from the other"

OFF: Choices = frozenset()
PLAIN = Rules()
NOTHING_KNOWN: Mapping[Choices, Answer | Reply] = MappingProxyType({})


def find_culprits(suspects: Sequence[Suspect | str], probe: ProbeOne, *, rules: Rules = PLAIN) -> Outcome:
    """Search with a predicate that answers one set at a time; `Search` also journals, resumes, and asks in parallel."""
    return Search(suspects, one_by_one(probe), rules=rules).run()


def one_by_one(probe: ProbeOne) -> ProbeMany:
    """Turn a predicate for one set into one for several, asked in turn."""
    return lambda sets: [probe(on) for on in sets]


def expect_probes(count: int, culprits: int = 1) -> int:
    """How many probes a search without a ranking takes at most for independent culprits, for an estimate of time."""
    return 2 + culprits * (math.ceil(math.log2(max(count, 2))) + 2)


class Search:
    """One search: owns the suspects and, through its ledger, the predicate.

    probe_many answers up to `rules.width` sets at once, in their order. known holds answers of an earlier, killed
    search (sets of other choices are ignored); record is handed every new answer before it is used. An exception of
    the predicate passes through; `best_so_far` then still says what is known.
    """

    def __init__(
        self,
        suspects: Sequence[Suspect | str],
        probe_many: ProbeMany,
        *,
        rules: Rules = PLAIN,
        known: Mapping[Choices, Answer | Reply] = NOTHING_KNOWN,
        record: Callable[[Probe], None] = ignore_probe,
    ) -> None:
        accused = [Suspect(each) if isinstance(each, str) else each for each in suspects]
        self._cost = {suspect.choice: max(suspect.cost, 0.0) for suspect in accused}
        if len(self._cost) < len(accused):
            raise UsageError("a choice is named twice among the suspects", "give each choice once")
        self._all = frozenset(self._cost)
        self._rules = rules
        self._order = Order(accused)
        self._ledger = Ledger(probe_many, rules, {on: said for on, said in known.items() if on <= self._all}, record)
        self._shrinker = Shrinker(self._ledger, self._order, rules.width)
        self._culprits: list[Choices] = []
        self._masked: list[Choices] = []

    def run(self) -> Outcome:
        """Search to the end or to the end of the budget."""
        try:
            while True:
                was_flaky = self._ledger.is_flaky
                outcome = self._attempt()
                # The first disagreement voids single answers: go again over the same sets, now with repeats.
                if self._ledger.is_flaky == was_flaky:
                    return outcome
        except BudgetSpentError:
            return replace(self.best_so_far(), reason=f"{self._rules.max_probes} trials are spent")
        except TooNoisyError:
            return self._withdraw()

    def best_so_far(self) -> Outcome:
        """What is known now: culprits already isolated, the largest set that passed, the smallest that failed."""
        passing = max(self._ledger.sets(Answer.GOOD), key=self._worth, default=None)
        return self._conclude(Status.BUDGET_SPENT, "stopped before the end", passing, False)

    def _attempt(self) -> Outcome:
        self._culprits, self._masked = [], []
        off, on = self._ledger.ask((OFF, self._all))
        self._ledger.ask_again((OFF, self._all), self._rules.repeats)
        if self._ledger.is_flaky:
            self._ledger.ask_again((OFF, self._all), FLAKY_START)
        off, on = self._ledger.ask((OFF, self._all))
        if off is not Answer.GOOD:
            return self._give_up("with every choice off", off)
        if on is Answer.GOOD and self._ledger.tally(self._all).bad == 0:
            return self._conclude(Status.NO_CULPRIT, "every choice on passes", self._all, True)
        if on is not Answer.BAD:
            return self._give_up("with every choice on", on)
        passing, is_best = self._find_passing()
        passing = self._audit(passing)
        self._look_for_masked(passing)
        claims = self._claims(passing)
        self._ledger.ask_again((on for on in claims if on not in (OFF, self._all)), self._rules.repeats)
        self._ledger.ask(claims)  # what a noisier record has opened again; nothing in a steady search
        outcome = self._conclude(Status.FOUND, "", passing, is_best)
        is_firm = self._ledger.answer(self._all) is Answer.BAD and (outcome.minimal or not outcome.flaky)
        if outcome.verified and is_firm:
            return outcome
        return self._withdraw()

    def _find_passing(self) -> tuple[Choices, bool]:
        """Collect culprits until the rest passes; the rest, and whether it is proven to be the largest."""
        while True:
            cover = self._cover()
            rest = self._all - cover.off
            if len(self._culprits) > SHARED_FACTOR * len(cover.off) + SHARED_START:
                return self._grow_plan(rest), False
            answer = self._ledger.ask_one(rest)
            if answer is Answer.GOOD:
                return rest, cover.is_cheapest
            if answer is Answer.UNKNOWN:
                grown = self._shrinker.grow(self._largest_passing(rest), rest)
                if not self._failing_within(rest):
                    return grown, False
            self._culprits.append(self._shrinker.shrink(self._failing_within(rest)[0]))

    def _grow_plan(self, rest: Choices) -> Choices:
        """A passing plan that cannot be added to; inside `rest` where another would hold every culprit found."""
        grown = self._shrinker.grow(self._largest_passing(self._all), self._all)
        if any(not core <= grown for core in self._culprits):
            return grown
        return self._shrinker.grow(self._largest_passing(rest), rest)

    def _look_for_masked(self, passing: Choices) -> None:
        """Explain failing sets inside the passing one: by noise, or as culprits that another choice hides."""
        while failing := [on for on in self._failing_within(passing) if not any(m <= on for m in self._masked)]:
            if not self._ledger.is_flaky:
                self._ledger.ask_again((failing[0], passing), 2)
            if self._ledger.answer(failing[0]) is Answer.BAD:
                self._masked.append(self._shrinker.shrink(failing[0]))

    def _audit(self, passing: Choices) -> Choices:
        """Spend the trials set apart for it on what monotony rules out: a repaired whole, a failing part."""
        budget = self._rules.audits
        off = self._order.sort(self._all - passing)
        for wider in [*(self._all - {choice} for choice in off), *(passing | {choice} for choice in off)]:
            # A plan that holds every culprit found would leave the failure of the whole unexplained.
            is_open = passing < wider and any(not core <= wider for core in self._culprits)
            if budget > 0 and is_open and self._ledger.answer(wider) is None:
                budget -= 1
                passing = wider if self._ledger.ask_one(wider) is Answer.GOOD else passing
        dice = random.Random(0)
        self._ledger.ask(
            frozenset(choice for choice in self._order.sort(passing) if dice.random() < 0.5) for _ in range(budget)
        )
        return passing

    def _claims(self, passing: Choices) -> list[Choices]:
        """The decisive sets: both ends, each culprit alone and with one member less, and the plan that passes."""
        cores = (*self._culprits, *self._masked)
        parts = [core - {choice} for core in cores for choice in self._order.sort(core)]
        return list(dict.fromkeys([OFF, self._all, *cores, *parts, passing]))

    def _cover(self) -> Cover:
        return find_cover(self._culprits, self._cost.__getitem__, self._order.position)

    def _failing_within(self, on: Choices) -> list[Choices]:
        """Sets known to fail that lie in another, the smallest first."""
        return sorted((bad for bad in self._ledger.sets(Answer.BAD) if bad <= on), key=len)

    def _largest_passing(self, within: Choices) -> Choices:
        # A flaky record may have opened even the empty set again.
        return max((good for good in self._ledger.sets(Answer.GOOD) if good <= within), key=self._worth, default=OFF)

    def _worth(self, on: Choices) -> tuple[float, int]:
        return sum(map(self._cost.__getitem__, on)), len(on)

    def _give_up(self, where: str, answer: Answer) -> Outcome:
        end = OFF if where.endswith("off") else self._all
        reason = f"{where} the run fails: the choices are not what makes it bad"
        if answer is Answer.UNKNOWN or end is not OFF:
            tally = self._ledger.tally(end)
            reason = f"{where} the run fails {tally.bad} and passes {tally.good} of {tally.asked} times. {tally.reason}"
        return self._conclude(Status.CANNOT_TELL, reason.strip(), None, False)

    def _withdraw(self) -> Outcome:
        """Claim nothing: what was found did not stand repeating."""
        self._culprits, self._masked = [], []
        return self._conclude(Status.CANNOT_TELL, TOO_NOISY, None, False)

    def _conclude(self, status: Status, reason: str, passing: Choices | None, is_best: bool) -> Outcome:
        culprits = tuple(core for core in self._culprits if passing is None or not core <= passing)
        masked = tuple(dict.fromkeys([*self._masked, *(core for core in self._culprits if core not in culprits)]))
        cores = (*culprits, *masked)
        evidence = self._evidence(passing)
        is_monotone = self._ledger.is_monotone
        return Outcome(
            status=status,
            reason=reason,
            culprits=culprits,
            masked=masked,
            largest_passing=passing,
            smallest_failing=min(self._ledger.sets(Answer.BAD), key=len, default=None),
            switch_off=OFF if passing is None else self._all - passing,
            probes=self._ledger.probes,
            confirmations=self._ledger.confirmations,
            confidence=self._confidence(evidence),
            noise=self._ledger.noise,
            evidence=evidence,
            unknown=self._ledger.unknown(),
            verified=self._is_verified(cores, passing),
            minimal=all(said is Answer.GOOD for core in cores for said in self._leave_one_out(core)),
            monotone=is_monotone,
            optimal=is_best and is_monotone,
            flaky=self._ledger.is_flaky,
        )

    def _evidence(self, passing: Choices | None) -> tuple[Evidence, ...]:
        """The record of the claims; an end that was not asked yet has none."""
        if passing is None:
            return ()
        claims = [(on, self._ledger.answer(on)) for on in self._claims(passing)]
        return tuple(self._ledger.evidence(on, answer) for on, answer in claims if answer is not None)

    def _confidence(self, evidence: Sequence[Evidence]) -> float:
        return math.prod(self._ledger.confidence(each.on, each.answer) for each in evidence) if evidence else 0.0

    def _is_verified(self, cores: Sequence[Choices], passing: Choices | None) -> bool:
        plan_passes = passing is not None and self._ledger.answer(passing) is Answer.GOOD
        cores_fail = all(self._ledger.answer(core) is Answer.BAD for core in cores)
        parts = [said for core in cores for said in self._leave_one_out(core)]
        return plan_passes and cores_fail and Answer.BAD not in parts and None not in parts

    def _leave_one_out(self, core: Choices) -> list[Answer | None]:
        return [self._ledger.answer(core - {choice}) for choice in core]
