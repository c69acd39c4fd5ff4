"""The search keeps its budgets, finds the exact sets, and says when there is nothing to say."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence

import pytest

from align.compare.search import (
    Answer,
    Outcome,
    Rules,
    Search,
    Status,
    Suspect,
    expect_probes,
    find_culprits,
    one_by_one,
)
from align.dumpers.errors import UsageError

Choices = frozenset[str]
Terms = Sequence[Sequence[int]]


def _names(count: int) -> list[str]:
    return [f"c{index}" for index in range(count)]


def _sets(terms: Terms) -> list[Choices]:
    return [frozenset(f"c{index}" for index in term) for term in terms]


def _fails_with(terms: Terms) -> Callable[[Choices], Answer]:
    """Bad where all choices of any one term are on."""
    failing = _sets(terms)
    return lambda on: Answer.BAD if any(term <= on for term in failing) else Answer.GOOD


def _most_probes(count: int, problems: Iterable[Terms]) -> int:
    """The worst count of probes; every problem must be solved exactly and without a repeat."""
    most = 0
    for terms in problems:
        outcome = find_culprits(_names(count), _fails_with(terms))
        assert set(outcome.culprits) == set(_sets(terms))
        assert outcome.status is Status.FOUND
        assert outcome.verified
        assert outcome.minimal
        assert outcome.optimal
        assert outcome.confirmations == 0
        most = max(most, outcome.probes)
    return most


def test_one_culprit_among_1024_takes_at_most_16_probes_wherever_it_is() -> None:
    assert _most_probes(1024, ([[index]] for index in range(1024))) <= 16


def test_any_two_independent_culprits_among_64_take_at_most_20_probes() -> None:
    assert _most_probes(64, ([[one], [two]] for one, two in itertools.combinations(range(64), 2))) <= 20


def test_any_pair_that_only_fails_together_among_64_takes_at_most_30_probes() -> None:
    assert _most_probes(64, ([[one, two]] for one, two in itertools.combinations(range(64), 2))) <= 30


def test_four_independent_culprits_among_256_take_at_most_42_probes() -> None:
    dice = random.Random(4)
    scattered = [[[index] for index in dice.sample(range(256), 4)] for _ in range(400)]
    adjacent = [[[start + step] for step in range(4)] for start in range(0, 253, 3)]
    assert _most_probes(256, scattered + adjacent) <= 42


@pytest.mark.parametrize("index", [0, 1, 511, 512, 700, 1023])
def test_a_ranking_with_the_culprit_on_top_finds_one_among_1024_in_4_probes(index: int) -> None:
    suspects = [Suspect(name, score=1.0 / (2 + abs(at - index))) for at, name in enumerate(_names(1024))]
    outcome = find_culprits(suspects, _fails_with([[index]]))
    assert outcome.culprits == (frozenset({f"c{index}"}),)
    assert outcome.probes <= 4


def test_a_ranking_with_several_culprits_on_top_takes_two_probes_each() -> None:
    suspects = [Suspect(name, score=float(at in {3, 90, 170, 255})) for at, name in enumerate(_names(256))]
    outcome = find_culprits(suspects, _fails_with([[3], [90], [170], [255]]))
    assert set(outcome.culprits) == set(_sets([[3], [90], [170], [255]]))
    assert outcome.probes <= 10


def test_a_misleading_ranking_changes_the_count_of_probes_but_not_the_answer() -> None:
    dice = random.Random(7)
    for _ in range(50):
        suspects = [Suspect(name, score=dice.random()) for name in _names(1024)]
        index = dice.randrange(1024)
        outcome = find_culprits(suspects, _fails_with([[index]]))
        assert outcome.culprits == (frozenset({f"c{index}"}),)
        assert outcome.probes <= 21


def test_a_score_that_is_not_a_number_is_the_most_suspicious() -> None:
    suspects = [Suspect("a", score=9.0), Suspect("b", score=math.nan), Suspect("c")]
    assert find_culprits(suspects, lambda on: Answer.BAD if "b" in on else Answer.GOOD).probes == 4


def test_the_estimate_of_probes_is_an_upper_bound_for_independent_culprits() -> None:
    assert _most_probes(100, ([[index], [99 - index]] for index in range(50))) <= expect_probes(100, 2)
    assert expect_probes(1024) == 14


def _tree_suspects() -> list[Suspect]:
    sites = itertools.product(range(10), range(20), range(25))
    return [Suspect(f"c{i}", ("net", f"stage{a}", f"block{b}", f"op{c}")) for i, (a, b, c) in enumerate(sites)]


@pytest.mark.parametrize("terms", [[[0]], [[4999]], [[2502]], [[17, 4100]], [[5], [2600]]])
def test_five_thousand_sites_in_a_module_tree_are_searched_in_few_probes(terms: Terms) -> None:
    outcome = find_culprits(_tree_suspects(), _fails_with(terms))
    assert set(outcome.culprits) == set(_sets(terms))
    assert outcome.probes <= 36


def test_most_splits_of_a_tree_fall_between_modules() -> None:
    suspects = _tree_suspects()
    stage_of = {suspect.choice: suspect.path[1] for suspect in suspects}
    asked: list[Choices] = []

    def probe(on: Choices) -> Answer:
        asked.append(on)
        return Answer.BAD if "c2502" in on else Answer.GOOD

    find_culprits(suspects, probe)
    first_cut = asked[2]
    assert {stage_of[name] for name in first_cut}.isdisjoint(
        stage_of[suspect.choice] for suspect in suspects if suspect.choice not in first_cut
    )


def test_scattered_siblings_are_brought_together() -> None:
    suspects = [Suspect(f"c{index}", (f"part{index % 2}",)) for index in range(64)]
    asked: list[Choices] = []

    def probe(on: Choices) -> Answer:
        asked.append(on)
        return Answer.BAD if "c6" in on else Answer.GOOD

    find_culprits(suspects, probe)
    assert asked[2] == frozenset(f"c{index}" for index in range(0, 64, 2))


def test_nothing_wrong_is_no_culprit_after_two_probes() -> None:
    outcome = find_culprits(_names(38), lambda on: Answer.GOOD)
    assert (outcome.status, outcome.probes, outcome.culprits) == (Status.NO_CULPRIT, 2, ())
    assert outcome.largest_passing == frozenset(_names(38))
    assert outcome.smallest_failing is None


def test_a_failing_baseline_blames_nobody() -> None:
    outcome = find_culprits(_names(38), lambda on: Answer.BAD)
    assert (outcome.status, outcome.culprits, outcome.confidence) == (Status.CANNOT_TELL, (), 0.0)
    assert "every choice off" in outcome.reason


def test_no_suspects_and_a_passing_run_is_no_culprit() -> None:
    assert find_culprits([], lambda on: Answer.GOOD).status is Status.NO_CULPRIT


def test_one_suspect_is_named_in_two_probes() -> None:
    outcome = find_culprits(["only"], lambda on: Answer.BAD if on else Answer.GOOD)
    assert (outcome.culprits, outcome.probes) == ((frozenset({"only"}),), 2)
    assert outcome.largest_passing == frozenset()


def test_of_a_pair_only_the_cheaper_choice_is_switched_off() -> None:
    suspects = [Suspect("c0", cost=5.0), Suspect("c1", cost=0.2), Suspect("c2")]
    outcome = find_culprits(suspects, _fails_with([[0, 1]]))
    assert outcome.switch_off == frozenset({"c1"})
    assert outcome.largest_passing == frozenset({"c0", "c2"})
    assert outcome.smallest_failing == frozenset({"c0", "c1"})


def test_a_choice_that_several_culprits_share_is_the_one_switched_off() -> None:
    outcome = find_culprits(_names(30), _fails_with([[3, 20], [11, 20], [7, 20]]))
    assert outcome.switch_off == frozenset({"c20"})
    assert outcome.optimal


def test_an_expensive_shared_choice_is_kept_where_its_partners_are_cheaper() -> None:
    suspects = [Suspect(name, cost=10.0 if name == "c20" else 1.0) for name in _names(30)]
    outcome = find_culprits(suspects, _fails_with([[3, 20], [11, 20]]))
    assert outcome.switch_off == frozenset({"c3", "c11"})
    assert set(outcome.culprits) == set(_sets([[3, 20], [11, 20]]))


def test_twenty_independent_culprits_are_all_found() -> None:
    terms = [[index] for index in range(0, 200, 10)]
    outcome = find_culprits(_names(200), _fails_with(terms))
    assert set(outcome.culprits) == set(_sets(terms))
    assert outcome.probes <= expect_probes(200, 20)


def test_guilt_shared_by_all_ends_with_a_plan_to_which_nothing_can_be_added() -> None:
    outcome = find_culprits(_names(40), lambda on: Answer.BAD if len(on) >= 8 else Answer.GOOD)
    assert outcome.status is Status.FOUND
    assert outcome.verified
    assert not outcome.optimal
    assert outcome.largest_passing is not None
    assert len(outcome.largest_passing) == 7
    assert {len(culprit) for culprit in outcome.culprits} == {8}
    assert outcome.probes <= 1000


def test_guilt_that_is_shared_and_masked_still_leaves_a_member_of_each_culprit_out() -> None:
    outcome = find_culprits(_names(24), lambda on: Answer.BAD if len(on) in {5, 6, 7, 24} else Answer.GOOD)
    assert outcome.status is Status.FOUND
    assert outcome.verified
    assert outcome.culprits
    assert all(core & outcome.switch_off for core in outcome.culprits)


def _solve_in_parallel(terms: Terms, count: int, width: int) -> tuple[Outcome, list[int]]:
    sizes: list[int] = []
    answer = _fails_with(terms)

    def probe_many(sets: Sequence[Choices]) -> list[Answer]:
        sizes.append(len(sets))
        return [answer(on) for on in sets]

    return Search(_names(count), probe_many, rules=Rules(width=width)).run(), sizes


@pytest.mark.parametrize("terms", [[[700]], [[3, 900]], [[1], [512]]])
def test_parallel_trials_give_the_same_answer_in_fewer_rounds(terms: Terms) -> None:
    outcome, sizes = _solve_in_parallel(terms, 1024, 7)
    assert set(outcome.culprits) == set(_sets(terms))
    assert max(sizes) <= 7
    assert len(sizes) <= 1 + 6 * sum(map(len, terms)) + 1


def test_a_choice_named_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="named twice"):
        find_culprits(["a", "a"], lambda on: Answer.GOOD)


@pytest.mark.parametrize("wrong", [{"width": 0}, {"max_probes": -1}, {"noise": 0.5}, {"repeats": -1}])
def test_rules_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        Rules(**wrong)


def test_a_cost_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(UsageError, match="NaN"):
        Suspect("a", cost=math.nan)


def test_a_negative_cost_counts_as_free() -> None:
    suspects = [Suspect("c0", cost=0.0), Suspect("c1", cost=-3.0)]
    outcome = Search(suspects, one_by_one(_fails_with([[0, 1]]))).run()
    assert len(outcome.switch_off) == 1
