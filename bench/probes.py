"""Count the probes of our search beside prefix bisection, ddmin and linear search, on the same simulated problems.

Each strategy names failing sets; the same loop around it switches one member of each off until the rest passes, so that
all are asked to solve the whole problem. Right means: exactly the planted sets, no more and no less.

    python -m bench.probes [--problems 20]
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from align.compare.search import Answer, Rules, Search, Suspect, one_by_one

Choices = frozenset[str]
Fails = Callable[[Choices], bool]
Isolate = Callable[[Fails, list[str]], Choices]

LIMIT = 20_000
"""Probes after which a strategy is stopped and counted as not right."""


class LimitReachedError(Exception):
    """A strategy has asked too often."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A kind of problem: how many choices, and the sizes of the sets planted in them."""

    name: str
    count: int
    sizes: tuple[int, ...]


SHAPES = (
    Shape("one among 1024", 1024, (1,)),
    Shape("two among 64", 64, (1, 1)),
    Shape("a pair among 64", 64, (2,)),
    Shape("four among 256", 256, (1, 1, 1, 1)),
    Shape("one and a pair among 256", 256, (1, 2)),
    Shape("a triple among 256", 256, (3,)),
    Shape("one among 5000", 5000, (1,)),
)


@dataclass(frozen=True, slots=True)
class Score:
    """What one strategy did on one problem."""

    probes: int
    is_right: bool


class Counter:
    """The planted predicate, cached, with its distinct probes counted."""

    def __init__(self, terms: Sequence[Choices]) -> None:
        self._terms = terms
        self._answers: dict[Choices, bool] = {}

    @property
    def probes(self) -> int:
        return len(self._answers)

    def fails(self, on: Choices) -> bool:
        if on not in self._answers:
            if self.probes >= LIMIT:
                raise LimitReachedError
            self._answers[on] = any(term <= on for term in self._terms)
        return self._answers[on]


def bisect_prefix(fails: Fails, choices: list[str]) -> Choices:
    """The choice that ends the shortest failing prefix ("the first k layers"); it knows no sets."""
    low, high = 0, len(choices)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fails(frozenset(choices[:middle])) else (middle, high)
    return frozenset({choices[high - 1]})


def minimise_by_ddmin(fails: Fails, choices: list[str]) -> Choices:
    """Zeller and Hildebrandt 2002: try chunks, then their complements, then finer chunks."""
    left, chunks = choices, 2
    while len(left) > 1:
        size = -(-len(left) // chunks)
        parts = [left[start : start + size] for start in range(0, len(left), size)]
        rests = [[choice for choice in left if choice not in set(part)] for part in parts]
        if smaller := next((part for part in parts if fails(frozenset(part))), None):
            left, chunks = smaller, 2
        elif rest := next((rest for rest in rests if fails(frozenset(rest))), None):
            left, chunks = rest, max(chunks - 1, 2)
        elif chunks >= len(left):
            break
        else:
            chunks = min(2 * chunks, len(left))
    return frozenset(left)


def drop_linearly(fails: Fails, choices: list[str]) -> Choices:
    """Switch off one choice after another and keep it off where the rest still fails."""
    left = frozenset(choices)
    for choice in choices:
        left = left - {choice} if fails(left - {choice}) else left
    return left


def solve_with(isolate: Isolate, terms: Sequence[Choices], choices: list[str]) -> Score:
    """Isolate a set, switch one of its members off, and go on until the rest passes."""
    counter, found, left = Counter(terms), set(), list(choices)
    try:
        counter.fails(frozenset())
        while counter.fails(frozenset(left)):
            found.add(isolate(counter.fails, left))
            left = [choice for choice in left if choice not in {min(each) for each in found}]
    except LimitReachedError:
        return Score(LIMIT, False)
    return Score(counter.probes, found == set(terms))


def solve_with_ours(terms: Sequence[Choices], choices: list[str], is_ranked: bool) -> Score:
    """Our search; ranked, every guilty choice has the top score, as a shadow pass gives it."""
    guilty = frozenset().union(*terms)
    suspects = [Suspect(choice, score=float(is_ranked and choice in guilty)) for choice in choices]
    counter = Counter(terms)
    probe = one_by_one(lambda on: Answer.BAD if counter.fails(on) else Answer.GOOD)
    outcome = Search(suspects, probe, rules=Rules(max_probes=LIMIT)).run()
    return Score(outcome.probes, set(outcome.culprits) == set(terms))


STRATEGIES: dict[str, Callable[[Sequence[Choices], list[str]], Score]] = {
    "ours": lambda terms, choices: solve_with_ours(terms, choices, False),
    "ours, ranked": lambda terms, choices: solve_with_ours(terms, choices, True),
    "prefix bisection": lambda terms, choices: solve_with(bisect_prefix, terms, choices),
    "ddmin": lambda terms, choices: solve_with(minimise_by_ddmin, terms, choices),
    "linear": lambda terms, choices: solve_with(drop_linearly, terms, choices),
}


def plant(shape: Shape, seed: int) -> tuple[list[Choices], list[str]]:
    """Disjoint random sets of the shape's sizes among its choices."""
    choices = [f"c{index}" for index in range(shape.count)]
    drawn = iter(random.Random(f"{shape.name}{seed}").sample(choices, sum(shape.sizes)))
    return [frozenset(next(drawn) for _ in range(size)) for size in shape.sizes], choices


def measure(shape: Shape, problems: int) -> dict[str, list[Score]]:
    planted = [plant(shape, seed) for seed in range(problems)]
    return {name: [solve(*problem) for problem in planted] for name, solve in STRATEGIES.items()}


def show(scores: list[Score]) -> str:
    """Median and worst count of probes, and how many problems were solved right."""
    counts = [score.probes for score in scores]
    right = sum(score.is_right for score in scores)
    return f"{statistics.median(counts):g} / {max(counts)}, {right} of {len(scores)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=20, help="random problems a row")
    print_table(parser.parse_args().problems)


def print_table(problems: int) -> None:
    """A row for each kind of problem, a column for each strategy."""
    print("probes: median / worst, solved right\n")
    print("".join(f"{name:<26}" for name in ("problem", *STRATEGIES)).rstrip())
    for shape in SHAPES:
        cells = [show(scores) for scores in measure(shape, problems).values()]
        print("".join(f"{cell:<26}" for cell in (shape.name, *cells)).rstrip(), flush=True)


if __name__ == "__main__":
    main()
