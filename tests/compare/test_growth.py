import math

import numpy as np
import pytest

from align.compare.growth import Law, fit_growth, growth_of
from align.compare.model import Comparison, Coverage, Measures, NodeComparison, Pairing
from align.dumpers.model import NodeKey, NodeKind, OpClass

LAWS = {
    Law.FLAT: lambda n: 0.003 + 0.0 * n,
    Law.SQUARE_ROOT: lambda n: 0.002 * np.sqrt(n),
    Law.LINEAR: lambda n: 0.001 * n,
    Law.EXPONENTIAL: lambda n: 1e-4 * 1.3**n,
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("steps", [8, 30])
def test_each_law_is_recognised_under_five_percent_of_noise(law, steps):
    rng = np.random.default_rng(steps)
    n = np.arange(1, steps + 1)
    found = [
        fit_growth(
            [
                (int(i), float(e))
                for i, e in zip(n, LAWS[law](n) * np.exp(0.05 * rng.standard_normal(steps)), strict=True)
            ]
        ).law
        for _ in range(50)
    ]
    assert found.count(law) >= 47


@pytest.mark.parametrize(
    ("law", "rate", "words"), [(Law.FLAT, 0.0, "stays at 0.003"), (Law.SQUARE_ROOT, 0.002, "square root"),
                               (Law.LINEAR, 0.001, "0.001 a step"),
                               (Law.EXPONENTIAL, 0.3, "30.0% a step (doubles every 2.64)")],
)  # fmt: skip
def test_the_rate_and_the_sentence_are_those_of_the_law(law, rate, words):
    growth = fit_growth([(n, float(LAWS[law](n))) for n in range(1, 13)])
    assert (growth.law, growth.points) == (law, 12)
    assert growth.rate == pytest.approx(rate, abs=1e-12)
    assert growth.residual == pytest.approx(0.0, abs=1e-6)
    assert words in growth.sentence
    assert growth.sentence.endswith("over 12 steps")


def test_falling_errors_are_not_called_growth():
    assert fit_growth([(n, 0.1 * 0.9**n) for n in range(12)]).law is Law.FLAT


def test_zero_and_nan_are_left_out_and_few_points_say_nothing():
    growth = fit_growth([(0, 0.0), (1, math.nan), (2, 0.1), (3, math.inf)])
    assert (growth.law, growth.points) == (Law.UNKNOWN, 1)
    assert "too few" in growth.sentence


def test_growth_follows_one_node_over_the_steps_of_a_comparison():
    def node(step, path="u"):
        plain = dict.fromkeys(Measures.__slots__, 0) | {"rel_l2": 0.01 * (step + 1), "max_abs_index": ()}
        return NodeComparison(
            NodeKey(path, "forward", step=step),
            step,
            NodeKind.MODULE,
            OpClass.ORDINARY,
            "T",
            "float32",
            (1,),
            Pairing.EXACT,
            Measures(**plain),
        )

    comparison = Comparison(
        (*(node(step) for step in range(6)), node(9, "other")), Coverage(7, 7, 0, 0, 0, 0), has_baseline=False
    )
    growth = growth_of(comparison, NodeKey("u", "forward", step=3))
    assert (growth.law, growth.points) == (Law.LINEAR, 6)
    assert growth.rate == pytest.approx(0.01)
