"""Timing names a winner only when there is one, and says why a figure is doubtful."""

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest

from align.reports.model import Confidence
from align.timing import (
    Rounds,
    TimingOptions,
    bootstrap_interval,
    confidence_of,
    measure_rounds,
    order_interval,
    settled,
    summarise,
    unsteadiness,
)

Floats = npt.NDArray[np.float64]


def machine_noise(random: np.random.Generator, count: int) -> Floats:
    """Factors on consecutive runs of one machine: drift, wandering clocks, jitter, and spikes in one run of ten."""
    drift = 1.0 + random.uniform(-0.15, 0.15) * np.linspace(0.0, 1.0, count)
    wander = np.zeros(count)
    for index in range(1, count):
        wander[index] = 0.8 * wander[index - 1] + random.normal(0.0, 0.01)
    spikes = np.where(random.random(count) < 0.1, 1.0 + random.exponential(0.5, count), 1.0)
    return drift * (1.0 + wander) * random.lognormal(0.0, 0.02, count) * spikes


def rounds_of(random: np.random.Generator, count: int, *, speedup: float = 1.0) -> Rounds:
    """Rounds as `measure_rounds` orders them: A B B A."""
    noise = machine_noise(random, 2 * count).reshape(count, 2)
    noise[1::2] = noise[1::2, ::-1]
    return Rounds(tuple(noise[:, 0]), tuple(noise[:, 1] / speedup))


def test_two_equal_runs_get_a_winner_in_at_most_one_comparison_of_twenty() -> None:
    random = np.random.default_rng(7)
    winners = {}
    for count in (7, 8, 12, 20, 40):
        verdicts = [summarise(rounds_of(random, count)).confidence for _ in range(200)]
        winners[count] = sum(verdict in (Confidence.FASTER, Confidence.SLOWER) for verdict in verdicts)
    assert max(winners.values()) <= 10, f"false winners of 200 by number of rounds: {winners}"


def test_a_run_that_is_a_fifth_faster_wins_nearly_always() -> None:
    random = np.random.default_rng(8)
    timings = [summarise(rounds_of(random, 20, speedup=1.2)) for _ in range(100)]
    assert sum(timing.confidence is Confidence.FASTER for timing in timings) >= 97
    assert sum(timing.low <= 1.2 <= timing.high for timing in timings) >= 92
    assert np.median([timing.speedup for timing in timings]) == pytest.approx(1.2, rel=0.01)


def test_drift_that_hits_both_runs_alike_does_not_move_the_speed_up() -> None:
    slower_and_slower = np.linspace(1.0, 2.0, 40).reshape(20, 2)
    slower_and_slower[1::2] = slower_and_slower[1::2, ::-1]
    timing = summarise(Rounds(tuple(slower_and_slower[:, 0]), tuple(slower_and_slower[:, 1])))
    assert timing.speedup == pytest.approx(1.0, abs=0.01)
    assert timing.confidence not in (Confidence.FASTER, Confidence.SLOWER)


def test_drift_is_named_as_the_cause() -> None:
    seconds = tuple(np.linspace(1.0, 1.4, 20))
    assert unsteadiness(Rounds(seconds, (1.0,) * 20)) == (
        "baseline rounds vary by 27 %: drift over time (clocks or heat)",
    )


def test_spikes_are_named_as_the_cause() -> None:
    seconds = tuple(2.0 if index % 6 == 2 else 1.0 for index in range(20))
    (warning,) = unsteadiness(Rounds((1.0,) * 20, seconds))
    assert warning == "candidate rounds vary by 100 %: spikes (other processes)"


def test_a_machine_that_jumps_between_two_speeds_gets_no_single_cause() -> None:
    seconds = (1.0, 1.3) * 10
    (warning,) = unsteadiness(Rounds(seconds, (1.0,) * 20))
    assert "no single cause found" in warning


def test_steady_rounds_get_no_warning() -> None:
    steady = tuple(np.random.default_rng(0).normal(1.0, 0.01, 20))
    assert unsteadiness(Rounds(steady, steady, (1.1, 1.0), (1.2, 1.0))) == ()


def test_a_compiling_first_round_is_discarded_and_named() -> None:
    timing = summarise(measure_rounds(replay([1.0]), replay([30.0, 1.0]), TimingOptions(8, 8, 0.0)))
    assert timing.candidate.p90 == 1.0
    (warning,) = timing.warnings
    assert warning.startswith("a first round of the candidate, discarded, took 30 times its median: compilation")


