"""The ledger of a search: the one door to the predicate. It caches, counts, journals, repeats and obeys the budget.

Invariant: no set is asked twice while its answer stands, and each answer is recorded before it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from align.compare.search_values import Answer, Choices, Evidence, Probe, ProbeMany, Reply, Rules, Unknown

WRONG_AT_MOST = 1e-3
"""The error each decision of a flaky search is allowed (the bound of Wald's sequential test)."""
NOISE_CEILING = 0.4
"""Above this rate the test needs more answers than a trial is worth; such sets end as UNKNOWN."""


class BudgetSpentError(Exception):
    """The next trial would exceed `max_probes`. Never leaves the search."""


class TooNoisyError(Exception):
    """A set gave no lead in `max_answers` answers, and noise is at its ceiling. Never leaves the search."""


def ignore_probe(probe: Probe) -> None:
    """Keep no journal."""


@dataclass(frozen=True, slots=True)
class Tally:
    """All answers one set has given."""

    good: int = 0
    bad: int = 0
    unknown: int = 0
    reason: str = ""

    @property
    def asked(self) -> int:
        return self.good + self.bad + self.unknown

    @property
    def is_mixed(self) -> bool:
        return max(self.good, self.bad, self.unknown) < self.asked

    def count(self, answer: Answer) -> int:
        return {Answer.GOOD: self.good, Answer.BAD: self.bad, Answer.UNKNOWN: self.unknown}[answer]

    def add(self, reply: Reply) -> Tally:
        if reply.answer is Answer.GOOD:
            return replace(self, good=self.good + 1)
        if reply.answer is Answer.BAD:
            return replace(self, bad=self.bad + 1)
        return replace(self, unknown=self.unknown + 1, reason=reply.reason)


class Ledger:
    """Owns the predicate and all its answers."""

    def __init__(
        self,
        probe_many: ProbeMany,
        rules: Rules,
        known: Mapping[Choices, Answer | Reply],
        record: Callable[[Probe], None],
    ) -> None:
        self._probe_many = probe_many
        self._rules = rules
        self._record = record
        self._tallies = {on: Tally().add(_as_reply(reply)) for on, reply in known.items()}
        self.probes = 0
        self.confirmations = 0
        self.is_flaky = False

    def ask(self, sets: Iterable[Choices]) -> list[Answer]:
        """Answer each set, asking only what is not decided yet."""
        wanted = list(sets)
        while pending := [on for on in dict.fromkeys(wanted) if self.answer(on) is None]:
            self._probe(pending)
            if self.noise == NOISE_CEILING and any(self._is_torn(on) for on in pending):
                raise TooNoisyError
        return [self.answer(on) or Answer.UNKNOWN for on in wanted]

    def ask_one(self, on: Choices) -> Answer:
        return self.ask((on,))[0]

    def ask_again(self, sets: Iterable[Choices], times: int) -> None:
        """Ask sets that were asked before; a differing answer makes the search flaky from here on."""
        wanted = list(dict.fromkeys(sets))
        for _ in range(times):
            self._probe(wanted)

    def answer(self, on: Choices) -> Answer | None:
        """The decided answer of a set, None while it is open. A steady search decides by one answer, a flaky one by
        a lead that answers wrong with the rate `noise` reach once in a thousand times (Wald 1945)."""
        tally = self._tallies.get(on)
        if tally is None:
            return None
        lead = self._lead()
        if tally.bad - tally.good >= lead:
            return Answer.BAD
        if tally.good - tally.bad >= lead:
            return Answer.GOOD
        is_stuck = tally.unknown >= lead and tally.unknown > tally.good + tally.bad
        return Answer.UNKNOWN if is_stuck or tally.asked >= self._rules.max_answers else None

    def tally(self, on: Choices) -> Tally:
        return self._tallies.get(on, Tally())

    def sets(self, answer: Answer) -> list[Choices]:
        """All sets decided so, in the order they were first asked."""
        return [on for on in self._tallies if self.answer(on) is answer]

    @property
    def is_monotone(self) -> bool:
        """Whether no set that passes holds one that fails."""
        passing = self.sets(Answer.GOOD)
        return not any(bad <= good for bad in self.sets(Answer.BAD) for good in passing)

    @property
    def noise(self) -> float:
        """The rate of wrong answers: assumed while all repeats agree, else what the repeats show (Laplace's rule).

        A fault that shows now and then makes only the failing side waver, so each side counts for itself.
        """
        if not self.is_flaky:
            return self._rules.noise
        repeated = [tally for tally in self._tallies.values() if tally.asked > 1]
        sides = (
            [each for each in repeated if each.bad > each.good],
            [each for each in repeated if each.bad <= each.good],
        )
        return min(max(self._rules.noise, *map(_odd_rate, sides)), NOISE_CEILING)

    def confidence(self, on: Choices, answer: Answer) -> float:
        """The chance that `answer` is right for a set, from even odds and the answers it gave."""
        tally = self.tally(on)
        lead = 2 * tally.count(answer) - tally.asked
        odds = self.noise / (1.0 - self.noise)
        return 1.0 / (1.0 + odds**lead) if lead > 0 else 0.0

    def evidence(self, on: Choices, answer: Answer) -> Evidence:
        tally = self.tally(on)
        return Evidence(on, answer, tally.count(answer), tally.asked)

    def unknown(self) -> tuple[Unknown, ...]:
        return tuple(Unknown(on, self._why_unknown(on)) for on in self.sets(Answer.UNKNOWN))

    def _is_torn(self, on: Choices) -> bool:
        tally = self.tally(on)
        return self.answer(on) is Answer.UNKNOWN and tally.good > 0 and tally.bad > 0

    def _why_unknown(self, on: Choices) -> str:
        tally = self.tally(on)
        if tally.good or tally.bad:
            return f"flaky: good {tally.good}, bad {tally.bad}, unknown {tally.unknown} times"
        return tally.reason

    def _lead(self) -> int:
        if not self.is_flaky:
            return 1
        noise = max(self.noise, 1e-9)
        return max(2, math.ceil(math.log((1 - WRONG_AT_MOST) / WRONG_AT_MOST) / math.log((1 - noise) / noise)))

    def _probe(self, sets: Sequence[Choices]) -> None:
        """The only place where the predicate is called."""
        start = 0
        while start < len(sets):
            room = self._rules.max_probes - self.probes - self.confirmations
            if room <= 0:
                raise BudgetSpentError
            batch = sets[start : start + min(room, self._rules.width)]
            for on, reply in zip(batch, self._probe_many(batch), strict=True):
                self._enter(on, _as_reply(reply))
            start += len(batch)

    def _enter(self, on: Choices, reply: Reply) -> None:
        is_repeat = on in self._tallies
        self.confirmations += is_repeat
        self.probes += not is_repeat
        self._tallies[on] = self.tally(on).add(reply)
        self.is_flaky |= self._tallies[on].is_mixed
        self._record(Probe(self.probes + self.confirmations, on, reply.answer, reply.reason, is_repeat))


def _odd_rate(tallies: Sequence[Tally]) -> float:
    asked = sum(tally.asked for tally in tallies)
    odd = asked - sum(max(tally.good, tally.bad, tally.unknown) for tally in tallies)
    return (odd + 1) / (asked + 2) if asked else 0.0


def _as_reply(reply: Answer | Reply) -> Reply:
    return reply if isinstance(reply, Reply) else Reply(reply)
