"""Whatever the problem, a search claims only what is true of the predicate."""

from __future__ import annotations

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from align.compare.search import Answer, Outcome, Rules, Search, Status, Suspect, one_by_one

Choices = frozenset[str]


def _names(count: int) -> list[str]:
    return [f"c{index}" for index in range(count)]


@st.composite
def _monotone_problems(draw: st.DrawFn) -> tuple[list[str], list[Choices]]:
    """Up to 24 choices; bad where one of up to three terms of one to three choices is wholly on."""
    names = _names(draw(st.integers(1, 24)))
    terms = draw(st.lists(st.frozensets(st.sampled_from(names), min_size=1, max_size=3), min_size=1, max_size=3))
    return names, terms


@st.composite
def _accusations(draw: st.DrawFn, names: list[str]) -> list[Suspect]:
    """Paths and scores at random: they may change the order only."""
    parts = st.lists(st.sampled_from(["a", "b"]), max_size=3).map(tuple)
    return [Suspect(name, draw(parts), float(draw(st.integers(0, 3)))) for name in names]


def _smallest_cover_size(terms: list[Choices], names: list[str]) -> int:
    sizes = range(len(names) + 1)
    return next(n for n in sizes for off in itertools.combinations(names, n) if all(term & set(off) for term in terms))


@settings(max_examples=300, deadline=None)
@given(st.data(), _monotone_problems(), st.integers(1, 4))
def test_a_monotone_problem_is_solved_exactly(
    data: st.DataObject, problem: tuple[list[str], list[Choices]], width: int
) -> None:
    """Each culprit is one of the problem's minimal terms, as many can be switched on as there can be, and terms that
    share no choice are all found."""
    names, terms = problem
    suspects = data.draw(_accusations(names))
    minimal = {term for term in terms if not any(other < term for other in terms)}
    probe = one_by_one(lambda on: Answer.BAD if any(term <= on for term in terms) else Answer.GOOD)
    outcome = Search(suspects, probe, rules=Rules(width=width)).run()
    assert outcome.status is Status.FOUND
    assert outcome.verified
    assert outcome.minimal
    assert outcome.monotone
    assert outcome.optimal
    assert outcome.confirmations == 0
    assert outcome.unknown == ()
    assert outcome.masked == ()
    assert set(outcome.culprits) <= minimal
    assert len(outcome.switch_off) == _smallest_cover_size(list(minimal), names)
    assert all(term & outcome.switch_off for term in minimal)
    if sum(map(len, minimal)) == len(frozenset().union(*minimal)):
        assert set(outcome.culprits) == minimal


def _table_answer(seed: int, on: Choices, answers: list[Answer]) -> Answer:
    """A fixed random answer for each set; the empty set passes."""
    return random.Random(f"{seed}{sorted(on)}").choice(answers) if on else Answer.GOOD


def _assert_claims_hold(outcome: Outcome, names: list[str], seed: int, answers: list[Answer]) -> None:
    everything = _table_answer(seed, frozenset(names), answers)
    expected = {Answer.GOOD: Status.NO_CULPRIT, Answer.BAD: Status.FOUND, Answer.UNKNOWN: Status.CANNOT_TELL}
    assert outcome.status is expected[everything]
    if outcome.status is not Status.FOUND:
        assert outcome.culprits == ()
        return
    assert outcome.verified
    assert outcome.culprits
    assert outcome.largest_passing is not None
    assert _table_answer(seed, outcome.largest_passing, answers) is Answer.GOOD
    for core in outcome.culprits + outcome.masked:
        parts = [_table_answer(seed, core - {choice}, answers) for choice in core]
        assert _table_answer(seed, core, answers) is Answer.BAD
        assert Answer.BAD not in parts
        assert (Answer.UNKNOWN in parts) <= (not outcome.minimal)
    assert all(core & outcome.switch_off for core in outcome.culprits)
    assert all(core <= outcome.largest_passing for core in outcome.masked)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 9), st.integers(0, 10**6), st.integers(0, 12), st.integers(1, 3))
def test_no_claim_is_wrong_where_choices_mask_each_other_at_random(
    count: int, seed: int, audits: int, width: int
) -> None:
    answers = [Answer.GOOD, Answer.BAD]
    probe = one_by_one(lambda on: _table_answer(seed, on, answers))
    outcome = Search(_names(count), probe, rules=Rules(audits=audits, width=width, max_probes=4000)).run()
    _assert_claims_hold(outcome, _names(count), seed, answers)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 9), st.integers(0, 10**6), st.integers(0, 6))
def test_no_claim_is_wrong_where_trials_crash_at_random(count: int, seed: int, audits: int) -> None:
    answers = [Answer.GOOD, Answer.BAD, Answer.UNKNOWN]
    probe = one_by_one(lambda on: _table_answer(seed, on, answers))
    outcome = Search(_names(count), probe, rules=Rules(audits=audits, max_probes=4000)).run()
    _assert_claims_hold(outcome, _names(count), seed, answers)
    assert all(_table_answer(seed, each.on, answers) is Answer.UNKNOWN for each in outcome.unknown)


@settings(max_examples=60, deadline=None)
@given(_monotone_problems(), st.integers(0, 40))
def test_a_search_stopped_anywhere_claims_only_what_was_asked(
    problem: tuple[list[str], list[Choices]], budget: int
) -> None:
    names, terms = problem

    def is_bad(on: Choices) -> bool:
        return any(term <= on for term in terms)

    probe = one_by_one(lambda on: Answer.BAD if is_bad(on) else Answer.GOOD)
    outcome = Search(names, probe, rules=Rules(max_probes=budget)).run()
    assert outcome.probes <= budget
    assert outcome.status in (Status.FOUND, Status.BUDGET_SPENT)
    assert all(core in terms for core in outcome.culprits)
    assert outcome.largest_passing is None or not is_bad(outcome.largest_passing)
    assert outcome.smallest_failing is None or is_bad(outcome.smallest_failing)