def test_a_baseline_much_faster_than_the_candidate_is_not_taken_for_compilation() -> None:
    assert unsteadiness(Rounds((1.0,) * 8, (9.0,) * 8, (1.0, 1.0), (9.0, 9.0))) == ()


def test_warm_up_goes_on_until_two_rounds_agree() -> None:
    rounds = measure_rounds(replay([8.0, 4.0, 2.0, 1.0]), replay([1.0]), TimingOptions(6, 6, 0.0))
    assert rounds.warm_up_baseline == (8.0, 4.0, 2.0, 1.0, 1.0)
    assert rounds.baseline == (1.0,) * 6


def test_warm_up_of_a_run_that_never_settles_ends() -> None:
    rounds = measure_rounds(replay([1.0, 2.0] * 50), replay([1.0]), TimingOptions(6, 6, 0.0, max_warm_up=4))
    assert len(rounds.warm_up_baseline) == 4


def test_rounds_that_still_compile_after_the_warm_up_are_discarded_too() -> None:
    late = (5.0, 5.0, *(1.0,) * 10)
    found = settled(Rounds((1.0,) * 12, late, (1.0,), (5.0, 5.0)))
    assert found == Rounds((1.0,) * 10, (1.0,) * 10, (1.0, 1.0, 1.0), (5.0, 5.0, 5.0, 5.0))


def test_a_spike_in_the_middle_is_kept_as_a_round() -> None:
    spiky = (1.0,) * 8 + (5.0,) + (1.0,) * 3
    assert settled(Rounds(spiky, (1.0,) * 12)).baseline == spiky


def test_rounds_alternate_and_neither_run_always_goes_first() -> None:
    order: list[str] = []

    def note(name: str) -> Callable[[], float]:
        def run() -> float:
            order.append(name)
            return 1.0

        return run

    measure_rounds(note("A"), note("B"), TimingOptions(4, 4, 0.0))
    assert "".join(order[4:]) == "ABBAABBA"


def test_the_number_of_rounds_stays_between_its_bounds() -> None:
    assert len(measure_rounds(replay([1.0]), replay([1.0]), TimingOptions(7, 60, 0.0)).baseline) == 7
    assert len(measure_rounds(replay([1.0]), replay([1.0]), TimingOptions(7, 9, 60.0)).baseline) == 9


def test_too_few_rounds_cannot_tell_however_clear_they_look() -> None:
    timing = summarise(Rounds((2.0,) * 5, (1.0,) * 5))
    assert timing.confidence is Confidence.CANNOT_TELL
    assert timing.warnings[0].startswith("only 5 rounds")


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1.05, 1.2, Confidence.FASTER),
        (0.8, 0.95, Confidence.SLOWER),
        (0.985, 1.015, Confidence.SAME),
        (1.005, 1.015, Confidence.SAME),
        (0.97, 1.2, Confidence.CANNOT_TELL),
        (0.9, 1.0, Confidence.CANNOT_TELL),
    ],
)
def test_a_winner_needs_the_whole_interval(low: float, high: float, expected: Confidence) -> None:
    assert confidence_of(low, high) is expected


def test_the_exact_interval_of_few_rounds_is_the_whole_range() -> None:
    values = np.array([3.0, 1.0, 2.0, 5.0, 4.0, 6.0])  # n = 6: 2 * 1/64 <= 0.05 < 2 * 7/64
    assert order_interval(values) == (1.0, 6.0)


def test_the_exact_interval_of_twenty_rounds_runs_from_the_sixth_to_the_fifteenth() -> None:
    values = np.arange(1.0, 21.0)  # tables of the sign test: n = 20, 95 %: ranks 6 and 15
    assert order_interval(values) == (6.0, 15.0)


def test_the_bootstrap_interval_holds_the_median_and_repeats() -> None:
    values = np.random.default_rng(3).normal(1.0, 0.1, 30)
    low, high = bootstrap_interval(values, seed=1)
    assert low < np.median(values) < high
    assert bootstrap_interval(values, seed=1) == (low, high)


def replay(seconds: list[float]) -> Callable[[], float]:
    """A run that takes these seconds, the last ones for ever."""
    stream: Iterator[float] = iter(seconds)
    return lambda: next(stream, seconds[-1])
