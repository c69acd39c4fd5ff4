"""Masking, crashes, flaky trials, budgets, journals, interrupts: the search stays right, or says it cannot tell."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from align.compare.search import (
    Answer,
    Outcome,
    Probe,
    Reply,
    Rules,
    Search,
    Status,
    Unknown,
    find_culprits,
    one_by_one,
)

Choices = frozenset[str]
PLAIN = Rules()
ProbeOne = Callable[[Choices], Answer | Reply]


def _names(count: int) -> list[str]:
    return [f"c{index}" for index in range(count)]


def _bad_if(condition: bool) -> Answer:
    return Answer.BAD if condition else Answer.GOOD


def _search(count: int, probe: ProbeOne, rules: Rules = PLAIN) -> Outcome:
    return find_culprits(_names(count), probe, rules=rules)


# --- choices that mask each other


def test_culprits_that_hide_each_other_when_left_out_singly_are_both_found() -> None:
    outcome = _search(30, lambda on: _bad_if("c7" in on or "c22" in on))
    assert set(outcome.culprits) == {frozenset({"c7"}), frozenset({"c22"})}


def test_a_culprit_that_another_choice_repairs_is_reported_as_masked_once_an_audit_meets_it() -> None:
    def probe(on: Choices) -> Answer:
        return _bad_if("c9" in on or ("c4" in on and "c17" not in on))

    outcome = _search(20, probe, Rules(audits=12))
    assert outcome.culprits == (frozenset({"c9"}),)
    assert outcome.masked == (frozenset({"c4"}),)
    assert not outcome.monotone
    assert not outcome.optimal
    assert not outcome.flaky
    assert outcome.largest_passing == frozenset(_names(20)) - {"c9"}


def test_two_errors_that_cancel_are_kept_on_where_an_audit_shows_that_they_do() -> None:
    def probe(on: Choices) -> Answer:
        return _bad_if(("c3" in on) != ("c12" in on) or "c16" in on)

    outcome = _search(20, probe, Rules(audits=10))
    assert outcome.verified
    assert outcome.largest_passing is not None
    assert probe(outcome.largest_passing) is Answer.GOOD
    assert frozenset({"c16"}) in outcome.culprits
    assert not outcome.monotone


def test_a_set_that_fails_only_by_an_even_count_is_still_answered_with_true_claims() -> None:
    outcome = _search(9, lambda on: _bad_if(len(on) % 2 == 1), Rules(audits=4))
    assert outcome.status is Status.FOUND
    assert outcome.verified
    assert all(len(core) == 1 for core in outcome.culprits)
    assert outcome.largest_passing is not None
    assert len(outcome.largest_passing) % 2 == 0


# --- trials that crash


def test_a_choice_that_crashes_without_its_partner_does_not_hide_the_culprit() -> None:
    def probe(on: Choices) -> Answer | Reply:
        if "c2" in on and "c40" not in on:
            return Reply(Answer.UNKNOWN, "c2 needs c40")
        return _bad_if("c21" in on)

    outcome = _search(64, probe)
    assert outcome.culprits == (frozenset({"c21"}),)
    assert outcome.largest_passing == frozenset(_names(64)) - {"c21"}
    assert {each.reason for each in outcome.unknown} == {"c2 needs c40"}
    assert outcome.probes <= 30


def test_where_the_plan_without_the_culprit_crashes_a_smaller_plan_that_passes_is_grown() -> None:
    def probe(on: Choices) -> Answer:
        if "c5" in on and "c8" not in on:
            return Answer.UNKNOWN
        return _bad_if("c8" in on)

    outcome = _search(32, probe)
    assert outcome.culprits == (frozenset({"c8"}),)
    assert outcome.largest_passing == frozenset(_names(32)) - {"c5", "c8"}
    assert outcome.verified
    assert not outcome.optimal


def test_a_second_culprit_behind_a_crash_is_found_while_growing() -> None:
    def probe(on: Choices) -> Answer:
        if "c5" in on and "c8" not in on:
            return Answer.UNKNOWN
        return _bad_if("c8" in on or "c30" in on)

    outcome = _search(32, probe)
    assert set(outcome.culprits) == {frozenset({"c8"}), frozenset({"c30"})}
    assert outcome.largest_passing == frozenset(_names(32)) - {"c5", "c8", "c30"}


def test_a_culprit_whose_part_crashes_is_reported_as_not_proven_minimal() -> None:
    def probe(on: Choices) -> Answer | Reply:
        if "c1" in on and "c6" not in on:
            return Reply(Answer.UNKNOWN, "c1 alone does not start")
        return _bad_if("c1" in on)

    outcome = _search(8, probe)
    assert outcome.culprits == (frozenset({"c1", "c6"}),)
    assert outcome.verified
    assert not outcome.minimal
    assert Unknown(frozenset({"c1"}), "c1 alone does not start") in outcome.unknown


def test_a_crash_with_everything_on_cannot_be_told_and_keeps_its_error() -> None:
    outcome = _search(8, lambda on: Reply(Answer.UNKNOWN, "out of memory") if len(on) == 8 else Answer.GOOD)
    assert outcome.status is Status.CANNOT_TELL
    assert "out of memory" in outcome.reason


def test_a_crash_with_everything_off_cannot_be_told() -> None:
    outcome = _search(8, lambda on: Answer.BAD if on else Reply(Answer.UNKNOWN, "no such device"))
    assert outcome.status is Status.CANNOT_TELL
    assert "no such device" in outcome.reason


# --- flaky trials


def _flipping(probe: Callable[[Choices], Answer], rate: float, seed: int) -> ProbeOne:
    dice = random.Random(seed)

    def noisy(on: Choices) -> Answer:
        answer = probe(on)
        if dice.random() >= rate:
            return answer
        return Answer.GOOD if answer is Answer.BAD else Answer.BAD

    return noisy


def _one_or_pair(on: Choices) -> Answer:
    return _bad_if("c11" in on or {"c20", "c3"} <= on)


@pytest.mark.parametrize("rate", [0.05, 0.15, 0.25])
def test_flaky_answers_are_repeated_until_the_answer_is_right(rate: float) -> None:
    solved = 0
    for seed in range(20):
        outcome = _search(32, _flipping(_one_or_pair, rate, seed), Rules(repeats=4, max_probes=5000))
        solved += set(outcome.culprits) == {frozenset({"c11"}), frozenset({"c20", "c3"})}
        assert outcome.flaky or outcome.status is Status.CANNOT_TELL or solved
    assert solved >= 18


def test_the_confidence_of_a_flaky_search_is_no_better_than_its_record() -> None:
    outcomes = [
        _search(32, _flipping(_one_or_pair, 0.2, seed), Rules(repeats=4, max_probes=5000)) for seed in range(30)
    ]
    stated = sum(outcome.confidence for outcome in outcomes) / len(outcomes)
    right = sum(set(o.culprits) == {frozenset({"c11"}), frozenset({"c20", "c3"})} for o in outcomes) / len(outcomes)
    assert 0.9 < stated < 1.0
    assert right >= stated - 0.08
    assert all(0.1 < outcome.noise < 0.35 for outcome in outcomes if outcome.flaky)


def test_a_fault_that_shows_in_half_the_runs_cannot_be_told() -> None:
    dice = random.Random(1)
    outcome = _search(16, lambda on: _bad_if("c3" in on and dice.random() < 0.5), Rules(repeats=5))
    assert outcome.status is Status.CANNOT_TELL
    assert outcome.flaky
    assert outcome.culprits == ()
    assert outcome.confidence == 0.0


def test_a_fault_that_shows_in_four_of_five_runs_is_found() -> None:
    dice = random.Random(2)
    outcome = _search(16, lambda on: _bad_if("c3" in on and dice.random() < 0.8), Rules(repeats=8))
    assert outcome.flaky
    assert outcome.culprits == (frozenset({"c3"}),)


def test_a_whole_that_fails_seldom_is_never_called_no_culprit() -> None:
    dice = random.Random(3)
    outcome = _search(16, lambda on: _bad_if("c3" in on and dice.random() < 0.15), Rules(repeats=30))
    assert outcome.status is Status.CANNOT_TELL


def test_a_disagreement_in_the_last_repeats_starts_the_search_again_with_repeats() -> None:
    asked: dict[Choices, int] = {}

    def probe(on: Choices) -> Answer:
        asked[on] = asked.get(on, 0) + 1
        is_lucky = on == frozenset({"c5"}) and asked[on] == 2
        return _bad_if("c5" in on and not is_lucky)

    outcome = _search(16, probe, Rules(repeats=2))
    assert outcome.flaky
    assert outcome.culprits == (frozenset({"c5"}),)
    assert min(asked[frozenset({"c5"})], asked[frozenset()]) > 3


def test_repeats_of_a_steady_search_are_counted_apart_and_raise_the_confidence() -> None:
    def probe(on: Choices) -> Answer:
        return _bad_if("c5" in on)

    once, thrice = _search(64, probe), _search(64, probe, Rules(repeats=3))
    assert (once.confirmations, thrice.confirmations) == (0, 3 * 4)
    assert once.probes == thrice.probes
    assert once.confidence == pytest.approx(0.95**4)
    assert thrice.confidence > 0.9999
    assert all((each.agreeing, each.asked) == (4, 4) for each in thrice.evidence)


def test_trials_declared_deterministic_give_full_confidence_without_repeats() -> None:
    assert _search(8, lambda on: _bad_if("c1" in on), Rules(noise=0.0)).confidence == 1.0


# --- budgets, journals, interrupts


def test_a_spent_budget_still_gives_the_best_sets_known() -> None:
    outcome = _search(64, lambda on: _bad_if("c40" in on), Rules(max_probes=5))
    assert (outcome.status, outcome.probes) == (Status.BUDGET_SPENT, 5)
    assert outcome.smallest_failing is not None
    assert "c40" in outcome.smallest_failing
    assert len(outcome.smallest_failing) < 64
    assert outcome.largest_passing is not None
    assert len(outcome.largest_passing) >= 32


def test_a_budget_of_nothing_claims_nothing() -> None:
    outcome = _search(4, lambda on: Answer.BAD, Rules(max_probes=0))
    assert (outcome.status, outcome.largest_passing, outcome.smallest_failing) == (Status.BUDGET_SPENT, None, None)
    assert outcome.confidence == 0.0
    assert not outcome.verified


def test_a_killed_search_resumes_without_repeating_a_probe() -> None:
    journal: list[Probe] = []
    first = one_by_one(lambda on: _bad_if("c9" in on or "c50" in on))
    Search(_names(64), first, rules=Rules(max_probes=11), record=journal.append).run()
    assert [probe.number for probe in journal] == list(range(1, 12))
    known = {probe.on: Reply(probe.answer, probe.reason) for probe in journal}
    again: list[Choices] = []

    def probe(on: Choices) -> Answer:
        again.append(on)
        return _bad_if("c9" in on or "c50" in on)

    outcome = Search(_names(64), one_by_one(probe), known=known).run()
    assert set(outcome.culprits) == {frozenset({"c9"}), frozenset({"c50"})}
    assert not known.keys() & set(again)
    assert outcome.probes == len(again)


def test_a_journal_of_other_choices_is_ignored() -> None:
    outcome = Search(["a"], one_by_one(lambda on: _bad_if(bool(on))), known={frozenset({"z"}): Answer.GOOD}).run()
    assert outcome.probes == 2


def test_an_interrupt_passes_through_and_leaves_the_best_answer_so_far() -> None:
    calls: list[Choices] = []

    def probe(on: Choices) -> Answer:
        calls.append(on)
        if len(calls) == 14:
            raise KeyboardInterrupt
        return _bad_if("c9" in on or "c50" in on)

    search = Search(_names(64), one_by_one(probe))
    with pytest.raises(KeyboardInterrupt):
        search.run()
    outcome = search.best_so_far()
    assert outcome.culprits == (frozenset({"c9"}),)
    assert outcome.probes == 13
    assert outcome.largest_passing is not None
    assert not outcome.largest_passing & {"c9", "c50"}


def test_every_answer_is_recorded_before_the_next_trial_starts() -> None:
    journal: list[Probe] = []

    def probe_many(sets: Sequence[Choices]) -> list[Answer]:
        assert len(journal) % 3 in (0, 2) or len(sets) < 3
        return [_bad_if("c5" in on) for on in sets]

    outcome = Search(_names(27), probe_many, rules=Rules(width=3), record=journal.append).run()
    assert len(journal) == outcome.probes
    assert len({probe.on for probe in journal}) == len(journal)
